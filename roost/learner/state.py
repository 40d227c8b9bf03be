"""All that learning goes on from, as one nested dictionary of tensors."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from roost.learner.checkpoint import State, check_whole, load_state, saved_names
from roost.learner.distributed import rank

RANDOM = "random"


def learner_state(model: nn.Module, optimizer: torch.optim.Optimizer, progress: Tensor, device: torch.device) -> State:
    """The tensors themselves, to be written or filled: weights, moments, how far it is, and random numbers.

    Weights that are not trained are left out where there are any: they come with the model.
    """
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    is_partial = any(not weight.requires_grad for weight in model.parameters())
    buffers = {} if is_partial else _persistent_buffers(model)
    return {
        "model": {name: weight.detach() for name, weight in trained.items()} | buffers,
        "optimizer": {name: dict(optimizer.state[weight]) for name, weight in trained.items()},
        "progress": progress,
        RANDOM: {str(rank()): _random_states(device)},
    }


def fill(state: State, folder: Path, device: torch.device) -> None:
    """Read a checkpoint into a state, and the random numbers into their generators."""
    check_whole(folder)
    if f"{RANDOM}.{rank()}.{device.type}" not in saved_names(folder):
        del state[RANDOM]  # no such rank has written: this one goes on with its own
    load_state(state, folder)
    if RANDOM in state:
        _set_random_states(state[RANDOM][str(rank())], device)


def _random_states(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def _set_random_states(states: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def _persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}
