"""Control tasks as tokens: observations are binned, and tokens of the policy are actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from roost.rollout.check_target import ENVIRONMENT, Part
from roost.rollout.environments.environment import Environment, Environments, Observation, make_environments
from roost.rollout.episode import EpisodeReward, Split, Task, Transcript

END = "<end>"
DEVIATIONS = 3.0  # on either side of the mean covered by the bins


@dataclass(frozen=True)
class ObservationBins:
    """Bounds of each observed number, with bins of equal width between them.

    >>> ObservationBins((-1.0, 0.0), (1.0, 10.0), bins=4).of([0.9, 99.0])
    [3, 3]
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    bins: int

    def __post_init__(self) -> None:
        if len(self.low) != len(self.high) or any(
            not low < high for low, high in zip(self.low, self.high, strict=True)
        ):
            raise ValueError(f"low is {self.low} and high is {self.high}; give each number a low below its high")
        if self.bins < 2:
            raise ValueError(f"bins is {self.bins}; write 2 or more")

    @classmethod
    def from_statistics(cls, mean: Sequence[float], deviation: Sequence[float], bins: int) -> ObservationBins:
        """Derive bounds from mean and standard deviation of observations.

        >>> ObservationBins.from_statistics([1.0], [0.5], bins=8).high
        (2.5,)
        """
        pairs = list(zip(mean, deviation, strict=True))
        low = tuple(middle - DEVIATIONS * width for middle, width in pairs)
        return cls(low, tuple(middle + DEVIATIONS * width for middle, width in pairs), bins)

    def of(self, numbers: Sequence[float] | npt.NDArray[Any]) -> list[int]:
        """Bin of each number; numbers beyond the bounds fall into the outermost bins."""
        found = np.asarray(numbers, np.float64)
        if found.shape != (len(self.low),):
            raise ValueError(f"the observation has {found.size} numbers, but bounds are given for {len(self.low)}")
        if np.isnan(found).any():
            raise ValueError(f"the observation has NaN: {found.tolist()}")
        share = (found - np.array(self.low)) / (np.array(self.high) - np.array(self.low))
        binned: list[int] = np.clip(np.floor(share * self.bins), 0, self.bins - 1).astype(int).tolist()
        return binned


@dataclass(frozen=True)
class Actions:
    """Action space: one of `choices`, or with bounds, one of `choices` values for each number.

    >>> Actions(2).action([1]), Actions(3, (-1.0, 0.0), (1.0, 5.0)).action([0, 1]).tolist()
    (1, [-1.0, 2.5])
    """

    choices: int
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.choices < 2:
            raise ValueError(f"there are {self.choices} actions; give 2 or more")
        if len(self.low) != len(self.high):
            raise ValueError(f"action_low has {len(self.low)} numbers, but action_high {len(self.high)}; give as many")

    @property
    def numbers(self) -> int:
        """Tokens per action."""
        return max(len(self.low), 1)

    def action(self, chosen: Sequence[int]) -> Any:
        """Convert chosen indices to the environment's action."""
        if not self.low:
            return chosen[0]
        low, high = np.array(self.low), np.array(self.high)
        return (low + (high - low) * np.array(chosen) / (self.choices - 1)).astype(np.float32)


def vocabulary(numbers: int, bins: int, choices: int) -> list[str]:
    """All tokens in the order of their IDs: one per bin of each number, one per choice.

    >>> vocabulary(numbers=2, bins=2, choices=2)
    ['o0.0', 'o0.1', 'o1.0', 'o1.1', 'a0', 'a1', '<end>']
    """
    shown = [f"o{number}.{bin}" for number in range(numbers) for bin in range(bins)]
    return [*shown, *(f"a{choice}" for choice in range(choices)), END]


class ControlTokens:
    """Converts observations to token IDs and token IDs to actions, with the tokenizer's IDs.

    `places` are the indices of the observed numbers to show; empty: all.
    """

    def __init__(self, tokenizer: Any, bins: ObservationBins, actions: Actions, places: Sequence[int] = ()) -> None:
        if places and len(places) != len(bins.low):
            raise ValueError(f"shown has {len(places)} indices, but bounds are given for {len(bins.low)} numbers")
        names = vocabulary(len(bins.low), bins.bins, actions.choices)
        ids = dict(zip(names, tokenizer.convert_tokens_to_ids(names), strict=True))
        if len(set(ids.values())) != len(names) or None in ids.values():
            raise ValueError(
                f"the tokenizer does not have a token for each of {len(bins.low)} x {bins.bins} bins and "
                f"{actions.choices} actions; write the model with the same numbers (write_control_model)"
            )
        self._bins, self.actions, self._places = bins, actions, list(places)
        self._bin_ids = [[ids[f"o{number}.{bin}"] for bin in range(bins.bins)] for number in range(len(bins.low))]
        self._choices = {ids[f"a{choice}"]: choice for choice in range(actions.choices)}

    def observation(self, content: Any) -> list[int]:
        """Token IDs of an observation."""
        numbers = numbers_of(content)
        if any(not 0 <= place < len(numbers) for place in self._places):
            raise ValueError(f"shown is {self._places}, but the observation has {len(numbers)} numbers (from 0)")
        binned = self._bins.of(numbers[self._places] if self._places else numbers)
        return [ids[bin] for ids, bin in zip(self._bin_ids, binned, strict=True)]

    def action(self, completion: Sequence[int]) -> tuple[Any, int]:
        """Return the action, and the number of its tokens that were not valid actions.

        Any other token counts as the choice `token % choices`, so that an untrained policy acts at random. A missing
        token counts as the choice in the middle.
        """
        choices = self.actions.choices
        chosen = [self._choices.get(token, token % choices) for token in completion[: self.actions.numbers]]
        wrong = sum(token not in self._choices for token in completion[: self.actions.numbers])
        missing = self.actions.numbers - len(chosen)
        return self.actions.action(chosen + [choices // 2] * missing), wrong + missing


def numbers_of(content: Any) -> npt.NDArray[np.float64]:
    """Flatten an observation to numbers: `state` of a mapping that has it, or all of its values.

    >>> numbers_of((np.int64(3), np.array([0.5, 1.0]))).tolist()
    [3.0, 0.5, 1.0]

    >>> numbers_of({"state": [1, 2], "images": {}}).tolist(), numbers_of({"b": [[3], [4]], "a": 1}).tolist()
    ([1.0, 2.0], [1.0, 3.0, 4.0])
    """
    if isinstance(content, Mapping):
        if "state" in content:
            return numbers_of(content["state"])
        return np.concatenate([numbers_of(content[name]) for name in sorted(content)])
    if isinstance(content, tuple):  # its parts may have any shapes
        return np.concatenate([np.zeros(0), *map(numbers_of, content)])
    return np.asarray(content, np.float64).reshape(-1)


EVALUATION_SEEDS = 1_000_000  # first seed of evaluation, beyond those of training
PREFERENCE = 40.0  # weight of action tokens, large enough to survive the first updates
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
    """Contents of a step's prompt: the whole episode so far, or the current observation only."""

    EPISODE = "episode"
    STEP = "step"


class ControlScenario:
    """Control episodes: in each step the policy is shown numbers as tokens, and replies with action tokens.

    `environment` is a mapping with `_target_`, instantiated at the first episode of this process unless
    `use_environments` was called before. `shown` has the indices of the observed numbers that the policy sees; their
    bounds are `low` and `high`, or `mean` and `deviation`. An action is one of `actions` choices; with `action_low` and
    `action_high` it has one of `actions` values between these for each number.
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
            raise ValueError("give bounds of the observed numbers: either low and high, or mean and deviation")
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
        """Use these environments, e.g. of other processes. Call it before the first episode."""
        if self._environments is not None:
            raise RuntimeError("episodes have run already; call use_environments before the first")
        self._environment = environments

    def size(self, split: Split) -> int:
        return self._sizes[split]

    def task(self, split: Split, index: int) -> Task:
        seed = index + (EVALUATION_SEEDS if split is Split.EVALUATION else 0)
        return Task(f"from seed {seed}", {"seed": seed})

    async def run_episode(self, task: Task, transcript: Transcript) -> EpisodeReward:
        environment = await self._get_environments().open()
        try:
            rewards, is_truncated = await self._act(environment, task, transcript)
            score = await environment.score()
        finally:
            await environment.close()
        return EpisodeReward(
            sum(rewards), f"{score:g} in {len(rewards)} steps", tuple(rewards), is_truncated=is_truncated
        )

    async def close(self) -> None:
        """Close the environments, if there are any."""
        if self._environments is not None:
            await self._environments.close()

    async def _act(self, environment: Environment, task: Task, transcript: Transcript) -> tuple[list[float], bool]:
        """Run the episode; return the reward of each step, and whether a limit ended it."""
        seen = await environment.reset(task, task.data["seed"])
        rewards: list[float] = []
        sequence = transcript
        while not seen.is_over and len(rewards) < self._max_steps:
            sequence = self._show(seen, sequence)
            completion = await sequence.take(max_tokens=self._tokens.actions.numbers)
            action, wrong = self._tokens.action(completion)
            seen = await environment.step(action)
            rewards.append(seen.reward * self._scale - wrong * self._penalty)
        is_truncated = seen.is_truncated or not seen.is_over
        if is_truncated:
            self._show(seen, sequence)
        return rewards, is_truncated

    def _show(self, seen: Observation, sequence: Transcript) -> Transcript:
        """Give the observation to the policy and return its sequence: a new one per step with Context.STEP."""
        if sequence.token_ids and self._context is Context.STEP:
            sequence = sequence.branch()
        sequence.give(self._tokens.observation(seen.content))
        return sequence

    def _get_environments(self) -> Environments:
        if self._environments is None:
            self._environments = _built(self._environment)
        return self._environments


def _built(environment: Mapping[str, Any] | Environments | None) -> Environments:
    if environment is None:
        raise ValueError("there is no environment; write environment: {_target_: ...}, or call use_environments")
    return make_environments(environment)


def write_control_model(
    folder: Path | str, numbers: int, bins: int = 16, actions: int = 2, positions: int = 64, seed: int = 0, **sizes: Any
) -> Path:
    """Write an untrained model that only generates actions, and its tokenizer; return the folder.

    `numbers` is how many observed numbers the policy sees. `positions` is the longest sequence: a whole episode if that
    is the context.
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
    """Bias the model towards these tokens, whatever the prompt.

    Otherwise any token could encode an action, and learning about one would not carry over to others. The first
    element of the hidden state, which no layer writes to, becomes a bias.
    """
    import torch

    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 4 * model.config.initializer_range
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.get_output_embeddings().weight[tokens.start : tokens.stop, 0] = PREFERENCE
