"""The reflector tells the truth about a collection, whatever happens to its connection."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import UnavailableError
from gpuslice.adapters.kube.resources import PODS
from gpuslice.adapters.kube.watch import (
    ASKED_AGAIN_S,
    AT_ONCE,
    Change,
    ChangeKind,
    HistoryRewoundError,
    Pace,
    Reflector,
)
from tests.unit.kube_wire import (
    EndOfScriptError,
    ScriptedTransport,
    VirtualTime,
    failure,
    line,
    page,
    pod,
)


class Followed:
    """A reflector run to the end of its script."""

    def __init__(self, *script: Any, **options: Any) -> None:
        self.time = VirtualTime()
        self.transport = ScriptedTransport(*script)
        self.changes: list[Change[Any]] = []
        self.reflector = Reflector(
            KubeClient(self.transport),
            PODS,
            self.changes.append,
            sleep=self.time.sleep,
            clock=self.time.clock,
            rng=random.Random(1),
            **options,
        )

    async def run(self) -> Followed:
        with pytest.raises(EndOfScriptError):
            await self.reflector.run()
        return self

    def told(self) -> list[str]:
        return [
            f"{change.kind} {change.object.metadata.name if change.object else ''}".strip()
            for change in self.changes
        ]

    def last(self, place: int) -> Any:
        """The object of one change."""
        return self.changes[place].object

    def versions(self) -> list[str]:
        """The resourceVersion of each request; "" for a list."""
        return [request.query.get("resourceVersion", "") for request in self.transport.requests]


async def test_what_is_there_at_the_start_is_added_and_then_synced() -> None:
    followed = await Followed(page("7", pod("a", "3"), pod("b", "4"))).run()
    assert followed.told() == ["added a", "added b", "synced"]
    assert followed.reflector.synced.is_set()
    assert followed.versions() == ["", "7"]


async def test_a_list_is_read_in_pages() -> None:
    followed = await Followed(page("7", pod("a", "3"), more="next"), page("7", pod("b", "4"))).run()
    assert followed.told() == ["added a", "added b", "synced"]
    first, second, watch = followed.transport.requests
    assert first.query == {"limit": "500"}
    assert second.query == {"limit": "500", "continue": "next"}
    assert watch.query["allowWatchBookmarks"] == "true"


async def test_pages_that_expire_are_replaced_by_one_whole_answer() -> None:
    followed = await Followed(
        page("7", pod("a", "3"), more="next"), failure(410, "Expired"), page("9", pod("b", "8"))
    ).run()
    assert followed.told() == ["added b", "synced"]
    assert "limit" not in followed.transport.requests[2].query


async def test_a_long_first_list_lets_others_work_but_a_later_one_is_seen_whole_or_not_at_all() -> None:
    many = [pod(f"p{number}", "3") for number in range(2 * AT_ONCE)]
    news = [pod(f"p{number}", "8") for number in range(2 * AT_ONCE)]
    followed, seen = Followed(page("7", *many), failure(410, "Expired"), page("9", *news)), [0]

    async def look() -> None:
        while True:
            seen.append(len(followed.changes))
            await asyncio.sleep(0)

    looking = asyncio.create_task(look())
    await followed.run()
    looking.cancel()
    assert AT_ONCE in seen
    assert followed.told().count("synced") == 2
    assert not [count for count in seen if len(many) + 1 < count < 2 * (len(many) + 1)]


async def test_lists_of_a_few_objects_come_from_the_servers_cache_and_never_go_back() -> None:
    """Older servers read every pod of the cluster from etcd otherwise, for each node's agent."""
    followed = await Followed(
        page("7", pod("a", "3")),
        [line("ADDED", pod("b", "8"))],
        failure(410, "Expired"),
        page("9"),
        cached=True,
    ).run()
    first, _, _, again, _ = followed.transport.requests
    assert first.query == {"resourceVersion": "0"}
    assert again.query == {"resourceVersion": "8"}
    assert followed.told() == ["added a", "synced", "added b", "deleted a", "deleted b", "synced"]


async def test_a_cache_that_lags_or_is_of_a_restored_backup_is_not_asked_twice() -> None:
    causes = [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]
    lags = failure(504, "Timeout", "Too large resource version: 8, current: 5", causes=causes)
    expired = [page("8"), failure(410, "Expired"), lags]
    followed = await Followed(*expired, page("9"), failure(410, "Expired"), page("9"), cached=True).run()
    lists = [each.query for each in followed.transport.requests if "watch" not in each.query]
    assert [each.get("resourceVersion", "") for each in lists] == ["0", "8", "", "9"]
    with pytest.raises(HistoryRewoundError):
        await Followed(*expired, page("6"), lags, page("6"), cached=True).reflector.run()
    unavailable = await Followed(failure(504, "Timeout", "busy"), page("9"), cached=True).run()
    assert [each.query for each in unavailable.transport.requests[:2]] == [{"resourceVersion": "0"}] * 2


async def test_changes_come_with_what_was_known_before() -> None:
    followed = await Followed(
        page("7", pod("a", "3")),
        [line("MODIFIED", pod("a", "8")), line("ADDED", pod("b", "9")), line("DELETED", pod("a", "10"))],
    ).run()
    assert followed.told() == ["added a", "synced", "modified a", "added b", "deleted a"]
    modified = followed.changes[2]
    assert modified.old is not None
    assert modified.old.metadata.resource_version == "3"
    assert followed.last(-1).metadata.resource_version == "10"


async def test_a_watch_that_ends_resumes_where_it_was() -> None:
    followed = await Followed(
        page("7"), [line("ADDED", pod("a", "8"))], [line("ADDED", pod("b", "12"))]
    ).run()
    assert followed.versions() == ["", "7", "8", "12"]
    assert followed.time.slept == []


async def test_a_watch_is_silent_since_its_last_line_of_any_kind() -> None:
    bookmark = line("BOOKMARK", {"metadata": {"resourceVersion": "9"}})
    followed = await Followed(page("7"), [bookmark], failure(500, "InternalError")).run()
    assert followed.time.slept
    assert followed.reflector.silent_s() == pytest.approx(sum(followed.time.slept))
    assert Reflector(KubeClient(ScriptedTransport()), PODS, print).silent_s() == 0  # it has not begun


HOLLOW_POD = {"kind": "Pod", "apiVersion": "v1", "spec": {"containers": None}, "status": {}}
"""What a real API server's bookmark has beside the metadata: a pod such as no client could make."""


@pytest.mark.parametrize("rest", [{}, HOLLOW_POD], ids=["bare", "as the API server sends it"])
async def test_a_bookmark_moves_the_place_to_resume_from(rest: dict[str, Any]) -> None:
    bookmark = rest | {"metadata": {"resourceVersion": "40", "creationTimestamp": None}}
    followed = await Followed(page("7"), [line("BOOKMARK", bookmark)]).run()
    assert followed.versions() == ["", "7", "40"]
    assert followed.told() == ["synced"]
    assert followed.time.slept == []


@pytest.mark.parametrize(
    "expired",
    [
        [line("ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"})],
        failure(410, "Expired"),
    ],
    ids=["as a line", "as the answer"],
)
async def test_after_410_a_new_list_reports_what_was_missed(expired: Any) -> None:
    followed = await Followed(
        page("7", pod("gone", "3"), pod("changed", "4"), pod("same", "5")),
        expired,
        page("90", pod("changed", "80"), pod("same", "5"), pod("new", "81")),
    ).run()
    assert followed.told()[4:] == ["deleted gone", "modified changed", "added new", "synced"]
    assert followed.versions() == ["", "7", "", "90"]
    assert followed.time.slept == []


async def test_an_object_made_anew_under_its_name_is_deleted_first() -> None:
    followed = await Followed(
        page("7", pod("a-0", "3", uid="old")),
        failure(410, "Expired"),
        page("20", pod("a-0", "15", uid="new")),
        [line("MODIFIED", pod("a-0", "25", uid="newest"))],
    ).run()
    told = ["deleted a-0", "added a-0", "synced", "deleted a-0", "added a-0"]
    assert followed.told()[2:] == told
    assert [followed.last(place).metadata.uid for place in (2, 3, 5, 6)] == ["old", "new", "new", "newest"]


async def test_a_late_delete_of_an_earlier_namesake_leaves_the_new_one() -> None:
    followed = await Followed(
        page("7", pod("a-0", "3", uid="new")), [line("DELETED", pod("a-0", "8", uid="old"))]
    ).run()
    assert followed.told() == ["added a-0", "synced"]
    assert ("default", "a-0") in followed.reflector.objects


async def test_an_event_told_twice_is_passed_on_once() -> None:
    again = line("ADDED", pod("a", "8"))
    followed = await Followed(page("7"), [again, again]).run()
    assert followed.told() == ["synced", "added a"]


async def test_what_a_later_list_shows_unchanged_is_kept_as_it_was_handled() -> None:
    """A process that holds a whole cluster makes objects smaller where it handles them."""
    here = [pod("a", "3"), pod("b", "4")]
    followed = Followed(page("7", *here), failure(410, "Expired"), page("9", here[0], pod("b", "8")))
    await followed.run()
    assert followed.told() == ["added a", "added b", "synced", "modified b", "synced"]
    kept = followed.reflector.objects
    assert kept["default", "a"] is followed.last(0)
    assert kept["default", "b"] is followed.last(3)


async def test_waits_grow_to_a_limit_and_start_anew_after_success() -> None:
    down = UnavailableError("down")
    followed = await Followed(
        *[down] * 9,
        page("7"),
        down,
        pace=Pace(first_delay_s=1, longest_delay_s=30),
    ).run()
    waits = followed.time.slept
    for wait, longest in zip(waits, [1, 2, 4, 8, 16, 30, 30, 30, 30, 1], strict=True):
        assert longest / 2 <= wait <= longest


async def test_a_watch_that_is_refused_each_time_is_not_listed_for_without_end() -> None:
    """A role without the verb watch, or a server that calls its own list too old: each try lists all."""
    forbidden = [page("7"), failure(403, "Forbidden", "no")] * 9
    expired = [page("7"), failure(410, "Expired")] * 10
    for script in (forbidden, expired):
        followed = await Followed(*script, pace=Pace(first_delay_s=1, longest_delay_s=30)).run()
        waits = followed.time.slept
        assert len(waits) == 9
        assert waits[-1] >= 15
    worked = [page("7"), failure(410, "Expired"), page("8"), [line("ADDED", pod("a", "9"))]]
    assert (await Followed(*worked, failure(410, "Expired"), page("10")).run()).time.slept == []


async def test_a_lost_connection_resumes_and_does_not_list_again() -> None:
    lost = UnavailableError("connection lost")
    followed = await Followed(page("7"), [line("ADDED", pod("a", "8")), lost], page("9"), []).run()
    assert followed.versions()[:4] == ["", "7", "", "8"]
    assert followed.transport.requests[2].query == {"limit": "1"}  # only for its version


@pytest.mark.parametrize(
    "after",
    [
        # a watch from 8 on would be silent until then
        [UnavailableError("connection lost"), page("6"), page("7")],
        [failure(410, "Expired"), page("7"), page("7")],
        [failure(410, "Expired"), *2 * [page("1000008", pod("a", "3"))]],  # of `etcdutl … --bump-revision`
    ],
    ids=["found before the watch is resumed", "found by the list", "found by an object of the list"],
)
async def test_a_backup_that_was_restored_ends_the_run(after: list[Any]) -> None:
    """What was deleted since the backup lives again, and versions are given out a second time."""
    followed = Followed(page("5", pod("a", "3")), [line("MODIFIED", pod("a", "8"))], *after)
    with pytest.raises(HistoryRewoundError, match="pods"):
        await followed.reflector.run()


async def test_a_server_that_is_behind_for_a_moment_is_asked_again() -> None:
    """As one of several of kine's may be."""
    lost = UnavailableError("connection lost")
    script = [page("8"), lost, page("7"), page("8"), [line("ADDED", pod("a", "9"))]]
    followed = await Followed(*script).run()
    assert followed.told() == ["synced", "added a"]
    assert followed.time.slept[-1] == ASKED_AGAIN_S


async def test_versions_that_are_no_numbers_are_not_compared() -> None:
    lost = UnavailableError("connection lost")
    followed = await Followed(page("z", pod("a", "y")), lost, page("x"), [], page("b", pod("a", "a"))).run()
    assert followed.told() == ["added a", "synced"]


async def test_the_server_may_ask_for_a_longer_wait() -> None:
    followed = await Followed(UnavailableError("busy", retry_after_s=12), page("7")).run()
    assert followed.time.slept == [12]


async def test_a_refusal_is_retried_with_a_new_list() -> None:
    followed = await Followed(page("7"), failure(403, "Forbidden", "no"), page("9")).run()
    assert followed.versions() == ["", "7", "", "9"]
    assert len(followed.time.slept) == 1


async def test_a_watch_that_ends_at_once_and_empty_is_not_hammered() -> None:
    followed = await Followed(page("7"), [], page("7"), [], page("7"), []).run()
    assert len(followed.time.slept) == 3


async def test_a_quiet_watch_that_lasted_is_no_failure() -> None:
    time = VirtualTime()
    followed = Followed(page("7"), [lambda: setattr(time, "now_s", time.now_s + 60)])
    followed.reflector._clock = time.clock
    await followed.run()
    assert followed.time.slept == []


async def test_an_error_of_the_consumer_ends_the_run() -> None:
    def refuse(_: Change[Any]) -> None:
        raise ZeroDivisionError

    reflector = Reflector(KubeClient(ScriptedTransport(page("7", pod("a", "3")))), PODS, refuse)
    with pytest.raises(ZeroDivisionError):
        await reflector.run()


async def test_plain_dicts_can_be_followed_too() -> None:
    seen: list[Any] = []
    transport = ScriptedTransport(page("7", pod("a", "3")), [line("DELETED", pod("a", "8"))])
    reflector = Reflector(KubeClient(transport), PODS.as_dict(), seen.append, namespace="default")
    with pytest.raises(EndOfScriptError):
        await reflector.run()
    assert [change.kind for change in seen] == [ChangeKind.ADDED, ChangeKind.SYNCED, ChangeKind.DELETED]
    assert transport.requests[0].path == "/api/v1/namespaces/default/pods"
