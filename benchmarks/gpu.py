"""Speed and memory of the learner, the engines and whole steps on one GPU, compared with the hardware, vLLM and TRL."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from verdicts import JsonFile, Verdict, print_verdicts, write_results

HERE = Path(__file__).parent
SECTIONS = {
    "learner": ("gpu_learner.py",),
    "serving": ("gpu_engines.py", "serving"),
    "step": ("gpu_engines.py", "step"),
    "trl": ("gpu_engines.py", "trl"),
    "memory": ("gpu_memory.py", "torch"),
    "memory_vllm": ("gpu_memory.py", "vllm"),
    "update": ("gpu_engines.py", "update"),
}
NEEDS = {"trl": "trl", "memory_vllm": "vllm"}  # a package; left out where it is not installed
# A Llama of 1.2 B parameters.
SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 16_384,
    "initializer_range": 0.005,  # all tokens are about as likely, so completions reach the limit
}


def main(
    only: Annotated[list[str] | None, typer.Option(help=f"Run this section only: {', '.join(SECTIONS)}.")] = None,
    model: Annotated[Path | None, typer.Option(help="Folder of the model; written if it does not exist.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Measure on the first CUDA device, each section in a separate process.

    Results of other sections that the JSON file has from the same commit, versions and device are kept and judged, too.
    """
    console = Console(highlight=False)
    unknown = set(only or ()) - SECTIONS.keys()
    if unknown:
        raise SystemExit(f"there is no section {unknown.pop()}; there are {', '.join(SECTIONS)}")
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device that torch can use; run this on a machine with a GPU")
    with tempfile.TemporaryDirectory() as temporary:
        folder = model or Path(temporary) / "model"
        if not (folder / "config.json").exists():
            console.print(f"writing a model of 1.2 B parameters to {folder}", style="dim")
            write_model(folder)
        results = earlier(json_file, versions())
        for name in only or [name for name in SECTIONS if name not in NEEDS or find_spec(NEEDS[name])]:
            console.print(f"measuring: {name}", style="dim")
            results |= section(name, folder, Path(temporary) / f"{name}.json")
            if json_file is not None:
                write_results(json_file, results, verdicts_of(results))
    console.print_json(json.dumps(results))
    print_verdicts(verdicts_of(results), console)


def earlier(file: Path | None, now: dict[str, str]) -> dict[str, Any]:
    """Results in the file, if they are of the same versions; else those alone."""
    if file is not None and file.exists():
        found: dict[str, Any] = json.loads(file.read_text())
        if found.get("versions") == now:
            return {name: value for name, value in found.items() if name not in ("machine", "targets")}
    return {"versions": now}


def verdicts_of(results: dict[str, Any]) -> list[Verdict]:
    judges = (of_learner, of_offload, of_serving, of_step, of_trl, of_memory, of_update)
    return [verdict for judge in judges for verdict in judge(results)]


def section(name: str, model: Path, file: Path) -> dict[str, Any]:
    script, *arguments = SECTIONS[name]
    done = subprocess.run([sys.executable, str(HERE / script), *arguments, str(model), str(file)])
    if done.returncode:
        return {f"{name}_failed": done.returncode}
    results: dict[str, Any] = json.loads(file.read_text())
    return results


def write_model(folder: Path) -> None:
    from roost.rollout.arithmetic import write_arithmetic_model

    write_arithmetic_model(folder, **SIZES)


def versions() -> dict[str, str]:
    found = {"gpu": torch.cuda.get_device_name(0), "cuda": str(torch.version.cuda)}
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True)
    found["commit"] = git.stdout.strip() or "unknown"
    for package in ("torch", "transformers", "vllm", "trl", "ray"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def of_learner(results: dict[str, Any]) -> list[Verdict]:
    verdicts = []
    for row in results.get("learner", ()):
        (count, length), recomputes = row["shape"], row["activation_checkpointing"]
        target, kind = (0.33, "with") if recomputes else (0.40, "without")
        about = f"learner {kind} activation checkpoints, {count} x {length}"
        share, ratio = row["learn_share"], row["score_tokens_per_s"] / row["learn_tokens_per_s"]
        learnt = f"{share:.1%}, {row['learn_tokens_per_s']:,.0f} tokens/s"
        scored = f"{ratio:.2f}, {row['score_tokens_per_s']:,.0f} tokens/s"
        verdicts.append(Verdict(f"{about}: {target:.0%} of the matrix rate", learnt, share >= target))
        verdicts.append(Verdict(f"{about}: scoring 2.5 times as fast", scored, ratio >= 2.5))
    return verdicts


def of_offload(results: dict[str, Any]) -> list[Verdict]:
    rates = results.get("offload")
    if not rates:
        return []
    seconds = 14 / rates["first_offload"]
    verdicts = [Verdict("first offload of 14 GiB within 2 s", f"{seconds:.1f} s", seconds <= 2)]
    for what in ("offload", "load"):
        share = rates[f"second_{what}"] / rates[f"pinned_{what}"]
        measured = f"{share:.0%}, {rates[f'second_{what}']:.1f} GiB/s"
        verdicts.append(Verdict(f"{what}: 85% of the pinned copy rate", measured, share >= 0.85))
    return verdicts


def of_serving(results: dict[str, Any]) -> list[Verdict]:
    served = results.get("serving", {})
    if "vllm" not in served:
        return []
    verdicts = []
    for count in ("1", "64", "256", "512"):
        own, peer = served["torch"][count], served["vllm"][count]
        measured = f"{peer / own:.2f}, {own:,.0f} and {peer:,.0f} tokens/s"
        about = f"vLLM at most 1.7 times the built-in engine, {count} requests"
        verdicts.append(Verdict(about, measured, peer <= 1.7 * own))
    return verdicts


def of_step(results: dict[str, Any]) -> list[Verdict]:
    verdicts = []
    for engine, step in results.get("step", {}).items():
        moved, share = step["switch"] + step["sync"], (step["switch"] + step["sync"]) / step["step"]
        verdicts.append(Verdict(f"switch and sync within 1 s, {engine}", f"{moved:.2f} s", moved <= 1.0))
        verdicts.append(Verdict(f"switch and sync within 3% of the step, {engine}", f"{share:.1%}", share <= 0.03))
        plain = results.get("serving", {}).get(engine.partition(",")[0], {}).get("groups")
        if plain:
            share = step["generated_tokens_per_s"] / plain
            measured = f"{share:.0%}, {step['generated_tokens_per_s']:,.0f} of {plain:,.0f} tokens/s"
            verdicts.append(Verdict(f"generation in a step: 85% of plain requests, {engine}", measured, share >= 0.85))
    return verdicts


def of_trl(results: dict[str, Any]) -> list[Verdict]:
    if "trl" not in results:
        return []
    verdicts = []
    peer, generation = results["trl"]["samples_per_s"], results["trl"]["generation"]
    for engine, step in results.get("step", {}).items():
        own = step["samples_per_s"]
        measured = f"{own / peer:.2f}, {own:.1f} and {peer:.1f} samples/s (its generation: {generation})"
        verdicts.append(Verdict(f"samples a second: at least 1.5 times TRL's, {engine}", measured, own >= 1.5 * peer))
    return verdicts


def of_memory(results: dict[str, Any]) -> list[Verdict]:
    verdicts = []
    for engine in ("torch", "vllm"):
        for decision, phases in results.get(f"memory_{engine}", {}).items():
            about = f"memory within 10% of the plan, {decision}, {engine}"
            if "failed" in phases:
                verdicts.append(Verdict(about, phases["failed"].splitlines()[0], False))
                continue
            off = {name: row["peak"] / row["predicted"] - 1 for name, row in phases.items()}
            shown = (f"{name} {row['peak']:.1f} of {row['predicted']:.1f}" for name, row in phases.items())
            verdicts.append(Verdict(about, f"GiB: {', '.join(shown)}", all(abs(each) <= 0.1 for each in off.values())))
    return verdicts


def of_update(results: dict[str, Any]) -> list[Verdict]:
    verdicts = []
    for about, rates in results.get("update", {}).items():
        if "failed" in rates:
            verdicts.append(Verdict(f"weight update, {about}", rates["failed"].splitlines()[0], False))
            continue
        rate, share = rates["float32, asleep"], rates["float32, asleep"] / rates["copy"]
        measured = f"{share:.1%}, {rate:.0f} of {rates['copy']:.0f} GB/s; reload {rates['reload']:.1f}"
        verdicts.append(Verdict(f"weight update, {about}: 50% of the copy rate", measured, share >= 0.5))
    return verdicts


if __name__ == "__main__":
    typer.run(main)
