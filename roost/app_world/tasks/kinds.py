"""All kinds of tasks, by difficulty. The place of a kind is part of its tasks' ids: new ones come last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roost.app_world.errors import unknown
from roost.app_world.tasks import money, one_app, pages, several_apps, tiny, two_apps
from roost.app_world.tasks.draft import Writer


@dataclass(frozen=True)
class Kind:
    """One generator of tasks."""

    write: Writer
    is_held_out: bool = False  # only for the split test_challenge, and nothing else is in it

    @property
    def name(self) -> str:
        return self.write.__name__

    def is_in(self, split: str) -> bool:
        return self.is_held_out == (split == "test_challenge")


KINDS: Mapping[int, tuple[Kind, ...]] = {
    1: (
        Kind(tiny.jot_note),
        Kind(tiny.jot_task),
        Kind(tiny.delete_file),
        Kind(tiny.read_file),
        Kind(one_app.finish_task),
        Kind(one_app.tell_phone),
        Kind(one_app.add_contact),
        Kind(one_app.book_event),
        Kind(one_app.rename_note),
        Kind(one_app.tell_balance),
        Kind(one_app.cancel_event),
        Kind(one_app.move_file, is_held_out=True),
        Kind(one_app.tag_note, is_held_out=True),
    ),
    2: (
        Kind(pages.finish_list),
        Kind(pages.delete_tagged),
        Kind(pages.total_sent),
        Kind(pages.raise_overdue),
        Kind(two_apps.invite_person),
        Kind(two_apps.pay_person),
        Kind(two_apps.note_to_tasks),
        Kind(two_apps.file_to_note),
        Kind(two_apps.list_city),
        Kind(pages.cancel_day, is_held_out=True),
        Kind(two_apps.prepare_day, is_held_out=True),
    ),
    3: (
        Kind(money.split_bill),
        Kind(money.settle_requests),
        Kind(money.watch_budget),
        Kind(money.reimburse),
        Kind(money.thank_most),
        Kind(several_apps.meeting_time),
        Kind(several_apps.postpone_trip),
        Kind(several_apps.birthday_gifts),
        Kind(several_apps.stock_up, is_held_out=True),
        Kind(several_apps.week_report, is_held_out=True),
    ),
}
TINY = ("jot_note", "jot_task", "delete_file", "read_file")  # what a model can learn that knows nothing


def places(split: str, difficulties: Sequence[int], names: Sequence[str] | None = None) -> list[tuple[int, int]]:
    """Difficulty and slot of the kinds that a split has, or of those of them with these names.

    >>> places("train", [1, 2], ["jot_task", "finish_list"])
    [(1, 1), (2, 0)]
    """
    slots = [(level, slot, kind) for level in difficulties for slot, kind in enumerate(KINDS[level])]
    here = {kind.name: (level, slot) for level, slot, kind in slots if kind.is_in(split)}
    for name in names or ():
        if name not in here:
            levels = ", ".join(map(str, difficulties))
            raise ValueError(str(unknown(f"kind of tasks in {split} at difficulty {levels}", name, here)))
    return [place for name, place in here.items() if names is None or name in names]
