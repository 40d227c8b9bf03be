"""An adapter: alone trained, switched off, merged, and read by PEFT."""

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from roost.config.train import AdapterSettings
from roost.engines.tiny_model import write_tiny_model
from roost.learner.adapter import adapted_layers
from roost.learner.learner import Learner
from roost.learner.model import whole_bytes
from roost.placement.memory.shape import adaptable_layers, shape_from_config
from tests.learner.random_samples import CPU, assert_equal, random_samples, settings_of, totals_of

SAMPLES = random_samples(12, 5, 9, 40)


@pytest.fixture
def adapted(learner):
    """A learner whose adapter has learnt something."""
    one = learner(adapter=AdapterSettings(lora_rank=4, lora_alpha=16))
    for _ in range(3):
        one.learn(SAMPLES, totals_of(SAMPLES))
    return one


def test_only_the_adapter_is_trained(adapted, models):
    trained = {name for name, weight in adapted.module.named_parameters() if weight.requires_grad}
    assert trained
    assert all(".lora_" in name for name in trained)
    assert not any("lm_head" in name for name in trained)
    before = AutoModelForCausalLM.from_pretrained(models()).state_dict()
    now = {name.replace(".base_layer", ""): weight for name, weight in adapted.module.state_dict().items()}
    assert all(torch.equal(now[name], weight) for name, weight in before.items())


def test_switched_off_it_is_the_reference(adapted, learner):
    reference = learner().score(SAMPLES)
    now, off = adapted.score(SAMPLES), adapted.score(SAMPLES, as_reference=True)
    assert all((one == other).all() for one, other in zip(off, reference, strict=True))
    assert abs(now[0] - off[0]).max() > 1e-3
    assert all((one == other).all() for one, other in zip(adapted.score(SAMPLES), now, strict=True))


def test_without_an_adapter_there_is_no_reference(learner):
    with pytest.raises(ValueError, match="has none"):
        learner().score(SAMPLES, as_reference=True)


def test_merged_it_says_the_same_under_the_names_of_the_checkpoint(adapted, learner):
    plain = learner()
    merged = dict(adapted.weights())
    assert merged.keys() == dict(plain.weights()).keys()
    plain.module.load_state_dict(merged)
    for one, other in zip(adapted.score(SAMPLES), plain.score(SAMPLES), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_peft_reads_what_is_exported(adapted, models, tmp_path):
    adapted.export(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(models(), dtype=torch.float32)
    read = PeftModel.from_pretrained(base, tmp_path / "adapter")
    ids = torch.from_numpy(SAMPLES[0].token_ids)
    logprobs = read(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0].detach().numpy()
    made = SAMPLES[0].is_generated[1:]
    np.testing.assert_allclose(logprobs[made], adapted.score(SAMPLES)[0][1:][made], atol=1e-4)
    assert {"q_proj", "down_proj"} < read.peft_config["default"].target_modules
    assert (tmp_path / "adapter" / "tokenizer.json").is_file()


def test_transformers_reads_the_merged_model(adapted, tmp_path):
    adapted.export_whole(tmp_path / "policy")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float32)
    ids = torch.from_numpy(SAMPLES[0].token_ids)
    logprobs = read(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0].detach().numpy()
    made = SAMPLES[0].is_generated[1:]
    np.testing.assert_allclose(logprobs[made], adapted.score(SAMPLES)[0][1:][made], atol=1e-4)
    assert not any("lora" in name or "base_layer" in name for name in load_file(tmp_path / "policy/model.safetensors"))
    assert (tmp_path / "policy" / "tokenizer.json").is_file()
    written = sum(
        weight.numel() * weight.element_size() for weight in load_file(tmp_path / "policy/model.safetensors").values()
    )
    assert whole_bytes(adapted.module, settings_of("")) == written


def test_the_adapter_keeps_its_precision_where_the_model_has_less(learner):
    one = learner(adapter=AdapterSettings(lora_rank=4), compute_dtype="bfloat16")
    assert {(weight.dtype, weight.requires_grad) for weight in one.module.parameters()} == {
        (torch.bfloat16, False),
        (torch.float32, True),
    }
    assert one.learn(SAMPLES, totals_of(SAMPLES))["skipped"] == 0


def test_some_layers_alone(learner):
    one = learner(adapter=AdapterSettings(lora_rank=2, lora_target_modules=("q_proj",)))
    assert all("q_proj" in name for name, _ in one.adapter())


@pytest.mark.parametrize("tied", [False, True], ids=["own last layer", "tied"])
def test_an_exported_model_is_one_of_transformers(models, tmp_path, tied):
    one = Learner(settings_of(models("qwen3", tie_word_embeddings=tied)), CPU)
    one.learn(SAMPLES, totals_of(SAMPLES))
    one.export(tmp_path / "export")
    two = Learner(settings_of(str(tmp_path / "export")), CPU)
    assert_equal(dict(two.weights()), dict(one.weights()))
    assert ("lm_head.weight" in dict(one.weights())) is not tied
    assert (tmp_path / "export" / "tokenizer.json").is_file()


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "mixtral"])
def test_the_adapter_of_a_mixture_leaves_its_experts(models, tmp_path, family):
    one = Learner(settings_of(models(family), adapter=AdapterSettings(lora_rank=4, lora_alpha=16)), CPU)
    for _ in range(3):
        one.learn(SAMPLES, totals_of(SAMPLES))
    assert not any(".experts." in name for name, _ in one.adapter())
    one.export_whole(tmp_path / "policy")
    merged = Learner(settings_of(str(tmp_path / "policy")), CPU)
    for here, there in zip(one.score(SAMPLES), merged.score(SAMPLES), strict=True):
        np.testing.assert_allclose(here, there, atol=1e-4)


def test_peft_reads_the_adapter_of_a_mixture_with_dense_layers(tmp_path):
    path = str(write_tiny_model(tmp_path / "model", "qwen3_moe", mlp_only_layers=[0]))
    one = Learner(settings_of(path, adapter=AdapterSettings(lora_rank=4, lora_alpha=16)), CPU)
    for _ in range(3):
        one.learn(SAMPLES, totals_of(SAMPLES))
    one.export(tmp_path / "adapter")
    read = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), tmp_path / "adapter"
    )
    ids = torch.from_numpy(SAMPLES[0].token_ids)
    logprobs = read(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0].detach().numpy()
    made = SAMPLES[0].is_generated[1:]
    np.testing.assert_allclose(logprobs[made], one.score(SAMPLES)[0][1:][made], atol=1e-4)


def test_routed_experts_named_for_an_adapter_are_refused(models):
    named = AdapterSettings(lora_rank=4, lora_target_modules=("q_proj", "gate_proj", "up_proj"))
    with pytest.raises(ValueError, match="has gate_proj, up_proj, but no linear layer"):
        Learner(settings_of(models("qwen3_moe"), adapter=named), CPU)


@pytest.mark.parametrize("names", [("q_prj", "v_proj"), ("q_prj",), ("proj",)])
def test_a_name_that_stands_for_no_layer_is_refused(learner, names):
    missing = names[0]
    with pytest.raises(ValueError, match=f"has {missing}, but no linear layer of the model is called so; .*q_proj"):
        learner(adapter=AdapterSettings(lora_rank=4, lora_target_modules=names))


@pytest.mark.parametrize(
    ("family", "config"),
    [
        *(("llama", {}), ("mistral", {}), ("qwen2", {}), ("qwen3", {}), ("mixtral", {}), ("qwen2_moe", {})),
        ("qwen3_moe", {}),
    ],
)
def test_checks_before_launch_know_the_layers(models, family, config):
    model = AutoModelForCausalLM.from_pretrained(models(family, **config))
    planned = adaptable_layers(shape_from_config(model.config.to_dict()))
    assert sorted(planned) == sorted(adapted_layers(model))
