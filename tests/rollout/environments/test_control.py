"""Control tasks with a policy of tokens."""

import pytest

from roost.rollout.environments.control import (
    EVALUATION_SEEDS,
    Actions,
    ControlScenario,
    ControlTokens,
    ObservationBins,
    vocabulary,
    write_control_model,
)
from roost.rollout.environments.environment import Observation
from roost.rollout.episode import Split, Transcript
from tests.rollout.script import completion, ran

CART_POLE = {
    "_target_": "roost.rollout.environments.gymnasium_envs.GymnasiumEnvironments",
    "id": "CartPole-v1",
    "slots": 2,
}
ARM = {
    "_target_": "roost.rollout.environments.driven_robot.DrivenRobots",
    "driver": {"_target_": "roost.rollout.environments.simulator.SimulatedArm"},
    "action_low": [-1, -1, -1, 0],
    "action_high": [1, 1, 1, 1],
    "robots": 1,
    "real_time": False,
    "max_steps": 5,
}
BOUNDS = {"low": [-2.4, -3, -0.21, -3], "high": [2.4, 3, 0.21, 3], "bins": 8}


class Names:
    """A tokenizer with a vocabulary; what it does not have is the last of it."""

    def __init__(self, names):
        self.names = names

    def convert_tokens_to_ids(self, names):
        return [self.names.index(name) if name in self.names else len(self.names) - 1 for name in names]


class Counting:
    """An environment that is over after so many steps, each worth its number."""

    def __init__(self, steps, is_limit=False):
        self._steps, self._is_limit, self.acted, self.closed = steps, is_limit, [], 0

    async def open(self):
        return self

    async def reset(self, task, seed=None):
        self._at = 0
        return Observation([float(seed % 4)])

    async def step(self, action):
        self._at += 1
        self.acted.append(action)
        return Observation([float(self._at)], float(self._at), self._at == self._steps, is_truncated=self._is_limit)

    async def score(self):
        return sum(range(self._at + 1))

    async def close(self):
        self.closed += 1


def tokens(numbers=2, bins=4, actions=None, places=()):
    actions = actions or Actions(3)
    names = Names(vocabulary(numbers, bins, actions.choices))
    return ControlTokens(names, ObservationBins((0.0,) * numbers, (1.0,) * numbers, bins), actions, places)


@pytest.mark.parametrize(
    ("numbers", "ids"),
    [
        pytest.param([0.0, 0.0], [0, 4], id="the least"),
        pytest.param([0.99, 1.0], [3, 7], id="the greatest"),
        pytest.param([-50.0, float("inf")], [0, 7], id="beyond the bounds"),
        pytest.param([0.25, 0.5], [1, 6], id="at an edge"),
    ],
)
def test_each_number_has_tokens_of_its_own(numbers, ids):
    assert tokens().observation(numbers) == ids


def test_only_the_numbers_at_some_places_are_shown():
    assert tokens(places=[2, 0]).observation([0.3, 0.9, 0.6]) == [2, 4 + 1]


@pytest.mark.parametrize(
    ("actions", "reported", "action", "wrong"),
    [
        pytest.param(Actions(3), [9], 1, 0, id="a choice"),
        pytest.param(Actions(3), [4], 1, 1, id="a token that is none"),
        pytest.param(Actions(3), [], 1, 1, id="nothing"),
        pytest.param(Actions(3, (-1.0, 0.0), (1.0, 4.0)), [8, 10], [-1.0, 4.0], 0, id="values between bounds"),
        pytest.param(Actions(3, (-1.0, 0.0), (1.0, 4.0)), [10], [1.0, 2.0], 1, id="one value missing"),
    ],
)
def test_what_is_said_is_an_action(actions, reported, action, wrong):
    found = tokens(actions=actions).action(reported)
    assert (getattr(found[0], "tolist", lambda: found[0])(), found[1]) == (action, wrong)


@pytest.mark.parametrize(
    ("numbers", "places", "described"),
    [
        pytest.param([0.0], [], "has 1 numbers, but bounds are given for 2", id="too few"),
        pytest.param([0.0, float("nan")], [], "has NaN", id="not a number"),
        pytest.param([0.0, 0.0], [1, 2], r"shown is \[1, 2\], but the observation has 2", id="too far"),
    ],
)
def test_what_cannot_be_binned_is_told(numbers, places, described):
    with pytest.raises(ValueError, match=described):
        tokens(places=places).observation(numbers)


def scripted(ids):
    """A draw that says one after another, and what it was shown."""
    shown, left = [], iter(ids)

    async def sample(token_ids, turn, max_tokens):
        shown.append(list(token_ids))
        return completion([next(left) for _ in range(max_tokens)])

    return sample, shown


@pytest.mark.parametrize(
    ("context", "shown", "sequences"),
    [
        pytest.param("step", [[2], [1], [2]], 3, id="only what is observed now"),
        pytest.param("episode", [[2], [2, 5, 1], [2, 5, 1, 4, 2]], 1, id="the whole episode"),
    ],
)
def test_each_step_is_a_turn_and_has_its_reward(context, shown, sequences):
    environments = Counting(steps=3)
    names = Names(vocabulary(1, 4, 2))
    scenario = ControlScenario(names, low=[0], high=[4], bins=4, context=context, reward_scale=0.5, invalid_penalty=0.1)
    scenario.use_environments(environments)
    sample, seen = scripted([5, 4, 3])
    transcript = Transcript(sample)
    score = ran(scenario.run_episode(scenario.task(Split.TRAIN, 2), transcript))
    assert (seen, len(transcript.sequences())) == (shown, sequences)
    assert environments.acted == [1, 0, 1] and environments.closed == 1
    assert score.turn_rewards == pytest.approx((0.5, 1.0, 1.4)) and score.reward == pytest.approx(2.9)
    assert score.shown == "6 in 3 steps" and not score.is_truncated


@pytest.mark.parametrize(
    ("context", "shown"), [("step", [2]), ("episode", [0, 4, 1, 4, 2])], ids=["only now", "the whole episode"]
)
def test_an_episode_has_no_more_steps_than_allowed_but_would_have_gone_on(context, shown):
    environments = Counting(steps=100)
    keys = {"low": [0], "high": [4], "bins": 4, "max_steps": 2, "context": context}
    scenario = ControlScenario(Names(vocabulary(1, 4, 2)), environments, **keys)
    sample, _ = scripted([4, 4, 4])
    transcript = Transcript(sample)
    score = ran(scenario.run_episode(scenario.task(Split.TRAIN, 0), transcript))
    assert len(score.turn_rewards) == 2 and environments.closed == 1
    assert score.is_truncated and transcript.shown_last().tolist() == shown
    assert all(len(tokens.completion_versions) for tokens in transcript.sequences())
    with pytest.raises(RuntimeError, match="before the first"):
        scenario.use_environments(environments)


def test_a_limit_of_the_environment_cuts_off_as_well():
    scenario = ControlScenario(Names(vocabulary(1, 4, 2)), Counting(2, is_limit=True), low=[0], high=[4], bins=4)
    assert ran(scenario.run_episode(scenario.task(Split.TRAIN, 0), Transcript(scripted([4, 4])[0]))).is_truncated


def test_seeds_of_evaluation_are_not_those_of_training():
    scenario = ControlScenario(Names(vocabulary(1, 4, 2)), low=[0], high=[4], bins=4, tasks=10, eval_tasks=3)
    assert (scenario.size(Split.TRAIN), scenario.size(Split.EVALUATION)) == (10, 3)
    assert scenario.task(Split.TRAIN, 7).data["seed"] == 7
    assert scenario.task(Split.EVALUATION, 2).data["seed"] == EVALUATION_SEEDS + 2


@pytest.mark.parametrize(
    ("keys", "described"),
    [
        pytest.param({}, "either low and high", id="no bounds"),
        pytest.param({"low": [0], "high": [1], "mean": [0], "deviation": [1]}, "either", id="both bounds"),
        pytest.param({"low": [0], "high": [0]}, "low below its high", id="nothing between them"),
        pytest.param({"low": [0], "high": [1], "shown": [0, 1]}, "shown has 2 indices", id="too few bounds"),
        pytest.param({"low": [0], "high": [1], "bins": 5}, "write the model with the same numbers", id="another model"),
        pytest.param({"low": [0], "high": [1], "context": "day"}, "day", id="an unknown context"),
    ],
)
def test_wrong_keys_are_told_at_once(keys, described):
    with pytest.raises(ValueError, match=described):
        ControlScenario(Names(vocabulary(1, 4, 2)), **{"bins": 4, **keys})


def test_a_scenario_without_environments_says_so():
    scenario = ControlScenario(Names(vocabulary(1, 4, 2)), low=[0], high=[4], bins=4)
    with pytest.raises(ValueError, match="use_environments"):
        ran(scenario.run_episode(scenario.task(Split.TRAIN, 0), Transcript(scripted([])[0])))


@pytest.mark.parametrize(
    ("environment", "keys", "steps"),
    [
        pytest.param(CART_POLE, BOUNDS, 8, id="a pole that is always pushed left"),
        pytest.param(
            ARM,
            {"mean": [0] * 16, "deviation": [1] * 16, "bins": 8, "action_low": [-1] * 4, "action_high": [1] * 4},
            5,
            id="an arm",
        ),
        pytest.param(
            ARM,
            {
                "shown": [0, 13],
                "low": [-2, -1],
                "high": [2, 1],
                "bins": 8,
                "action_low": [-1] * 4,
                "action_high": [1] * 4,
            },
            5,
            id="a part of an arm",
        ),
    ],
)
def test_environments_of_a_config_are_played(environment, keys, steps):
    names = Names(vocabulary(len(keys.get("low") or keys["mean"]), 8, 2))

    async def sample(token_ids, turn, max_tokens):
        return completion([names.names.index("a0")] * max_tokens)

    async def run():
        scenario = ControlScenario(names, environment, **keys)
        transcript = Transcript(sample)
        score = await scenario.run_episode(scenario.task(Split.TRAIN, 1), transcript)
        await scenario.close()
        return score, transcript.turns

    score, turns = ran(run())
    assert len(score.turn_rewards) == turns
    assert turns == pytest.approx(steps, abs=3) and score.reward == pytest.approx(sum(score.turn_rewards))


def test_a_model_is_written_whose_tokens_the_scenario_knows(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = write_control_model(tmp_path / "model", numbers=4, bins=8, actions=2, hidden_size=16, intermediate_size=16)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ControlScenario(tokenizer, **BOUNDS)
    assert model.config.vocab_size == len(tokenizer) == 4 * 8 + 2 + 1
    assert tokenizer.eos_token_id == model.config.eos_token_id == 34
    assert tokenizer("o3.7 a1").input_ids == [31, 33]


def test_a_model_that_knows_nothing_says_actions_and_prefers_none(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(write_control_model(tmp_path, numbers=6, bins=16, actions=3))
    shown = torch.arange(16)[:, None] + torch.arange(6) * 16
    reported = model(shown).logits[:, -1].softmax(-1)[:, 6 * 16 : 6 * 16 + 3]
    assert reported.sum(-1).min() > 0.99 and reported.min() > 0.02
