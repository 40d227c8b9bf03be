import asyncio
import math

import pytest

from roost.config.train import EvaluationSettings, LearnerSettings, RolloutSettings, TrainSettings
from roost.rollout.episode import EpisodeReward, Split, Task
from roost.rollout.episode_runner import LocalEpisodeRunner
from roost.trainer.evaluation import Evaluation, VersionChanged, evaluate
from roost.trainer.samplers import EVALUATION, samplers_of
from tests.rollout.script import completion, for_ever, others_running, ran, settled
from tests.trainer.example_groups import example_group


class Engines:
    """A fleet of one engine that says the version it has, or what it is told to."""

    def __init__(self, versions=(4,)):
        self._versions = list(versions)
        self.samplings, self.ended = [], []

    async def generate(self, token_ids, sampling, episode=None):
        version = self._versions[min(len(self.samplings), len(self._versions) - 1)]
        self.samplings.append(sampling)
        return completion((1, 2), version)

    def end_episode(self, episode):
        self.ended.append(episode)


class Exam:
    """Tasks numbered from 0; the odd ones are done fully, those of `broken` fail."""

    def __init__(self, size=10, broken=()):
        self._size, self._broken = size, broken

    def size(self, split):
        return self._size if split is Split.EVALUATION else 0

    def task(self, split, index):
        assert split is Split.EVALUATION
        return Task(f"task {index}", {"index": index})

    async def run_episode(self, task, transcript):
        transcript.give([task.data["index"]])
        await transcript.take()
        if task.data["index"] in self._broken:
            raise OSError("broken")
        return EpisodeReward(1.0 if task.data["index"] % 2 else 0.5)


def settings_of(rollout=None, **evaluation):
    return TrainSettings(
        LearnerSettings("model"),
        evaluation=EvaluationSettings(**evaluation),
        rollout=RolloutSettings(episode_attempts=2, extra_generations=5, rollout_fraction=0.1, **(rollout or {})),
        seed=3,
    )


async def evaluated(fleet, exam, settings, version):
    samplers = samplers_of(fleet, settings, None)[EVALUATION]
    runner = LocalEpisodeRunner(exam, samplers.open, settings.rollout.episode_timeout_s)
    return await evaluate(exam, runner, settings, version, samplers.close)


def test_evaluations_have_a_sampling_of_their_own():
    fleet = Engines()
    ran(evaluated(fleet, Exam(), settings_of(eval_temperature=0.6, eval_top_p=0.7, eval_top_k=50), version=4))
    assert {(sampling.temperature, sampling.top_p, sampling.top_k) for sampling in fleet.samplings} == {(0.6, 0.7, 50)}


def test_all_tasks_are_tried_at_the_version_that_is_named():
    fleet = Engines()
    found = ran(evaluated(fleet, Exam(), settings_of(eval_samples=2), version=4))
    assert found.version == 4
    assert sorted(group.task.data["index"] for group in found.groups) == list(range(10))
    described = {"reward/mean": 0.75, "reward/full": 0.5, "samples": 20.0, "samples/failed": 0.0}
    assert found.metrics | described == found.metrics
    assert found.metrics["length/completion/max"] == 2.0 and found.metrics["length/truncated"] == 0.0
    assert {(sampling.temperature, sampling.top_p, sampling.top_k) for sampling in fleet.samplings} == {(0.0, 1.0, 0)}
    assert len(fleet.samplings) == 20, "what collecting does about stragglers is no business of an evaluation"
    assert sorted(fleet.ended) == sorted(f"evaluation {number}" for number in range(10))


def test_a_sum_of_rewards_that_rounds_below_1_is_a_full_reward():
    rewards = (0.7 + 0.2 + 0.1, 0.9)
    assert rewards[0] < 1
    metrics = Evaluation(4, (example_group(0, rewards),)).metrics
    assert metrics["reward/full"] == 0.5


@pytest.mark.parametrize(("limit", "expected"), [(3, 3), (10, 10), (99, 10)])
def test_no_more_tasks_than_asked_for_or_than_there_are(limit, expected):
    found = ran(evaluated(Engines(), Exam(), settings_of(eval_tasks=limit), version=4))
    assert len(found.groups) == expected
    again = ran(evaluated(Engines(), Exam(), settings_of(eval_tasks=limit), version=4))
    assert [group.task for group in again.groups] == [group.task for group in found.groups]


@pytest.mark.parametrize(
    "versions",
    [pytest.param((4, 4, 5), id="updated on the way"), pytest.param((3,), id="an engine that is behind")],
)
def test_tokens_of_another_version_are_an_error(versions):
    (other,) = set(versions) - {4}
    with pytest.raises(VersionChanged, match=rf"version 4 was to be evaluated, .* of version \[{other}\]"):
        ran(evaluated(Engines(versions), Exam(), settings_of(), version=4))


def test_tasks_that_fail_are_counted_and_left_out():
    found = ran(evaluated(Engines(), Exam(broken=(0, 2)), settings_of(), version=4))
    assert found.metrics["samples/failed"] == 2
    assert found.metrics["samples"] == 8
    assert found.metrics["reward/mean"] == pytest.approx((5 * 1.0 + 3 * 0.5) / 8)


@pytest.mark.parametrize(
    ("exam", "failed"),
    [pytest.param(Exam(broken=range(10)), 10, id="all fail"), pytest.param(Exam(size=0), 0, id="no tasks")],
)
def test_nothing_to_tell_is_told_without_an_error(exam, failed):
    metrics = ran(evaluated(Engines(), exam, settings_of(), version=4)).metrics
    assert (metrics["samples"], metrics["samples/failed"]) == (0, failed)
    assert math.isnan(metrics["reward/mean"])
    assert math.isnan(metrics["reward/full"])


def test_an_evaluation_that_is_cancelled_leaves_nothing_behind():
    class Endless(Exam):
        async def run_episode(self, task, transcript):
            await for_ever()

    async def cancelled():
        evaluating = asyncio.create_task(evaluated(Engines(), Endless(), settings_of(), version=4))
        await settled()
        evaluating.cancel()
        await asyncio.wait([evaluating])
        assert evaluating.cancelled()
        return others_running()

    assert not ran(cancelled())


def test_no_more_are_played_at_a_time_than_the_run_allows():
    running, most = set(), []

    class Counting(Exam):
        async def run_episode(self, task, transcript):
            running.add(task.name)
            most.append(len(running))
            await asyncio.sleep(0)
            running.discard(task.name)
            return EpisodeReward(1.0)

    ran(evaluated(Engines(), Counting(), settings_of({"max_concurrent_episodes": 2}), version=4))
    assert (max(most), len(most)) == (2, 10)
