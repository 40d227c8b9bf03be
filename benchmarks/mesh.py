"""Two learners on two cores beside one, for each dimension of their mesh: time of a step, and bytes sent.

python benchmarks/mesh.py --rounds 5
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from verdicts import JsonFile, Verdict, print_verdicts, write_results

from roost.config.job import MeshSizes, ParallelSizes, read_model_config
from roost.config.train import LearnerSettings, LossSettings, OldLogprobs
from roost.engines.tiny_model import write_tiny_model
from roost.learner.distributed import close_distributed, init_distributed
from roost.learner.learner import Learner
from roost.learner.losses import Totals
from roost.learner.parallel.mesh import LearnerMesh
from roost.learner.sample import NOT_GENERATED, Sample
from roost.placement.memory.shape import shape_from_config
from roost.placement.memory.traffic import Traffic, learner_traffic

CPU = torch.device("cpu")
RANKS, LIMIT_S = 2, 300.0
DENSE, MIXTURE = "dense", "mixture"
FAMILIES = {DENSE: "qwen2", MIXTURE: "qwen3_moe"}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
CONTEXT, OTHER = "context", "other"
TOLERANCE = 0.02  # of predicted bytes
SHARES = {"allgather": 1, "reducescatter": 1, "allreduce": 2, "alltoall": 1}  # of each other rank's part, with rings
INPUTS = ("input_tensors", "input_tensor", "input", "tensors")  # names of what collectives are given
NO_DATA = ("wait_tensor", "_wrap_tensor_autograd", "barrier")
Bytes = dict[str, float]


@dataclass(frozen=True, slots=True)
class Case:
    """A mesh of two ranks and the model that they train."""

    model: str
    mesh: MeshSizes
    recomputes: bool = False


def cases(recomputes: bool) -> dict[str, Case]:
    meshes = {
        "replicate": (DENSE, MeshSizes(replicate=RANKS)),
        "shard": (DENSE, MeshSizes(shard=RANKS)),
        "context": (DENSE, MeshSizes(context=RANKS)),
        "tensor": (DENSE, MeshSizes(tensor=RANKS)),
        "expert": (MIXTURE, MeshSizes(shard=RANKS, expert=RANKS)),
    }
    return {name: Case(*each, recomputes) for name, each in meshes.items()}


def main(
    rounds: Annotated[int, typer.Option(min=0, help="Timed steps of each side, in turn.")] = 5,
    hidden: Annotated[int, typer.Option(min=128, help="The models' width, a multiple of 128.")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="The models' layers.")] = 4,
    samples: Annotated[int, typer.Option(min=2, help="Samples of a step, an even number.")] = 8,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a sample.")] = 256,
    json_file: JsonFile = None,
) -> None:
    """Measure on the CPU with gloo; print the results and the predictions of plans."""
    console = Console(highlight=False)
    os.environ["OMP_WAIT_POLICY"] = "passive"
    found, times = measured(rounds, hidden, layers, samples, length, multiprocessing.get_context("spawn"))
    report_bytes(found, console)
    judged = [of_bytes(name, *each, recomputes) for recomputes, rows in found.items() for name, each in rows.items()]
    if times:
        report_times(times, console)
    print_verdicts(judged, console)
    if json_file is not None:
        rows = [
            {"dimension": name, "recomputes": recomputes, "measured": measured, "predicted": predicted}
            for recomputes, each in found.items()
            for name, (measured, predicted) in each.items()
        ]
        write_results(json_file, {"bytes": rows, "seconds": times}, judged)


def measured(
    rounds: int, hidden: int, layers: int, samples: int, length: int, context: Any
) -> tuple[dict[bool, dict[str, tuple[Bytes, Bytes]]], list[dict[str, float]]]:
    """Bytes by recomputation and mesh, measured and predicted, and seconds of each round, in processes of a context."""
    sizes = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 64,
        "head_dim": 32,
        "intermediate_size": 4 * hidden,
    }
    with tempfile.TemporaryDirectory() as folder:
        models = {
            DENSE: str(write_tiny_model(Path(folder) / DENSE, FAMILIES[DENSE], **sizes)),
            MIXTURE: str(write_tiny_model(Path(folder) / MIXTURE, FAMILIES[MIXTURE], **sizes, **EXPERTS)),
        }
        sides = Sides(models, samples, length, folder, context)
        try:
            found = {recomputes: counted(sides, models, samples * length, recomputes) for recomputes in (False, True)}
            times = [timed(sides) for _ in range(rounds)]
            sides.close()
        except BaseException:
            sides.kill()
            raise
    return found, times


class Sides:
    """One process alone, and two ranks; all keep their learners, and wait while others take their turn."""

    def __init__(self, models: Mapping[str, str], samples: int, length: int, folder: str, context: Any) -> None:
        self._results: Queue[Any] = context.Queue()
        self._orders: list[Queue[Any]] = [context.Queue() for _ in range(1 + RANKS)]
        self._processes = [
            context.Process(
                target=_serve, args=(self._results, index, orders, models, samples, length, folder), daemon=True
            )
            for index, orders in enumerate(self._orders)
        ]
        for process in self._processes:
            process.start()

    def alone(self, model: str, threads: int) -> float:
        """Seconds of a step of one process."""
        self._orders[0].put((Case(model, MeshSizes()), threads, False))
        return self._result()[0]

    def together(self, case: Case) -> float:
        """Seconds of a step of two ranks with a thread each."""
        return max(seconds for seconds, _ in self._ranks(case, counts=False))

    def sent(self, case: Case) -> Bytes:
        """Bytes that a rank sends in a step, by dimension; the mean of both."""
        of_ranks = [sent for _, sent in self._ranks(case, counts=True)]
        return {name: mean(sent[name] for sent in of_ranks) for name in sum(of_ranks, Counter())}

    def _ranks(self, case: Case, counts: bool) -> list[tuple[float, Counter[str]]]:
        for orders in self._orders[1:]:
            orders.put((case, 1, counts))
        return [self._result() for _ in range(RANKS)]

    def _result(self) -> tuple[float, Counter[str]]:
        found = self._results.get(timeout=LIMIT_S)
        if isinstance(found, str):
            raise RuntimeError(found)
        return found  # type: ignore[no-any-return]

    def close(self) -> None:
        for orders in self._orders:
            orders.put(None)
        for process in self._processes:
            process.join(LIMIT_S)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()


def _serve(results: Queue[Any], *arguments: Any) -> None:
    try:
        serve(results, *arguments)
    except Exception:
        results.put(traceback.format_exc())


def serve(
    results: Queue[Any],
    index: int,
    orders: Queue[Any],
    models: Mapping[str, str],
    samples: int,
    length: int,
    folder: str,
) -> None:
    """Take a step for each order: the first process alone, the others as ranks."""
    rank = index - 1
    torch.set_num_threads(1)
    if rank >= 0:
        init_distributed(rank, RANKS, "", 0, CPU, LIMIT_S, Path(folder) / "meeting")
    batch = [random_sample(seed, length) for seed in range(samples)]
    own = batch if rank < 0 else batch[rank::RANKS]
    totals = Totals(samples, sum(sample.num_generated for sample in batch), length)
    learners: dict[Case, Learner] = {}
    names: dict[str, str] = {}
    while (order := orders.get()) is not None:
        case, threads, counts = order
        if case not in learners:
            learners[case] = new_learner(models[case.model], case, samples * length // RANKS)
            learners[case].learn(own, totals)  # warm-up
            # Of all learners: torch takes the groups of an equal mesh that it has seen before.
            names.update(group_names(learners[case]._mesh))
        torch.set_num_threads(threads)
        if rank >= 0:
            dist.barrier()
        sent = SentBytes(names)
        before = time.perf_counter()
        with sent if counts else nullcontext():
            learners[case].learn(own, totals)
        results.put((time.perf_counter() - before, sent.bytes))
    close_distributed()


def new_learner(model: str, case: Case, tokens: int) -> Learner:
    mesh = case.mesh
    sizes = ParallelSizes(tensor=mesh.tensor, context=mesh.context, shard=mesh.fsdp, expert=mesh.expert)
    settings = LearnerSettings(
        model,
        parallel=sizes,
        micro_batch_tokens=tokens,
        activation_checkpointing=case.recomputes,
        loss=LossSettings(old_logprobs=OldLogprobs.ROLLOUT),
    )
    return Learner(settings, CPU)


def random_sample(seed: int, length: int) -> Sample:
    chance = np.random.default_rng(seed)
    turns = np.where(np.arange(length) < length // 4, NOT_GENERATED, 0)
    logprobs = np.full(length, -5.0, np.float32)
    return Sample(chance.integers(0, 256, length), turns, logprobs, chance.normal(size=length).astype(np.float32))


class SentBytes(TorchDispatchMode):
    """Counts the bytes of numbers that this rank sends to others, by dimension of its mesh, with ring algorithms.

    Whatever else is sent, such as samples and counts, is `other`.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self._names = names  # of dimensions, by those of groups

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # its own collectives come here
        if func.namespace in ("c10d", "_c10d_functional"):
            given = zip((each.name for each in func._schema.arguments), args, strict=False)
            self._count(func._schema.name.partition("::")[2], dict(given))
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, given: Mapping[str, Any]) -> None:
        kind = next((kind for kind in SHARES if name.replace("_", "").startswith(kind)), None)
        if kind is None:
            if name not in NO_DATA:
                raise NotImplementedError(f"bytes of the collective {name} are not counted")
            return
        group = _group(given)
        ranks = group.size()
        tensors, _ = tree_flatten(next(given[key] for key in INPUTS if key in given))
        size = sum(each.nbytes for each in tensors) * (ranks if kind == "allgather" else 1)
        sent = size * SHARES[kind] * (ranks - 1) / ranks
        if splits := given.get("input_split_sizes"):
            sent = size * (1 - splits[group.rank()] / max(1, sum(splits)))
        is_number = all(each.is_floating_point() for each in tensors)
        self.bytes[self._names.get(group.group_name, OTHER) if is_number else OTHER] += sent


def group_names(mesh: LearnerMesh) -> Iterator[tuple[str, str]]:
    """Names of a mesh's groups, each with its dimension's."""
    if mesh.context is not None:
        yield mesh.context.group.group_name, CONTEXT
    for devices in (mesh.devices, mesh.experts):
        for name in () if devices is None else devices.mesh_dim_names or ():
            yield devices.get_group(name).group_name, name


def _group(given: Mapping[str, Any]) -> Any:
    if (boxed := given.get("process_group")) is not None:
        return dist.ProcessGroup.unbox(boxed)
    return dist.distributed_c10d._resolve_process_group(given["group_name"])


def counted(sides: Sides, models: Mapping[str, str], tokens: int, recomputes: bool) -> dict[str, tuple[Bytes, Bytes]]:
    """Bytes of a rank in a step by dimension, measured and predicted."""
    found = {}
    for name, case in cases(recomputes).items():
        shape = shape_from_config(read_model_config(models[case.model]) or {})
        own = tokens // case.mesh.data
        rounds = own // (tokens // RANKS)
        predicted = learner_traffic(shape, case.mesh, own, rounds, 4, None if recomputes else 0)
        found[name] = sides.sent(case), {each: getattr(predicted, each) for each in Traffic.__slots__}
    return found


def timed(sides: Sides) -> dict[str, float]:
    """Seconds of a step of each side, in turn."""
    alone = {alone_name(model, threads): sides.alone(model, threads) for model in FAMILIES for threads in (1, 2)}
    return alone | {name: sides.together(case) for name, case in cases(False).items()}


def alone_name(model: str, threads: int) -> str:
    return f"{model}, one process, {threads} thread{'s' if threads > 1 else ''}"


def report_bytes(found: Mapping[bool, Mapping[str, tuple[Bytes, Bytes]]], console: Console) -> None:
    table = Table("mesh", "recomputes", "collectives of", "measured, kB", "predicted, kB", "ratio")
    table.title, table.title_justify = "Bytes that a rank sends in a step", "left"
    for recomputes, rows in found.items():
        for name, (measured, predicted) in rows.items():
            for dimension in (*Traffic.__slots__, OTHER):
                sent, expected = measured.get(dimension, 0.0), predicted.get(dimension, 0.0)
                if sent or expected:
                    ratio = f"{sent / expected:.3f}" if expected else ""
                    row = (name, "yes" if recomputes else "no", dimension)
                    table.add_row(*row, f"{sent / 1e3:,.1f}", f"{expected / 1e3:,.1f}" if expected else "", ratio)
    console.print(table)


def of_bytes(name: str, measured: Bytes, predicted: Bytes, recomputes: bool) -> Verdict:
    sent, expected = (sum(size for key, size in each.items() if key != OTHER) for each in (measured, predicted))
    kind = ", recomputed" if recomputes else ""
    target = f"bytes of {name}{kind}: within {TOLERANCE:.0%} of the prediction"
    return Verdict(target, f"{sent / expected:.3f}", abs(sent / expected - 1) <= TOLERANCE)


def report_times(times: Sequence[Mapping[str, float]], console: Console) -> None:
    table = Table("side", "seconds", "against 1 thread", "against 2 threads")
    table.title, table.title_justify = "Time of a step, medians and ratios of the rounds", "left"
    for name in times[0]:
        model = next((each for each in FAMILIES if name.startswith(each)), None) or cases(False)[name].model
        ratios = [median(each[alone_name(model, threads)] / each[name] for each in times) for threads in (1, 2)]
        table.add_row(name, f"{median(each[name] for each in times):.3f}", *(f"{ratio:.2f}" for ratio in ratios))
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
