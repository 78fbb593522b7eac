"""What a page is told of changes: a client that follows them knows what one that reads everything knows."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gpuslice.apps.console.access import Viewer
from gpuslice.apps.console.documents import NOTHING, UNSEEN, ClusterDocuments, without_strangers
from gpuslice.apps.console.rows import TABLES, Rows
from gpuslice.apps.console.usage_history import STEP_S, STEPS, Point, UsageHistory

EVERYTHING = Viewer("anna")
KEYS = st.sampled_from(["a/1", "a/2", "b/1", "b/2"])
STEPS_OF_ROWS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from(["pods", "waiting", "podUsage"]), KEYS, st.integers(0, 3)),
        st.tuples(st.just("drop"), st.sampled_from(["pods", "waiting", "podUsage"]), KEYS, st.just(0)),
        st.tuples(st.just("look"), st.just(""), st.just(""), st.just(0)),
    ),
    max_size=40,
)


class Page:
    """What a browser does with the documents."""

    def __init__(self, documents: ClusterDocuments, viewer: Viewer) -> None:
        self.tables: dict[str, dict[str, Any]] = {}
        self.version = ""
        self._documents = documents
        self._viewer = viewer

    def look(self) -> None:
        known = self._documents.known(self.version, self._viewer)
        answer = self._documents.changes(known, self._viewer, {}, figures=known != NOTHING)
        found = msgspec.json.decode(answer)
        if found["full"]:
            self.tables = {}
        for table, keys in found.get("gone", {}).items():
            for key in keys:
                self.tables.get(table, {}).pop(key, None)
        for table in TABLES:
            for row in found.get(table, []):
                self.tables.setdefault(table, {})[row["key"]] = row
        self.version = found["version"]

    def known(self) -> dict[str, dict[str, Any]]:
        return {table: rows for table, rows in self.tables.items() if rows}


@given(STEPS_OF_ROWS, st.sampled_from([EVERYTHING, Viewer("wei", False, True, {"a": True, "b": False})]))
def test_who_follows_the_changes_knows_what_who_reads_everything_knows(
    steps: list[tuple[str, str, str, int]], viewer: Viewer
) -> None:
    rows = Rows()
    documents = ClusterDocuments(rows)
    follower = Page(documents, viewer)
    for verb, table, key, value in steps:
        if verb == "put":
            rows.put(table, key, {"key": key, "value": value}, key[0])
        elif verb == "drop":
            rows.drop(table, key)
        else:
            follower.look()
    newcomer = Page(documents, viewer)
    for page in (follower, newcomer):
        page.look()
        page.look()  # what is used comes second
    assert follower.known() == newcomer.known()


def test_a_row_that_says_the_same_is_no_change() -> None:
    rows = Rows()
    rows.put("pods", "a/1", {"key": "a/1"}, "a")
    before = rows.number
    rows.put("pods", "a/1", {"key": "a/1"}, "a")
    assert rows.number == before


def test_another_viewer_another_process_and_nonsense_read_everything() -> None:
    rows = Rows()
    rows.put("pods", "a/1", {"key": "a/1"}, "a")
    documents = ClusterDocuments(rows)
    version = msgspec.json.decode(documents.changes(NOTHING, EVERYTHING, {}))["version"]
    assert documents.known(version, EVERYTHING) == (rows.number, rows.number)
    assert documents.known(version, Viewer("wei", False)) == NOTHING
    assert ClusterDocuments(rows).known(version, EVERYTHING) == NOTHING
    for nonsense in ("", "x", "1.2.3", "..", version.replace(str(rows.number), "-1"), "²"):
        assert documents.known(nonsense, EVERYTHING) == NOTHING


def test_names_of_pods_that_one_may_not_list_are_left_out_of_sentences() -> None:
    viewer = Viewer("wei", False, True, {"mine": True, "theirs": False})
    told = {"why": "mine/a and theirs/b-0.x hold it; read docs/b", "list": ["theirs/b"]}
    assert without_strangers(told, viewer, {"mine", "theirs"}) == {
        "why": f"mine/a and {UNSEEN} hold it; read docs/b",
        "list": [UNSEEN],
    }


def test_an_hour_is_remembered_and_what_was_not_measured_is_unknown() -> None:
    history = UsageHistory()
    for step in range(STEPS + 10):
        assert history.step(step * STEP_S)
        if step % 3:
            history.put("a/1", Point(step, 50))
    points = history.of("a/1")
    assert len(points) in (STEPS - 1, STEPS)
    for at_s, point in points:
        step = round(at_s / STEP_S)
        assert point == (Point(step, 50) if step % 3 else Point(None, None))
    assert not history.step((STEPS + 9) * STEP_S + 1)
    assert history.of("a/2") == []
