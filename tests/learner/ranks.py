"""Learners of several ranks, in processes of their own, and the meshes of two and of four ranks."""

import dataclasses
import socket
import traceback
from itertools import product, starmap
from pathlib import Path

import torch
from transformers import PreTrainedModel

from roost.config.job import MeshSizes, ParallelSizes
from roost.learner.distributed import close_distributed, init_distributed
from roost.learner.forward import Head
from roost.learner.learner import Learner
from tests.forked import FORKED
from tests.learner.random_samples import CPU
from tests.limits import HANG_S

READ = PreTrainedModel.__dict__["from_pretrained"]


def ranks_of(mesh):
    return mesh.data * mesh.model


def sizes_of(mesh):
    return ParallelSizes(tensor=mesh.tensor, context=mesh.context, shard=mesh.fsdp, expert=mesh.expert)


MESHES = [mesh for mesh in starmap(MeshSizes, product((1, 2, 4), repeat=4)) if ranks_of(mesh) in (2, 4)]
# Every way to divide experts over them: among the ranks of one copy, and over all of a tensor group.
EXPERT = [
    dataclasses.replace(mesh, expert=size)
    for mesh in MESHES
    for size in (2, 4)
    if mesh.fsdp * mesh.tensor % size == 0 and size % mesh.tensor == 0
]


def on_ranks(count, work, *arguments, limit_s=HANG_S):
    """Run `work(rank, *arguments)` on that many ranks, and give what each returns; a collective ends at the limit."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = FORKED.Queue()
    processes = [
        FORKED.Process(target=_run, args=(rank, count, port, results, work, arguments, limit_s))
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    try:
        found = dict(results.get(timeout=HANG_S) for _ in processes)
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    failures = [value for value in found.values() if isinstance(value, str)]
    if failures:
        raise AssertionError("\n".join(failures))
    return [found[rank] for rank in range(count)]


def _run(rank, count, port, results, work, arguments, limit_s):
    torch.set_num_threads(1)
    if rank:
        # As many copies of a large model as there are ranks would not fit on a machine: only the first reads it.
        PreTrainedModel.from_pretrained = None
    try:
        init_distributed(rank, count, "127.0.0.1", port, CPU, limit_s)
        results.put((rank, work(rank, *arguments)))
        close_distributed()
    except BaseException:
        results.put((rank, traceback.format_exc()))


def meet_in_pairs(rank, folder):
    """Go on from one world of four ranks in two of two ranks, side by side, of which the first reads a model."""
    close_distributed()
    if rank == 2:
        PreTrainedModel.from_pretrained = READ
    init_distributed(rank % 2, 2, "", 0, CPU, HANG_S, Path(folder) / f"meeting {rank // 2}")


def learn_and_keep(rank, settings, shares, totals, folder, head=Head.POLICY):
    """Learn from this rank's share of each batch, with all that happens to a learner in between."""
    folder = Path(folder)
    learner = Learner(settings, CPU, head)
    say = learner.score if head is Head.POLICY else learner.values
    learnt = []
    for number, (share, total) in enumerate(zip(shares, totals, strict=True)):
        say(share[rank])
        learner.offload()
        learner.load()
        learnt.append(learner.learn(share[rank], total))
        if number == len(shares) - 2:
            learner.save(folder / "before last")
    reported = say(shares[0][rank])
    learner.export(folder / "export")
    learner.wait_saved()
    again = Learner(settings, CPU, head)
    again.restore(folder / "before last")
    learnt_again = again.learn(shares[-1][rank], totals[-1])
    return {
        "learnt": learnt,
        "learnt again": learnt_again,
        "said": reported,
        "weights": weights(learner),
        "again": weights(again),
    }


def learn_and_read(rank, settings, shares, totals, folder):
    """As above, and what is in a checkpoint that one rank wrote."""
    found = learn_and_keep(rank, settings, shares, totals, folder)
    reader = Learner(settings, CPU)
    reader.restore(Path(folder) / "of one")
    return found | {"read": {"weights": weights(reader), "moments": moments(reader), "step": reader.step}}


def in_turn(rank, works):
    """Several functions with their arguments in one start."""
    return [work(rank, *arguments) for work, *arguments in works]


def weights(learner):
    return {name: weight.float().numpy().copy() for name, weight in learner.weights()}


def moments(learner):
    names = {weight: name for name, weight in learner.module.named_parameters()}
    return {
        f"{names[weight]} {kind}": _whole(tensor).numpy().copy()
        for weight, state in learner._optimizer.state.items()
        for kind, tensor in state.items()
    }


def _whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
