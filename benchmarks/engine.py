"""Speed of the built-in engine compared with transformers, on the same model, prompts and cores."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Annotated

import numpy as np
import torch
import typer
from engine_ways import ROOM, Task, Way, by_continuous_batching, by_engine, generate_ways
from rich.console import Console
from rich.table import Table

from roost.engines.tiny_model import write_tiny_model
from roost.torch_engine.engine import EngineSettings, TorchEngine

ROOST, CONTINUOUS = "roost", "transformers' continuous batching"
GENERATE_TARGET, CONTINUOUS_TARGET = 3.0, 1.5
HOPELESS = 1.5  # times the fastest `generate` in the first round: not run again
VOCABULARY = 16_384
# Rollouts are long-tailed: most answers are short, a few run into the limit. Both lengths are log-normal and cut at the
# ends. Answers have a mean of about a quarter of the limit, and a tenth of them have more than half of it.
PROMPTS = (100, 0.6, 16, 512)  # median, sigma, least, most
ANSWERS = (90, 0.9, 8, 512)


@dataclass(frozen=True)
class Run:
    """All tasks done once, in one way."""

    seconds: float
    cpu_seconds: float
    answers: list[list[int]]


@dataclass(frozen=True)
class Result:
    """One way of doing all tasks, over the rounds in which it took part."""

    name: str
    rounds: int
    seconds: float
    tokens_per_second: float
    tokens_per_core_second: float
    agreeing: int  # requests with the same tokens as the engine's


@dataclass(frozen=True)
class Verdict:
    """A target and what was measured."""

    target: str
    measured: str
    met: bool


def main(
    requests: Annotated[int, typer.Option(min=1, help="Requests at the same time.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each runs all ways once.")] = 3,
    hidden: Annotated[int, typer.Option(min=64, help="The model's width, a multiple of 64.")] = 512,
    layers: Annotated[int, typer.Option(min=1, help="The model's layers.")] = 8,
    batch: Annotated[list[int] | None, typer.Option(help="A batch size of generate; several may be given.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the lengths and prompts.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results here.")] = None,
) -> None:
    """Measure all ways on the CPU; print results and targets."""
    from transformers import AutoModelForCausalLM

    console, progress = Console(highlight=False), Console(stderr=True, highlight=False, style="dim")
    tasks = made_tasks(requests, seed)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), hidden, layers)
        engine = TorchEngine(EngineSettings(folder, device="cpu", max_sequences=requests))
        module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        parameters = sum(weight.numel() for weight in engine.named_weights().values())
        console.print(description(parameters, tasks))
        ways: dict[str, Way] = {
            ROOST: lambda: by_engine(engine, tasks),
            CONTINUOUS: lambda: by_continuous_batching(module, tasks, engine.settings.limits(on_cuda=False).tokens),
            **generate_ways(module, tasks, batch or [64, 16, 4, 1]),
        }
        runs = measure(ways, rounds, progress)
        engine.close()
    results = summarized(runs, sum(task.answer for task in tasks))
    judged = verdicts(results)
    report(results, judged, console)
    if json_file is not None:
        machine = {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "torch": torch.__version__}
        rows, targets = [asdict(row) for row in results], [asdict(verdict) for verdict in judged]
        found = {"machine": machine, "parameters": parameters, "results": rows, "targets": targets}
        json_file.write_text(json.dumps(found, indent=2) + "\n")


def made_tasks(count: int, seed: int) -> list[Task]:
    chance = np.random.default_rng(seed)

    def lengths(middle: float, sigma: float, least: int, most: int) -> list[int]:
        drawn: list[int] = np.clip(chance.lognormal(np.log(middle), sigma, count), least, most).astype(int).tolist()
        return drawn

    prompts, answers = lengths(*PROMPTS), lengths(*ANSWERS)
    return [
        Task(tuple(chance.integers(0, VOCABULARY, prompt).tolist()), answer)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def write_model(folder: Path, hidden: int, layers: int) -> None:
    write_tiny_model(
        folder,
        "qwen2",
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(hidden // 128, 1),
        head_dim=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=ROOM,
    )


def description(parameters: int, tasks: Sequence[Task]) -> str:
    prompts, answers = [len(task.prompt) for task in tasks], [task.answer for task in tasks]
    return (
        f"{parameters / 1e6:.0f} M parameters in float32 on {torch.get_num_threads()} threads; {len(tasks)} requests, "
        f"prompts of {mean(prompts):.0f} tokens (at most {max(prompts)}), answers of {mean(answers):.0f} "
        f"(at most {max(answers)})\n"
    )


def measure(ways: Mapping[str, Way], rounds: int, progress: Console) -> dict[str, list[Run]]:
    """Run all ways in turn, in rounds, so that other load on the machine affects all of them."""
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    for turn in range(rounds):
        for name, way in ways.items():
            if turn and is_hopeless(name, runs):
                continue
            progress.print(f"round {turn + 1} of {rounds}, {name}")
            start, cpu_start = time.perf_counter(), time.process_time()
            answers = way()
            runs[name].append(Run(time.perf_counter() - start, time.process_time() - cpu_start, answers))
    return runs


def is_hopeless(name: str, runs: Mapping[str, Sequence[Run]]) -> bool:
    if name in (ROOST, CONTINUOUS):
        return False
    fastest = min(done[0].seconds for other, done in runs.items() if other not in (ROOST, CONTINUOUS))
    return runs[name][0].seconds > HOPELESS * fastest


def summarized(runs: Mapping[str, Sequence[Run]], tokens: int) -> list[Result]:
    results = []
    for name, done in runs.items():
        pairs = zip(done[0].answers, runs[ROOST][0].answers, strict=True)
        agreeing = sum(answer == ours for answer, ours in pairs)
        wall, cpu = median(run.seconds for run in done), median(run.cpu_seconds for run in done)
        results.append(Result(name, len(done), wall, tokens / wall, tokens / cpu, agreeing))
    return results


def verdicts(results: Sequence[Result]) -> list[Verdict]:
    ours, continuous, *generate = results
    fastest = max(generate, key=lambda row: row.tokens_per_second)

    def faster(other: Result, times: float) -> Verdict:
        ratio = ours.tokens_per_second / other.tokens_per_second
        return Verdict(f"at least {times:g} times {other.name}", f"{ratio:.2f}", ratio >= times)

    same = min(row.agreeing for row in results)
    return [
        faster(fastest, GENERATE_TARGET),
        faster(continuous, CONTINUOUS_TARGET),
        Verdict("the same greedy tokens everywhere", f"{same} of {ours.agreeing}", same == ours.agreeing),
    ]


def report(results: Sequence[Result], judged: Sequence[Verdict], console: Console) -> None:
    columns = ("", "time", "tokens/s", "tokens per core second", "rounds", "same tokens")
    table = Table(*columns, title="Generation", title_justify="left")
    for row in results:
        speeds = f"{row.seconds:.1f} s", f"{row.tokens_per_second:,.0f}", f"{row.tokens_per_core_second:,.0f}"
        table.add_row(row.name, *speeds, str(row.rounds), str(row.agreeing))
    console.print(table)
    targets = Table("target", "measured", "", title="Targets", title_justify="left")
    for verdict in judged:
        targets.add_row(verdict.target, verdict.measured, "[green]met[/]" if verdict.met else "[red]missed[/]")
    console.print(targets)


if __name__ == "__main__":
    typer.run(main)
