"""Slots of a gymnasium vector environment that are stepped and reset independently; all calls block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, SupportsFloat

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from roost.rollout.environments.environment import Observation

HOLD = "roost_hold"  # option of reset: return the last observation and do nothing
GO, WAIT = 1, 0


class Holding(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment that can skip a step: a vector always steps all its environments."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.action_space = gymnasium.spaces.Tuple((gymnasium.spaces.Discrete(2), env.action_space))
        self._seen: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if options and options.get(HOLD):
            return self._seen, {}
        self._seen, info = self.env.reset(seed=seed, options=options)
        return self._seen, info

    def step(self, action: tuple[int, Any]) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        if action[0] == WAIT:
            return self._seen, 0.0, False, False, {}
        self._seen, reward, terminated, truncated, info = self.env.step(action[1])
        return self._seen, reward, terminated, truncated, info


class VectorSlots:
    """A vector environment whose slots are reset and stepped by number; the others do not change."""

    def __init__(self, id: str, slots: int, vectorization: str, make_kwargs: Mapping[str, Any]) -> None:
        vector_kwargs: dict[str, Any] = {"autoreset_mode": AutoresetMode.DISABLED}
        if vectorization == "async":
            vector_kwargs["context"] = "forkserver"  # this process has threads, and a fork would copy their locks
            # In shared memory gymnasium keeps the first value of observations without a fixed size, such as text.
            vector_kwargs["shared_memory"] = False
        self._vector: VectorEnv[Any, Any, Any] = gymnasium.make_vec(
            id, slots, vectorization, vector_kwargs=vector_kwargs, wrappers=[Holding], **make_kwargs
        )
        self._slots = slots
        self._vector.reset()  # a vector batches the observations of all slots, so all must have one
        space = self._vector.single_action_space
        if not isinstance(space, gymnasium.spaces.Tuple):
            raise TypeError(f"the wrappers of {id} change its actions to {space}; register it without them")
        self.action_space: gymnasium.Space[Any] = space.spaces[1]
        self._idle = (WAIT, self.action_space.sample())

    def reset(
        self, seeds: Mapping[int, int | None], options: Mapping[str, Any] | None = None
    ) -> dict[int, Observation]:
        """Reset these slots."""
        by_slot = [seeds.get(slot) for slot in range(self._slots)]
        reset_options = {**(options or {}), "reset_mask": self._mask(seeds)}
        # Typed for one seed or a list; None, which keeps a slot's random state, is accepted as well.
        contents, infos = self._vector.reset(seed=by_slot, options=reset_options)  # type: ignore[arg-type]
        shown = list(iterate(self._vector.observation_space, contents))
        return {slot: Observation(shown[slot], info=slot_info(infos, slot)) for slot in seeds}

    def step(self, actions: Mapping[int, Any]) -> dict[int, Observation]:
        """Step these slots."""
        space = self._vector.single_action_space
        each = [(GO, actions[slot]) if slot in actions else self._idle for slot in range(self._slots)]
        empty: Any = create_empty_array(space, self._slots)
        batch = concatenate(space, each, empty)
        contents, rewards, terminated, truncated, infos = self._vector.step(batch)
        over = terminated | truncated
        if over.any():  # else the vector refuses to step; the next episode resets the slot
            self._vector.reset(options={"reset_mask": over, HOLD: True})
        shown = list(iterate(self._vector.observation_space, contents))
        return {
            slot: Observation(
                shown[slot],
                float(rewards[slot]),
                bool(over[slot]),
                {**slot_info(infos, slot), "truncated": bool(truncated[slot])},
                is_truncated=bool(truncated[slot] and not terminated[slot]),
            )
            for slot in actions
        }

    def close(self) -> None:
        self._vector.close()

    def _mask(self, slots: Mapping[int, Any]) -> np.ndarray[Any, np.dtype[np.bool_]]:
        mask = np.zeros(self._slots, np.bool_)
        mask[list(slots)] = True
        return mask


def slot_info(infos: Mapping[str, Any], slot: int) -> dict[str, Any]:
    """Return the infos of one slot of a vector: `_key` marks the slots that have `key`.

    >>> slot_info({"lives": np.array([3, 0]), "_lives": np.array([True, False])}, 0)
    {'lives': np.int64(3)}
    >>> slot_info({"lives": np.array([3, 0]), "_lives": np.array([True, False])}, 1)
    {}
    """
    held = {key: value for key, value in infos.items() if f"_{key}" in infos and infos[f"_{key}"][slot]}
    return {key: slot_info(value, slot) if isinstance(value, Mapping) else value[slot] for key, value in held.items()}
