"""Find the job that a script starts, and read its arguments into a config."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import reduce
from operator import getitem
from pathlib import Path
from textwrap import shorten

from roost.config.findings import Findings, Where, counted, shown
from roost.config.frameworks.arguments import GIVE_ARGUMENTS, MODULE, Arguments, Start, how_to_give, value_at
from roost.config.frameworks.pools import VISIBLE
from roost.config.frameworks.registry import COMMANDS, COMMANDS_WITH_FILES, ENTRIES, Entry
from roost.config.shell.children import base_name
from roost.config.shell.script import COMMAND_LINE, read_script
from roost.config.shell.state import Command, Reading, Unknown, Value, of_unknown
from roost.config.source import Launch, Source, Unresolved

MAX_NAMED = 4
MAX_NAME = 120
# Programs of a framework whose jobs Roost does not plan.
_UNPLANNED: Mapping[str, str] = {
    r"verl\.trainer\.main|(?:.*/)?verl/trainer/main\.py": "EasyR1 has keys of its own (worker...), which are not read",
    r"verl\.trainer\.\w*sft\w*|(?:.*/)?verl/trainer/\w*sft\w*\.py": "verl's supervised training is not planned",
    r"verl\.trainer\.main_(?:generation|eval)\w*": "verl's generation and evaluation are not planned",
}
_BEFORE = ("sudo", "nohup", "time", "nice", "env", "exec", "command")  # the command follows them
# Commands that name a program without starting it.
_BYSTANDERS = """grep egrep fgrep rg pgrep pkill killall kill ps cat cp mv rm ls ln sed git vim vi nano less head tail
    awk find echo printf diff chmod touch rsync scp tar wc which test ["""
_RENDEZVOUS = re.compile(
    r"--?(?:(?:[\w-]*[_-])?port|rdzv[\w-]*|log[_-]dir)(?:=|$)"
)  # flags of a launcher that do not change a plan
_LAUNCHER = re.compile(
    r"python[\d.]*|ipython\d*|pypy\d*|torchrun|accelerate|deepspeed|uvx?|ray|srun|mpirun|mpiexec|horovodrun|poetry|pixi"
    r"|conda|debugpy|coverage|viztracer|nsys"
)


@dataclass(frozen=True, slots=True)
class Found:
    """A command that starts a job of a framework."""

    entry: Entry
    start: Start

    @property
    def command(self) -> Command:
        return self.start.command

    @property
    def arguments(self) -> Arguments:
        return self.start.arguments


def load_script(file: Path, arguments: Sequence[str], findings: Findings) -> Source | None:
    """The config of the job that a script starts; None, with findings, if it starts none."""
    job_commands = [entry.job_command for entry in ENTRIES if entry.job_command]
    reading = read_script(file, arguments, findings, job_commands=job_commands)
    if reading is None:
        return None
    jobs = list(_jobs(reading))
    _report(reading, jobs, file, arguments, findings)
    if not jobs:
        return None
    certain = [one for one in jobs if one.command.is_certain] or jobs
    job = next((one for one in certain if one.arguments.values or one.arguments.options), certain[0])
    _report_others(jobs, job, findings)
    _report_rest(reading, job, findings)
    framework = job.entry.load()
    _report_overrides(job, framework.placing, findings)
    read = framework.beside(framework.base(job.start, findings), reading)
    _report_unknown(read, findings)
    written = {path: text for path, value in job.command.written.items() if (text := value.known) is not None}
    added = frozenset(job.arguments.added)
    launch = Launch(job.entry.notation.value, job.start.program, job.command.position, written, added)
    return Source(read.values, str(file), {**read.positions, (): job.command.position}, launch)


def _report_overrides(job: Found, placing: Sequence[str], findings: Findings) -> None:
    """Report words that are not overrides, and keys of placement without a value."""
    program, form = job.entry.notation.program, "--key value" if job.entry.has_flags else "key=value"
    stray = [word for word in job.arguments.stray if not (word.known or "").isspace()]  # see _report_rest
    for word in stray[:MAX_NAMED]:
        findings.error(
            "RST-C051",
            Where(*word.position, path=() if word.position[1] else (word.shown,)),
            f"{shown(word.shown)} is not an override",
            f"{program} reads {form}, and not this word",
            f"write {form}" if job.entry.has_flags else "write key=value, without spaces, a colon or --",
        )
    for path, position in job.arguments.empty.items():
        key = ".".join(map(str, path))
        if position == job.arguments.positions.get(path) and any(fnmatchcase(key, one) for one in placing):
            findings.warn(
                "RST-C052",
                Where(*position, path),
                "has no value; the plan is made with its default",
                f"{program} takes it for an empty text",
                f"write {key}=..., or leave it out",
            )
    for path, position in job.arguments.positions.items():
        key, value = ".".join(map(str, path)), value_at(job.arguments.values, path)
        if isinstance(value, Unresolved) and any(one.startswith(f"{key}.") for one in placing):  # a={b: $X}
            what = f"{shown(value.text)} cannot be resolved"
            findings.error("RST-C022", Where(*position, path), what, value.reason, value.fix)


def _report_unknown(read: Arguments, findings: Findings) -> None:
    """Report unknown arguments, grouped by cause."""
    causes: dict[tuple[str, str], list[Value]] = {}
    for word in read.unknown:
        if word.unknown is not None and not word.unknown.is_unset:
            causes.setdefault((word.unknown.reason, how_to_give(word.unknown)), []).append(word)
    for (reason, fix), words in causes.items():
        names = list(dict.fromkeys(word.shown for word in words))
        listed = ", ".join(names[:MAX_NAMED]) + (
            f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        )
        findings.warn(
            "RST-C040",
            Where(*words[0].position),
            f"arguments from {listed} are not known; the plan is made without them",
            reason,
            fix,
        )


def _jobs(reading: Reading) -> Iterator[Found]:
    for command in reading.commands.values():
        for at in _programs(command.words):
            found = _recognised(command, at)
            if found is not None:
                yield found
                break


def _programs(words: Sequence[Value]) -> Iterator[int]:
    """Where a command may name the program it starts: its own path, a module after -m, or a file after a launcher."""
    texts = [word.known for word in words]
    names = [None if text is None else text.rpartition("/")[2] for text in texts]
    own = next((at for at, name in enumerate(names) if name not in _BEFORE and "=" not in (name or "")), 0)
    if names and names[own] in _BYSTANDERS.split():
        return
    has_launcher = False
    for at, (text, name) in enumerate(zip(texts, names, strict=True)):
        if text is not None and not re.search(r"\s", text):
            is_module = at > 0 and MODULE.fullmatch(texts[at - 1] or "") is not None
            # rl @ rl.toml, or rl --trainer @ train.toml
            has_file = name in COMMANDS_WITH_FILES and any(word.prefix.startswith("@") for word in words[at + 1 :])
            is_command = name in COMMANDS and (at == own or has_launcher)
            is_file = has_launcher and (is_module or text.endswith(".py"))
            if is_command or is_file or has_file or (at == 0 and "/" in text):
                yield at
        is_open = at == own and (name is None or name.startswith("-"))  # $PYTHON, unknown or unset
        if is_open or _LAUNCHER.fullmatch(name or ""):
            has_launcher = True
        elif text is not None and text.endswith(".py"):
            has_launcher = False  # what follows are the arguments of this program


def _recognised(command: Command, at: int) -> Found | None:
    words = (*command.words[at + 1 :], *_added(command.words[:at]))
    for entry in ENTRIES:
        start = entry.started(Start(command, at, Arguments()), words)
        if start is not None:
            return Found(entry, start)
    return None


def _added(before: Sequence[Value]) -> Iterator[Value]:
    """Words that xargs adds to the command that it starts, from a file or its input."""
    for word in before:
        if base_name(word) == "xargs":
            yield of_unknown(Unknown("xargs", "xargs adds the words of its input", word.position, is_list=True))


def _report(reading: Reading, jobs: Sequence[Found], file: Path, arguments: Sequence[str], findings: Findings) -> None:
    """Report the parts of the script that could not be followed."""
    report = findings.warn if jobs else findings.error
    for error in reading.errors[:MAX_NAMED]:
        report(
            "RST-C037",
            Where(*error.position),
            f"cannot be read as a shell script: {error.what}",
            "the script is read up to this point only",
            "check it with bash -n",
        )
    if reading.is_cut:
        place = Where(*(reading.cut_at or (str(file), None, None)))
        report("RST-C037", place, "is too long to be followed to its end", fix="give the job's own script")
    for path, position in reading.missing_sources[:MAX_NAMED]:
        findings.warn(
            "RST-C039",
            Where(*position),
            f"{path or 'the file'} is not {'known' if path.startswith('$(') else 'here'}; what it sets is not known",
            fix="plan from the folder that the script is started in, with the files it sources",
        )
    for path, position, why in reading.not_followed[:MAX_NAMED]:
        findings.warn(
            "RST-C039",
            Where(*position),
            f"{path} {why}; what it sets there is not known",
            fix="give the job's own script, or source the file once",
        )
    for position, names in reading.stops[:MAX_NAMED]:
        findings.warn(
            "RST-C041",
            Where(*position),
            "the script would stop here; the plan is made as if it continued",
            f"{' and '.join(names)} {'are' if len(names) > 1 else 'is'} not set" if names else "",
            _how_to_give(names) or "give the script what it asks for",
        )
    for name, (unknown, text) in reading.given.items():
        findings.note(
            "RST-C042",
            Where(*unknown.position),
            f"{name} is {shown(text)}, as you gave it, instead of {unknown.shown}",
            unknown.reason,
            f"write ${{{name}:-...}} in the script, for bash to take it too",
        )
    if arguments and not reading.reads_arguments and not reading.errors:  # the text after an error may read them
        findings.warn(
            "RST-C043",
            Where(COMMAND_LINE, path=(" ".join(arguments),)),
            "is not used: the script does not read its arguments",
            'bash would ignore it too, for the script has neither "$@" nor $1',
            'add "$@" at the end of the command that starts the job',
        )
    if not jobs and not findings.has_errors:
        commands = reading.commands.values()
        starts = list(dict.fromkeys(filter(None, map(_started_by, commands))))
        kind = "program" if starts else "command"
        asked = {} if starts else dict(list(reading.asked.items())[:MAX_NAMED])
        starts = starts or [_beginning(one) for one in commands]
        named = [shorten(text, MAX_NAME, placeholder=" ...") for text in starts[-MAX_NAMED:]]
        started = f"it starts {counted(len(starts), kind)}: {'; '.join(named)}" if starts else ""
        ended = f"it ends in line {reading.ended[1]}, by its own exit" if reading.ended is not None else ""
        unset = [
            f"the condition in line {position[1]} looks at {name}, which has no value"
            for name, position in asked.items()
        ]
        absent = [f"{path} of line {position[1]} is not here" for path, position in reading.missing_scripts[:MAX_NAMED]]
        findings.error(
            "RST-C038",
            Where(*next(iter(asked.values()), (str(file), None, None))),
            "starts no job that Roost knows",
            "; ".join(filter(None, (started, *_unplanned(reading), *absent, *unset, ended))) or "it starts nothing",
            _other_fix(reading, asked)
            + f"give the script that starts a job of {', '.join(one.notation.program for one in ENTRIES)}",
        )


def _how_to_give(names: Sequence[str]) -> str:
    """The fix that gives unset variables, and arguments, which are named $1."""
    given = " ".join(f"{name}=..." for name in names if not name.startswith("$"))
    fixes = [f"give {given} before roost"] if given else []
    if any(name.startswith("$") for name in names):
        fixes.append(GIVE_ARGUMENTS)
    return ", and ".join(fixes)


def _other_fix(reading: Reading, asked: Collection[str]) -> str:
    """Another way to plan a script that starts no job: what it asks for, its folder or the files that it sources."""
    if asked:
        return f"{_how_to_give(tuple(asked))}, or "
    if any(
        word.unknown is not None and word.unknown.argument for one in reading.commands.values() for word in one.words
    ):
        return f"{GIVE_ARGUMENTS}, or "
    if reading.missing_scripts:
        return "plan from the folder that it is started in, or "
    return "plan it with the files that it sources, or " if reading.missing_sources else ""


def _started_by(command: Command) -> str:
    """The program that a command starts, behind its launcher; empty for a command without one."""
    words = command.words
    if not words or base_name(words[0]) in _BYSTANDERS.split():
        return ""
    files = (at for at, word in enumerate(words) if word.shown.endswith(".py"))
    at = next(_programs(words), next(files, None))
    return "" if at is None else words[at].shown if at == 0 else f"{words[0].shown} {words[at].shown}"


def _beginning(command: Command) -> str:
    """The first words of a command, at least up to the first that is not known and may be its program."""
    unknown = next((at for at, word in enumerate(command.words) if word.known is None), 0)
    return " ".join(word.shown for word in command.words[: max(3, unknown + 1)])


def _unplanned(reading: Reading) -> Iterator[str]:
    """Why programs that belong to a framework start no job of it."""
    names = [command.words[at].known or "" for command in reading.commands.values() for at in _programs(command.words)]
    for pattern, why in _UNPLANNED.items():
        if any(re.fullmatch(pattern, name) for name in names):
            yield why


def _report_others(jobs: Sequence[Found], chosen: Found, findings: Findings) -> None:
    """Warn about other jobs of the script whose plans may differ; those that differ only in a seed do not."""
    own = _planned_by(chosen)
    others = [one for one in jobs if one is not chosen and _planned_by(one) != own]
    if not others:
        return
    numbers = list(dict.fromkeys(str(one.command.position[1]) for one in others))
    is_loop = numbers == [str(chosen.command.position[1])]
    findings.warn(
        "RST-C044",
        Where(*chosen.command.position),
        f"this is one of {len(others) + 1} jobs that the script may start; only this one is planned",
        "a loop starts the others" if is_loop else f"others are in line {', '.join(numbers[:MAX_NAMED])}",
        "plan a copy of the script whose loop has one value"
        if is_loop
        else "give what decides which one is started, or plan a script with one job",
    )


def _planned_by(job: Found) -> object:
    """Inputs of a job's plan: its launcher and program, visible devices, options, and arguments for placing."""
    patterns = job.entry.load().placing
    named = {path: ".".join(map(str, path)) for path in job.arguments.positions}
    paths = [path for path, name in named.items() if any(fnmatchcase(name, one) for one in patterns)]
    values = {path: reduce(getitem, path, job.arguments.values) for path in paths}
    launcher = iter(word.shown for word in job.command.words[: job.start.at + 1])
    words = [word for word in launcher if not (_RENDEZVOUS.match(word) and ("=" in word or next(launcher, "")))]
    visible = job.command.given(VISIBLE)
    return words, visible, job.arguments.options, values


def _report_rest(reading: Reading, job: Found, findings: Findings) -> None:
    """Report arguments that bash takes for another command; an error if they would decide the placement."""
    commands = list(reading.commands.values())
    following = next(iter(commands[commands.index(job.command) + 1 :]), None)
    first = following.words[0].prefix if following is not None else ""
    if following is None or not re.match(r"(\+\+?|~)?[A-Za-z_]\w*\.[\w.]+=|--[A-Za-z]", first):
        return
    keys = [re.split(r"[= ]", word.prefix.lstrip("+~"), maxsplit=1)[0] for word in following.words]
    is_lost = any(fnmatchcase(key, pattern) for key in keys for pattern in job.entry.load().placing)
    last = job.command.words[-1]
    why = "a comment, or a line without \\ at its end, ends the command before it"
    fix = "move comments out of the command, and end each of its lines but the last with \\"
    if last.known is not None and last.known and not last.known.strip():
        why = f"a blank stands after the \\ in line {last.position[1]}, which ends the command there"
        fix = "remove the blank"
    report = findings.error if is_lost else findings.warn
    what = f"{shown(following.words[0].shown)} is not an argument of the job, but a separate command"
    report("RST-C045", Where(*following.position), what, why, fix)
