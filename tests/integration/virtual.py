"""A world in which the test decides what happens next: time stands still, every message waits to be let go.

Processes run as they are, on an event loop without real time. Between them and the API server stands a
`Network` that holds each request and each watch until the test delivers it, loses it on its way, or loses its
answer. A process that was killed is gone with its tasks; its messages are still on their way.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hashlib
import heapq
import itertools
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gpuslice.adapters.kube.errors import UnavailableError, error_of
from gpuslice.adapters.kube.http import ApiRequest, ApiResponse
from gpuslice.adapters.kube.watch import PROBE_S
from gpuslice.core.contract import ANN_ALLOCATION
from simcluster.cluster.cluster import Cluster
from simcluster.cluster.faults import Fault, answer_of
from simcluster.cluster.request import Request, Response
from simcluster.cluster.watch import Watch

MOST_TURNS = 10_000
"""Of the loop at one moment of virtual time; whoever needs more waits for nothing."""

_running = contextvars.ContextVar["Process | None"]("the process that a task belongs to", default=None)

START_NS = 1_800_000_000 * 10**9  # since the epoch, when virtual time begins


class NumberedTask(asyncio.Task[Any]):
    """asyncio keeps sets of tasks, which are walked alike each time by number, not by address."""

    def __init__(self, coroutine: Any, *, number: int, **options: Any) -> None:
        self.number = number
        self.owner = (options.get("context") or contextvars.copy_context()).get(_running)
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self.number


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock moves only when the test says so; what happens in it happens alike each time.

    What would go to a thread is done at once, in the loop.
    """

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _clock_resolution: float

    def __init__(self) -> None:
        self._now_s = 0.0
        self._frozen: dict[Process, tuple[list[asyncio.Handle], list[asyncio.TimerHandle]]] = {}
        super().__init__()
        numbers = itertools.count()
        self.set_task_factory(
            lambda loop, work, **options: NumberedTask(work, loop=loop, number=next(numbers), **options)
        )

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def tasks_of(self, process: Process) -> list[NumberedTask]:
        """What the process has not ended, in order."""
        living = [each for each in asyncio.all_tasks(self) if isinstance(each, NumberedTask)]
        return sorted((each for each in living if each.owner is process), key=lambda each: each.number)

    def freeze(self, process: Process) -> None:
        """As with SIGSTOP: from now on it does nothing, whatever arrives for it and whatever time passes."""
        timers = [each for each in self._scheduled if _owner(each) is process]
        self._scheduled[:] = [each for each in self._scheduled if _owner(each) is not process]
        heapq.heapify(self._scheduled)
        self._frozen[process] = ([], timers)
        self._hold_back()

    def thaw(self, process: Process) -> None:
        ready, timers = self._frozen.pop(process, ([], []))
        self._ready.extend(ready)
        for timer in timers:
            heapq.heappush(self._scheduled, timer)

    def _hold_back(self) -> None:
        if self._frozen:
            kept: list[asyncio.Handle] = []
            for handle in self._ready:
                held = self._frozen.get(_owner(handle))  # type: ignore[arg-type]
                (held[0] if held else kept).append(handle)
            self._ready.clear()
            self._ready.extend(kept)

    def turn(self) -> bool:
        """One turn of the loop, which may be in the middle of anything; whether there is more to do."""
        self._hold_back()
        # asyncio runs timers a nanosecond early; who then looks at the clock must not find it before its time
        if (due := self._next_timer()) is not None and due < self._now_s + self._clock_resolution:
            self._now_s = max(self._now_s, due)
        self.call_soon(self.stop)
        self.run_forever()
        self._hold_back()
        return bool(self._ready)

    def time(self) -> float:
        return self._now_s

    def settle(self) -> None:
        """Run until nothing can go on without a message or without time."""
        for _ in range(MOST_TURNS):
            if not self.turn():
                return
        turning: Counter[str] = Counter()
        for _ in range(100):
            turning.update(map(_what, self._ready))
            self.turn()
        raise AssertionError(f"the processes never come to rest, in 100 turns: {turning.most_common(5)}")

    def advance(self, seconds: float) -> None:
        """Let time pass, stopping at each timer on the way."""
        end = self._now_s + seconds
        while (due := self._next_timer()) is not None and due <= end:
            self._now_s = max(self._now_s, due)
            self.settle()
        self._now_s = max(self._now_s, end)
        self.settle()

    def _next_timer(self) -> float | None:
        timers = self._scheduled
        if timers and timers[0].cancelled():
            timers[:] = [timer for timer in timers if not timer.cancelled()]
            heapq.heapify(timers)
            self._timer_cancelled_count = 0  # what asyncio counts, to do the same when there are many
        return timers[0].when() if timers else None


def _what(handle: asyncio.Handle) -> str:
    """Which task of which process, and the line outside asyncio at which it waits."""
    callback: Any = handle._callback  # type: ignore[attr-defined]
    task, where = getattr(callback, "__self__", None), ""
    if not isinstance(task, asyncio.Task):
        return f"{_owner(handle)}: {getattr(callback, '__qualname__', callback)}"
    waits: Any = task.get_coro()
    while (frame := getattr(waits, "cr_frame", None)) is not None:
        if not frame.f_globals["__name__"].startswith("asyncio."):
            where = f" at {frame.f_globals['__name__']}:{frame.f_lineno}"
        waits = waits.cr_await
    return task.get_name() + where


def _owner(handle: asyncio.Handle) -> Process | None:
    return handle._context.get(_running)  # type: ignore[attr-defined, no-any-return]


@dataclass(eq=False)
class Process:
    """What dies together. `alive` is False after `kill`; its messages may still arrive."""

    name: str
    loop: VirtualLoop
    alive: bool = True
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    def start(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        context = contextvars.copy_context()
        context.run(_running.set, self)
        task = self.loop.create_task(work, name=f"{self.name}: {name}", context=context)
        self.tasks.append(task)
        return task

    def kill(self) -> None:
        """As with SIGKILL: whatever the tasks still try to send goes nowhere."""
        self.alive = False
        self.loop.thaw(self)
        for task in self.loop.tasks_of(self):  # those that they have shielded from each other, too
            task.cancel()
        self.loop.settle()

    def check(self) -> None:
        """Raise what a task of a living process died of."""
        for task in self.tasks:
            if self.alive and task.done() and not task.cancelled() and task.exception() is not None:
                raise AssertionError(f"{task.get_name()} died") from task.exception()


@dataclass(eq=False)
class Message:
    """One request on its way. `answer` is what the sender waits for."""

    sender: Process
    request: Request
    answer: asyncio.Future[Any]

    def __repr__(self) -> str:
        return f"{self.sender.name}: {self.request.method} {self.request.path}"


@dataclass(eq=False)
class Stream:
    """An open watch of a living process."""

    owner: Process
    watch: Watch
    lines: asyncio.Queue[bytes | None]
    asks: bool = False
    waiting: list[bytes] = field(default_factory=list)

    def fetch(self) -> None:
        self.waiting += [line for line in self.watch.take().split(b"\n") if line]

    @property
    def pending(self) -> bool:
        self.fetch()
        return bool(self.waiting) or self.watch.ended


class Network:
    """Everything between the processes and the API server."""

    def __init__(self, cluster: Cluster, loop: VirtualLoop) -> None:
        self.cluster = cluster
        self.loop = loop
        self.messages: list[Message] = []
        self.streams: list[Stream] = []
        self.trail = hashlib.blake2b(digest_size=8)  # of all that was asked and answered, and when
        self.bound: dict[str, str] = {}  # by uid, the cards that a pod's Binding named
        self.withdrawn: dict[Process, int] = {}  # whose credentials, and the status that they are answered

    # -- what the test decides ---------------------------------------------------------------------------

    def deliver(self, message: Message) -> None:
        self.messages.remove(message)
        code = self.withdrawn.get(message.sender)
        answer = answer_of(Fault(code=code)) if code else self._carry_out(message.request)
        self._answer(message, answer)

    def repeat(self, message: Message) -> None:
        """It arrives twice, as what a proxy sends again does; the sender hears the second answer."""
        first = self._carry_out(message.request)
        if first.watch is not None:
            first.watch.end()
        self.deliver(message)

    def lose_request(self, message: Message) -> None:
        self.messages.remove(message)
        self._fail(message)

    def lose_answer(self, message: Message) -> None:
        """The API server did it, and nobody hears of it."""
        self.messages.remove(message)
        answer = self._carry_out(message.request)
        if answer.watch is not None:
            answer.watch.end()
        self._fail(message)

    def delay(self, message: Message) -> None:
        """The sender gives up; the request arrives later, when nobody expects it any more."""
        self._fail(message)

    def deliver_line(self, stream: Stream) -> None:
        stream.fetch()
        if stream.waiting:
            stream.lines.put_nowait(stream.waiting.pop(0))
        elif stream.watch.ended:
            self.cut(stream)
        self.loop.settle()

    def cut(self, stream: Stream) -> None:
        """The connection of a watch breaks; what was on its way is lost."""
        self.streams.remove(stream)
        stream.watch.end()
        stream.lines.put_nowait(None)
        self.loop.settle()

    def calm(self) -> bool:
        """Deliver all there is, in order; True when there was something."""
        busy = False
        while True:
            if self.messages:
                asks = asks_after_a_watch(self.messages[0].request)
                self.deliver(self.messages[0])
            elif pending := [each for each in self.streams if each.pending]:
                asks = pending[0].asks
                self.deliver_line(pending[0])
            else:
                return busy
            busy = busy or not asks  # who asks after a watch moves nothing, and goes on for ever

    def forget(self, process: Process) -> None:
        """A killed process's connections are closed; its requests stay on their way."""
        for stream in [each for each in self.streams if each.owner is process]:
            self.streams.remove(stream)
            stream.watch.end()

    # -- the API server ------------------------------------------------------------------------------------

    def moved(self, pod: dict[str, Any]) -> bool:
        """Whether its annotations name other cards than its Binding did: those that kubelet chose."""
        meta = pod["metadata"]
        said = (meta.get("annotations") or {}).get(ANN_ALLOCATION)
        return said is not None and self.bound.get(meta["uid"], said) != said

    def _carry_out(self, request: Request) -> Response:
        answer = self.cluster.handle(request)
        if answer.watch is not None and asks_after_a_watch(request):  # time is nothing here: it ends at once
            answer.watch.bookmark()
            answer.watch.end()
        what = f"{self.loop.time()} {request.method} {request.path} {answer.status}\n"
        self.trail.update(what.encode())
        if "/leases" not in request.path:  # where each process has a name of its own
            self.trail.update(request.body)
        if request.path.endswith("/binding"):  # whatever is answered, it may have taken effect
            meta = msgspec.json.decode(request.body)["metadata"]
            said = meta["annotations"][ANN_ALLOCATION]
            for pod in (entry.obj["metadata"] for entry in self.cluster.store.shelf("pods").items.values()):
                if pod["uid"] == meta["uid"] and (pod.get("annotations") or {}).get(ANN_ALLOCATION) == said:
                    self.bound.setdefault(pod["uid"], said)
        return answer

    # -- the answers ---------------------------------------------------------------------------------------

    def _answer(self, message: Message, answer: Any) -> None:
        if message.sender.alive and not message.answer.done():
            message.answer.set_result(answer)
        elif answer.watch is not None:
            answer.watch.end()
        self.loop.settle()

    def _fail(self, message: Message) -> None:
        if message.sender.alive and not message.answer.done():
            message.answer.set_exception(UnavailableError(f"{message}: connection lost"))
        self.loop.settle()


def asks_after_a_watch(request: Request | ApiRequest) -> bool:
    """Whether a reflector asks what its silent watch may have missed."""
    return request.query.get("timeoutSeconds") == str(PROBE_S)


class HeldTransport:
    """The Kubernetes client's transport of one process."""

    def __init__(self, network: Network, owner: Process) -> None:
        self._network = network
        self._owner = owner

    async def request(self, request: ApiRequest) -> ApiResponse:
        answer = await self._send(request)
        return ApiResponse(answer.status, dict(answer.headers), answer.body)

    async def stream(self, request: ApiRequest) -> AsyncGenerator[bytes]:
        answer = await self._send(request)
        if answer.watch is None:
            raise error_of(answer.status, answer.body, {}, what=str(request))
        stream = Stream(self._owner, answer.watch, asyncio.Queue(), asks_after_a_watch(request))
        self._network.streams.append(stream)
        try:
            while (line := await stream.lines.get()) is not None:
                yield line
        finally:
            with contextlib.suppress(ValueError):
                self._network.streams.remove(stream)
            stream.watch.end()
        raise UnavailableError(f"{request}: connection lost")

    async def _send(self, asked: ApiRequest) -> Any:
        headers = {name.lower(): value for name, value in asked.headers.items()}
        request = Request(asked.method, asked.path, asked.query, headers, asked.body)
        if not self._owner.alive:
            raise asyncio.CancelledError  # a dead process sends nothing
        future = self._network.loop.create_future()
        self._network.messages.append(Message(self._owner, request, future))
        return await future


class Played:
    """A story of one process on a loop of its own: how the process dies and the story ends."""

    loop: VirtualLoop
    network: Network
    process: Process

    def kill(self) -> None:
        self.process.kill()
        self.network.forget(self.process)

    def close(self) -> None:
        self.kill()
        self.loop.close()
        asyncio.set_event_loop(None)
