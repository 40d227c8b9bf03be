"""The best checkpoint is known, shown and not pruned."""

import io

import pytest
from rich.console import Console

from roost.trainer.records.checkpoints import Best, Checkpoints, TrainerState, best_checkpoint, best_of
from roost.trainer.records.run_folder import RunFolder
from roost.trainer.report.live_view import print_summary
from roost.trainer.report.page_data import page_data


def rewards(*pairs):
    return [{"step": step, "reward/mean": reward} for step, reward in pairs]


@pytest.mark.parametrize(
    ("steps", "evaluations", "among", "best"),
    [
        pytest.param([(1, 0.1), (2, 0.9)], [], {1, 2}, Best(1, 0.9, "training"), id="step 2 sampled from checkpoint 1"),
        pytest.param([(1, 0.9)], [], {1}, None, id="nothing was sampled from the newest"),
        pytest.param(
            [(1, 0.1), (2, 0.9)], [(2, 0.2)], {1, 2}, Best(2, 0.2, "evaluation"), id="evaluations count first"
        ),
        pytest.param([(1, 0.1), (2, 0.9)], [(0, 1.0)], {1, 2}, Best(1, 0.9, "training"), id="of a step without one"),
        pytest.param([(2, 0.5), (3, 0.5)], [], {1, 2}, Best(2, 0.5, "training"), id="of equal ones the latest"),
        pytest.param([(1, None), (2, float("nan"))], [], {1, 2}, None, id="no numbers"),
        pytest.param([(1, 0.5)], [], {7}, None, id="no checkpoint"),
    ],
)
def test_which_is_best(steps, evaluations, among, best):
    assert best_of(rewards(*steps), rewards(*evaluations), among) == best


@pytest.mark.parametrize(
    ("evaluated", "shown"),
    [
        pytest.param((), [], id="never evaluated"),
        pytest.param((20,), ["answer", "evaluation 20"], id="stopped after an evaluation"),
        pytest.param((20, 25), ["answer", "evaluation 25"], id="evaluated at the end"),
    ],
)
def test_the_summary_shows_answers_of_the_first_and_the_last_step(tmp_path, evaluated, shown):
    run = RunFolder.create(tmp_path / "run", "steps: 25", "{}")
    for kind, steps in (("train", (1, 25)), ("evaluation", evaluated)):
        for step in steps:
            answer = {"completion": f"{kind} {step}", "reward": 1.0}
            run.add_samples([{"step": step, "kind": kind, "task": f"task {kind} {step}", **answer}])
    console = Console(file=io.StringIO(), width=200)
    print_summary(run, console)
    reported = console.file.getvalue()
    lines = [[part.strip() for part in line.split("  ") if part] for line in reported.splitlines()]
    assert [line[2] for line in lines] == ["answer", "train 1", "train 25", *shown], "a table for each kind"
    assert [line[0] for line in lines if line[2] == "answer"] == ["training", *(["evaluation"] if shown else [])]


def test_the_best_checkpoint_outlives_the_newest_ones_and_is_named(tmp_path):
    run = RunFolder.create(tmp_path / "run", "steps: 9", "{}")
    checkpoints = Checkpoints(run.checkpoints, keep=2)
    for step, reward in enumerate((0.1, 0.8, 0.3, 0.2, 0.4, 0.5), start=1):
        run.add_step({"step": step, "reward/mean": reward, "time/step": 1.0})
        checkpoint = checkpoints.at(step)
        checkpoint.begin()
        checkpoint.learner.mkdir()
        checkpoint.write_state(TrainerState(step, step))
        best = best_checkpoint(run)
        checkpoints.prune(best=best.step if best is not None else None)
    assert [one.step for one in checkpoints.found()] == [1, 5, 6]
    console = Console(file=io.StringIO(), width=200)
    print_summary(run, console)
    assert f"best     step 1, mean training reward 0.800: {checkpoints.at(1).folder}" in console.file.getvalue()
    assert page_data(run)["best"] == {"step": 1, "figure": "mean training reward 0.800"}
