"""Models are run as they are meant to be, or refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from roost.config.job import eos_ids
from roost.engines.tiny_model import write_tiny_model
from roost.torch_engine.engine import block_count, block_size, cuda_room
from roost.torch_engine.model import load_model
from roost.torch_engine.settings import EngineSettings

REFUSED = {
    "sliding window": ("mistral", {"sliding_window": 64}, {}, "sliding window of 64 tokens"),
    "soft caps": ("gemma2", {"attn_logit_softcapping": 20.0, "sliding_window": 4096}, {}, "softcap"),
    "layers without attention": ("lfm2", {"layer_types": ["conv", "full_attention"]}, {}, r"but only \[1\] use"),
    "attention of its own": ("bloom", {"n_head": 4, "n_layer": 2}, {}, "2 layers, but only"),
    "too long a context": ("qwen2", {}, {"max_context": 513}, "513, but the model has 512 positions"),
    "unknown type": ("qwen2", {}, {"dtype": "int8"}, "'int8'; write auto"),
}


@pytest.mark.parametrize(("family", "sizes", "settings", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(tmp_path: Path, family: str, sizes: dict[str, Any], settings: dict[str, Any], message: str) -> None:
    folder = write_tiny_model(tmp_path, family, **sizes)
    with pytest.raises(ValueError, match=message):
        load_model(EngineSettings(str(folder), device="cpu", **settings))


def test_a_window_that_is_never_left_is_no_window(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "mistral", sliding_window=64)
    assert load_model(EngineSettings(str(folder), device="cpu", max_context=64)).max_context == 64


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [(None, 5, {5}), (7, 5, {7}), ([7, 8], None, {7, 8}), (None, None, set())],
    ids=["the model's", "the generation's first", "several", "none"],
)
def test_end_tokens(generation: Any, config: Any, expected: set[int]) -> None:
    class Holder:
        def __init__(self, ids: Any) -> None:
            self.eos_token_id = ids

    assert eos_ids(Holder(generation), Holder(config)) == expected  # type: ignore[arg-type]


def test_room_for_keys_and_values(models: Any) -> None:
    settings = EngineSettings(str(models("llama")), device="cpu", max_sequences=4)
    model = load_model(settings)
    per_token = 2 * 2 * (16 + 16) * 4  # layers, heads, keys and values, bytes
    assert block_size(settings, torch.device("cpu")) == 16
    assert block_count(settings, model, 16) == 4 * 512 // 16  # never more than all sequences at their longest
    assert block_count(EngineSettings("", kv_bytes=100 * per_token), model, 16) == 6
    with pytest.raises(ValueError, match="takes 8,192 bytes, but kv_bytes leaves 8,000"):
        block_count(EngineSettings("", kv_bytes=8000), model, 16)


@pytest.mark.parametrize("others", [0, 20, 40])
def test_a_share_of_a_device_is_of_this_process_alone(others: int) -> None:
    assert cuda_room(0.5, total=100, free=100 - 30 - others, own=30, step=5) == 15


def test_a_share_that_others_have_taken_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"leaves this process 20 .* only 10 are free .* set memory_fraction to 0.4 at most"
    ):
        cuda_room(0.5, total=100, free=10, own=30, step=5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_sequences": 0}, "max_sequences is 0"),
        ({"max_batch_tokens": 8, "max_sequences": 9}, "less than max_sequences 9"),
        ({"memory_fraction": 1.5}, "memory_fraction is 1.5"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineSettings("model", **settings)
