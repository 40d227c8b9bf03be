import json
from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from roost.app_world.changes import Change, changes_between
from roost.app_world.generation import generated_state
from roost.app_world.state import KEYS, MOST_RECORDS, ApiError, State
from roost.app_world.world import APPS, World
from tests.app_world.play import WORKING_APPS, arguments

NOTE = {"note_id": 4, "title": "tea", "tags": []}
seeds = st.integers(0, 2**32)


@given(seeds)
@settings(max_examples=25)
def test_a_seed_gives_one_state_whose_names_are_unique(seed):
    state = generated_state(seed)
    assert state == generated_state(seed)
    for table, field in (("contacts", "name"), ("notes", "title"), ("tasks", "title"), ("events", "title")):
        values = [row[field] for row in state.rows(table)]
        assert len(set(values)) == len(values) >= 8
    assert state.profile["email"] not in {row["email"] for row in state.rows("contacts")}
    assert all(row[KEYS[table]] == key for table, rows in state.tables.items() for key, row in rows.items())


def test_seeds_differ():
    assert len({json.dumps(generated_state(seed).snapshot()) for seed in range(20)}) == 20


@given(seeds)
@settings(max_examples=25)
def test_a_snapshot_brings_the_world_back_after_a_journey_as_json(seed):
    world = World.from_seed(seed)
    world.call("notes", "create", {"title": "milk"})
    world.call("supervisor", "complete_task", {"answer": [1, {"a": None}]})
    back = World.from_snapshot(json.loads(json.dumps(world.snapshot())))
    assert back.snapshot() == world.snapshot()
    assert (back.is_completed, back.answer, back.status) == (True, [1, {"a": None}], "success")


def test_a_snapshot_does_not_follow_the_world():
    world = World.from_seed(1)
    before = world.snapshot()
    note = before["tables"]["notes"][0]["note_id"]
    world.call("notes", "add_tag", {"note_id": note, "tag": "new"})
    assert "new" not in before["tables"]["notes"][0]["tags"]
    before["tables"]["notes"].clear()
    assert world.call("notes", "show", {"note_id": note})["tags"][-1] == "new"


@given(seeds)
@settings(max_examples=60)
def test_calls_are_done_or_refused_and_what_was_refused_changed_nothing(seed):
    random = Random(seed)
    world = World.from_seed(seed)
    initial = world.snapshot()
    for _ in range(12):
        app = random.choice(WORKING_APPS)
        api = random.choice(list(APPS[app].apis.values()))
        kwargs = arguments(random, api, world.snapshot(), ["soup", "/docs/new.txt"])
        before = world.snapshot()
        try:
            result = world.call(app, api.name, kwargs)
        except ApiError:
            assert world.snapshot() == before
        else:
            assert json.loads(json.dumps(result)) == result
            if api.name.startswith(("show", "search", "read", "login")):
                assert world.snapshot() == before
    assert {key: value for key, value in world.snapshot().items() if key not in ("tables", "next_ids")} == {
        key: value for key, value in initial.items() if key not in ("tables", "next_ids")
    }


def test_results_are_copies():
    world = World.from_seed(1)
    before = world.snapshot()
    for result in (world.call("notes", "search", {}), world.call("contacts", "search", {})):
        result[0].clear()
    world.call("supervisor", "show_profile", {}).clear()
    assert world.snapshot() == before


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        pytest.param(lambda state: None, [], id="nothing"),
        pytest.param(
            lambda state: state.add("notes", {"title": "milk", "tags": []}),
            ["notes: title 'milk' added"],
            id="added",
        ),
        pytest.param(lambda state: state.remove("notes", 4), ["notes 4: removed"], id="removed"),
        pytest.param(
            lambda state: state.find("notes", 4)["tags"].append("x"),
            ["notes 4: tags set to ['x']"],
            id="changed inside",
        ),
        pytest.param(
            lambda state: (state.remove("notes", 4), state.add("notes", NOTE)), [], id="removed and put back as it was"
        ),
    ],
)
def test_changes(act, expected):
    state = State(today="2026-03-02")
    state.add("notes", NOTE)
    before = state.snapshot()
    act(state)
    assert [change.describe() for change in changes_between(before, state.snapshot())] == expected


MILK = {"note_id": 5, "title": "milk"}


@pytest.mark.parametrize(
    ("other", "is_match"),
    [
        pytest.param(Change("notes", 5, None, MILK), True, id="the same"),
        pytest.param(Change("notes", 9, None, {"note_id": 9, "title": "milk"}), True, id="another id"),
        pytest.param(Change("notes", 5, None, {"note_id": 5, "title": "milk\n"}), True, id="space around it"),
        pytest.param(Change("notes", 5, None, {"note_id": 5, "title": "Milk"}), False, id="another title"),
        pytest.param(Change("notes", 5, None, {**MILK, "tags": []}), False, id="one more field"),
        pytest.param(Change("tasks", 5, None, MILK), False, id="another table"),
        pytest.param(Change("notes", 5, MILK, None), False, id="removed"),
    ],
)
def test_which_changes_come_to_the_same(other, is_match):
    assert Change("notes", 5, None, MILK).matches(other) is is_match


def test_paths_are_not_ids():
    one, other = ({"path": path, "content": ""} for path in ("/a", "/b"))
    assert not Change("files", "/a", None, one).matches(Change("files", "/b", None, other))


def test_ids_are_not_given_twice():
    state = State(today="2026-03-02")
    first = state.add("notes", {"title": "a"})["note_id"]
    state.remove("notes", first)
    assert state.add("notes", {"title": "b"})["note_id"] == first + 1


def test_a_table_does_not_grow_without_end():
    state = State(today="2026-03-02", tables={"notes": {key: {} for key in range(MOST_RECORDS)}})
    with pytest.raises(ApiError, match=f"notes is full: it holds {MOST_RECORDS} records"):
        state.add("notes", {"title": "one more"})
