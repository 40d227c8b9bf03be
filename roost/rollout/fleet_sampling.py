"""Sample turns of the policy from a fleet of engines."""

from __future__ import annotations

from collections.abc import Sequence

from roost.config.train import SamplingSettings
from roost.engines.fleet import Fleet
from roost.engines.protocol import Completion, Sampling
from roost.rollout.episode import Draw, TurnForm
from roost.rollout.order import sample_seed

ANY_FORM = TurnForm()


class FleetDraws:
    """Opens samplers for episodes. Episodes of a group use one engine, which has their prompt in its cache."""

    def __init__(self, fleet: Fleet, settings: SamplingSettings, seed: int, label: str = "group") -> None:
        self._fleet, self._settings, self._seed, self._label = fleet, settings, seed, label

    def open(self, number: int, episode: int, attempt: int) -> Draw:
        """Return the sampler for one attempt at an episode. Seeds depend on the numbers alone."""

        async def draw(
            token_ids: Sequence[int], turn: int, max_tokens: int | None, form: TurnForm = ANY_FORM
        ) -> Completion:
            settings = self._settings
            limit = settings.max_new_tokens if max_tokens is None else min(max_tokens, settings.max_new_tokens)
            sampling = Sampling(
                max_tokens=limit,
                temperature=settings.temperature,
                top_p=settings.top_p,
                top_k=settings.top_k,
                min_p=settings.min_p,
                seed=sample_seed(self._seed, number, episode, attempt, turn),
                stop=form.stop,
                json_schema=form.json_schema,
            )
            return await self._fleet.generate(token_ids, sampling, episode=f"{self._label} {number}")

        return draw

    def close(self, number: int) -> None:
        """Release the engine of a finished group."""
        self._fleet.end_episode(f"{self._label} {number}")
