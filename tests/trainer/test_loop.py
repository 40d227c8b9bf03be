"""The loop with a real feed and real metrics; models are replaced by some that only note what is asked of them."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from roost.config.train import (
    AdvantageEstimator,
    AdvantageSettings,
    ImportanceSamplingLevel,
    LearnerSettings,
    LossSettings,
    OldLogprobs,
    RolloutSettings,
    TrainSettings,
)
from roost.engines.residency import EngineSwitch
from roost.engines.weights.sync import WrongWeights
from roost.learner.advantages import adapted_kl_coef
from roost.learner.sample import apart_from_engine
from roost.placement.memory.residency import Decision
from roost.trace.spans import SpanRecorder
from roost.trainer.feed import Feed, Position
from roost.trainer.guards import Diverged
from roost.trainer.loop import DeviceSwitch, Loop, Models, StalenessExceeded
from roost.trainer.records.checkpoints import TrainerState
from tests.rollout.script import Script, ran, settled


class Model:
    """Notes what it scores and learns from; everything else that can go on does, while it learns."""

    def __init__(self, name, events):
        self._name = self.name = name
        self._events = events
        self.learnt = []
        self.mismatches = []
        self.over_kl = ()
        self.positions = []  # in the learning-rate schedule

    async def score(self, samples, as_reference=False):
        self._events.append(f"{self._name} scores" + (" as reference" if as_reference else ""))
        apart = self.mismatches.pop(0) if self.mismatches else 0.0
        return [sample.logprobs + np.float32(apart) for sample in samples]

    async def values(self, samples):
        self._events.append(f"{self._name} values")
        self.valued = [sample.token_ids.tolist() for sample in samples]
        return [np.zeros(len(sample), np.float32) for sample in samples]

    async def learn(self, samples, totals, position):
        self._events.append(f"{self._name} learns")
        await settled()
        self._events.append(f"{self._name} learnt")
        self.positions.append(position)
        self.learnt.append([int(sample.token_ids[1]) * 100 + int(sample.token_ids[2]) for sample in samples])
        over = {"steps/over_kl": 1.0} if len(self.learnt) in self.over_kl else {}
        return {"loss": float(len(samples)), "tokens": float(totals.tokens), **over}

    async def weight_update(self, version):
        return SimpleNamespace(version=version)

    async def give_weights(self, other):
        self._events.append(f"{self._name} gives {other._name} its weights")

    async def load(self, parts):
        self._events.append("load")

    async def offload(self, parts, in_background):
        self._events.append("offload")


class Engines:
    """A fleet that only has a version, which the scenario's draws are made by."""

    def __init__(self, scenario, events, takes_updates=True, wrong_weights=()):
        self._scenario, self._events, self._takes_updates = scenario, events, takes_updates
        self.weights = self
        self.wrong_weights = list(wrong_weights)

    current_update = None

    async def wrong(self):
        """Those with other weights than they were given."""
        return self.wrong_weights.pop(0) if self.wrong_weights else []

    async def replace_wrong(self, wrong):
        self._events.append(f"replace {[one.name for one in wrong]}")

    def report(self, text):
        self._events.append(f"report: {text}")

    async def update(self, update, in_flight=None):
        self._events.append(f"version {update.version}")
        if self._takes_updates:
            self._scenario.version = update.version

    async def wake(self, update, in_flight, offload):
        self._events.append("wake")
        await self.update(update)
        await offload()

    async def sleep(self, level, in_flight, names):
        self._events.append("sleep")

    def learning_begins(self):
        pass

    async def serve(self, work):
        return await work


@dataclass
class Run:
    """A loop, and what became of it."""

    settings: TrainSettings
    decision: Decision = Decision.KEEP
    state: TrainerState = field(default_factory=TrainerState)
    engines_take_updates: bool = True
    has_critic: bool = False
    has_reference: bool = False
    has_inference: bool = False
    stops_after: int = 10**6
    plays: object = None
    is_truncated: bool = False
    wrong_weights: list = field(default_factory=list)  # what a check of the engines finds, one time after the other
    mismatches: list = field(default_factory=list)  # of the log-probabilities that the policy scores with, likewise
    over_kl: tuple = ()  # optimizer steps of the policy, from 1, that exceed early_stop_kl
    events: list = field(default_factory=list)
    recorded: list = field(default_factory=list)
    after: list = field(default_factory=list)

    async def go(self):
        self.scenario = Script(self._run_turns, is_truncated=self.is_truncated)
        self.scenario.version = self.state.version
        self.policy, self.critic = Model("policy", self.events), Model("critic", self.events)
        self.policy.mismatches, self.policy.over_kl = self.mismatches, self.over_kl
        models = Models(
            Engines(self.scenario, self.events, self.engines_take_updates, self.wrong_weights),
            self.policy,
            self.critic if self.has_critic else None,
            Model("reference", self.events) if self.has_reference else None,
            Model("inference", self.events) if self.has_inference else None,
            (self.policy,),
            {teacher.name: Model(teacher.name, self.events) for teacher in self.settings.teachers},
        )
        self.feed = Feed(
            self.scenario,
            self.scenario.runner(self.settings.rollout),
            self.settings.rollout,
            self.settings.max_staleness,
            self.settings.seed,
            self.state.position,
            self.state.version,
        )
        switch = DeviceSwitch(EngineSwitch(self.decision), {"policy": ("weight",)})
        self.recorder = SpanRecorder()
        loop = Loop(
            self.settings,
            models,
            self.feed,
            switch,
            self.recorder,
            self,
            self.state,
            self._after_learning,
            self._after_step,
            lambda: len(self.recorded) >= self.stops_after,
        )
        try:
            self.state = await loop.run()
        finally:
            await self.feed.close()
        return self

    async def _run_turns(self, number, episode, attempt):
        self.events.append(f"play {number}")
        if self.plays is not None:
            await self.plays(self, number)
        return float(episode)

    async def _after_learning(self, state):
        self.events.append("after learning")

    async def _after_step(self, state):
        self.events.append("after step")
        self.after.append((state, self.scenario.version))

    def phase(self, name, total=None):
        self.events.append(f"{name} {total}" if total is not None else name)

    def step_done(self, state, metrics, groups, tokens=()):
        self.recorded.append((state, dict(metrics), [group.number for group in groups]))


def settings_of(max_steps=1, prompts_per_step=2, num_generations=2, loss=None, **more):
    return TrainSettings(
        LearnerSettings("model", loss=LossSettings(**(loss or {}))),
        max_steps=max_steps,
        rollout=RolloutSettings(prompts_per_step, num_generations, max_concurrent_episodes=8),
        **more,
    )


def trained(*args, **kwargs):
    return ran(Run(*args, **kwargs).go())


def samples_of(groups, size=2):
    """As `Model` notes them."""
    return sorted(number * 100 + episode for number in groups for episode in range(size))


def test_a_step_from_beginning_to_end():
    run = trained(settings_of(), Decision.SLEEP)
    assert [event for event in run.events if not event.startswith("play")] == [
        "generate 4",
        "switch",
        "sleep",
        "load",
        "score",
        "policy scores",
        "learn",
        "policy learns",
        "policy learnt",
        "after learning",
        "sync",
        "wake",
        "version 1",
        "offload",
        "after step",
    ]
    assert run.state == TrainerState(step=1, version=1, position=Position(next=2))
    assert run.after == [(run.state, 1)], "the engines have the new policy before anything else is done with it"
    (_, metrics, groups) = run.recorded[0]
    assert groups == [0, 1]
    assert metrics["samples/finished"] == metrics["samples/learnt"] == metrics["loss/total"] == 4
    assert metrics["staleness/max"] == 0


def test_phases_are_timed_and_recorded():
    run = trained(settings_of(max_steps=2))
    phases = ["generate", "switch", "score", "learn", "sync"]
    for _, metrics, _ in run.recorded:
        assert all(metrics[f"time/{name}"] > 0 for name in phases)
        assert sum(metrics[f"time/{name}"] for name in phases) <= metrics["time/step"]
    assert [(span.name, span.args["step"]) for span in run.recorder.drain()] == [
        (name, step) for step in range(2) for name in phases
    ]


@pytest.mark.parametrize("decision", [Decision.KEEP, Decision.SLEEP])
@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 1), (1, 2), (1, 3), (2, 1), (3, 2), (1, 99)])
def test_every_sample_is_learnt_from_once_in_every_epoch(epochs, minibatches, decision):
    run = trained(settings_of(ppo_epochs=epochs, minibatches=minibatches, prompts_per_step=4), decision)
    cuts = min(minibatches, 8)
    assert len(run.policy.learnt) == epochs * cuts
    for epoch in range(epochs):
        parts = run.policy.learnt[epoch * cuts : (epoch + 1) * cuts]
        assert sorted(sample for part in parts for sample in part) == samples_of(range(4))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_epochs_and_steps_are_shuffled_each_in_its_own_way_and_alike_when_run_again():
    settings = settings_of(max_steps=2, ppo_epochs=2, minibatches=2, num_generations=8)
    orders = [trained(settings, Decision.SLEEP).policy.learnt for _ in range(2)]
    assert orders[0] == orders[1]
    cuts = [tuple(sample % 200 for sample in part) for part in orders[0][::2]]
    assert len(set(cuts)) == 4


def test_a_step_that_leaves_everything_out_goes_on_without_learning():
    run = trained(settings_of(max_steps=2, advantage=AdvantageSettings(min_abs_advantage=99.0)))
    assert not run.policy.learnt
    assert (run.state.step, run.state.version, run.scenario.version) == (2, 2, 2)
    for _, metrics, _ in run.recorded:
        assert (metrics["samples/learnt"], metrics["samples/left_out"]) == (0, 4)
        assert "loss/total" not in metrics


@pytest.mark.parametrize(("allowed", "is_error"), [(0, True), (1, True), (2, False)])
def test_tokens_that_are_too_old_end_the_run(allowed, is_error):
    """Engines that say they took an update, and go on with what they had: nobody but the tokens tells."""
    run = Run(settings_of(max_steps=3, max_staleness=allowed), engines_take_updates=False)
    if not is_error:
        assert ran(run.go()).recorded[-1][1]["staleness/max"] == 2
        return
    with pytest.raises(StalenessExceeded, match=f"a token is {allowed + 1} versions old; the run allows {allowed}"):
        ran(run.go())
    assert len(run.recorded) == allowed + 1


def test_stopping_ends_after_the_step():
    run = trained(settings_of(max_steps=9), stops_after=2)
    assert (run.state.step, run.state.version, len(run.after)) == (2, 2, 2)
    assert run.events[-1] == "after step"


def test_a_run_goes_on_from_where_it_was():
    state = TrainerState(step=3, version=5, position=Position(next=10, waiting=(7,)))
    run = trained(settings_of(max_steps=5), state=state)
    assert [groups for _, _, groups in run.recorded] == [[7, 10], [11, 12]]
    assert run.state == TrainerState(step=5, version=7, position=Position(next=13))


def test_a_run_that_has_done_all_its_steps_does_nothing():
    state = TrainerState(step=5, version=5)
    run = trained(settings_of(max_steps=5), state=state)
    assert (run.state, run.events) == (state, [])


# Engines with other weights than they were given ---------------------------------------------------------------------


def reports(run):
    return [event.removeprefix("report: ") for event in run.events if event.startswith("report: ")]


@pytest.mark.parametrize("staleness", [0, 1])
def test_groups_of_an_engine_with_wrong_weights_are_generated_again(staleness):
    wrong = [[], [WrongWeights("rollout-1", "the probe is off by 4")]]
    run = trained(settings_of(max_steps=3, max_staleness=staleness), wrong_weights=wrong)
    assert [groups for _, _, groups in run.recorded] == [[0, 1], [2, 3], [4, 5]]
    learnt = [sample for part in run.policy.learnt for sample in part]
    assert sorted(learnt) == samples_of(range(6)), "each is learnt from once"
    assert run.events.count("play 2") == 4, "two episodes, twice"
    assert "replace ['rollout-1']" in run.events
    assert reports(run) == [
        "step 2 is discarded and generated again: rollout-1: the probe is off by 4. The engine is started again "
        "with its weights"
    ]
    assert [metrics["groups/discarded"] for _, metrics, _ in run.recorded] == [0, 2 + 2 * staleness, 0]


STREAMED = [
    pytest.param({"loss": {"old_logprobs": OldLogprobs.DECOUPLED}}, {}, id="scored by the learner"),
    pytest.param({"loss": {"old_logprobs": OldLogprobs.ROLLOUT}}, {}, id="not scored"),
    pytest.param({}, {"has_inference": True}, id="scored while the learner learns"),
]


@pytest.mark.parametrize(("loss", "models"), STREAMED)
def test_every_part_of_a_streamed_step_is_checked_before_it_is_learnt_from(loss, models):
    wrong = [[], [], [WrongWeights("rollout-0", "the probe is off by 4")]]
    run = trained(settings_of(prompts_per_step=4, minibatches=4, **loss), wrong_weights=wrong, **models)
    assert [groups for _, _, groups in run.recorded] == [[0, 1, 2, 3]]
    assert run.policy.learnt == [samples_of([number]) for number in range(4)], "each is learnt from once"
    assert [run.events.count(f"play {number}") for number in range(4)] == [2, 2, 4, 4]
    assert reports(run) == [
        "the rest of step 1 is discarded and generated again: rollout-0: the probe is off by 4. The engine is started "
        "again with its weights"
    ]
    assert run.recorded[0][1]["groups/discarded"] == 2


@pytest.mark.parametrize("decision", [Decision.KEEP, Decision.SLEEP])
def test_a_jump_of_the_mismatch_is_not_learnt_from(decision):
    run = trained(settings_of(max_steps=2), decision, mismatches=[0.01, 4.0, 0.01])
    assert [groups for _, _, groups in run.recorded] == [[0, 1], [2, 3]]
    assert sum(map(len, run.policy.learnt)) == 8
    assert reports(run) == [
        "step 2 is discarded and generated again: the mean mismatch of log-probabilities jumped from 0.01 to 4. "
        "The engines get their weights again"
    ]
    assert run.events.count("version 1") == 2, "the weight update of version 1 is sent again"
    assert run.recorded[1][1]["mismatch/logprob_mean"] == pytest.approx(0.01, rel=1e-3)


async def half_late(run, number):
    """Of the groups of step 2, numbers 4 and 5 hold all engines until the weight sync, so 6 and 7 are not stale."""
    while number in (4, 5) and run.scenario.version == 0:
        await asyncio.sleep(0)


ASYNCHRONOUS = {"max_steps": 2, "prompts_per_step": 4, "num_generations": 4, "max_staleness": 1}


def test_of_stale_steps_the_samples_that_are_not_stale_are_compared():
    run = trained(settings_of(**ASYNCHRONOUS), plays=half_late, mismatches=[0.01, 0.02])
    first, second = (metrics for _, metrics, _ in run.recorded)
    assert (first["staleness/max"], second["staleness/max"], second["staleness/mean"]) == (0, 1, 0.5)
    assert "drift/logprob_mean" not in first
    assert second["mismatch/logprob_mean"] == second["drift/logprob_mean"] == pytest.approx(0.02, rel=1e-3)
    assert not reports(run)


def test_a_jump_of_the_mismatch_is_found_among_stale_samples():
    run = trained(settings_of(**ASYNCHRONOUS), plays=half_late, mismatches=[0.01, 4.0, 0.01])
    assert len(run.recorded) == 2
    assert [report.partition(" from ")[0] for report in reports(run)] == [
        "step 2 is discarded and generated again: the mean mismatch of log-probabilities jumped"
    ]


def test_the_largest_mismatch_is_checked_among_stale_samples():
    settings = settings_of(**ASYNCHRONOUS, loss={"max_logprob_mismatch": 0.5})
    with pytest.raises(Diverged, match="max_logprob_mismatch"):
        trained(settings, plays=half_late, mismatches=[0.4, 0.6])


def test_of_a_streamed_step_the_first_part_is_compared():
    settings = settings_of(prompts_per_step=4, minibatches=4, loss={"old_logprobs": OldLogprobs.DECOUPLED})
    ((_, metrics, _),) = trained(settings, mismatches=[0.01, 4.0, 4.0, 4.0]).recorded
    assert metrics["mismatch/logprob_mean"] == pytest.approx(0.01, rel=1e-3)
    assert metrics["drift/logprob_mean"] > 1


def test_a_mismatch_that_is_large_from_the_start_is_the_usual_one():
    run = trained(settings_of(max_steps=3), mismatches=[1.4, 1.1, 2.0])
    assert not reports(run) and len(run.recorded) == 3


def test_a_mismatch_that_stays_after_the_weights_were_sent_again_is_accepted():
    run = trained(settings_of(max_steps=5), mismatches=[0.01, 0.01, 0.01, 4.0, 4.0, 4.0])
    assert len(run.recorded) == 5
    assert len(reports(run)) == 2 and "it counts as usual now" in reports(run)[1]


# Modes --------------------------------------------------------------------------------------------------------------


def order_of(run, *wanted):
    return [event for event in run.events if event in wanted]


def test_without_a_lag_nothing_is_generated_while_the_learner_learns():
    run = trained(settings_of(max_steps=2, prompts_per_step=1, num_generations=1))
    wanted = ("play 0", "play 1", "policy learnt", "version 1", "version 2")
    assert order_of(run, *wanted) == ["play 0", "policy learnt", "version 1", "play 1", "policy learnt", "version 2"]


def test_with_a_lag_the_next_groups_are_played_while_the_learner_learns():
    async def plays(run, number):
        while number == 1 and "policy learns" not in run.events:
            await asyncio.sleep(0)
        run.events.append(f"played {number}")

    settings = settings_of(max_steps=2, prompts_per_step=1, num_generations=1, max_staleness=1)
    run = trained(settings, plays=plays)
    assert order_of(run, "play 1", "played 1", "policy learnt", "version 1")[:4] == [
        "play 1",
        "played 1",
        "policy learnt",
        "version 1",
    ]
    assert [metrics["staleness/max"] for _, metrics, _ in run.recorded] == [0, 1]
    assert run.state.position == Position(next=3, waiting=(2,)), "what nobody learnt from is played again"


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
def test_a_lag_is_never_more_than_allowed_and_nothing_is_learnt_from_twice(max_staleness):
    async def plays(run, number):
        for _ in range(number * 7919 % 53):  # as if by chance
            await asyncio.sleep(0)

    run = trained(settings_of(max_steps=8, prompts_per_step=3, max_staleness=max_staleness), plays=plays)
    assert all(metrics["staleness/max"] <= max_staleness for _, metrics, _ in run.recorded)
    learnt = [sample for part in run.policy.learnt for sample in part]
    assert len(learnt) == len(set(learnt)) == 8 * 6


def test_minibatches_are_learnt_from_while_others_are_still_generated():
    async def plays(run, number):
        while number == 0 and "policy learnt" not in run.events:
            await asyncio.sleep(0)

    run = trained(settings_of(minibatches=2, loss={"old_logprobs": OldLogprobs.DECOUPLED}), plays=plays)
    assert run.policy.learnt == [samples_of([1]), samples_of([0])]
    assert run.recorded[0][2] == [1, 0]
    assert run.recorded[0][1]["samples/learnt"] == 4


def test_a_minibatch_is_scored_while_the_one_before_is_learnt_from_where_somebody_else_scores():
    async def plays(run, number):
        while number == 0 and "policy learns" not in run.events:
            await asyncio.sleep(0)

    run = trained(settings_of(minibatches=2), plays=plays, has_inference=True)
    wanted = ("inference scores", "policy learns", "policy learnt")
    assert order_of(run, *wanted) == ["inference scores", "policy learns", "inference scores", *wanted[2:], *wanted[1:]]
    assert run.policy.learnt == [samples_of([1]), samples_of([0])]


def test_what_is_made_ready_ahead_ends_with_a_step_that_fails():
    async def plays(run, number):
        while number == 0 and "policy learns" not in run.events:
            await asyncio.sleep(0)

    run = Run(settings_of(minibatches=2), plays=plays, has_inference=True)

    async def go():
        with pytest.raises(OSError, match="the learner is gone"):
            await run.go()
        return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    async def learn(self, samples, totals, position):
        run.events.append("policy learns")
        raise OSError("the learner is gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Model, "learn", learn)
        assert ran(go()) == []


@pytest.mark.parametrize(
    "case",
    [
        pytest.param({}, id="recomputed log-probabilities must be of before the first part"),
        pytest.param(
            {
                "loss": {"old_logprobs": OldLogprobs.ROLLOUT},
                "advantage": AdvantageSettings(AdvantageEstimator.REINFORCE),
            },
            id="normalised over the whole step",
        ),
        pytest.param({"loss": {"old_logprobs": OldLogprobs.ROLLOUT}, "ppo_epochs": 2}, id="gone through twice"),
    ],
)
def test_minibatches_wait_for_all_groups_where_they_must(case):
    async def plays(run, number):
        for _ in range(50 * (number == 0)):
            await asyncio.sleep(0)
        run.events.append(f"played {number}")

    run = trained(settings_of(minibatches=2, **case), plays=plays)
    assert run.events.index("played 0") < run.events.index("policy learns")


# Who is asked what --------------------------------------------------------------------------------------------------


WEIGHTED = {
    "old_logprobs": OldLogprobs.ROLLOUT,
    "importance_sampling_level": ImportanceSamplingLevel.NONE,
    "rollout_is": ImportanceSamplingLevel.TOKEN,
}


@pytest.mark.parametrize(
    ("case", "scored"),
    [
        pytest.param({}, ["policy scores"], id="the learner's own log-probabilities"),
        pytest.param({"loss": {"old_logprobs": OldLogprobs.DECOUPLED}}, ["policy scores"], id="proximal"),
        pytest.param({"loss": WEIGHTED}, [], id="weights of the policy that learns"),
        pytest.param(
            {"loss": WEIGHTED | {"rollout_is_batch_normalize": True}}, ["policy scores"], id="normalised weights"
        ),
        pytest.param({"loss": {"old_logprobs": OldLogprobs.ROLLOUT}}, [], id="the engine's"),
        pytest.param(
            {"loss": {"kl_coef": 0.1}}, ["policy scores", "policy scores as reference"], id="its own reference"
        ),
        pytest.param(
            {"loss": {"kl_coef": 0.1}, "has_reference": True},
            ["policy scores", "reference scores"],
            id="a reference apart",
        ),
        pytest.param({"has_reference": True}, ["policy scores"], id="a reference that nobody needs"),
        pytest.param({"has_inference": True}, ["inference scores"], id="inference on devices of its own"),
        pytest.param(
            {"loss": {"kl_coef": 0.1}, "has_inference": True},
            ["inference scores", "policy scores as reference"],
            id="inference, and the policy's own reference",
        ),
    ],
)
def test_who_scores(case, scored):
    loss = case.pop("loss", None)
    run = trained(settings_of(loss=loss), **case)
    assert [event for event in run.events if "scores" in event] == scored


def test_teachers_score_and_their_kl_is_a_figure():
    run = trained(settings_of(teacher={"math": {"coef": 0.5}, "code": {"tags": ["code"]}}))
    assert [event for event in run.events if "scores" in event] == [
        "policy scores",
        "teacher.math scores",
        "teacher.code scores",
    ]
    metrics = run.recorded[0][1]
    assert metrics["teacher.math/kl"] == 0 and "teacher.code/kl" not in metrics, "no task has the tag"


@pytest.mark.parametrize(
    ("count", "name", "apart"),
    [
        pytest.param(1, "mismatch", 0.1, id="the same weights"),
        pytest.param(2, "drift", 0.15, id="the second has newer weights"),
    ],
)
def test_the_ratios_to_the_engine_are_those_of_the_first_epoch(count, name, apart):
    async def learn(self, samples, totals, position):
        zeros = torch.zeros(2)
        sums = apart_from_engine(zeros - 0.1 * (position + 1), zeros, zeros.long())
        return {"loss": 0.0, **{key: float(value) for key, value in sums.items()}}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Model, "learn", learn)
        run = trained(settings_of(minibatches=count, ppo_epochs=2, loss={"old_logprobs": OldLogprobs.ROLLOUT}))
    metrics = run.recorded[0][1]
    assert metrics[f"{name}/logprob_mean"] == metrics[f"{name}/position/0"] == pytest.approx(apart)
    assert not [key for key in metrics if "apart" in key], "sums are no metrics"


@pytest.mark.parametrize(
    ("decision", "order"),
    [
        pytest.param(Decision.KEEP, ["version 1", "policy gives inference its weights"], id="engines do not wait"),
        pytest.param(
            Decision.SLEEP, ["policy gives inference its weights", "version 1", "offload"], id="devices change hands"
        ),
    ],
)
def test_whoever_scores_gets_the_new_policy(decision, order):
    run = trained(settings_of(), decision, has_inference=True)
    assert order_of(run, "version 1", "policy gives inference its weights", "offload") == order


def test_the_reference_follows_the_policy_every_so_many_steps():
    settings = settings_of(max_steps=5, reference_sync_steps=2, loss={"kl_coef": 0.1})
    run = trained(settings, has_reference=True)
    wanted = "policy gives reference its weights", "policy learnt"
    assert order_of(run, *wanted) == [wanted[1], wanted[1], wanted[0]] * 2 + [wanted[1]]


def test_the_coefficient_of_the_kl_is_that_of_its_step():
    advantage = AdvantageSettings(kl_penalty_coef=0.1, kl_penalty_target=0.5, kl_penalty_horizon=1)
    run = trained(settings_of(max_steps=3, advantage=advantage), has_reference=True)
    used = [metrics["loss/kl_penalty_coef"] for _, metrics, _ in run.recorded]
    assert used == pytest.approx([0.1, run.recorded[0][0].kl_coef, run.recorded[1][0].kl_coef])
    assert used[1] != used[0]
    kls = [metrics["loss/kl_penalty"] for _, metrics, _ in run.recorded]
    assert [state.kl_coef for state, _, _ in run.recorded] == [
        adapted_kl_coef(coef, kl, 4, advantage) for coef, kl in zip(used, kls, strict=True)
    ]
