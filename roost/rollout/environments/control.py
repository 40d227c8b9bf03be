"""Control tasks for a policy of tokens: a small transformer balances poles and reaches with arms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

from roost.rollout.check_target import Part
from roost.rollout.environments.control_tokens import END, Actions, ControlTokens, ObservationBins, vocabulary
from roost.rollout.environments.environment import Environment, Environments, Observation
from roost.rollout.environments.making import make_environments
from roost.rollout.parts import ENVIRONMENT
from roost.rollout.scenario import Score, Split, Task
from roost.rollout.transcript import Transcript

EVALUATION_SEEDS = 1_000_000  # where the seeds of evaluation begin, far from those of training
PREFERENCE = 40.0  # for tokens that are actions, as a weight: so much that the first updates do not undo it
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "bos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
}


class Context(StrEnum):
    """What the policy sees at a step: all since the episode began, or only what is observed now."""

    EPISODE = "episode"
    STEP = "step"


class ControlScenario:
    """Episodes of control: at each step the policy is shown numbers as tokens, and says an action in one token or more.

    `environment` is a mapping with `_target_`, made at the first episode of this process, unless `use_environments`
    gave others before. `shown` says which of the observed numbers the policy sees; the bounds of those are `low` and
    `high`, or `mean` and `deviation`. Actions are a number of choices, or with `action_low` and `action_high`, so many
    values between those.
    """

    config_parts: ClassVar[Mapping[tuple[str, ...], Part]] = {("environment",): ENVIRONMENT}

    def __init__(
        self,
        tokenizer: Any,
        environment: Mapping[str, Any] | Environments | None = None,
        low: Sequence[float] = (),
        high: Sequence[float] = (),
        mean: Sequence[float] = (),
        deviation: Sequence[float] = (),
        shown: Sequence[int] = (),
        bins: int = 16,
        actions: int = 2,
        action_low: Sequence[float] = (),
        action_high: Sequence[float] = (),
        context: str = "step",
        max_steps: int = 500,
        tasks: int = 10_000,
        eval_tasks: int = 100,
        reward_scale: float = 1.0,
        invalid_penalty: float = 0.0,
    ) -> None:
        if bool(low) == bool(mean):
            raise ValueError("give bounds of what is observed: either low and high, or mean and deviation")
        bounds = ObservationBins.from_statistics(mean, deviation, bins) if mean else None
        self._tokens = ControlTokens(
            tokenizer,
            bounds or ObservationBins(tuple(low), tuple(high), bins),
            Actions(actions, tuple(action_low), tuple(action_high)),
            shown,
        )
        self._environment, self._context, self._max_steps = environment, Context(context), max_steps
        self._environments: Environments | None = None
        self._sizes = {Split.TRAIN: tasks, Split.EVALUATION: eval_tasks}
        self._scale, self._penalty = reward_scale, invalid_penalty

    def use_environments(self, environments: Environments) -> None:
        """Take environments from here, such as those of other processes; to be said before the first episode."""
        if self._environments is not None:
            raise RuntimeError("episodes were played already; say which environments to use before the first")
        self._environment = environments

    def size(self, split: Split) -> int:
        return self._sizes[split]

    def task(self, split: Split, index: int) -> Task:
        seed = index + (EVALUATION_SEEDS if split is Split.EVALUATION else 0)
        return Task(f"from seed {seed}", {"seed": seed})

    async def play(self, task: Task, transcript: Transcript) -> Score:
        environment = await self._made_environments().open()
        try:
            rewards, goes_on = await self._act(environment, task, transcript)
            earned = await environment.score()
        finally:
            await environment.close()
        return Score(sum(rewards), f"{earned:g} in {len(rewards)} steps", tuple(rewards), goes_on=goes_on)

    async def close(self) -> None:
        """End the environments, if any were made."""
        if self._environments is not None:
            await self._environments.close()

    async def _act(self, environment: Environment, task: Task, transcript: Transcript) -> tuple[list[float], bool]:
        """The reward of each step until the episode is over, and whether only a limit ended it."""
        seen = await environment.reset(task, task.data["seed"])
        rewards: list[float] = []
        sequence = transcript
        while not seen.is_over and len(rewards) < self._max_steps:
            sequence = self._shown(seen, sequence)
            said = await sequence.take(max_tokens=self._tokens.actions.numbers)
            action, wrong = self._tokens.action(said)
            seen = await environment.step(action)
            rewards.append(seen.reward * self._scale - wrong * self._penalty)
        goes_on = seen.goes_on or not seen.is_over
        if goes_on:
            self._shown(seen, sequence)
        return rewards, goes_on

    def _shown(self, seen: Observation, sequence: Transcript) -> Transcript:
        """The sequence in which the policy is shown what is observed: where it sees only now, another for each step."""
        if sequence.token_ids and self._context is Context.STEP:
            sequence = sequence.branch()
        sequence.give(self._tokens.observation(seen.content))
        return sequence

    def _made_environments(self) -> Environments:
        if self._environments is None:
            self._environments = _made(self._environment)
        return self._environments


def _made(environment: Mapping[str, Any] | Environments | None) -> Environments:
    if environment is None:
        raise ValueError("there is no environment; write environment: {_target_: ...}, or call use_environments")
    return make_environments(environment)


def write_control_model(
    folder: Path | str, numbers: int, bins: int = 16, actions: int = 2, positions: int = 64, seed: int = 0, **sizes: Any
) -> Path:
    """Write a model that knows no more than that it says actions, and its tokenizer; returns the folder.

    `numbers` is how many observed numbers it is shown. `positions` is the longest sequence: all tokens of an episode
    where the context is the episode.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    folder = Path(folder)
    names = vocabulary(numbers, bins, actions)
    own = {"vocab_size": len(names), "eos_token_id": names.index(END), "max_position_embeddings": positions}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, **own, **sizes}), dtype=torch.float32)
    _prefer(model, range(names.index("a0"), names.index("a0") + actions))
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(folder)
    return folder


def _prefer(model: Any, tokens: range) -> None:
    """Make these tokens nearly all that the model says, whatever it is shown.

    Otherwise each action would be said in as many ways as there are tokens, and what is learnt of one is learnt of no
    other. The first place of the hidden state, which no layer writes to, is made a bias.
    """
    import torch

    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 4 * model.config.initializer_range
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.get_output_embeddings().weight[tokens.start : tokens.stop, 0] = PREFERENCE
