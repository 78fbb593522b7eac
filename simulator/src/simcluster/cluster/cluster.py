"""The API server without its sockets: one request in, one response out."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import msgspec

from simcluster.cluster import router
from simcluster.cluster.admission import WebhookAnswer, WebhookCall
from simcluster.cluster.body import with_warnings
from simcluster.cluster.errors import ApiError
from simcluster.cluster.faults import Fault, Faults, answer_of
from simcluster.cluster.identities import Identities
from simcluster.cluster.request import Object, Request, Response
from simcluster.cluster.state import ApiState
from simcluster.cluster.store import Store
from simcluster.cluster.watch import Watch
from simcluster.cluster.writes import Steps

NAMESPACES = ("default", "kube-node-lease", "kube-public", "kube-system")

Webhook = Callable[[WebhookCall], WebhookAnswer]


class Cluster(ApiState):
    """``handle`` does everything; ``steps`` is for a server that calls admission webhooks itself.

    The clock (seconds since the epoch) and the random numbers are passed in, so that a run can be repeated
    exactly. With ``tracks_managers`` False, managedFields are omitted, which makes writes cheaper.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.time,
        dice: random.Random | None = None,
        webhook: Webhook | None = None,
        history_limit: int = 5_000,
        tracks_managers: bool = True,
    ) -> None:
        super().__init__(clock, Identities(dice or random.Random()), Store(history_limit), tracks_managers)
        self.faults = Faults()
        self._webhook = webhook
        self._watches: list[Watch] = []
        for name in NAMESPACES:
            self._create("/api/v1/namespaces", {"metadata": {"name": name}})
        service: Object = {
            "metadata": {
                "name": "kubernetes",
                "labels": {"component": "apiserver", "provider": "kubernetes"},
            },
            "spec": {"ports": [{"name": "https", "port": 443, "targetPort": 6443}]},
        }
        self._create("/api/v1/namespaces/default/services", service)

    def handle(self, request: Request) -> Response:
        """Answers the request; calls admission webhooks through the function that was passed in."""
        steps = self.steps(request)
        try:
            call = next(steps)
            while True:
                if self._webhook is None:
                    ask = WebhookAnswer(error="this API server cannot call webhooks")
                else:
                    ask = self._webhook(call)
                call = steps.send(ask)
        except StopIteration as stop:
            answer: Response = stop.value
            return answer

    def steps(self, request: Request) -> Steps:
        """The same as a generator that yields each webhook call and is sent its answer.

        The webhooks' warnings go to the client whether or not they admit the request.
        """
        fault = self.faults.strike(request)
        if fault is not None and fault.code and not fault.after:
            return answer_of(fault)
        warnings: list[str] = []
        routed = router.route(self, request)
        try:
            call = next(routed)
            while True:
                answer = yield call
                warnings += (answer.response or {}).get("warnings") or []
                call = routed.send(answer)
        except StopIteration as stop:
            response: Response = with_warnings(stop.value, warnings)
        except ApiError as error:
            return with_warnings(error.response(), warnings)
        if fault is not None and fault.code:
            return answer_of(fault)
        if response.watch is not None:
            self._watches = [*self.watches(), response.watch]
        return response

    def send_bookmarks(self) -> None:
        """A bookmark to every watch that wants them."""
        for watch in self.watches():
            if watch.wants_bookmarks:
                watch.bookmark()

    def drop_watches(self, shelf: str | None = None) -> None:
        """Ends watches (of one kind, such as ``pods``) as a lost connection does."""
        for watch in self.watches():
            if shelf in (None, watch.shelf):
                watch.end()

    def watches(self) -> list[Watch]:
        """Those still open."""
        self._watches = [watch for watch in self._watches if not watch.ended]
        return list(self._watches)

    def compact(self) -> None:
        """Forgets history: continuing from an older version is answered with 410."""
        self.store.compact()

    def add_fault(self, fault: Fault) -> None:
        self.faults.add(fault)

    def _create(self, path: str, obj: Object) -> None:
        headers = {"user-agent": "kube-apiserver"}
        response = self.handle(Request("POST", path, {}, headers, msgspec.json.encode(obj)))
        if response.status != 201:
            raise RuntimeError(f"POST {path} answered {response.status}: {response.body.decode()}")
