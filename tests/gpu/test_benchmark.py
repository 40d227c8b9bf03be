"""The parts of benchmarks/gpu.py that need no GPU."""

import asyncio
import importlib
import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from roost.rollout.arithmetic import write_arithmetic_model
from roost.trace.chrome import write_trace
from roost.trace.spans import Span, WorkerSpans

FOLDER = Path(__file__).parents[2] / "benchmarks"
SECOND = 1_000_000_000
VERSIONS = {"gpu": "one", "commit": "abc"}


@pytest.fixture
def module(monkeypatch):
    """Import a module of the benchmarks, which are scripts beside each other."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


@pytest.fixture
def model(tmp_path):
    return write_arithmetic_model(tmp_path / "model", max_position_embeddings=512)


@pytest.mark.parametrize("engine", ["torch", "vllm"])
@pytest.mark.parametrize("decision", ["keep", "sleep", "restart"])
def test_plans_of_the_memory_section_decide_what_is_measured(module, model, engine, decision):
    memory = module("gpu_memory")
    expected = memory.predicted(memory.job(model, engine, decision), decision, 140.0)
    assert expected["generate"] == pytest.approx(0.4 * 140, rel=0.02)
    assert (expected["learn"] > 50) == (decision == "keep")


def test_memory_is_attributed_to_the_trainers_phases(module, tmp_path):
    memory = module("gpu_memory")
    trainer = WorkerSpans(
        "trainer",
        0,
        0,
        spans=(
            Span("generate", "work", 100 * SECOND, 110 * SECOND, args={"step": 1}),
            Span("learn", "work", 111 * SECOND, 112 * SECOND, args={"step": 1}),
            Span("sync", "work", 112 * SECOND, 116 * SECOND, args={"step": 1}),
            Span("sync", "work", 117 * SECOND, 118 * SECOND, args={"step": 1}),
        ),
    )
    calls = (
        Span("learn", "call", 105 * SECOND, 106 * SECOND),
        Span("send_weights", "call", 113 * SECOND, 114 * SECOND),
    )
    learner = WorkerSpans("actor", 0, 0, ((0, 0),), calls)
    summary = write_trace(tmp_path / "trace.json", [trainer, learner], {0: "here"})
    found = memory.intervals(json.loads(summary.path.read_text()))
    assert [(each.phase, each.start_ns, each.end_ns) for each in found] == [
        ("generate", 100 * SECOND, 110 * SECOND),
        ("learn", 111 * SECOND, 112 * SECOND),
        ("sync", 113 * SECOND, 114 * SECOND),
        ("sync", 117 * SECOND, 118 * SECOND),
    ]
    readings = [memory.Reading(at * SECOND // 10, float(at)) for at in range(990, 1_200)]
    assert memory.by_phase(readings, found)["generate"] == {"peak": 1100.0, "median": 1050.0}


def test_results_of_sections_are_judged_together(module, tmp_path):
    """Sections may be measured one by one, into the same file."""
    gpu = module("gpu")
    file = tmp_path / "gpu.json"
    first = {"versions": VERSIONS, "trl": {"samples_per_s": 10.0, "generation": "vllm"}}
    gpu.write_results(file, first, gpu.verdicts_of(first))
    step = {"switch": 0.2, "sync": 0.2, "step": 20.0, "generated_tokens_per_s": 1.0, "samples_per_s": 14.0}
    [trl] = gpu.of_trl(gpu.earlier(file, VERSIONS) | {"step": {"vllm": step}})
    assert not trl.met
    assert trl.measured.startswith("1.40")
    assert gpu.earlier(file, VERSIONS | {"commit": "def"}) == {"versions": VERSIONS | {"commit": "def"}}


@pytest.mark.parametrize(("peak", "is_met"), [(54.0, True), (70.0, False)])
def test_memory_is_judged_by_its_peak(module, peak, is_met):
    phases = {"generate": {"predicted": 56.0, "peak": peak, "median": 1.0}}
    [verdict, failed] = module("gpu").of_memory({"memory_torch": {"keep": phases, "sleep": {"failed": "it\nended"}}})
    assert verdict.met == is_met
    assert (failed.met, failed.measured) == (False, "it")


@pytest.mark.long
def test_updates_are_measured(module, model):
    """By shared memory, as there is no device."""
    engines = module("gpu_engines")
    sizes = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    with engines.sent_model(model, sizes | heads, torch.device("cpu")) as (sent, folder, written):
        rates = asyncio.run(engines.update_rates(engines.EngineKind.TORCH, sent, folder))
    rows = {"tiny": {"copy": 1e9, "write": written, **rates}, "gone": {"copy": 1e9, "failed": "it\nended"}}
    tiny, gone = module("gpu").of_update({"update": rows})
    assert (tiny.met, gone.met, gone.measured) == (False, False, "it")
    assert min(rates.values()) > 0
