"""Single-turn tasks from data files: the task of `train.data`, and a source of tasks for agents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from roost.config.data import DataSettings, DataSource, read_data, shares_of_batch
from roost.config.findings import Findings, Where, bug, counted, did_you_mean
from roost.rollout.agents.chat_format import ChatFormat
from roost.rollout.check_target import own_keys
from roost.rollout.data.prompts import (
    Prompt,
    PromptFormat,
    check_columns,
    message_text,
    prompt_column,
    short_name,
)
from roost.rollout.data.tables import DataError, ManyRows, Row, first_of, first_rows, open_rows
from roost.rollout.episode import EpisodeReward, Split, Task, Transcript
from roost.rollout.order import MixedOrder, Order, TaskOrder
from roost.vision.image import Image, files_of

CHUNK = 1024  # rows scanned at a time
CHECKED_ROWS = 1000  # rows that are checked before a run, where no setting needs all
ROLL_SPLIT = ("split", "train")  # ROLL selects by it in every file, also where rows have no such column
HELD_OUT = 0x0DD  # separates the random choice of held-out rows from the order of tasks
Ints = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, eq=False)
class Loaded:
    """Opened sources: their rows, those that are used, and the number of each row's domain if tasks are mixed."""

    rows: ManyRows
    sources: tuple[tuple[DataSource, str], ...]  # of each file: its source and its prompt column
    used: Ints
    dropped: int
    kinds: Ints | None = None


class PromptScenario:
    """Tasks from `train.data`, each answered in one turn; rewards come from `train.rewards`.

    The data are opened lazily, at the first task: processes that only run episodes never open them. A task's
    data has every column of its row, and `answer`, `prompt_text` and `messages`.
    """

    single_turn = True

    def __init__(self, tokenizer: Any = None, **data: Any) -> None:
        findings = Findings()
        settings = read_data(data, Where(path=("train", "data")), findings)
        findings.raise_errors()
        if settings is None:
            raise bug("the data were not read, and no finding says why")
        if isinstance(tokenizer, str):
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        self._settings, self._tokenizer = settings, tokenizer
        self._format = PromptFormat(tokenizer, settings)
        self._train: Loaded | None = None
        self._evaluation: Loaded | None = None
        self._set_sizes: dict[str, int] = {}

    @staticmethod
    def check_config(config: Mapping[str, Any], where: Where, findings: Findings) -> None:
        """Report unknown keys, missing files and columns, and wrong prompts in the first rows of each file."""
        keys = {key: value for key, value in own_keys(config).items() if key != "tokenizer"}
        settings = read_data(keys, where, findings)
        if settings is None:
            return
        before, counts = findings.num_errors, []
        for source in all_sources(settings):
            for path in source.path:
                try:
                    counts.append(_check_first(path, source, settings))
                except DataError as error:
                    error.report(where, findings)
        if findings.num_errors == before and not any(counts):
            _no_rows(settings).report(where, findings)

    def open_data(self, where: Where, findings: Findings) -> None:
        """Open all sources; report what is wrong with them."""
        try:
            self._opened(Split.TRAIN)
            self._opened(Split.EVALUATION)
        except DataError as error:
            error.report(where, findings)

    def show_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Write prompts with these tools, as an agent does: they count for their lengths."""
        self._format.tools = tuple(tools)

    def first_tasks(self) -> Iterator[tuple[str, Task]]:
        """Tasks of the first rows of each source, without prompts, with their places.

        Data sets that have to be loaded are left out until the data are opened.
        """
        parts = [
            (part, source)
            for loaded in (self._train, self._evaluation)
            if loaded is not None
            for part, (source, _) in zip(loaded.rows.parts, loaded.sources, strict=True)
        ]
        for source in all_sources(self._settings):
            for path in source.path:
                found = first_rows(path, CHECKED_ROWS)
                if found is None:
                    own = (part for part, its in parts if its is source and part.label == path)
                    found = next((first_of(part, CHECKED_ROWS) for part in own), None)
                for number, row in enumerate([] if found is None else found.rows):
                    if has_values(row, self._settings.only):
                        label = path if found is None else found.label
                        yield f"row {number} of {label}", Task("", _with_answer(row, source), self._tag(row, source))

    # Tasks ------------------------------------------------------------------------------------------------------------

    def size(self, split: Split) -> int:
        count = len(self._opened(split).used)
        is_set = split is Split.TRAIN and self._settings.rows_per_epoch
        return self._settings.rows_per_epoch or count if is_set else count

    def task(self, split: Split, index: int) -> Task:
        loaded = self._opened(split)
        number = int(loaded.used[index])
        row = loaded.rows.row(number)
        source, column = loaded.sources[loaded.rows.place(number)[0]]
        prompt = self._prompt(row, source, column, loaded.rows, number)
        data = {**_with_answer(row, source), "prompt_text": prompt.text, "messages": prompt.messages}
        return Task(
            short_name(prompt),
            {**data, "is_rendered": prompt.is_rendered, "row_tag": _raw_tag(row, source)},
            self._tag(row, source),
        )

    def order(self, split: Split, seed: int) -> Order:
        """Order of tasks, for a run with this seed."""
        settings, loaded = self._settings, self._opened(split)
        seed = seed if settings.seed is None else settings.seed
        if split is Split.EVALUATION:
            return TaskOrder(len(loaded.used), seed)
        shares = self._shares()
        if not shares or loaded.kinds is None:
            whole = len(loaded.used) - len(loaded.used) % settings.batch_size if settings.batch_size else 0
            return TaskOrder(len(loaded.used), seed, settings.shuffle, whole if settings.drop_last else 0)
        places = [np.flatnonzero(loaded.kinds == kind) for kind in range(len(shares))]
        counts = shares_of_batch(list(shares.values()), settings.batch_size or 100)
        present = [kind for kind, count in enumerate(counts) if count]
        return MixedOrder(
            [places[kind] for kind in present], [counts[kind] for kind in present], seed, settings.shuffle
        )

    @property
    def eval_sets(self) -> dict[str, range]:
        """Evaluation tasks of each named set."""
        self._opened(Split.EVALUATION)
        found, start = {}, 0
        for name, size in self._set_sizes.items():
            found[name] = range(start, start + size)
            start += size
        return found

    @property
    def data_metrics(self) -> dict[str, float]:
        """Numbers of rows, for metrics."""
        loaded = self._opened(Split.TRAIN)
        return {"data/rows": float(len(loaded.used)), "data/dropped_rows": float(loaded.dropped)}

    def data_summary(self) -> str:
        """One line about the data, for the terminal."""
        train, tried = self._opened(Split.TRAIN), self._opened(Split.EVALUATION)
        dropped = train.dropped + tried.dropped
        why = f"; {counted(dropped, 'row')} dropped: {self._dropped_because}" if dropped else ""
        sets = ", ".join(f"{name} {size:,}" for name, size in self._set_sizes.items())
        held = f", evaluation: {sets}" if sets else ""
        return f"data: {counted(len(train.used), 'row')}{held}{why}"

    @property
    def _dropped_because(self) -> str:
        """Reasons to drop rows, by the settings."""
        limit, shortest = self._settings.max_prompt_tokens, self._settings.min_prompt_tokens
        least = f"shorter than {shortest} or " if shortest else ""
        reasons = [f"prompts {least}longer than {limit} tokens"] if limit or least else []
        return ", or ".join([*reasons, *(f"{key} is not {value}" for key, value in self._settings.only.items())])

    async def run_episode(self, task: Task, transcript: Transcript) -> EpisodeReward:
        shown = [(str(one.get("role")), message_text(one)) for one in task.data["messages"]]
        ids, images = self._shown(task)
        transcript.give(ids, shown, images)
        completion = await transcript.take()
        text = self._tokenizer.decode(list(completion), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return EpisodeReward(0.0, str(text))

    def prompt_ids(self, task: Task) -> tuple[int, ...]:
        """Token IDs of a task's prompt."""
        return self._shown(task)[0]

    def _shown(self, task: Task) -> tuple[tuple[int, ...], tuple[Image, ...]]:
        data = task.data
        return self._format.ids(data["prompt_text"], data["is_rendered"], files_of(data["messages"]))

    def chat_format(self, task: Task) -> ChatFormat | None:
        """The format of conversations that begin with a task's messages; None if its prompt is finished text."""
        return self._format.chat_format(task.data["row_tag"]) if task.data["is_rendered"] else None

    # Opening ----------------------------------------------------------------------------------------------------------

    def _opened(self, split: Split) -> Loaded:
        if self._train is None or self._evaluation is None:
            only = self._settings.only
            train = self._selected(self._settings.sources, self._settings.limit, self._shares(), only)
            if not len(train.rows):
                raise _no_rows(self._settings)
            if not len(train.used):
                why = f"{counted(train.dropped, 'row')} dropped of {len(train.rows):,}"
                why += f": {self._dropped_because}" if train.dropped else ""
                fix = ("change only, " if only else "") + "raise max_prompt_tokens, or add rows"
                raise DataError("RST-T066", "no row is left to train on", why, fix)
            sets = {name: self._selected(sources, None) for name, sources in self._settings.eval.items()}
            self._set_sizes = {name: len(each.used) for name, each in sets.items()}
            evaluation = _joined(list(sets.values()))
            if self._settings.held_out:
                train, evaluation = self._held_out(train)
                self._set_sizes = {"held_out": len(evaluation.used)}
            self._check_mix(train)
            self._train, self._evaluation = train, evaluation
        return self._train if split is Split.TRAIN else self._evaluation

    def _selected(
        self,
        sources: Sequence[DataSource],
        limit: int | None,
        shares: Mapping[str, float] | None = None,
        only: Mapping[str, Any] | None = None,
    ) -> Loaded:
        """Open sources and choose their rows."""
        opened, about, starts = [], [], []
        for number, source in enumerate(sources):
            left = source.limit
            for path in source.path:
                for part in open_rows(path, source.name, source.split):
                    if not len(part):
                        continue
                    columns = part.columns
                    try:
                        check_columns(source, columns)
                        column = prompt_column(source, columns)
                    except DataError as error:
                        raise error.of(part.label) from None
                    opened.append(part)
                    about.append((source, column))
                    count = len(part) if left is None else min(left, len(part))
                    left = None if left is None else left - count
                    starts.append((number, count))
        rows = ManyRows(opened)
        parts = [
            np.arange(count, dtype=np.uint32) + (end - len(part))
            for (_, count), part, end in zip(starts, opened, np.cumsum([len(part) for part in opened]), strict=True)
        ]
        used: Ints = np.concatenate(parts) if parts else np.zeros(0, np.uint32)
        used = used if limit is None else used[:limit]
        loaded = Loaded(rows, tuple(about), used, 0)
        kept, kinds = self._scanned(loaded, dict(shares or {}), only or {})
        by_source = np.repeat([number for number, _ in starts], [count for _, count in starts])[: len(used)]
        if shares and not self._settings.mix:
            kinds = by_source.astype(np.int32)
        dropped = len(used) - int(np.count_nonzero(kept))
        if kinds is not None:
            kept &= kinds >= 0  # rows of a domain that has no share are not used
            kinds = kinds[kept]
        return Loaded(rows, tuple(about), used[kept], dropped, kinds)

    def _scanned(
        self, loaded: Loaded, shares: dict[str, float], only: Mapping[str, Any]
    ) -> tuple[npt.NDArray[np.bool_], Ints | None]:
        """Mask of rows with a prompt of the right length and the values of `only`, and the domain of each row."""
        settings = self._settings
        is_bounded = settings.max_prompt_tokens is not None and settings.overlong != "truncate"
        measures = is_bounded or settings.min_prompt_tokens > 0
        if measures and self._tokenizer is None:
            fix = "name the model's folder as tokenizer, or remove max_prompt_tokens"
            raise DataError("RST-T060", "max_prompt_tokens needs a tokenizer", "", fix)
        kept = np.ones(len(loaded.used), bool)
        mixes = bool(settings.mix and shares)
        kinds = np.full(len(loaded.used), -1, np.int32) if mixes else None
        names = {name: number for number, name in enumerate(shares)}
        unseen = {key for key, value in only.items() if (key, value) != ROLL_SPLIT}
        for start in range(0, len(loaded.used), CHUNK):
            if not (measures or mixes or only) and start >= CHECKED_ROWS:
                break
            numbers = loaded.used[start : start + CHUNK].tolist()
            rows = _rows(loaded.rows, numbers)
            prompts = []
            for number, row in zip(numbers, rows, strict=True):
                source, column = loaded.sources[loaded.rows.place(number)[0]]
                prompts.append(self._prompt(row, source, column, loaded.rows, number))
                if kinds is not None:
                    kinds[start + len(prompts) - 1] = names.get(self._domain(row, source), -1)
            if measures:
                lengths = np.array(self._format.lengths(prompts))
                fits = (lengths <= settings.max_prompt_tokens) if is_bounded else np.ones(len(lengths), bool)
                if settings.overlong == "error" and not fits.all():
                    first = int(np.argmin(fits))
                    what = f"{loaded.rows.spelled(numbers[first])} has {lengths[first]} tokens"
                    why = f"max_prompt_tokens is {settings.max_prompt_tokens}"
                    raise DataError("RST-T069", what, why, "raise it, or write overlong: filter or overlong: truncate")
                kept[start : start + len(numbers)] = fits & (lengths >= settings.min_prompt_tokens)
            if only:
                kept[start : start + len(numbers)] &= [has_values(row, only) for row in rows]
                unseen -= {key for row in rows if unseen for key in row}
        if unseen and len(loaded.used):
            columns = dict.fromkeys(column for part in loaded.rows.parts for column in part.columns)
            wanted = min(str(key) for key in unseen)
            fix = did_you_mean(wanted, columns) or "name one of these, or remove it"
            what = f"only selects rows by {wanted}, a column that no row has"
            raise DataError("RST-T064", what, f"the columns are {', '.join(columns)}", fix)
        return kept, kinds

    def _held_out(self, train: Loaded) -> tuple[Loaded, Loaded]:
        """Split rows off for evaluation; which ones depends on the seed of the data alone."""
        held_out, size = self._settings.held_out, len(train.used)
        count = int(held_out) if held_out >= 1 else max(1, round(held_out * size))
        if count >= size:
            why = f"there are {counted(size, 'row')}"
            raise DataError("RST-T066", f"held_out is {held_out:g}, which leaves no row to train on", why, "lower it")
        chosen = np.random.default_rng((self._settings.seed or 0, HELD_OUT)).permutation(size)[:count]
        is_held = np.zeros(size, bool)
        is_held[chosen] = True
        kinds = None if train.kinds is None else train.kinds[~is_held]
        rest = Loaded(train.rows, train.sources, train.used[~is_held], train.dropped, kinds)
        return rest, Loaded(train.rows, train.sources, train.used[is_held], 0)

    def _shares(self) -> dict[str, float]:
        """Shares of the domains, or of the sources; empty if nothing is mixed."""
        if self._settings.mix:
            return dict(self._settings.mix)
        if all(source.weight is None for source in self._settings.sources):
            return {}
        return {str(number): each.weight or 0.0 for number, each in enumerate(self._settings.sources)}

    def _check_mix(self, train: Loaded) -> None:
        shares = self._shares()
        if not shares or train.kinds is None:
            return
        counts = shares_of_batch(list(shares.values()), self._settings.batch_size or 100)
        for kind, (name, count) in enumerate(zip(shares, counts, strict=True)):
            if count and not np.any(train.kinds == kind):
                what, fix = f"mix has {name}, but no row is of it", "correct the name, or remove it"
                raise DataError("RST-T070", what, f"{counted(len(train.used), 'row')} have other tags", fix)

    def _prompt(self, row: Row, source: DataSource, column: str, rows: ManyRows, number: int) -> Prompt:
        folder = Path(rows.parts[rows.place(number)[0]].label).parent
        try:
            return self._format.prompt(row, source, column, _raw_tag(row, source), folder)
        except DataError as error:
            raise error.of(rows.spelled(number)) from None

    def _domain(self, row: Row, source: DataSource) -> str:
        """Mixing key of a task: the row's own domain, the domain of its tag, or the default."""
        own = row.get(self._settings.domain_column) if self._settings.domain_column else None
        if own is not None:
            return str(own)
        tag = _raw_tag(row, source)
        if not self._settings.domains:
            return tag
        of_tag = (domain for domain, tags in self._settings.domains.items() if tag in tags)
        return next(of_tag, self._settings.default_domain)

    def _tag(self, row: Row, source: DataSource) -> str:
        """The tag that rewards select by: the row's, or its domain if no domain lists that tag."""
        tag = _raw_tag(row, source)
        domain = self._domain(row, source) if self._settings.domains else tag
        return tag if tag in self._settings.domains.get(domain, (tag,)) else domain


def all_sources(settings: DataSettings) -> list[DataSource]:
    """The sources to train on, and those of the evaluation sets."""
    return [*settings.sources, *(one for sources in settings.eval.values() for one in sources)]


def _check_first(path: str, source: DataSource, settings: DataSettings) -> bool:
    """Check columns and prompts in the first rows of a path; return True unless it has no rows. Raise DataError."""
    found = first_rows(path, CHECKED_ROWS)
    if found is None or not found.rows:
        return found is None
    check_columns(source, found.columns)
    prompt_format, column = PromptFormat(None, settings), prompt_column(source, found.columns)
    for number, row in enumerate(found.rows):
        if has_values(row, settings.only):
            try:
                prompt_format.prompt(row, source, column, _raw_tag(row, source), Path(found.label).parent)
            except DataError as error:
                raise error.of(f"row {number} of {found.label}") from None
    return True


def _no_rows(settings: DataSettings) -> DataError:
    paths = [path for source in settings.sources for path in source.path]
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    what = f"{paths[0]}{more} {'has' if len(paths) == 1 else 'have'} no rows"
    return DataError("RST-T066", what, "there is nothing to train on", "name a file with rows", "path")


def has_values(row: Row, only: Mapping[str, Any]) -> bool:
    """Return True if a row has these values, as far as it has the columns."""
    return all(row.get(key, value) == value for key, value in only.items())


def _with_answer(row: Row, source: DataSource) -> Row:
    """The columns of a row, and the named one as `answer`.

    An `answer` beside an `optional_answer` replaces it: ROLL's rewards read that column by name. An optional answer may
    stand in a column of mappings, as verl's does: `reward_model.ground_truth`.
    """
    wanted = source.answer or source.optional_answer or ""
    outer, _, inner = wanted.partition(".")
    if wanted in row:
        found = row[wanted]
    elif isinstance(nested := row.get(outer), Mapping) and inner in nested:
        found = nested[inner]
    else:
        return row
    if source.choices:
        found = {"choices": row.get(source.choices), "correct_answer": found}
    named = {} if source.optional_answer is None else {source.optional_answer: found}
    return {**row, **named, "answer": found}


def _raw_tag(row: Row, source: DataSource) -> str:
    own = row.get(source.tag_column or source.optional_tag_column or "")
    return source.tag if own is None else str(own)


def _rows(rows: ManyRows, numbers: Sequence[int]) -> list[Row]:
    """Rows by their numbers, read together where they follow each other."""
    found: list[Row] = []
    while len(found) < len(numbers):
        first = numbers[len(found)]
        part, inside = rows.place(first)
        wanted = numbers[len(found) :]
        most = min(len(wanted), len(rows.parts[part]) - inside)
        count = next((n for n in range(1, most) if wanted[n] != first + n), most)
        found += rows.parts[part].read(inside, inside + count)
    return found


def _joined(sets: Sequence[Loaded]) -> Loaded:
    """Several opened sets as one, in order."""
    rows = ManyRows([part for each in sets for part in each.rows.parts])
    starts = np.cumsum([0, *(len(each.rows) for each in sets)])
    used = [each.used.astype(np.int64) + start for each, start in zip(sets, starts, strict=False)]
    sources = tuple(one for each in sets for one in each.sources)
    return Loaded(rows, sources, np.concatenate(used) if used else np.zeros(0, np.int64), sum(s.dropped for s in sets))
