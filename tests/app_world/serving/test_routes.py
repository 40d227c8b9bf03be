"""The contract of every route, asked over HTTP."""

import pytest

from roost.app_world.tasks.task_set import TaskSet
from tests.app_world.serving.session import NOBODY, NOTE, asking, solution
from tests.rollout.script import ran


def asked(*requests, **limits):
    """Answers to requests; a request is a route and its fields."""

    async def run():
        async with asking(**limits) as ask:
            return [await ask(route, **fields) for route, fields in requests]

    return ran(run())


def test_a_server_says_what_it_is():
    async def run():
        async with asking(worlds=3) as ask:
            return await ask.get("/"), await ask.get(f"/tasks/{NOTE.id}"), await ask("/initialize")

    about, shown, begun = ran(run())
    assert about == (200, {"name": "roost app world", "episodes": True, "worlds": 3})
    assert shown == (200, {"output": begun[1]})


def test_a_task_is_told_without_what_solves_it():
    _, described = asked(("/initialize", {}))[0]
    assert described["task_id"] == NOTE.id
    assert described["instruction"] == NOTE.instruction
    assert set(described["supervisor"]) == {"first_name", "last_name", "email", "phone_number"}
    assert described["datetime"].startswith(NOTE.initial["today"])
    assert len(described) == 4


def test_fields_of_appworld_are_taken():
    fields = {"experiment_name": "mine", "raise_on_unsafe_syntax": True, "remote_docker": False, "max_interactions": 9}
    answers = asked(("/initialize", fields), ("/evaluate", {"suppress_errors": True, "report": False}))
    assert [status for status, _ in answers] == [200, 200]


def test_an_episode_from_its_beginning_to_its_end():
    answers = asked(
        ("/initialize", {}),
        ("/execute", {"code": "x = 6"}),
        ("/execute", {"code": "print(x * 7)"}),
        ("/execute", {"code": "apis.notes.creat(title='a')"}),
        ("/task_completed", {}),
        ("/execute", {"code": solution()}),
        ("/task_completed", {}),
        ("/evaluate", {"suppress_errors": True}),
        ("/save_logs", {}),
        ("/close", {}),
        ("/close", {}),
    )
    assert [status for status, _ in answers] == [200] * len(answers)
    _, nothing, printed, failed, before, _, after, report, *nulls = (output for _, output in answers)
    assert (nothing, printed) == ("[Nothing was printed.]", "42\n")
    assert "did you mean 'create'?" in failed
    assert (before, after) == (False, True)
    assert (report["success"], report["difficulty"], report["failures"]) == (True, 1, [])
    assert report["num_tests"] == len(report["passes"]) == 4
    assert nulls == [None] * 3


def test_a_report_says_what_is_wrong():
    _, begun, _ = asked(("/initialize", {}), ("/evaluate", {}), ("/close", {}))
    report = begun[1]
    assert not report["success"]
    assert "the task is completed" in [test["requirement"] for test in report["failures"]]
    assert {test["label"] for test in report["failures"]} == {"no_op_pass", "no_op_fail"}
    assert all(test["trace"] for test in report["failures"])


def test_states_are_saved_and_brought_back():
    answers = asked(
        ("/initialize", {}),
        ("/save_state", {"state_id": "first"}),
        ("/execute", {"code": f"kept = 5\n{solution()}"}),
        ("/load_state", {"state_id": "first"}),
        ("/task_completed", {}),
        ("/execute", {"code": f"print(kept)\n{solution()}"}),
        ("/evaluate", {}),
        ("/load_state", {"state_id": "second"}),
        ("/save_state", {"state_id": "third"}),
        states=1,
    )
    outputs = [output for _, output in answers]
    assert (outputs[1], outputs[3], outputs[4], outputs[5]) == ("first", None, False, "5\n")
    assert outputs[6]["success"]
    assert answers[7] == (404, "no state 'second' was saved; there are: first")
    assert answers[8] == (400, "1 states are saved already; overwrite one of ['first']")


@pytest.mark.parametrize(
    "route", ["/execute", "/task_completed", "/evaluate", "/save_state", "/load_state", "/save_logs"]
)
def test_what_needs_a_world_says_so(route):
    fields = {"code": "1", "state_id": "a", "episode": "mine"}
    other = TaskSet("train", 2, 1)[0].id
    missing, _, mixed = asked(
        (route, fields), ("/initialize", {"episode": "mine"}), (route, fields | {"task_id": other})
    )
    assert missing[0] == 404 and missing[1].startswith("episode 'mine' has no world")
    assert mixed == (400, f"episode 'mine' has task {NOTE.id}, not {other}")


@pytest.mark.parametrize(
    ("route", "fields", "status", "reported"),
    [
        pytest.param("/initialize", {"task_id": "soon"}, 404, "'soon' is not a task id", id="no id"),
        pytest.param("/initialize", {"task_id": NOBODY}, 404, f"there is no task '{NOBODY}'", id="no task"),
        pytest.param("/initialize", {"task_id": 3}, 422, "task_id: Input should be a valid string", id="no text"),
        pytest.param("/initialize", {"episode": ""}, 422, "episode: String should have at least 1", id="no episode"),
        pytest.param("/execute", {}, 422, "code: Field required", id="no code"),
        pytest.param("/execute", {"code": "a" * 2_300_000}, 413, "larger than", id="far too large"),
    ],
)
def test_mistakes_of_clients_are_told(route, fields, status, reported):
    async def run():
        async with asking() as ask:
            answer = await ask._client.post(route, json={"task_id": NOTE.id} | fields)
            return answer.status_code, answer.text

    found = ran(run())
    assert found[0] == status
    assert reported in found[1]


def test_episodes_of_one_task_have_worlds_of_their_own():
    one, other = {"episode": "one"}, {"episode": "other"}
    answers = asked(
        ("/initialize", one),
        ("/initialize", other),
        ("/execute", one | {"code": f"x = 1\n{solution()}"}),
        ("/execute", other | {"code": "print('x' in dir())"}),
        ("/task_completed", one),
        ("/task_completed", other),
        ("/close", one),
        ("/task_completed", other),
    )
    assert [output for _, output in answers[3:]] == ["False\n", True, False, None, False]


def test_initializing_again_begins_anew():
    answers = asked(
        ("/initialize", {}),
        ("/execute", {"code": f"x = 1\n{solution()}"}),
        ("/initialize", {}),
        ("/execute", {"code": "print('x' in dir())"}),
        ("/task_completed", {}),
        worlds=1,
    )
    assert [output for _, output in answers[3:]] == ["False\n", False]


def test_a_full_server_says_so_until_worlds_are_closed():
    answers = asked(
        ("/initialize", {"episode": "a"}),
        ("/initialize", {"episode": "b"}),
        ("/close_all", {}),
        ("/initialize", {"episode": "b"}),
        ("/task_completed", {"episode": "a"}),
        worlds=1,
    )
    assert [status for status, _ in answers] == [200, 503, 200, 200, 404]
    assert answers[1][1] == "all 1 worlds are in use; close some, or allow more with --worlds"


def test_code_that_is_too_long_is_told_to_the_agent():
    answers = asked(("/initialize", {}), ("/execute", {"code": "print(1)" * 9}), code_chars=70)
    assert answers[1] == (200, "[The code has 72 characters; 70 are allowed. Nothing was run.]")
