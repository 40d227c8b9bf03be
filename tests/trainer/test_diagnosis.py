"""Recorded runs that go wrong are named within 20 steps, and healthy ones are not."""

import io
import math

import pytest
from rich.console import Console

from roost.trainer.diagnosis import CAUSES, QUIET, RULES, Code, Diagnoser, onsets
from roost.trainer.records.checkpoints import TrainerState
from roost.trainer.records.fan_out import open_metrics
from roost.trainer.records.run_folder import RunFolder, status_of
from roost.trainer.report.live_view import LiveView, print_summary
from roost.trainer.report.page_data import page_data
from roost.trainer.watching import Watching
from tests.trainer.pathologies import CASES, recorded

SICK, HEALTHY = [case for case in CASES if case.diagnosis], [case for case in CASES if not case.diagnosis]


@pytest.mark.parametrize("case", SICK, ids=lambda case: case.name)
def test_a_pathology_is_named_within_20_steps(case):
    assert {one.code for one in onsets(recorded(case.name)[:20])} == {case.diagnosis}


@pytest.mark.parametrize("case", HEALTHY, ids=lambda case: case.name)
def test_a_healthy_run_has_no_diagnosis(case):
    rows = recorded(case.name)
    assert len(rows) >= 20
    assert onsets(rows) == []


def test_a_learning_rate_that_ruins_the_first_steps_is_named_at_once():
    assert onsets(recorded("learning-rate"))[0].step == 4


def test_the_figures_of_a_learning_rate_say_how_many_steps_went_too_far():
    (found,) = onsets(LOST)
    assert found.figures == (
        "2 of 4 steps moved the policy by a KL above 0.1, the farthest by 0.54, reward 0.076 -> 0.045"
    )


def test_rejected_tokens_may_be_due_to_truncated_sampling():
    (found, *_) = onsets(recorded("rejected"))
    assert "top_p" in found.cause and "sampling_mask_replay" in found.advice


def test_every_code_has_a_rule_a_cause_and_a_recorded_run():
    assert set(RULES) == set(CAUSES) == set(Code) == {case.diagnosis for case in SICK}


def rows_of(count, **values):
    """Rows in which each metric is a number, or follows from the step."""
    return [
        {"step": step}
        | {name.replace("__", "/"): value(step) if callable(value) else value for name, value in values.items()}
        for step in range(1, count + 1)
    ]


def parts_of(count, **parts):
    """Rows of a run with these rewards, each given by some of its figures."""
    names = {f"reward__{name}__{figure}": value for name, figures in parts.items() for figure, value in figures.items()}
    return rows_of(count, **names, **{f"reward__{name}__scored": 8.0 for name in parts})


PENALTY = parts_of(
    30, right={"mean": lambda step: min(0.9, step / 10), "weight": 1.0}, repeats={"mean": 0.0, "weight": -0.5}
)
MINOR_STYLE = parts_of(
    30, right={"mean": 0.5, "std": 0.4, "share": 0.99}, style={"mean": 0.5, "std": 0.3, "share": 0.01, "weight": 0.1}
)
# A learning rate ten times too high: the policy is lost in the first steps, and gains a little for long after them.
LOST = rows_of(
    15,
    loss__kl=lambda step: (0.539, 0.156, 0.054, 0.037)[step - 1] if step < 5 else 0.02,
    reward__mean=lambda step: 0.076 if step == 1 else 0.035 + step / 300,
    mismatch__kl_k3=1e-14,
)
CUT = {"length__truncated": 0.95, "reward__mean": 0.1, "reward__std": 0.3, "reward__max": 1.0}


@pytest.mark.parametrize(
    ("rows", "codes"),
    [
        pytest.param([], [], id="no step"),
        pytest.param(rows_of(30), [], id="no metrics"),
        pytest.param(rows_of(30, entropy=math.nan, loss__kl=None, grad__norm=math.inf), [], id="no numbers"),
        pytest.param(
            rows_of(9, grad__norm=lambda step: 1.0 if step < 8 else 20.0), [Code.LEARNING_RATE], id="gradients jump"
        ),
        pytest.param(rows_of(9, grad__norm=lambda step: 20.0 if step == 8 else 1.0), [], id="one outlier"),
        pytest.param(
            rows_of(30, grad__norm=lambda step: 1.0 if step < 6 or step > 28 else 0.01),
            [],
            id="gradients are as at the start again",
        ),
        pytest.param(rows_of(9, loss__kl=lambda step: 0.5 if step == 1 else 0.01), [], id="one large first step"),
        pytest.param(
            rows_of(9, loss__kl=lambda step: 0.2 if step in (3, 8) else 0.01),
            [Code.LEARNING_RATE],
            id="two large steps",
        ),
        pytest.param(rows_of(9, loss__kl=lambda step: 0.2 if step < 3 else 0.01), [], id="two large steps at first"),
        pytest.param(LOST, [Code.LEARNING_RATE], id="two large steps at first, and the reward falls"),
        pytest.param(
            [row | {"reward/mean": 0.076 + row["step"] / 100} for row in LOST], [], id="the same, and the reward rises"
        ),
        pytest.param(
            [row | {"loss/kl": 0.02} if row["step"] == 2 else row for row in LOST], [], id="one, and the reward falls"
        ),
        pytest.param(rows_of(9, loss__kl=0.3, loss__clipped_high=0.4), [], id="truncated engine from the start"),
        pytest.param(
            rows_of(9, loss__kl=0.3, loss__clipped_high=0.4, mismatch__ess=0.5), [], id="the same, with its ratios"
        ),
        pytest.param(
            rows_of(9, loss__kl=0.3, loss__clipped_high=0.4, mismatch__kl_k3=1e-7),
            [Code.CLIPPED, Code.LEARNING_RATE],
            id="the same against the learner's own",
        ),
        pytest.param(
            rows_of(9, loss__kl=lambda step: 0.3 if step < 6 else 0.5), [Code.LEARNING_RATE], id="truncated, and far"
        ),
        pytest.param(rows_of(9, mismatch__kl_k3=0.2), [Code.ENGINE_MISMATCH], id="engine broken from the start"),
        pytest.param(rows_of(9, mismatch__kl_k3=0.005), [], id="rounding of bfloat16"),
        pytest.param(PENALTY, [], id="a penalty that is never given"),
        pytest.param(MINOR_STYLE, [], id="a reward of little weight decides little"),
        pytest.param([row | {"reward/style/weight": 0.5} for row in MINOR_STYLE], [Code.DOMINANT_REWARD], id="of more"),
        pytest.param(rows_of(9, drift__kl_k3=0.2), [], id="stale samples are no broken engine"),
        pytest.param(
            rows_of(30, entropy=lambda step: 1 / step, reward__mean=lambda step: step / 30, reward__std=0.3),
            [],
            id="entropy falls while the reward rises",
        ),
        pytest.param(
            rows_of(30, entropy=lambda step: 1 / step, reward__mean=0.1, reward__std=0.3),
            [Code.ENTROPY_COLLAPSE],
            id="entropy falls while the reward is flat",
        ),
        pytest.param(
            rows_of(6, reward__mean=0.1)
            + rows_of(30, entropy=lambda step: 1 / step, reward__mean=0.1, reward__std=0.3),
            [Code.ENTROPY_COLLAPSE],
            id="the same once a critic has warmed up",
        ),
        pytest.param(
            rows_of(30, entropy=lambda step: 1 / step, reward__mean=0.0, teacher__kl=lambda step: 1 - step / 31),
            [],
            id="the policy becomes as sure as its teacher",
        ),
        pytest.param(
            rows_of(30, entropy=lambda step: 1 / step, reward__mean=0.0, teacher__kl=1.0),
            [Code.ENTROPY_COLLAPSE],
            id="a teacher that is not followed",
        ),
        pytest.param(rows_of(9, reward__equal_groups=1.0, reward__mean=0.2), [Code.NO_SIGNAL], id="equal groups"),
        pytest.param(
            rows_of(9, reward__equal_groups=0.96, reward__mean=0.6, reward__max=1.0, pass_rate__mean=0.97),
            [],
            id="dynamic sampling once nearly all is solved",
        ),
        pytest.param(rows_of(24, **CUT), [Code.TRUNCATED], id="truncated from the start"),
        pytest.param(rows_of(14, **CUT), [], id="not for long"),
        pytest.param(rows_of(24, **CUT | {"length__truncated": 0.45}), [], id="less than half"),
        pytest.param(
            rows_of(24, **CUT | {"length__truncated": lambda step: 0.1 if step == 12 else 0.95}), [], id="once"
        ),
        pytest.param(
            rows_of(24, **CUT | {"length__truncated": lambda step: 0.99 - step / 60}), [], id="fewer and fewer"
        ),
        pytest.param(rows_of(24, **CUT | {"reward__mean": lambda step: 0.1 + step / 100}), [], id="truncated, learns"),
        pytest.param(rows_of(24, **CUT | {"pass_rate__mean": lambda step: step / 100}), [], id="passes more and more"),
        pytest.param(rows_of(24, **CUT | {"reward__mean": 0.7}), [], id="truncated, paid well"),
        pytest.param(rows_of(24, **CUT, reward__equal_groups=1.0), [Code.NO_SIGNAL], id="truncated without signal"),
        pytest.param(
            rows_of(24, **CUT, teacher__kl=lambda step: 1 - step / 31), [], id="truncated, follows its teacher"
        ),
        pytest.param(
            rows_of(400, tokens__mean=lambda step: 1000 + 10 * step, length__truncated=0.1), [], id="slow growth"
        ),
    ],
)
def test_rules(rows, codes):
    assert [one.code for one in onsets(rows)] == codes


def test_a_diagnosis_is_named_once_per_onset():
    def broken(step):
        return 0.2 if 5 <= step < 20 or step >= 20 + QUIET + 5 else 1e-6

    assert [one.step for one in onsets(rows_of(60, mismatch__kl_k3=broken))] == [6, 36]


@pytest.mark.parametrize("share", [0.95, 0.1])
def test_a_missing_signal_names_truncation_where_most_episodes_are_cut(share):
    (found,) = onsets(rows_of(9, reward__equal_groups=1.0, reward__mean=0.0, length__truncated=share))
    assert found.code == Code.NO_SIGNAL
    is_named = share > 0.5
    assert ("95% of the episodes are truncated" in found.figures) == is_named
    assert ("max_new_tokens" in found.cause) == ("max_new_tokens" in found.advice) == is_named


@pytest.mark.parametrize(("others", "verb"), [(["style"], "varies"), (["style", "tone"], "vary")])
def test_dominated_rewards_are_counted(others, verb):
    parts = {name: {"mean": 0.5, "std": 0.3, "share": 0.01} for name in others}
    (found,) = onsets(parts_of(9, right={"mean": 0.5, "std": 0.4, "share": 0.98}, **parts))
    assert found.figures.endswith(f"though {', '.join(others)} {verb}, too")


def test_the_figures_stand_beside_cause_and_advice():
    (found,) = onsets(rows_of(9, mismatch__kl_k3=lambda step: 1e-5 if step < 5 else 0.2))
    assert str(found).startswith(
        "engine_mismatch at step 6: KL of engine and learner with the same weights 1e-05 -> 0.2"
    )
    assert found.cause in str(found) and found.advice in str(found)


def run_of(folder, name):
    run = RunFolder.create(folder / name, "max_steps: 20", "{}")
    for row in recorded(name):
        run.add_step(row)
    return run


def test_it_is_shown_in_the_status_the_summary_and_the_page(tmp_path):
    run = run_of(tmp_path, "length")
    (found,) = onsets(recorded("length"))
    assert status_of(run).diagnoses == (f"length_explosion at step {found.step}",)
    console = Console(file=io.StringIO(), width=2000)
    print_summary(run, console)
    assert f"diagnosis {found}" in console.file.getvalue()
    (shown,) = page_data(run)["diagnoses"]
    assert (shown["step"], shown["code"], shown["advice"]) == (found.step, "length_explosion", found.advice)


def test_it_is_noted_once_in_the_terminal_and_not_again_after_a_resume(tmp_path):
    rows = recorded("length")
    run = RunFolder.create(tmp_path / "run", "max_steps: 20", "{}")

    def noted(rows):
        console = Console(file=io.StringIO(), width=2000)
        watching = Watching(run, open_metrics(run), LiveView(20, console))
        for row in rows:
            watching.step_done(TrainerState(row["step"], row["step"]), {"time/step": 1.0, **row}, [])
        return [line for line in console.file.getvalue().splitlines() if line.startswith("diagnosis: ")]

    assert noted(rows[:10]) == [f"diagnosis: {found}" for found in onsets(rows)]
    assert noted(rows[10:]) == []


def test_a_diagnoser_keeps_only_what_rules_look_at():
    diagnoser = Diagnoser()
    for row in rows_of(1000, entropy=1.0):
        diagnoser.add(row)
    assert max(map(len, diagnoser._first.values())) + len(diagnoser._newest) < 30
