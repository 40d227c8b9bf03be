import subprocess
import sys
from functools import lru_cache

import pytest
from hypothesis import given, strategies as st

from roost.app_world.evaluate import evaluate, scenario_goal_completion, task_goal_completion
from roost.app_world.tasks.task_set import (
    DIFFICULTIES,
    KINDS,
    NUMBERS,
    SLOTS,
    SPLITS,
    TINY,
    ScenarioName,
    TaskSet,
    make_task,
)
from tests.app_world.play import report_of, report_of_random_agent

SETS = [pytest.param(split, difficulty, id=f"{split}-{difficulty}") for split in SPLITS for difficulty in DIFFICULTIES]
COUNT = 66


@lru_cache
def tasks_of(split, difficulty):
    return list(TaskSet(split, difficulty, COUNT, seed=11))


@pytest.mark.parametrize(("split", "difficulty"), SETS)
def test_the_oracle_solves_everything(split, difficulty):
    reports = [report_of(task, task.solution) for task in tasks_of(split, difficulty)]
    failed = [f"{report.task_id}\n{report.describe()}" for report in reports if not report.success]
    assert not failed, failed[0]
    assert {report.score for report in reports} == {report.share for report in reports} == {1.0}
    assert task_goal_completion(reports) == scenario_goal_completion(reports) == 1.0


@pytest.mark.parametrize(("split", "difficulty"), SETS)
@pytest.mark.parametrize(
    "source",
    [
        pytest.param("", id="nothing"),
        pytest.param("apis.supervisor.complete_task()", id="completes"),
        pytest.param("apis.supervisor.complete_task(answer='')", id="empty answer"),
        pytest.param("apis.supervisor.complete_task(answer=0)", id="zero"),
        pytest.param("apis.supervisor.complete_task(answer='yes')", id="yes"),
    ],
)
def test_who_does_nothing_earns_nothing(split, difficulty, source):
    for task in tasks_of(split, difficulty):
        report = report_of(task, source)
        assert (report.score, report.share) == (0.0, 0.0), (task.id, report.describe())


@pytest.mark.parametrize(("split", "difficulty"), SETS)
def test_who_calls_at_random_solves_nearly_nothing(split, difficulty):
    reports = [report_of_random_agent(task, seed) for task in tasks_of(split, difficulty) for seed in range(3)]
    assert task_goal_completion(reports) <= (0.02 if difficulty == 1 else 0.0)


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_a_change_too_many_fails(difficulty):
    for task in tasks_of("train", difficulty):
        report = report_of(task, 'apis.notes.create(title="too much")\n' + task.solution)
        assert [check.name for check in report.failures] == ["nothing else changed"]


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_what_was_not_completed_or_given_up_fails(difficulty):
    for task in tasks_of("train", difficulty):
        given_up = task.solution.replace("complete_task(", 'complete_task(status="fail", ')
        assert [check.name for check in report_of(task, given_up).failures] == ["the task is completed"]
        left = "\n".join(line for line in task.solution.splitlines() if "complete_task" not in line)
        assert not report_of(task, left).success


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_variants_cannot_be_known_by_heart(difficulty):
    tasks = [task for task in tasks_of("train", difficulty) if task.kind not in TINY]
    outcomes = {(task.instruction, task.answer, *(change.describe() for change in task.wanted)) for task in tasks}
    assert len(outcomes) == len(tasks) > 40


def test_difficulty_is_seen_in_the_solutions():
    def apps(task):
        return len(
            {
                app
                for app in ("notes", "todo", "contacts", "calendar", "payments", "files")
                if f"apis.{app}." in task.solution
            }
        )

    assert {apps(task) for task in tasks_of("train", 1)} == {1}
    assert all(apps(task) == 2 or "while batch" in task.solution for task in tasks_of("train", 2))
    assert all(apps(task) >= 2 for task in tasks_of("train", 3))


@pytest.mark.parametrize("kind", TINY)
def test_tiny_tasks_are_few_words_and_one_short_call(kind):
    tasks = TaskSet("train", 1, 150, kinds=[kind])
    assert {task.kind for task in tasks} == {kind}
    assert len({task.instruction for task in tasks}) == 16
    assert all(len(task.instruction) < 40 and len(task.solution) < 100 for task in tasks)


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_kinds(difficulty):
    names = [kind.name for kind in KINDS[difficulty]]
    assert len(set(names)) == len(names) <= SLOTS
    assert sum(not kind.is_held_out for kind in KINDS[difficulty]) >= 8
    assert sum(kind.is_held_out for kind in KINDS[difficulty]) == 2
    for split in SPLITS:
        here = [kind.name for kind in KINDS[difficulty] if kind.is_held_out == (split == "test_challenge")]
        tasks = TaskSet(split, difficulty, 3 * len(here), seed=2)
        assert sorted(task.kind for task in tasks) == sorted(3 * here), "kinds take turns"


def test_splits_have_no_task_in_common():
    ids = [set(TaskSet(split, None, 3000, seed=seed).ids) for split in SPLITS for seed in (0, 1)]
    assert all(len(of_set) == 3000 for of_set in ids)
    by_split = [ids[index] | ids[index + 1] for index in range(0, len(ids), 2)]
    assert len(set.union(*by_split)) == sum(len(of_split) for of_split in by_split)
    assert all({ScenarioName.parse(one[:7]).split for one in of_split} == {split}
               for split, of_split in zip(SPLITS, by_split, strict=True))  # fmt: skip


def test_a_set_is_the_same_whenever_it_is_made():
    one, other = (TaskSet("dev", 2, 12, seed=5) for _ in range(2))
    assert one.ids == other.ids and list(one) == list(other)
    assert one.ids != TaskSet("dev", 2, 12, seed=6).ids
    assert one[1:3] == [one[1], one[2]]


def test_a_task_is_the_same_in_another_process():
    ids = [*TaskSet("train", None, 30, seed=1).ids]
    source = (
        "import hashlib, sys\nfrom roost.app_world.tasks.task_set import make_task\n"
        "print(hashlib.sha256(repr([make_task(one) for one in sys.argv[1:]]).encode()).hexdigest())"
    )
    described = {
        subprocess.run(
            [sys.executable, "-c", source, *ids], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(described) == 1


def test_a_set_holds_whole_scenarios():
    ids = TaskSet("train", 1, 9).ids
    assert [one.split("_")[1] for one in ids] == ["1", "2", "3"] * 3
    assert len({one.split("_")[0] for one in ids}) == 3
    assert [one.difficulty for one in TaskSet("train", 3, 1)] == [3]


def test_a_world_of_a_task_is_its_own():
    task = TaskSet("train", 1, 1)[0]
    first, second = task.open_world(), task.open_world()
    first.call("notes", "create", {"title": "x"})
    assert second.snapshot() == task.initial != first.snapshot()
    assert not evaluate(task, second).success


@given(
    st.builds(
        ScenarioName,
        st.sampled_from(SPLITS),
        st.sampled_from(DIFFICULTIES),
        st.integers(0, SLOTS - 1),
        st.integers(0, NUMBERS - 1),
    )
)
def test_an_id_says_what_it_names(name):
    assert ScenarioName.parse(name.id) == name
    assert len(name.id) == 7


@pytest.mark.parametrize(
    ("task_id", "message"),
    [
        pytest.param("3f2a91c", "is not a task id; one looks like 3f2a91c_1", id="no variant"),
        pytest.param("3f2a91c_4", "with a variant from 1 to 3", id="fourth variant"),
        pytest.param("3F2A91C_1", "is not a task id", id="capitals"),
        pytest.param(ScenarioName("dev", 1, 31, 5).id + "_1", "there is no task", id="no such kind"),
        pytest.param(ScenarioName("train", 1, 11, 5).id + "_1", "there is no task", id="held out"),
    ],
)
def test_ids_that_name_nothing(task_id, message):
    with pytest.raises(ValueError, match=message):
        make_task(task_id)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param({"split": "test"}, "there is no split called 'test'", id="split"),
        pytest.param({"split": "trian"}, "did you mean 'train'?", id="split, nearly"),
        pytest.param({"difficulty": 4}, "difficulty is 4; write 1, 2 or 3", id="difficulty"),
        pytest.param({"count": 0}, "count is 0; a set needs at least 1 task", id="count"),
        pytest.param({"count": 10**8}, "count is 100000000, but there are only", id="more than there are"),
        pytest.param({"kinds": ["jot_nota"]}, "did you mean 'jot_note'?", id="kind"),
        pytest.param({"kinds": ["tag_note"]}, "in train at difficulty 1 called 'tag_note'", id="held-out kind"),
        pytest.param({"kinds": []}, "kinds is empty", id="no kinds"),
    ],
)
def test_sets_that_cannot_be(settings, message):
    with pytest.raises(ValueError) as caught:
        TaskSet(**{"split": "train", "difficulty": 1, "count": 3, **settings})
    assert message in str(caught.value)
