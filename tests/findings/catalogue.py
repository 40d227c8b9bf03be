"""Every finding with an example: the catalogue, how an example is run, and the pages in docs/findings.

python -m tests.findings.catalogue    writes the pages, and the examples that `roost explain-finding` shows
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, chdir, redirect_stdout
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import indent
from unittest.mock import patch

import yaml
from rich.console import Console
from typer.main import get_command

import roost
from roost.cli import check, diff, explain, main, plan, train
from roost.config.finding_codes import AREAS, FindingKind, finding_kinds
from roost.config.findings import Finding, Findings
from roost.view.text import print_findings

HERE = Path(__file__).parent
PAGES = HERE.parents[1] / "docs" / "findings"
INDEX = "README.md"
CODES = "codes.md"
SHIPPED = HERE.parents[1] / "roost" / "config" / "finding_examples.json"
FOLDER = "/home/me/job"  # what messages show instead of the temporary folder of a run
REPEATED = re.compile(r"‹([^›]*)›×(\d+)")
COMMANDS = (check, diff, explain, plan, train)
ROOST = get_command(main.build_app())
MAX_SHOWN = 3  # findings of one example on a page
Found = tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Example:
    """A mistake that somebody makes, and the message it gives; catalogue.yaml says what the fields are."""

    title: str
    expects: str
    config: str | None = None
    bytes_hex: str | None = None
    inventory: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    notation: str | None = None
    layout: str | None = None
    gpus_per_node: int | None = None
    strict: bool = False
    overrides: tuple[str, ...] = ()
    convert_to: str | None = None
    component: str | None = None
    html: str | None = None
    explain: str | None = None
    compare: str | None = None
    train: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    python: str | None = None
    several: bool = False

    @property
    def main(self) -> str:
        """The name of the config: a script has another."""
        return "run.sh" if (self.config or "").startswith("#!") else "job.yaml"

    @property
    def texts(self) -> dict[str, str]:
        """The files of the example in the order they are shown."""
        written = {self.main: self.config, "machines.yaml": self.inventory, **self.files}
        return {name: text for name, text in written.items() if text is not None}

    @property
    def words(self) -> list[str]:
        """The command line, after `roost`."""
        if self.explain is not None:
            words = ["explain", self.main, self.explain]
        elif self.convert_to is not None:
            words = ["convert", self.main, "--to", self.convert_to]
        elif self.compare is not None:
            words = ["diff", self.main, self.compare, *self.overrides]
        elif self.train:
            words = ["train", self.main]
        elif self.overrides or self.component is not None or self.html is not None:
            words = ["plan", self.main, *(["--"] if self.main == "run.sh" else []), *self.overrides]
        else:
            words = ["check", self.main]
        options = {"component": self.component, "html": self.html}
        options |= {"notation": self.notation, "layout": self.layout, "gpus-per-node": self.gpus_per_node}
        options["inventory"] = "machines.yaml" if self.inventory is not None else None
        for name, value in options.items():
            words += [f"--{name}", str(value)] if value is not None else []
        return [*words, "--strict"] if self.strict else words

    def promised(self, found: Found) -> Finding:
        """The finding that the example is about."""
        pattern = ".+".join(re.escape(part) for part in self.expects.split("…"))
        for finding in found:
            if re.fullmatch(pattern, finding.what):
                return finding
        raise LookupError(f"{self.title} expects {self.expects!r} and gives {[finding.what for finding in found]}")


@dataclass(frozen=True, slots=True)
class Chapter:
    """Examples that belong together, on a page of their own."""

    title: str
    page: str  # the file's name, without .md
    about: str
    examples: tuple[Example, ...]


def read_catalogue() -> tuple[Chapter, ...]:
    written = yaml.load((HERE / "catalogue.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)
    return tuple(
        Chapter(part["chapter"], part["page"], part["about"], tuple(Example(**fields) for fields in part["examples"]))
        for part in written
    )


def run(example: Example) -> Found:
    """Do what the example says in a folder of its own, and return what Roost finds."""
    with TemporaryDirectory() as folder, chdir(folder), patch.dict(os.environ, example.environment):
        if not example.environment:
            os.environ.pop("ROOST_HARDWARE", None)  # what is added on this machine is no part of the example
        for name, text in example.texts.items():
            file = Path(name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(REPEATED.sub(lambda match: match[1] * int(match[2]), text), encoding="utf-8")
        if example.bytes_hex is not None:
            Path("job.yaml").write_bytes(bytes.fromhex(example.bytes_hex))
        found = _run_command(example.words) if example.python is None else _run_python(example.python)
        return tuple(_elsewhere(finding, str(Path(folder).resolve())) for finding in found)


def _run_command(words: list[str]) -> list[Finding]:
    shown: list[Finding] = []
    with ExitStack() as stack:
        for command in COMMANDS:
            stack.enter_context(patch.object(command, "print_findings", lambda findings, _: shown.extend(findings)))
        stack.enter_context(redirect_stdout(StringIO()))
        ROOST.main(words, prog_name="roost", standalone_mode=False)
    return shown


def _run_python(snippet: str) -> Found:
    names: dict[str, object] = {"roost": roost}
    try:
        exec(snippet, names)
    except roost.ConfigError as error:
        return error.findings
    collected = names.get("findings")
    if isinstance(collected, Findings):
        return collected.found
    made = names["plan"]
    assert isinstance(made, roost.Plan)
    return made.warnings


def _elsewhere(finding: Finding, folder: str) -> Finding:
    """The finding as it would read in another folder, the same on every machine."""
    texts = {
        name: getattr(finding, name).replace(folder, FOLDER).replace(sys.executable, "python")
        for name in ("what", "why", "fix")
    }
    file = finding.where.file
    where = replace(finding.where, file=file.replace(folder, FOLDER) if file else file)
    return replace(finding, where=where, **texts)


def findings_pages(found: Mapping[str, Found] | None = None) -> dict[str, str]:
    """The Markdown of each file in docs/findings; `found` are the findings of each example where they are known."""
    chapters = read_catalogue()
    if found is None:
        found = {example.title: run(example) for chapter in chapters for example in chapter.examples}
    pages = {INDEX: "\n\n".join([INTRODUCTION, "\n".join(_index(chapters, found))]) + "\n"}
    pages[CODES] = "\n\n".join(_codes(chapters, found)) + "\n"
    for chapter in chapters:
        parts = [f"# {chapter.title}", GENERATED, f"{chapter.about} [All findings](README.md)"]
        parts += ["\n\n".join(_example(example, found[example.title])) for example in chapter.examples]
        pages[f"{chapter.page}.md"] = "\n\n".join(parts) + "\n"
    return pages


def shipped_examples(found: Mapping[str, Found] | None = None) -> str:
    """The text of finding_examples.json: for each code its shortest example, as files, command and message."""
    examples = [example for chapter in read_catalogue() for example in chapter.examples]
    if found is None:
        found = {example.title: run(example) for example in examples}
    texts: dict[str, list[str]] = {}
    for example in examples:
        finding = example.promised(found[example.title])
        texts.setdefault(finding.code, []).append("\n".join(_shipped(example, finding)))
    shortest = {code: min(texts[code], key=len) for code in sorted(texts)}
    return json.dumps(shortest, indent=1, ensure_ascii=False) + "\n"


def _shipped(example: Example, finding: Finding) -> Iterator[str]:
    for name, text in example.texts.items():
        yield f"{name}\n{indent(text.rstrip(), '    ')}\n"
    if example.python is not None:
        yield f"{indent(example.python.rstrip(), '    ')}\n\n{finding}"
    else:
        yield f"$ {_command_line(example)}\n{_printed((finding,)).rstrip()}"


def written_pages() -> dict[str, str]:
    """The pages as they are in docs/findings."""
    return {file.name: file.read_text(encoding="utf-8") for file in PAGES.glob("*.md")}


GENERATED = "<!-- Generated by `python -m tests.findings.catalogue` from the code and catalogue.yaml beside it. -->"
INTRODUCTION = f"""\
# Findings

{GENERATED}

Every message that Roost reports about a config, with an example that triggers it. Search this page for the words of
your message; `…` stands for your own values. An **error** stops the plan, a **warning** is printed and stored in the
plan, a **note** needs no action. A finding has its position as `file:line:column key.path`, what is wrong, why (the
numbers), and how to fix it.

Each message begins with its severity and its code, such as `error RST-P007`. A code names one kind of mistake and does
not change between releases; [codes](codes.md) explains each, and so does `roost explain-finding RST-P007`.

In the examples, `‹text›×N` is text repeated N times. The tests compare these pages with what Roost reports."""


def _index(chapters: tuple[Chapter, ...], found: Mapping[str, Found]) -> Iterator[str]:
    """A row for each example; messages that several places give are told apart by the key they are about."""
    uses = Counter(example.expects for chapter in chapters for example in chapter.examples)
    yield "| code | message | severity | example |"
    yield "|---|---|---|---|"
    for chapter in chapters:
        yield f"| | **[{chapter.title}]({chapter.page}.md)** | | |"
        for example in chapter.examples:
            finding = example.promised(found[example.title])
            keys = [part for part in finding.where.path if isinstance(part, str)]
            key = f"{keys[-1]}: " if keys and uses[example.expects] > 1 else ""
            message = f"{key}{example.expects}".replace("|", "\\|")
            link = f"[{example.title}]({chapter.page}.md#{example.title})"
            yield f"| {_code_link(finding.code)} | `{message}` | {finding.severity.value} | {link} |"


CODES_INTRODUCTION = f"""\
# Codes of findings

{GENERATED}

The code in a message, such as `error RST-P007`, names one kind of mistake. It does not change between releases, so it
can be searched for and linked to. `roost explain-finding RST-P007` prints the same text with an example; `p007` is
enough. The letter says what the finding is about. [All messages](README.md)"""


def _codes(chapters: tuple[Chapter, ...], found: Mapping[str, Found]) -> Iterator[str]:
    """An index of all codes, and for each its meaning and its examples under a heading that can be linked to."""
    examples: dict[str, list[str]] = {}
    for chapter in chapters:
        for example in chapter.examples:
            code = example.promised(found[example.title]).code
            examples.setdefault(code, []).append(f"[{example.title}]({chapter.page}.md#{example.title})")
    kinds = finding_kinds().values()
    yield CODES_INTRODUCTION
    rows = [f"| [{kind.code}](#{kind.code.lower()}) | {kind.title} | {kind.area} |" for kind in kinds]
    yield "\n".join(["| code | meaning | about |", "|---|---|---|", *rows])
    for letter, area in AREAS.items():
        yield f"## {letter}: {area}"
        for kind in kinds:
            if kind.area == area:
                yield "\n\n".join(_meaning(kind, examples.get(kind.code, [])))


def _meaning(kind: FindingKind, examples: Sequence[str]) -> Iterator[str]:
    yield f"### {kind.code}"
    yield f"**{kind.title}.** {kind.explanation}"
    if examples:
        yield f"Example{'s' if len(examples) > 1 else ''}: {', '.join(examples)}"


def _code_link(code: str) -> str:
    return f"[{code}]({CODES}#{code.lower()})"


def _example(example: Example, found: Found) -> Iterator[str]:
    code = example.promised(found).code
    yield f"## {example.title}"
    yield f"{_code_link(code)}: {finding_kinds()[code].title}."
    texts = example.texts
    for name, text in texts.items():
        if len(texts) > 1 or example.python is not None:
            yield f"`{name}`:"
        yield _block(Path(name).suffix.lstrip("."), text.replace("\r", ""))  # pages have one kind of line end
    if example.bytes_hex is not None:
        yield f"A file that starts with the bytes `{bytes.fromhex(example.bytes_hex).hex(' ')}`:"
    if example.python is not None:
        yield _block("python", example.python)
        yield _block("text", "\n".join(str(finding) for finding in found[:MAX_SHOWN]))
    else:
        yield _block("console", f"$ {_command_line(example)}\n{_printed(found)}")


def _command_line(example: Example) -> str:
    variables = "".join(f"{name}={value} " for name, value in example.environment.items())
    return f"{variables}roost {' '.join(example.words)}"


def _printed(found: Found) -> str:
    """The findings as the command line prints them."""
    paper = StringIO()
    print_findings(found[:MAX_SHOWN], Console(file=paper, width=10_000, color_system=None, highlight=False))
    return paper.getvalue() + (f"... and {len(found) - MAX_SHOWN} more\n" if len(found) > MAX_SHOWN else "")


def _block(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"


if __name__ == "__main__":
    PAGES.mkdir(exist_ok=True)
    examples = {example.title: run(example) for chapter in read_catalogue() for example in chapter.examples}
    pages = findings_pages(examples)
    SHIPPED.write_text(shipped_examples(examples), encoding="utf-8")
    for name in written_pages().keys() - pages.keys():
        (PAGES / name).unlink()
    for name, text in pages.items():
        (PAGES / name).write_text(text, encoding="utf-8")
    print(f"wrote {len(pages)} pages in {PAGES.relative_to(HERE.parents[1])}")
