"""The easiest tasks, of difficulty 1: a fixed wording, one of a few words, and a single short call."""

from __future__ import annotations

from roost.app_world import records
from roost.app_world.tasks.draft import DONE, Draft, Plan, code
from roost.app_world.words import TINY_WORDS


def jot_note(draft: Draft) -> Plan:
    word = draft.pick(TINY_WORDS)
    after = draft.state.copy()
    after.add("notes", records.note(word, after.today))
    return Plan(f'Add a note titled "{word}".', code(f'apis.notes.create(title="{word}")', DONE), after)


def jot_task(draft: Draft) -> Plan:
    word = draft.pick(TINY_WORDS)
    after = draft.state.copy()
    after.add("tasks", records.task(word))
    return Plan(f'Add a task titled "{word}".', code(f'apis.todo.create(title="{word}")', DONE), after)


def delete_file(draft: Draft) -> Plan:
    path, _ = _plant_files(draft)
    after = draft.state.copy()
    after.remove("files", path)
    return Plan(f"Delete the file {path}.", code(f'apis.files.delete(path="{path}")', DONE), after)


def read_file(draft: Draft) -> Plan:
    path, content = _plant_files(draft)
    solution = f'apis.supervisor.complete_task(answer=apis.files.read(path="{path}")["content"])'
    return Plan(f"What does the file {path} say?", solution, answer=content)


def _plant_files(draft: Draft) -> tuple[str, str]:
    """A file that the task is about, and others like it."""
    wanted, *others = draft.random.sample(TINY_WORDS, 3)
    for word in draft.shuffled([wanted, *others]):
        content = "".join(draft.random.sample("abcdefghijkmnpqrstuvwxyz", 6))
        draft.state.add("files", records.file(f"/{word}.txt", draft.state.today, content))
    path = f"/{wanted}.txt"
    return path, str(draft.state.find("files", path)["content"])
