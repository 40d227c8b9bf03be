"""Short runs that go wrong in a known way, and healthy ones.

`python -m tests.trainer.pathologies [NAME ...]` records their metrics. Each is a real run of a
small model on sums: an engine, a learner and Ray on this machine.
"""

import json
import random
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import roost.trainer.setup
from roost.engines.weights.source import WeightStream
from roost.rollout.arithmetic import Arithmetic, write_arithmetic_model
from roost.rollout.episode import EpisodeReward
from roost.trainer.learners import LearnerWorker

RECORDED = Path(__file__).parent / "recorded_metrics"
OF_SAMPLES = ("step", "reward/", "tokens/mean", "length/truncated", "staleness/max", "pass_rate/")
OF_LEARNER = ("entropy", "loss/", "grad/", "mismatch/kl_k3", "mismatch/logprob_mean", "drift/kl_k3")
NOISE = 0.2  # of the weights, relative to their standard deviation
HERE = "tests.trainer.pathologies"
HEALTHY = {
    "max_steps": 20,
    "prompts_per_step": 9,
    "num_generations": 16,
    "ppo_epochs": 2,
    "learning_rate": 2e-3,
    "entropy_coef": 0.02,
    "eval_tasks": 1,
}


class PaysForLength(Arithmetic):
    """Pays for each token, whatever it says."""

    longest = 48

    async def run_episode(self, task, transcript):
        transcript.give(self._ids(task.name))
        completion = await transcript.take(max_tokens=self.longest)
        return EpisodeReward(len(completion) / self.longest, self._tokenizer.decode(completion))


class PaysForZeros(Arithmetic):
    """Pays for zeros, less what the last answers had of them: all answers become the same, and none is paid."""

    usual = 0.0

    async def run_episode(self, task, transcript):
        transcript.give(self._ids(task.name))
        completion = await transcript.take(max_tokens=3)
        zeros = completion.count(0) / 3
        reward, self.usual = zeros - self.usual, 0.95 * self.usual + 0.05 * zeros
        return EpisodeReward(reward, self._tokenizer.decode(completion))


class PaysNothing(Arithmetic):
    """A reward that recognises no answer."""

    async def run_episode(self, task, transcript):
        episode = await super().run_episode(task, transcript)
        return replace(episode, reward=0.0)


class LongSums(Arithmetic):
    """Sums that this model does not learn within a few steps, of answers with four digits."""

    def task(self, split, index):
        one = super().task(split, index)
        answer = str(1000 + 7919 * index % 9000)
        return replace(one, data={**one.data, "answer": answer})


class CutShort(Arithmetic):
    """Answers that a limit cuts off before their end, so that the judge of them guesses."""

    async def run_episode(self, task, transcript):
        transcript.give(self._ids(task.name))
        completion = await transcript.take(max_tokens=2)
        return EpisodeReward(random.choice((0.0, 0.0, 0.0, 0.5)), self._tokenizer.decode(completion))


def only_digits(answer):
    """Format reward: the share of characters that are digits."""
    return sum(character.isdigit() for character in answer.text) / max(1, len(answer.text))


class NoisyStream(WeightStream):
    """Weights as an engine with a broken loader would have them."""

    def stream(self):
        random = torch.Generator().manual_seed(0)
        for tensor in super().stream():
            noise = torch.randn(tensor.shape, generator=random)
            yield tensor + NOISE * tensor.float().std(unbiased=False) * noise.to(tensor.dtype)


class NoisyLearner(LearnerWorker):
    """Its engines get noisy weights, and the check after a weight sync does not see it."""

    def _stream(self):
        return NoisyStream(self._learner.module)

    def probe(self, shows_image=False):
        return replace(super().probe(shows_image), tolerance=1e9)


@dataclass(frozen=True)
class Case:
    """A run: its settings, its task, and the diagnosis that it must get."""

    name: str
    diagnosis: str | None = None
    keys: dict[str, Any] = field(default_factory=dict)
    task: dict[str, Any] = field(default_factory=dict)
    learner: type = LearnerWorker
    placement: dict[str, str] = field(default_factory=lambda: {"actor": "0", "rollout": "1"})


EXACT = {"_target_": "roost.rollout.rewards.math_answer.ExactAnswer"}
DIGITS = {"_target_": f"{HERE}.only_digits"}
CASES = (
    Case("length", "length_explosion", {"max_new_tokens": 48}, {"_target_": f"{HERE}.PaysForLength"}),
    Case(
        "format",
        "format_only",
        {"rewards": {"format": DIGITS, "correct": EXACT}, "max_new_tokens": 5},
        {"_target_": f"{HERE}.LongSums"},
    ),
    Case("truncated", "truncated", {"learning_rate": 5e-4, "ppo_epochs": 1}, {"_target_": f"{HERE}.CutShort"}),
    Case("engine", "engine_mismatch", learner=NoisyLearner),
    Case("learning-rate", "learning_rate", {"learning_rate": 2e-2}),
    Case("collapse", "entropy_collapse", {"entropy_coef": 0.0}, {"_target_": f"{HERE}.PaysForZeros"}),
    Case("dominant", "dominant_reward", {"rewards": {"format": {**DIGITS, "weight": 20}, "scenario": {"weight": 1}}}),
    Case("clipped", "clipped", {"clip_range": 0.02, "ppo_epochs": 4}),
    Case("no-signal", "no_signal", task={"_target_": f"{HERE}.PaysNothing"}),
    Case("rejected", "rejected", {"rollout_rejection": {"token": [0.999, 1.001]}, "max_staleness": 1}),
    Case("healthy"),
    Case("healthy-seed", keys={"seed": 3}),
    Case("healthy-slow", keys={"learning_rate": 5e-4, "ppo_epochs": 1}),
    Case("healthy-epochs", keys={"learning_rate": 1e-3, "ppo_epochs": 4}),
    Case("healthy-minibatches", keys={"learning_rate": 1e-3, "minibatch_size": 36}),
    Case("healthy-stale", keys={"max_staleness": 1}),
    Case("healthy-long", keys={"max_steps": 60}),
    Case("healthy-parts", keys={"rewards": {"format": {**DIGITS, "weight": 0.2}, "scenario": {"weight": 1.0}}}),
)


def run_case(case, model, folder, notes=None, **keys):
    """Train, and return the folder of the run; `notes` takes what the terminal shows beside the steps."""
    from tests.trainer.live.jobs import config, trained

    values = config(model, case.placement, case.task, **{**HEALTHY, **case.keys, **keys})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(roost.trainer.setup, "LearnerWorker", case.learner)
        return trained(values, folder, notes=notes).run


def recorded(name):
    """Metrics of a recorded run, one row per step."""
    return [json.loads(line) for line in (RECORDED / f"{name}.jsonl").read_text().splitlines()]


def record(names):
    from tests.local_ray import end_ray, shared_ray

    RECORDED.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as made:
        shared_ray(patch)
        sizes = {"hidden_size": 64, "intermediate_size": 128}
        model = write_arithmetic_model(Path(made) / "model", **sizes)
        for case in CASES:
            if not names or case.name in names:
                rows = run_case(case, model, Path(made) / case.name).steps()
                (RECORDED / f"{case.name}.jsonl").write_text("".join(map(_line, rows)))
                print(case.name, len(rows), flush=True)
        end_ray()


def _line(row):
    kept = {key: _short(value) for key, value in row.items() if key.startswith(OF_SAMPLES + OF_LEARNER)}
    return json.dumps(kept, separators=(",", ":")) + "\n"


def _short(value):
    return float(f"{value:.5g}") if isinstance(value, float) else value


if __name__ == "__main__":
    record(sys.argv[1:])
