"""Versions, lists at a version, watches: what reflectors build on."""

from __future__ import annotations

from typing import Any

import pytest
from cluster_wire import PODS, Wire, kinds, lines, make_pod


@pytest.fixture
def wire() -> Wire:
    return Wire()


def test_a_watch_from_a_lists_version_sees_every_later_change_once(wire: Wire) -> None:
    wire.make(PODS, make_pod("a"))
    version = wire.get(PODS)["metadata"]["resourceVersion"]
    wire.make(PODS, make_pod("b"))
    watch = wire.watch(PODS, resourceVersion=version)
    wire.patch(f"{PODS}/a", {"metadata": {"labels": {"x": "y"}}})
    wire.call("DELETE", f"{PODS}/b")
    assert kinds(watch) == [("ADDED", "b"), ("MODIFIED", "a"), ("DELETED", "b")]
    assert kinds(watch) == []


def test_a_deletion_carries_a_version_newer_than_the_object_had(wire: Wire) -> None:
    made = wire.make(PODS, make_pod("a"))
    watch = wire.watch(PODS, resourceVersion=made["metadata"]["resourceVersion"])
    wire.call("DELETE", f"{PODS}/a")
    (event,) = lines(watch)
    assert int(event["object"]["metadata"]["resourceVersion"]) > int(made["metadata"]["resourceVersion"])


def test_without_a_version_a_watch_begins_with_the_present_state(wire: Wire) -> None:
    wire.make(PODS, make_pod("a"))
    assert kinds(wire.watch(PODS)) == [("ADDED", "a")]


def test_a_pod_that_comes_to_match_is_added_and_one_that_ceases_to_is_deleted(wire: Wire) -> None:
    wire.make(PODS, make_pod("a"))
    watch = wire.watch(PODS, labelSelector="x=y", resourceVersion="0")
    wire.patch(f"{PODS}/a", {"metadata": {"labels": {"x": "y"}}})
    wire.patch(f"{PODS}/a", {"metadata": {"labels": {"x": "z"}}})
    assert kinds(watch) == [("ADDED", "a"), ("DELETED", "a")]


def test_a_kubelets_watch_sees_only_pods_bound_to_its_node(wire: Wire) -> None:
    watch = wire.watch("/api/v1/pods", fieldSelector="spec.nodeName=n1")
    for name in ("a", "b"):
        wire.make(PODS, make_pod(name))
    wire.call("POST", f"{PODS}/b/binding", {"target": {"name": "n1"}})
    assert kinds(watch) == [("ADDED", "b")]


def test_a_streaming_list_ends_with_a_marked_bookmark(wire: Wire) -> None:
    wire.make(PODS, make_pod("a"))
    watch = wire.watch(
        PODS, sendInitialEvents="true", resourceVersionMatch="NotOlderThan", allowWatchBookmarks="true"
    )
    first, last = lines(watch)
    assert first["type"] == "ADDED"
    assert last["type"] == "BOOKMARK"
    assert last["object"]["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}
    assert last["object"]["kind"] == "Pod"


def test_a_streaming_list_without_its_match_rule_is_refused(wire: Wire) -> None:
    status, answer = wire.call("GET", PODS, watch="1", sendInitialEvents="true")
    assert status == 422
    assert "resourceVersionMatch" in answer["message"]


def test_bookmarks_go_to_those_who_asked(wire: Wire) -> None:
    with_bookmarks = wire.watch(PODS, resourceVersion="1", allowWatchBookmarks="true")
    without = wire.watch(PODS, resourceVersion="1")
    wire.cluster.send_bookmarks()
    (bookmark,) = lines(with_bookmarks)
    assert (bookmark["type"], bookmark["object"]["spec"]) == ("BOOKMARK", {"containers": None})
    assert lines(without) == []


def test_a_version_that_history_forgot_is_answered_with_410(wire: Wire) -> None:
    made = wire.make(PODS, make_pod("a"))
    wire.patch(f"{PODS}/a", {"metadata": {"labels": {"x": "y"}}})
    wire.cluster.compact()
    watch = wire.watch(PODS, resourceVersion=made["metadata"]["resourceVersion"])
    (event,) = lines(watch)
    assert (event["type"], event["object"]["code"], event["object"]["reason"]) == ("ERROR", 410, "Expired")
    assert watch.ended


def test_history_is_bounded() -> None:
    wire = Wire(history_limit=3)
    made = wire.make(PODS, make_pod("a"))
    for number in range(5):
        wire.patch(f"{PODS}/a", {"metadata": {"labels": {"n": str(number)}}})
    (event,) = lines(wire.watch(PODS, resourceVersion=made["metadata"]["resourceVersion"]))
    assert event["object"]["code"] == 410


def test_dropped_watches_end_and_hear_nothing_more(wire: Wire) -> None:
    watch = wire.watch(PODS)
    wire.cluster.drop_watches("pods")
    wire.make(PODS, make_pod("a"))
    assert watch.ended
    assert lines(watch) == []


def test_a_paged_list_shows_one_moment_even_when_objects_change_between_the_pages(wire: Wire) -> None:
    for name in ("a", "b", "c"):
        wire.make(PODS, make_pod(name))
    first = wire.get(PODS, limit="2")
    wire.call("DELETE", f"{PODS}/c")
    wire.make(PODS, make_pod("d"))
    second = wire.get(PODS, limit="2", **{"continue": first["metadata"]["continue"]})
    assert _names(first) == ["a", "b"]
    assert first["metadata"]["remainingItemCount"] == 1
    assert _names(second) == ["c"]
    assert "continue" not in second["metadata"]


def test_a_page_whose_moment_is_forgotten_is_gone(wire: Wire) -> None:
    for name in ("a", "b"):
        wire.make(PODS, make_pod(name))
    token = wire.get(PODS, limit="1")["metadata"]["continue"]
    wire.call("DELETE", f"{PODS}/a")
    wire.cluster.compact()
    status, answer = wire.call("GET", PODS, limit="1", **{"continue": token})
    assert (status, answer["reason"]) == (410, "Expired")


def test_an_exact_version_is_answered_from_the_past(wire: Wire) -> None:
    version = wire.make(PODS, make_pod("a"))["metadata"]["resourceVersion"]
    wire.make(PODS, make_pod("b"))
    past = wire.get(PODS, resourceVersion=version, resourceVersionMatch="Exact")
    assert _names(past) == ["a"]


def test_a_version_from_the_future_times_out_with_the_cause_clients_look_for(wire: Wire) -> None:
    status, answer = wire.call("GET", PODS, resourceVersion="999999")
    assert status == 504
    assert answer["details"]["causes"][0]["reason"] == "ResourceVersionTooLarge"


def test_items_of_a_list_carry_no_kind_of_their_own(wire: Wire) -> None:
    wire.make(PODS, make_pod("a"))
    listing = wire.get(PODS)
    assert listing["kind"] == "PodList"
    assert "kind" not in listing["items"][0]


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("app=a", ["one"]),
        ("app!=a", ["three", "two"]),
        ("app in (a,b)", ["one", "two"]),
        ("app notin (a, b)", ["three"]),
        ("tier", ["two"]),
        ("!tier", ["one", "three"]),
        ("app=b,tier=x", ["two"]),
    ],
)
def test_label_selectors(wire: Wire, selector: str, expected: list[str]) -> None:
    wire.make(PODS, make_pod("one", labels={"app": "a"}))
    wire.make(PODS, make_pod("two", labels={"app": "b", "tier": "x"}))
    wire.make(PODS, make_pod("three"))
    assert _names(wire.get(PODS, labelSelector=selector)) == expected


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("metadata.name=one", ["one"]),
        ("metadata.name!=one", ["two"]),
        ("status.phase=Pending,spec.nodeName=", ["one", "two"]),
        ("spec.nodeName!=", []),
    ],
)
def test_field_selectors(wire: Wire, selector: str, expected: list[str]) -> None:
    for name in ("one", "two"):
        wire.make(PODS, make_pod(name))
    assert _names(wire.get(PODS, fieldSelector=selector)) == expected


def test_an_unknown_field_label_is_refused_by_name(wire: Wire) -> None:
    status, answer = wire.call("GET", PODS, fieldSelector="spec.colour=red")
    assert (status, answer["message"]) == (400, 'field label not supported: "spec.colour"')


def test_events_are_the_same_objects_in_both_groups(wire: Wire) -> None:
    event = {
        "metadata": {"name": "e"},
        "regarding": {"kind": "Pod", "name": "a", "namespace": "default"},
        "note": "hello",
        "reason": "Because",
        "type": "Normal",
        "action": "Acting",
        "reportingController": "tester",
        "reportingInstance": "tester-1",
        "eventTime": "2024-01-01T00:00:00.000000Z",
    }
    wire.make("/apis/events.k8s.io/v1/namespaces/default/events", event)
    core = wire.get("/api/v1/namespaces/default/events", fieldSelector="involvedObject.name=a")["items"][0]
    assert core["message"] == "hello"
    patched = wire.patch("/apis/events.k8s.io/v1/namespaces/default/events/e", {"note": "again"})[1]
    assert (patched["note"], patched["kind"]) == ("again", "Event")


def _names(listing: Any) -> list[str]:
    return [item["metadata"]["name"] for item in listing["items"]]
