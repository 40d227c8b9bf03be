"""Tasks, and helpers for their generators."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from roost.app_world import records
from roost.app_world.changes import Change
from roost.app_world.generation import generated_state
from roost.app_world.state import Json, Record, Snapshot, State
from roost.app_world.world import World


@dataclass(frozen=True)
class AppTask:
    """A task of the supervisor. The agent sees only the id and the instruction."""

    id: str  # scenario and variant, such as 3f2a91c_1
    kind: str  # its generator
    difficulty: int
    instruction: str
    initial: Snapshot  # the world at the start
    wanted: tuple[Change, ...]  # exactly the changes that the agent has to make
    answer: Json  # None if the task needs no answer
    solution: str  # code against `apis` that solves it

    @property
    def scenario_id(self) -> str:
        return self.id.partition("_")[0]

    def open_world(self) -> World:
        """Return a new world in which the task can be done."""
        return World.from_snapshot(self.initial)


T = TypeVar("T")

DONE = "apis.supervisor.complete_task()"
LOGIN = (
    "account = apis.supervisor.show_account_passwords()[0]\n"
    'token = apis.payments.login(email=account["email"], password=account["password"])["access_token"]'
)


class Draft:
    """A task under construction; the generator prepares the world in `state`."""

    def __init__(self, scenario_id: str, variant: int) -> None:
        self._phrasing = Random(f"phrasing {scenario_id}")  # the same wording for all variants of a scenario
        self.random = Random(f"values {scenario_id} {variant}")
        self.state: State = generated_state(f"{scenario_id} {variant}")

    def phrase(self, *templates: str, **values: Json) -> str:
        """Fill in one of the templates."""
        return self._phrasing.choice(templates).format(**values)

    def pick(self, choices: Sequence[T]) -> T:
        return self.random.choice(choices)

    def number(self, least: int, most: int) -> int:
        return self.random.randint(least, most)

    def people(self, count: int) -> list[Record]:
        """Distinct random contacts."""
        return self.random.sample(self.state.rows("contacts"), count)

    def record(self, table: str) -> Record:
        """A random record of a table."""
        return self.pick(self.state.rows(table))

    def shuffled(self, items: Sequence[T]) -> list[T]:
        return self.random.sample(items, len(items))


@dataclass(frozen=True)
class Plan:
    """Result of a task generator."""

    instruction: str
    solution: str
    after: State | None = None  # the expected final state; None if nothing should change
    answer: Json = None


Writer = Callable[[Draft], Plan]


def pay(after: State, email: str, amount: int, note: str) -> None:
    """Apply a payment to the state."""
    after.find("wallets", after.profile["email"])["balance"] -= amount
    after.add("transactions", records.transaction("sent", email, amount, note, after.today))


def quoted(value: Json) -> str:
    """Format a string or number as a literal.

    >>> quoted("milk"), quoted(3)
    ('"milk"', '3')
    """
    return json.dumps(value, ensure_ascii=False)


def code(*parts: str) -> str:
    return "\n".join(parts)


def all_pages(name: str, call: str) -> str:
    """Code that collects all pages of a search; `call` lacks its closing bracket.

    >>> print(all_pages("found", "apis.notes.search(tag='a'"))
    found, page = [], 0
    while batch := apis.notes.search(tag='a', page_index=page):
        found, page = found + batch, page + 1
    """
    separator = "" if call.endswith("(") else ", "
    return code(
        f"{name}, page = [], 0",
        f"while batch := {call}{separator}page_index=page):",
        f"    {name}, page = {name} + batch, page + 1",
    )
