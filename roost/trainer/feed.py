"""The stream of groups from engines to the learner, with bounded staleness.

A version is one update, which consumes the groups of one step. A group that began at version b is consumed at version
b + max_staleness at the latest. At version v at most (v + 1 + max_staleness) * groups have begun, so that every group
has a step; and no step consumes so many young groups that later steps could not consume all the old ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from roost.config.train import RolloutSettings
from roost.rollout.concurrency import Slots
from roost.rollout.episode import Group, Scenario, Split
from roost.rollout.episode_runner import EpisodeRunner, GroupRollout, may_end, raise_fatal, task_of
from roost.rollout.order import order_of


@dataclass(frozen=True, slots=True)
class StartedGroup:
    """A group that has begun."""

    number: int
    began_at: int  # the policy version
    is_over: bool


def may_begin(
    consumed: int, in_flight: int, version: int, groups: int, max_staleness: int, first_version: int = 0
) -> int:
    """Number of groups that may begin now.

    `consumed` and `first_version` count from the same moment: the start of the run, or the step it was resumed at.

    >>> may_begin(consumed=0, in_flight=0, version=0, groups=4, max_staleness=1)
    8
    >>> may_begin(consumed=4, in_flight=4, version=0, groups=4, max_staleness=1), may_begin(4, 4, 1, 4, 1)
    (0, 4)
    """
    return max(0, (version - first_version + 1 + max_staleness) * groups - consumed - in_flight)


def choose(
    in_flight: Sequence[StartedGroup], count: int, version: int, max_staleness: int, groups: int, left: int = 0
) -> tuple[int, ...] | None:
    """Return the oldest finished groups, to learn from at this version.

    Return None if there are too few, or if the remaining groups could not all be consumed in time: `left` more at this
    version, and `groups` at each later one.

    >>> begun = [(0, 0, True), (1, 0, False), (2, 1, True), (3, 1, True)]
    >>> waiting = [StartedGroup(*group) for group in begun]
    >>> choose(waiting, 2, version=1, max_staleness=1, groups=2) is None
    True
    >>> choose(waiting, 2, version=0, max_staleness=1, groups=2)
    (0, 2)
    """
    over = sorted((group for group in in_flight if group.is_over), key=lambda group: (group.began_at, group.number))
    chosen = tuple(group.number for group in over[:count])
    staying = [group.began_at for group in in_flight if group.number not in chosen]
    are_in_time = all(
        sum(began_at + max_staleness <= version + ahead for began_at in staying) <= left + ahead * groups
        for ahead in range(max_staleness + 1)
    )
    return chosen if len(chosen) == count and are_in_time else None


LOST_LIMIT = 8  # failed groups in a row that end the run; prompts_per_step if that is more
REPLACED_LIMIT = 10  # times the groups of a step: beyond it equal-reward groups are no longer replaced


@dataclass(frozen=True, slots=True)
class Position:
    """Position in the task order, as stored in a checkpoint: the next task, and tasks begun but not learnt from."""

    next: int = 0
    waiting: tuple[int, ...] = ()


@dataclass(slots=True)
class Tally:
    """Counts of episodes and groups since the last `pop_tally`."""

    cancelled: int = 0
    failed: int = 0
    retried: int = 0
    lost_groups: int = 0  # without a finished episode
    equal_groups: list[Group] = field(default_factory=list)  # replaced as all rewards were equal; without their tokens
    equal_tokens: int = 0  # generated for them
    discarded_groups: int = 0  # generated again because an engine had wrong weights

    def add_equal(self, group: Group) -> None:
        """Count a group that is replaced. Its tokens are dropped to save memory: there may be many such groups."""
        self.equal_tokens += sum(episode.completion_tokens for episode in group.episodes)
        without = tuple(replace(episode, sequences=(), stopped_in=None) for episode in group.episodes)
        self.equal_groups.append(replace(group, episodes=without))


class NothingFinishes(RuntimeError):
    """Too many groups in a row failed; the message has the last error."""


class Feed:
    """Starts groups and hands out finished ones.

    A group is replaced if all its episodes fail or, with dynamic sampling, if all its rewards are equal.
    """

    def __init__(
        self,
        scenario: Scenario,
        runner: EpisodeRunner,
        settings: RolloutSettings,
        max_staleness: int,
        seed: int,
        position: Position | None = None,
        version: int = 0,
        on_progress: Callable[[int, int], None] | None = None,
        on_end: Callable[[int], None] | None = None,  # called with the number of a finished group
        steps: int | None = None,  # steps left; no group is started beyond them
    ) -> None:
        position = position or Position()
        self.tally = Tally()
        self._scenario, self._runner, self._settings = scenario, runner, settings
        self._max_staleness, self._first_version = max_staleness, version
        self._order = order_of(scenario, Split.TRAIN, seed)
        self._next = position.next
        self._requeued = sorted(position.waiting)  # numbers of groups to start before new ones
        self._rollouts: dict[int, GroupRollout] = {}
        self._given_up: list[GroupRollout] = []  # replaced groups, which may still be cleaning up
        self._kept: set[int] = set()  # finished groups to learn from; each is checked once per step
        self._consumed = 0
        self._replaced = 0
        self._lost_in_a_row = 0
        self.slots = Slots(settings.concurrency(getattr(scenario, "single_turn", False)))
        self._changed = asyncio.Event()
        self._on_progress, self._on_end = on_progress, on_end
        self._wanted = None if steps is None else steps * settings.prompts_per_step

    @property
    def position(self) -> Position:
        return Position(self._next, tuple(sorted([*self._rollouts, *self._requeued])))

    @property
    def data_metrics(self) -> dict[str, float]:
        """Rows of the data and passes over them so far, of a scenario that reads data files."""
        found: dict[str, float] = dict(getattr(self._scenario, "data_metrics", {}))
        return found | ({"data/epoch": self._next / found["data/rows"]} if found else {})

    def begin(self, version: int) -> None:
        """Start as many groups as max_staleness allows at this version."""
        count = may_begin(
            self._consumed,
            len(self._rollouts),
            version,
            self._settings.prompts_per_step,
            self._max_staleness,
            self._first_version,
        )
        if self._wanted is not None:
            count = min(count, self._wanted - self._consumed - len(self._rollouts))
        for _ in range(count):
            self._begin_one(version)

    async def take(self, version: int, count: int | None = None) -> list[Group]:
        """Wait for the groups of a step, or of a part of it, and replace those that cannot be learnt from."""
        wanted = self._settings.prompts_per_step if count is None else count
        numbers = await self._wait(wanted, version)
        chosen = [self._rollouts.pop(number) for number in numbers]
        given_up, self._given_up = self._given_up, []
        self._consumed += wanted
        groups = await asyncio.gather(*(rollout.result() for rollout in [*chosen, *given_up]))
        for group in groups:
            self._count(group)
            if self._on_end is not None:
                self._on_end(group.number)
        return sorted(groups[:wanted], key=lambda group: group.number)

    async def discard(self, groups: Sequence[Group]) -> None:
        """Cancel all groups under way, and queue them and these taken groups to be generated again."""
        rollouts, self._rollouts = list(self._rollouts.values()), {}
        for group in await asyncio.gather(*(rollout.result() for rollout in rollouts)):
            if self._on_end is not None:
                self._on_end(group.number)
        self._kept.clear()
        self._consumed -= len(groups)
        self._requeued = sorted(
            [*self._requeued, *(rollout.number for rollout in rollouts), *(group.number for group in groups)]
        )
        self.tally.discarded_groups += len(groups) + len(rollouts)

    async def close(self) -> None:
        """Cancel all groups under way."""
        await asyncio.gather(*(rollout.result() for rollout in [*self._rollouts.values(), *self._given_up]))

    async def _wait(self, count: int, version: int) -> Sequence[int]:
        groups = self._settings.prompts_per_step
        left = (version - self._first_version + 1) * groups - self._consumed - count
        while True:
            self._changed.clear()
            raise_fatal(self._rollouts.values())
            self._replace_useless(version)
            self._show_progress(count)
            chosen = choose(self._in_flight(), count, version, self._max_staleness, groups, left)
            if chosen is not None:
                return chosen
            self._cut_off_stragglers(count)
            await self._changed.wait()

    def _oldest(self, count: int) -> list[GroupRollout]:
        return sorted(self._rollouts.values(), key=lambda rollout: (rollout.began_at, rollout.number))[:count]

    def _in_flight(self) -> list[StartedGroup]:
        return [StartedGroup(rollout.number, rollout.began_at, rollout.is_over) for rollout in self._rollouts.values()]

    def _replace_useless(self, version: int) -> None:
        """Replace finished groups that cannot be learnt from, without waiting for the rest of the step."""
        for rollout in [
            rollout for rollout in self._rollouts.values() if rollout.is_over and rollout.number not in self._kept
        ]:
            if self._is_wanted(rollout.so_far):
                self._kept.add(rollout.number)
            else:
                self._given_up.append(self._rollouts.pop(rollout.number))
                self._begin_one(version)

    def _cut_off_stragglers(self, count: int) -> None:
        """Cancel the remaining episodes of the oldest groups, which the step waits for, if enough have finished."""
        oldest = self._oldest(count)
        finished, possible = [rollout.finished for rollout in oldest], [rollout.possible for rollout in oldest]
        if len(oldest) == count and may_end(finished, possible, self._settings):
            for rollout in oldest:
                rollout.cut_off()

    def _begin_one(self, version: int) -> None:
        if self._requeued:
            number = self._requeued.pop(0)
        else:
            number, self._next = self._next, self._next + 1
        task = task_of(self._scenario, Split.TRAIN, self._order.index(number))
        self._rollouts[number] = GroupRollout(
            number, task, version, self._runner, self._settings, self.slots, self._changed.set
        )

    def _is_wanted(self, group: Group) -> bool:
        if not group.episodes:
            self.tally.lost_groups += 1
            self._lost_in_a_row += 1
            if self._lost_in_a_row >= max(LOST_LIMIT, self._settings.prompts_per_step):
                raise NothingFinishes(
                    f"no episode of {self._lost_in_a_row} groups in a row finished; "
                    f"the last failed with: {group.last_error}"
                )
            return False
        self._lost_in_a_row = 0
        may_replace = self._replaced < REPLACED_LIMIT * self._settings.prompts_per_step
        if self._settings.dynamic_sampling and group.is_equal and may_replace:
            self._replaced += 1
            self.tally.add_equal(group)
            return False
        return True

    def _count(self, group: Group) -> None:
        self.tally.cancelled += group.cancelled
        self.tally.failed += group.failed
        self.tally.retried += sum(episode.attempts - 1 for episode in group.episodes)

    def pop_tally(self) -> Tally:
        """Return the counts since the last call, and reset them."""
        tally, self.tally, self._replaced = self.tally, Tally(), 0
        self._kept.clear()  # groups kept at the replacement limit may be replaced in the next step
        return tally

    def _show_progress(self, count: int) -> None:
        if self._on_progress is not None:
            finished = sum(rollout.finished for rollout in self._oldest(count))
            self._on_progress(finished, count * self._settings.num_generations)
