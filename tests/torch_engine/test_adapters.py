"""Adapters give what PEFT gives, to those who ask for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from roost.engines.protocol import InFlight, Sampling

PROMPT = list(range(30))
GREEDY = Sampling(max_tokens=10, temperature=0.0, ignore_eos=True)


@pytest.fixture
def adapter(models: Any, tmp_path: Path) -> Any:
    """Writes a random adapter, and gives its folder."""
    from transformers import AutoModelForCausalLM

    def written(name: str, seed: int = 0, **options: Any) -> Path:
        torch.manual_seed(seed)
        base = AutoModelForCausalLM.from_pretrained(models("qwen2"))
        config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"], **options}
        peft = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **config))
        for key, parameter in peft.named_parameters():
            if "lora_" in key:
                torch.nn.init.normal_(parameter, std=0.3)
        peft.save_pretrained(tmp_path / name)
        return tmp_path / name

    return written


def expected(reference: Any, folder: Path | None) -> tuple[list[int], list[float]]:
    model = reference("qwen2")
    if folder is not None:
        model = PeftModel.from_pretrained(model, folder).eval()
    ids, logprobs = list(PROMPT), []
    for _ in range(GREEDY.max_tokens):
        with torch.no_grad():
            rows = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        ids.append(int(rows.argmax()))
        logprobs.append(float(rows.max()))
    return ids[len(PROMPT) :], logprobs


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}], ids=["plain", "rsLoRA"])
def test_a_batch_of_both_adapters_and_the_base(
    start: Any, reference: Any, adapter: Any, options: dict[str, Any]
) -> None:
    driver = start()
    folders = {None: None, "one": adapter("one", 1, **options), "two": adapter("two", 2, target_modules=["gate_proj"])}
    for name, folder in folders.items():
        if name is not None:
            driver.engine.load_adapter(name, str(folder))
    driver.engine.pause(InFlight.HOLD)
    answers = {name: driver.ask(PROMPT, GREEDY, adapter=name) for name in folders}
    driver.engine.resume()
    seen = set()
    for name, folder in folders.items():
        tokens, logprobs = expected(reference, folder)
        assert answers[name].all().token_ids == tokens
        assert answers[name].logprobs == pytest.approx(logprobs, abs=1e-4)
        seen.add(tuple(tokens))
    assert len(seen) == 3


def test_loading_a_name_again_replaces_it_and_what_was_computed_with_it(
    start: Any, reference: Any, adapter: Any
) -> None:
    driver = start()
    for seed in (1, 2):
        folder = adapter(f"seed{seed}", seed)
        driver.engine.load_adapter("policy", str(folder))
        answer = driver.ask(PROMPT, GREEDY, adapter="policy").all()
        assert answer.taken[0].cached_tokens == 0
        assert answer.token_ids == expected(reference, folder)[0]
    assert driver.ask(PROMPT, GREEDY, adapter="policy").all().taken[0].cached_tokens == 16
    driver.engine.unload_adapter("policy")
    assert driver.engine.adapters == ()
    assert driver.ask(PROMPT, GREEDY).all().token_ids == expected(reference, None)[0]


def test_one_in_use_is_not_unloaded(start: Any, adapter: Any) -> None:
    driver = start()
    driver.engine.load_adapter("policy", str(adapter("one")))
    driver.engine.pause(InFlight.HOLD)
    driver.ask(PROMPT, GREEDY, adapter="policy")
    with pytest.raises(ValueError, match="1 requests use adapter 'policy'"):
        driver.engine.unload_adapter("policy")
    with pytest.raises(ValueError, match="no adapter 'other'"):
        driver.engine.unload_adapter("other")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"use_dora": True}, "use_dora", id="DoRA"),
        pytest.param({"bias": "all"}, "bias", id="biases"),
        pytest.param({"modules_to_save": ["lm_head"]}, "modules_to_save", id="saved modules"),
        pytest.param({"rank_pattern": {"q_proj": 2}}, "rank_pattern", id="ranks by name"),
        pytest.param({"init_lora_weights": "pissa"}, "init_lora_weights", id="starts that change the base"),
        pytest.param({"something_new": 3}, "something_new", id="what is not known"),
        pytest.param({"peft_type": "IA3"}, "IA3", id="other kinds"),
    ],
)
def test_what_is_not_supported_is_refused(start: Any, adapter: Any, change: dict[str, Any], message: str) -> None:
    folder = adapter("bad")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **change}))
    driver = start()
    with pytest.raises(ValueError, match=message):
        driver.engine.load_adapter("bad", str(folder))
    assert driver.engine.adapters == ()


def renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key.replace("layers.0", "layers.9"): tensor for key, tensor in tensors.items()}


def narrowed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: tensor[:, :3].contiguous() if "lora_A" in key else tensor for key, tensor in tensors.items()}


def halved(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in tensors.items() if "lora_B" not in key or "layers.0" in key}


def extended(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**tensors, "base_model.model.lm_head.weight": torch.zeros(2)}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(renamed, "layers.9", id="a layer that is not there"),
        pytest.param(narrowed, r"\(4, 3\)", id="the wrong shape"),
        pytest.param(halved, "lora_B", id="half missing"),
        pytest.param(extended, "lm_head.weight", id="more than LoRA"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(start: Any, adapter: Any, damage: Any, message: str) -> None:
    folder, driver = adapter("bad"), start()
    save_file(damage(load_file(folder / "adapter_model.safetensors")), folder / "adapter_model.safetensors")
    before = driver.ask(PROMPT, GREEDY).all().token_ids
    with pytest.raises(ValueError, match=message):
        driver.engine.load_adapter("bad", str(folder))
    assert driver.engine.adapters == ()
    assert driver.ask(PROMPT, GREEDY).all().token_ids == before
