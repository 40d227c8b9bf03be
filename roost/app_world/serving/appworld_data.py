"""AppWorld's own data, where somebody has downloaded it. Only what an agent may know is read."""

from __future__ import annotations

import json
import os
from pathlib import Path

from roost.rollout.scenario import Split, Task


def root_of_appworld(root: str | None = None) -> Path:
    """The folder with AppWorld's data: the given one, or what APPWORLD_ROOT says, or the one we are in."""
    folder = Path(root or os.environ.get("APPWORLD_ROOT") or ".").expanduser().resolve()
    if not (folder / "data" / "tasks").is_dir():
        raise ValueError(
            f"AppWorld's data is not in {folder / 'data'}; run `appworld download data --root {folder}`, or name the "
            "folder that has it by root or APPWORLD_ROOT"
        )
    return folder


class AppWorldDataTasks:
    """Tasks of AppWorld's splits: `split` to learn from, `evaluation_split` to be tried on."""

    def __init__(self, split: str = "train", root: str | None = None, evaluation_split: str = "dev") -> None:
        self._data = root_of_appworld(root) / "data"
        self._ids = {Split.TRAIN: self._listed(split), Split.EVALUATION: self._listed(evaluation_split)}
        common = set(self._ids[Split.TRAIN]) & set(self._ids[Split.EVALUATION])
        if common:
            raise ValueError(
                f"{split} and {evaluation_split} have {len(common)} tasks in common; choose two that differ"
            )

    def size(self, split: Split) -> int:
        return len(self._ids[split])

    def task(self, split: Split, index: int) -> Task:
        task_id = self._ids[split][index]
        folder = self._data / "tasks" / task_id
        instruction = json.loads((folder / "specs.json").read_text(encoding="utf-8"))["instruction"]
        difficulty = _difficulty(folder)
        data = {
            "task_id": task_id,
            "instruction": instruction,
            "difficulty": difficulty,
            "scenario_id": task_id.partition("_")[0],
        }
        tag = "appworld" if difficulty is None else f"appworld.{difficulty}"
        return Task(f"{task_id}: {instruction}", data, tag)

    def _listed(self, split: str) -> tuple[str, ...]:
        path = self._data / "datasets" / f"{split}.txt"
        if not path.is_file():
            known = ", ".join(sorted(other.stem for other in path.parent.glob("*.txt"))) or "none"
            raise ValueError(f"AppWorld's data has no split {split!r}; there are: {known}")
        lines = path.read_text(encoding="utf-8").splitlines()
        return tuple(line.partition(":")[0].strip() for line in lines if line.strip())  # a tag may follow the id


def _difficulty(folder: Path) -> int | None:
    """As the data tells it; splits that are kept secret may not."""
    path = folder / "ground_truth" / "metadata.json"
    return json.loads(path.read_text(encoding="utf-8")).get("difficulty") if path.is_file() else None
