"""Rewards as written and shown during a run."""

import io
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from roost.config.train import AdvantageEstimator, AdvantageLevel, AdvantageSettings
from roost.rollout.episode import NOT_GENERATED, Episode, EpisodeReward, Task
from roost.rollout.rewards.config import Route, Routing
from roost.trainer.batch import batch_of, with_advantages
from roost.trainer.evaluation import Evaluation
from roost.trainer.metrics import TokenRatio
from roost.trainer.records.checkpoints import TrainerState
from roost.trainer.records.fan_out import open_metrics
from roost.trainer.records.run_folder import RunFolder
from roost.trainer.report.live_view import LiveView
from roost.trainer.watching import Watching
from tests.trainer.example_groups import example_episode, example_group


class Watched:
    def __init__(self, folder):
        self.run = RunFolder.create(folder / "run", "steps: 9", "{}")
        self.console = Console(file=io.StringIO(), width=200)
        self.watching = Watching(self.run, open_metrics(self.run), LiveView(9, self.console))

    def step(self, number, groups, **metrics):
        measured = {"time/step": 1.0, "reward/mean": 0.5} | {
            key.replace("__", "/"): one for key, one in metrics.items()
        }
        self.watching.step_done(TrainerState(number, number), measured, groups)

    @property
    def reported(self):
        return self.console.file.getvalue().splitlines()


@pytest.fixture
def watched(tmp_path):
    return Watched(tmp_path)


def tagged(group, tag):
    return replace(group, task=Task("t", tag=tag))


def test_a_reward_that_takes_no_task_is_told_once(watched):
    routing = Routing((Route("exact", frozenset({"maths"})), Route("polite")))
    watched.watching.watch_rewards(routing)
    for step in (1, 2):
        watched.step(step, [tagged(example_group(0, [1.0]), "math"), example_group(1, [0.0])])
    notes = [line for line in watched.reported if line.startswith("reward ")]
    assert notes == [
        "reward exact scores nothing in this step: its tags are maths, and the tasks have math (1), no tag (1)"
    ]


GIGPO = AdvantageSettings(AdvantageEstimator.GIGPO, advantage_level=AdvantageLevel.SAMPLE, step_gamma=0.95)
BY_STEP = AdvantageSettings(AdvantageEstimator.REWARD, advantage_level=AdvantageLevel.SAMPLE, step_gamma=0.5)


def of_turns(reward, *turns_of_samples):
    """A group of one episode whose samples have these turns, one token each."""
    sequences = []
    for turns in turns_of_samples:
        (tokens,) = example_episode(reward, (0,) * len(turns)).sequences
        sequences.append(replace(tokens, turns=np.array([NOT_GENERATED, NOT_GENERATED, *turns])))
    return replace(example_group(0, []), episodes=(Episode(tuple(sequences), EpisodeReward(reward), 1.0, 1),))


@pytest.mark.parametrize(
    ("settings", "groups", "told"),
    [
        pytest.param(GIGPO, [of_turns(1.0, (0, 1, 2))], "advantage_estimator: gigpo", id="gigpo"),
        pytest.param(BY_STEP, [of_turns(1.0, (0, 1)), of_turns(0.0, (0,))], "step_gamma", id="step_gamma"),
        pytest.param(GIGPO, [of_turns(1.0, (0,), (1,))], None, id="a sample for each turn"),
        pytest.param(GIGPO, [of_turns(1.0, (0,), (1,)), of_turns(1.0, (0, 1))], None, id="some with several samples"),
        pytest.param(GIGPO, [of_turns(1.0, (0,))], None, id="single turns"),
        pytest.param(GIGPO, [], None, id="no episode"),
        pytest.param(AdvantageSettings(AdvantageEstimator.GRPO), [of_turns(1.0, (0, 1))], None, id="credit by episode"),
    ],
)
def test_steps_without_credit_of_their_own_are_told_once(watched, settings, groups, told):
    watched.watching.watch_steps(settings)
    for step in (1, 2):
        watched.step(step, groups)
    notes = [line for line in watched.reported if "a step is a sample" in line]
    assert [note.partition(" gives all turns")[0] for note in notes] == ([] if told is None else [told])


@pytest.mark.parametrize(("samples", "expected"), [([(0, 1)], [1.0]), ([(0,), (1,)], [0.0, 1.0])])
def test_what_is_told_of_steps_is_what_they_get(samples, expected):
    group = of_turns(1.0, *samples)
    (episode,) = group.episodes
    group = replace(group, episodes=(replace(episode, score=EpisodeReward(1.0, turn_rewards=(0.0, 1.0))),))
    selected, _, _ = with_advantages(batch_of([group]), replace(BY_STEP, step_gamma=0.0))
    assert [float(sample.advantages[-1]) for sample in selected.samples] == expected


def test_tokens_with_the_largest_ratio_are_recorded_with_their_text(watched):
    watched.watching.decode = lambda ids, has_special: " ".join(f"t{token}" for token in ids) * has_special
    token = TokenRatio(2.0, -3.0, -2.3, 5, 7, (1, 2), 1, 4)
    watched.watching.step_done(TrainerState(1, 1), {"time/step": 1.0}, [], [token])
    assert list(watched.run.token_lines) == [
        {
            "step": 1, "token": "t7", "before": "t1 t2", "ratio": 2.0, "engine_logprob": -3.0, "learner_logprob": -2.3,
            "position": 5, "staleness": 1, "group": 4,
        }
    ]  # fmt: skip


def test_a_step_says_how_many_failed(watched):
    watched.step(1, [example_group(0, [1.0])], samples__failed=0.0)
    watched.step(2, [example_group(1, [1.0])], samples__failed=3.0)
    assert ["failed" in line for line in watched.reported] == [False, True]
    assert "failed 3" in watched.reported[1]


def test_an_evaluation_says_how_many_failed(watched):
    watched.watching.evaluated(1, Evaluation(1, (example_group(0, [1.0], failed=2),)))
    assert watched.reported == ["evaluation of version 1: mean reward 1.000, 2 failed"]


def test_rollouts_have_what_each_reward_gave(watched):
    group = example_group(0, [1.0])
    (episode,) = group.episodes
    score = replace(episode.score, parts={"exact": 1.0, "polite": 0.25}, answer="4")
    watched.step(1, [replace(group, episodes=(replace(episode, score=score),)), example_group(1, [0.0])])
    first, second = watched.run.sample_lines
    assert (first["parts"], first["answer"]) == ({"exact": 1.0, "polite": 0.25}, "4")
    assert "parts" not in second and "answer" not in second
