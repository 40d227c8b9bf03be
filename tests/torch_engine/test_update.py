"""Updates that are refused, broken off or interrupted: the engine has its old weights, or knows that it has none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roost.engines.protocol import Finish, InFlight, Part, Sampling
from roost.engines.tiny_model import write_tiny_model
from roost.engines.weights.payload import announced
from roost.torch_engine.engine import EngineSettings, TorchEngine, Weights
from roost.torch_engine.server import WeightUpdater
from roost.torch_engine.update import checkpoint_files
from tests.torch_engine.conftest import Driver

GREEDY = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)


class Updating:
    """An engine that is paused, and another model whose weights it is to get."""

    def __init__(self, driver: Driver, other: Path) -> None:
        self.driver, self.engine, self.other = driver, driver.engine, other
        self.before = self.weights()
        self._updater = WeightUpdater(self.engine)
        self.engine.pause(InFlight.HOLD)

    def updater(self, action: Callable[[WeightUpdater], Any]) -> Any:
        return self.engine.between_steps(lambda: action(self._updater))

    def take(self) -> None:
        for path, infos in checkpoint_files(str(self.other)).items():
            self.updater(lambda updater, info={**announced(infos), "path": path}: updater.take(info))  # type: ignore[misc]

    def weights(self) -> dict[str, Tensor]:
        return {name: weight.clone() for name, weight in self.engine.named_weights().items()}

    @property
    def is_as_before(self) -> bool:
        return all(torch.equal(weight, self.before[name]) for name, weight in self.weights().items())


@pytest.fixture
def updating(start: Any, tmp_path: Path) -> Updating:
    return Updating(start(), write_tiny_model(tmp_path, seed=1))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_a_mixture_takes_the_experts_of_a_checkpoint(start: Any, tmp_path: Path, family: str) -> None:
    updating = Updating(start(family), write_tiny_model(tmp_path, family, seed=1))
    updating.updater(lambda updater: updater.reload(str(updating.other)))
    other = TorchEngine(EngineSettings(str(updating.other), device="cpu"))
    try:
        expected = {name: weight.clone() for name, weight in other.named_weights().items()}
    finally:
        other.close()
    assert updating.weights().keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in updating.weights().items())
    updating.updater(lambda updater: updater.start(None))
    assert updating.updater(lambda updater: updater.abandon())
    assert all(torch.equal(weight, expected[name]) for name, weight in updating.weights().items())


def drop_weights(engine: TorchEngine) -> None:
    engine.sleep(2)
    engine.wake([Part.WEIGHTS])


def test_an_update_replaces_everything(updating: Updating) -> None:
    updating.updater(lambda updater: updater.start(None))
    updating.take()
    updating.updater(lambda updater: updater.finish("3"))
    assert updating.engine.version == 3
    assert not updating.is_as_before
    assert updating.updater(lambda updater: updater.abandon())


def test_an_abandoned_update_is_undone(updating: Updating) -> None:
    updating.updater(lambda updater: updater.start(None))
    updating.take()
    assert not updating.is_as_before
    assert updating.updater(lambda updater: updater.abandon())
    assert updating.is_as_before


@pytest.mark.parametrize("has_started", [True, False])
def test_there_is_no_way_back_to_weights_that_were_dropped(updating: Updating, has_started: bool) -> None:
    drop_weights(updating.engine)
    if has_started:
        updating.updater(lambda updater: updater.start(None))
    assert not updating.updater(lambda updater: updater.abandon())
    assert not updating.engine.has_weights


def test_a_refused_manifest_leaves_nothing_open(updating: Updating) -> None:
    with pytest.raises(ValueError, match="do not fit this model"):
        updating.updater(lambda updater: updater.start({"tensors": [("other", "float32", [1])]}))
    with pytest.raises(ValueError, match="no update is open"):
        updating.take()


@pytest.mark.parametrize("version", ["best", "-1", ""])
def test_a_version_that_is_no_number_undoes_the_update(updating: Updating, version: str) -> None:
    updating.updater(lambda updater: updater.start(None))
    updating.take()
    with pytest.raises(ValueError, match=f"weight_version is '{version}'.*back on version 0"):
        updating.updater(lambda updater: updater.finish(version))
    assert updating.is_as_before
    assert updating.engine.version == 0


def test_an_update_that_nobody_finished_is_undone_by_the_next(updating: Updating) -> None:
    updating.updater(lambda updater: updater.start(None))
    updating.take()
    updating.updater(lambda updater: updater.start(None))
    assert updating.is_as_before
    with pytest.raises(ValueError, match="were not sent"):
        updating.updater(lambda updater: updater.finish("1"))


def test_weights_do_not_change_under_a_running_engine(updating: Updating) -> None:
    updating.engine.resume()
    with pytest.raises(ValueError, match="pause it before a weight update"):
        updating.updater(lambda updater: updater.start(None))
    updating.updater(lambda updater: updater.reload(str(updating.other)))  # at one go, between two steps
    assert not updating.is_as_before


INTERRUPTIONS: dict[str, Callable[[TorchEngine], None]] = {
    "resume": lambda engine: engine.resume(),
    "drain": lambda engine: engine.pause(InFlight.DRAIN),
    "sleep": lambda engine: engine.sleep(1),
}


@pytest.mark.parametrize("interrupt", INTERRUPTIONS.values(), ids=INTERRUPTIONS)
def test_who_steps_or_sleeps_amid_an_update_has_the_old_weights(
    updating: Updating, interrupt: Callable[[TorchEngine], None]
) -> None:
    waiting = updating.driver.ask([1, 2, 3], GREEDY)
    updating.updater(lambda updater: updater.start(None))
    updating.take()
    interrupt(updating.engine)
    updating.engine.wake()
    assert updating.is_as_before
    assert waiting.all().finish is Finish.LENGTH
    with pytest.raises(ValueError, match="no update is open"):
        updating.updater(lambda updater: updater.finish("1"))


@pytest.mark.parametrize("leave", [Weights.move_to_host, Weights.drop])
def test_saved_buffers_come_and_go_with_the_parameters(leave: Callable[[Weights], None]) -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).requires_grad_(False)
    module.register_buffer("scratch", torch.ones(1), persistent=False)
    kept = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    weights = Weights(module)
    assert weights.named().keys() == kept.keys() >= {"0.weight", "1.running_mean", "1.num_batches_tracked"}
    leave(weights)
    assert module.get_buffer("1.running_mean").numel() == 0
    weights.bring_back()
    for name, weight in weights.named().items():
        weight.copy_(kept[name]) if leave is Weights.drop else None
    assert all(torch.equal(module.state_dict()[name], kept[name]) for name in kept)
