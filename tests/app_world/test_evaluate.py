import pytest

from roost.app_world.changes import changes_between
from roost.app_world.evaluate import (
    Check,
    Report,
    evaluate,
    is_same_answer,
    judge,
    scenario_goal_completion,
    task_goal_completion,
)
from roost.app_world.state import State
from roost.app_world.tasks.task import AppTask
from roost.app_world.world import World
from tests.app_world.play import run_code


def task_of(change=None, answer=None):
    """A world with the tasks 1 and 2, both open."""
    state = State(today="2026-03-02")
    for title in ("tea", "rice"):
        World(state).call("todo", "create", {"title": title})
    after = state.copy()
    if change:
        change(after)
    wanted = tuple(changes_between(state.snapshot(), after.snapshot()))
    return AppTask("3f2a91c_1", "made_up", 1, "", state.snapshot(), wanted, answer, "")


def finish_first(state):
    state.find("tasks", 1)["is_done"] = True


def add_two(state):
    for _ in range(2):
        World(state).call("notes", "create", {"title": "milk"})


DONE = "apis.supervisor.complete_task()"
FINISH = "apis.todo.complete(task_id=1)"
MILK = 'apis.notes.create(title="milk")'


@pytest.mark.parametrize(
    ("task", "source", "failed", "share"),
    [
        pytest.param(task_of(finish_first), f"{FINISH};{DONE}", [], 1.0, id="right"),
        pytest.param(task_of(finish_first), FINISH, ["the task is completed"], 3 / 4, id="not completed"),
        pytest.param(
            task_of(finish_first), f"apis.todo.complete(task_id=2);{DONE}",
            ["tasks 1: is_done set to True", "nothing else changed"], 0.0, id="another one",
        ),
        pytest.param(
            task_of(finish_first), f"{FINISH};apis.todo.delete(task_id=2);{DONE}", ["nothing else changed"], 3 / 4,
            id="too much",
        ),
        pytest.param(
            task_of(finish_first), f"{FINISH};apis.todo.update(task_id=1, priority=1);{DONE}",
            ["tasks 1: is_done set to True"], 0.0, id="the right record, changed too much",
        ),
        pytest.param(
            task_of(finish_first), f"{FINISH};apis.supervisor.complete_task(answer=1)", ["there is no answer"], 3 / 4,
            id="an answer nobody asked for",
        ),
        pytest.param(task_of(add_two), f"{MILK};{MILK};{DONE}", [], 1.0, id="two of the same"),
        pytest.param(
            task_of(add_two), f"{MILK};{DONE}", ["notes: title 'milk', created_on '2026-03-02' added"], 4 / 5,
            id="one of the two",
        ),
        pytest.param(task_of(add_two), f"{MILK};{MILK};{MILK};{DONE}", ["nothing else changed"], 4 / 5, id="three"),
        pytest.param(
            task_of(add_two), f"note={MILK};apis.notes.delete(note_id=note['note_id']);{MILK};{MILK};{DONE}", [], 1.0,
            id="put right again",
        ),
        pytest.param(task_of(answer=42), "apis.supervisor.complete_task(answer='42')", [], 1.0, id="answer"),
        pytest.param(
            task_of(answer=42), "apis.supervisor.complete_task(answer=41)", ["the answer is right"], 0.0, id="wrong"
        ),
        pytest.param(
            task_of(answer=42), f"{MILK};apis.supervisor.complete_task(answer=42)", ["nothing else changed"], 2 / 3,
            id="right answer and damage",
        ),
    ],
)  # fmt: skip
def test_outcomes(task, source, failed, share):
    world = task.open_world()
    run_code(world, source)
    report = evaluate(task, world)
    assert [check.name for check in report.failures] == failed
    assert report.share == pytest.approx(share)
    assert (report.success, report.score) == (not failed, float(not failed))
    assert len(report.passes) + len(report.failures) == len(report.checks)
    assert judge(task, world.snapshot()) == report


def test_a_report_says_why():
    task = task_of(finish_first)
    world = task.open_world()
    run_code(world, f"apis.todo.update(task_id=1, priority=3);{MILK};apis.supervisor.complete_task(status='fail')")
    assert evaluate(task, world).describe().splitlines() == [
        "FAIL  the task is completed  its status is fail",
        "FAIL  tasks 1: is_done set to True  instead tasks 1: priority set to 3",
        "FAIL  nothing else changed  notes: title 'milk', created_on '2026-03-02' added",
        "pass  there is no answer",
    ]


@pytest.mark.parametrize(
    ("reported", "wanted", "is_same"),
    [
        pytest.param(42, 42, True, id="number"),
        pytest.param(42.0, 42, True, id="float"),
        pytest.param("42", 42, True, id="text"),
        pytest.param("$1,042", 1042, True, id="dollars"),
        pytest.param("42 dollars", 42, False, id="with words"),
        pytest.param("nan", 42, False, id="not a number"),
        pytest.param(True, 1, False, id="a bool is no number"),
        pytest.param(None, 0, False, id="none"),
        pytest.param([42], 42, False, id="list"),
        pytest.param({"answer": 42}, 42, False, id="mapping"),
        pytest.param(" ada BERG ", "Ada Berg", True, id="name"),
        pytest.param("Ada", "Ada Berg", False, id="part of a name"),
        pytest.param("", "Ada Berg", False, id="empty"),
        pytest.param(5, "5", True, id="a number for a text"),
    ],
)
def test_answers(reported, wanted, is_same):
    assert is_same_answer(reported, wanted) is is_same


@pytest.mark.parametrize(
    ("outcomes", "tasks", "scenarios"),
    [
        pytest.param({}, 0.0, 0.0, id="none"),
        pytest.param({"a_1": True, "a_2": True, "a_3": True}, 1.0, 1.0, id="all"),
        pytest.param({"a_1": True, "a_2": False, "b_1": True, "b_2": True}, 0.75, 0.5, id="one missed"),
        pytest.param({"a_1": False, "b_1": False}, 0.0, 0.0, id="no one"),
    ],
)
def test_goal_completion(outcomes, tasks, scenarios):
    reports = [Report(name, (Check("x", "" if solved else "y"),)) for name, solved in outcomes.items()]
    assert task_goal_completion(reports) == tasks
    assert scenario_goal_completion(reports) == scenarios
