"""Parameters of known models from their published shapes."""

import json

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import roost
from roost.config.job import MeshSizes, ParallelSizes, Sharding
from roost.config.train import AdapterSettings, LearnerSettings, OptimizerSettings, OptimizerType
from roost.engines.tiny_model import write_tiny_model
from roost.learner.adapter import add_adapter
from roost.learner.learner import Learner
from roost.placement.memory.model import (
    DIVIDED_LOGIT_BYTES,
    GIB,
    LOGIT_BYTES,
    activation_bytes,
    adapter_parameters,
    footprint,
    layer_values,
    learner_memory,
)
from roost.placement.memory.phases import Phase
from roost.placement.memory.shape import UnknownShape, shape_from_config
from roost.placement.memory.traffic import learner_traffic
from roost.trainer.setup import planned_learner
from tests.grid import grid
from tests.learner.random_samples import CPU, settings_of
from tests.learner.ranks import on_ranks


def config(family, hidden, layers, heads, kv_heads, feed_forward, vocabulary, tied=False, **more):
    return {
        "model_type": family,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": feed_forward,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        **more,
    }


QWEN3_MOE = {"head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
QWEN2_MOE = {
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts": 60,
    "num_experts_per_tok": 4,
}
MODELS = [
    pytest.param(config("qwen2", 896, 24, 14, 2, 4864, 151936, tied=True), 494_032_768, id="Qwen2.5-0.5B"),
    pytest.param(config("qwen2", 3584, 28, 28, 4, 18944, 152064), 7_615_616_512, id="Qwen2.5-7B"),
    pytest.param(config("qwen3", 5120, 64, 64, 8, 25600, 151936, head_dim=128), 32_762_123_264, id="Qwen3-32B"),
    pytest.param(config("llama", 4096, 32, 32, 8, 14336, 128256), 8_030_261_248, id="Llama-3.1-8B"),
    pytest.param(config("qwen3_moe", 2048, 48, 32, 4, 6144, 151936, **QWEN3_MOE), 30_532_122_624, id="Qwen3-30B-A3B"),
    pytest.param(
        config("qwen2_moe", 2048, 24, 16, 16, 5632, 151936, **QWEN2_MOE), 14_315_784_192, id="Qwen1.5-MoE-A2.7B"
    ),
    pytest.param(
        config("mixtral", 4096, 32, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2),
        46_702_792_704,
        id="Mixtral-8x7B",
    ),
]


@pytest.mark.parametrize(("described", "published"), MODELS)
def test_parameters(described, published):
    assert shape_from_config(described).parameters == published


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral"])
def test_configs_that_transformers_writes_now_are_counted(tmp_path, family):
    folder = write_tiny_model(tmp_path, family)
    shape = shape_from_config(json.loads((folder / "config.json").read_text()))
    assert shape.parameters == AutoModelForCausalLM.from_pretrained(folder).num_parameters()


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        *((family, {}) for family in ("qwen2", "qwen3", "llama", "qwen2_moe", "qwen3_moe", "mixtral")),
        *((family, {"mlp_only_layers": [0]}) for family in ("qwen2_moe", "qwen3_moe")),
    ],
)
def test_parameters_of_an_adapter(tmp_path, family, sizes):
    folder = write_tiny_model(tmp_path, family, **sizes)
    model = AutoModelForCausalLM.from_pretrained(folder)
    add_adapter(model, AdapterSettings(lora_rank=4), torch.float32)
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert adapter_parameters(shape_from_config(json.loads((folder / "config.json").read_text())), 4) == trained


@pytest.mark.parametrize(("described", "published"), MODELS)
def test_weights_and_optimizer_state_of_all_processes_add_up(described, published):
    """Sixteen-bit weights are 2 bytes a parameter, Adam with master weights 12, however many processes share them."""
    memory = learner_memory(shape_from_config(described), ParallelSizes(), processes=64, tokens=4096)
    assert memory.weights * 64 * GIB == pytest.approx(2 * published, rel=0.02)
    assert memory.optimizer * 64 * GIB == pytest.approx(12 * published, rel=0.02)


@grid(
    ("weight_dtype", "optimizer", "adapter"),
    [
        ("float32", OptimizerType.ADAMW, None),
        ("bfloat16", OptimizerType.ADAMW, None),
        ("bfloat16", OptimizerType.MUON, None),
        ("float32", OptimizerType.ADAMW, AdapterSettings(lora_rank=4)),
    ],
)
def test_optimizer_state_is_that_of_the_learner(weight_dtype, optimizer, adapter, tmp_path):
    folder = write_tiny_model(tmp_path, "qwen3")
    options = {"compute_dtype": weight_dtype, "optimizer": OptimizerSettings(optimizer=optimizer), "adapter": adapter}
    settings = settings_of(str(folder), weight_dtype=weight_dtype, **options)
    learner = Learner(settings, CPU)
    trained = [weight for weight in learner.module.parameters() if weight.requires_grad]
    held = sum(each.nbytes for each in learner._optimizer.device_tensors())
    held += sum(each.nbytes for each in trained) if adapter is not None else 0
    size = {"float32": 4, "bfloat16": 2}[weight_dtype]
    shape = shape_from_config(json.loads((folder / "config.json").read_text()))
    memory = learner_memory(
        shape,
        ParallelSizes(),
        processes=1,
        tokens=64,
        weight_bytes=size,
        lora_rank=None if adapter is None else 4,
        optimizer=optimizer.value,
        trained_bytes=size,
    )
    assert memory.optimizer * GIB == pytest.approx(held, rel=0.01)


def test_megatron_cuts_weights_by_the_model_sizes_and_experts_further():
    shape = shape_from_config(MODELS[4].values[0])
    sizes = ParallelSizes(tensor=2, pipeline=2, expert=4)
    memory = learner_memory(shape, sizes, processes=16, tokens=4096, sharding=Sharding.OPTIMIZER)
    held = shape.dense_parameters / 4 + shape.expert_parameters / 16
    assert memory.weights * GIB == pytest.approx(2 * held)
    assert memory.gradients * GIB == pytest.approx(4 * held)
    assert memory.optimizer * GIB == pytest.approx(12 * shape.parameters / 16)


@pytest.mark.parametrize(
    "broken", [{}, {"model_type": "mamba"}, {"model_type": "llama"}, {**MODELS[1].values[0], "hidden_size": "big"}]
)
def test_what_cannot_be_counted(broken):
    with pytest.raises(UnknownShape):
        shape_from_config(broken)


def test_memory_of_a_learner_follows_its_mesh():
    shape = shape_from_config(
        {
            "model_type": "qwen2",
            "hidden_size": 3584,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "intermediate_size": 18944,
            "vocab_size": 152064,
        }
    )
    plain, tensor, context = (
        learner_memory(shape, sizes, processes=8, tokens=32768)
        for sizes in (ParallelSizes(), ParallelSizes(tensor=2), ParallelSizes(context=2))
    )
    assert plain.weights == tensor.weights == context.weights
    assert plain.activations > tensor.activations > context.activations
    assert learner_memory(shape, ParallelSizes(), processes=4, tokens=32768).optimizer == 2 * plain.optimizer


@pytest.mark.parametrize(
    ("described", "compiles", "kept"),
    [
        pytest.param(config("qwen2", 3584, 28, 28, 4, 18944, 152064), False, 225_357, id="Qwen2.5-7B"),
        pytest.param(config("qwen2", 3584, 28, 28, 4, 18944, 152064), True, 158_819, id="Qwen2.5-7B, compiled"),
        pytest.param(config("qwen2", 1536, 28, 12, 2, 8960, 151936), False, 103_459, id="Qwen2.5-1.5B"),
        pytest.param(config("qwen2", 1536, 28, 12, 2, 8960, 151936), True, 73_272, id="Qwen2.5-1.5B, compiled"),
        pytest.param(config("qwen3", 5120, 64, 64, 8, 25600, 151936, head_dim=128), False, 379_475, id="Qwen3-32B"),
        pytest.param(
            config("qwen3", 5120, 64, 64, 8, 25600, 151936, head_dim=128), True, 250_408, id="Qwen3-32B, compiled"
        ),
    ],
)
def test_activations_of_a_layer(described, compiles, kept):
    """Bytes that each token of a layer kept on an H200, in bfloat16."""
    assert 2 * layer_values(shape_from_config(described), ParallelSizes(), compiles) == pytest.approx(kept, rel=0.01)


@pytest.mark.parametrize(
    ("processes", "tokens", "changes", "expected"),
    [
        # A layer's gradients in 16 bits, another's in 32, and those of the last layer.
        pytest.param(8, 32768, {}, 0.233 * 6 + 0.545 * 2, id="in layers"),
        # Embedding and last layer in 16 and 32 bits, less what layers had: two of them, an inside and inputs.
        pytest.param(8, 1024, {}, 1.09 * 8 - 3.993 * 1.0737, id="at the end"),
        pytest.param(1, 1024, {}, 0.545 * 6, id="one process"),
        pytest.param(8, 32768, {"lora_rank": 8}, 0.0043, id="adapter"),
    ],
)
def test_gradients_on_their_way_to_their_shards(processes, tokens, changes, expected):
    shape = shape_from_config(config("qwen2", 3584, 28, 28, 4, 18944, 152064))
    memory = learner_memory(shape, ParallelSizes(), processes, tokens, weight_bytes=4, **changes)
    assert memory.transient == pytest.approx(expected / 1.0737, rel=0.02)


def test_scoring_keeps_one_layer():
    shape = shape_from_config(config("qwen2", 3584, 28, 28, 4, 18944, 152064))
    learning, scoring = (activation_bytes(shape, ParallelSizes(), 32768, learns=learns) for learns in (True, False))
    assert learning - scoring == 27 * 32768 * 3584 * 2


def test_memory_grows_with_each_layer_that_is_not_recomputed():
    shape = shape_from_config(MODELS[1].values[0])
    needed = [
        learner_memory(shape, ParallelSizes(), processes=8, tokens=4096, recomputed_layers=count).activations
        for count in range(shape.layers + 1)
    ]
    assert needed[-1] == learner_memory(shape, ParallelSizes(), processes=8, tokens=4096).activations
    of_layer = 4096 * (2 * layer_values(shape, ParallelSizes()) - 2 * shape.hidden) / GIB
    assert np.diff(needed[:-1]) == pytest.approx(-of_layer)
    assert needed[-2] < needed[-1], "the last layer would be recomputed at once"


def test_experts_that_ranks_divide_are_not_gathered():
    shape = shape_from_config(MODELS[4].values[0])
    plain, divided, whole = (
        learner_memory(shape, ParallelSizes(expert=size), processes=8, tokens=4096, compiles=False)
        for size in (1, 2, 8)
    )
    assert plain.weights == divided.weights == whole.weights
    saved = (plain.activations - whole.activations) * GIB
    layers = 2 * 2 * shape.expert_parameters / shape.layers  # two layers of two bytes
    exchanged = 4096 * shape.active_experts * shape.hidden * 3 * 2
    assert saved == pytest.approx(layers * 7 / 8 - exchanged)
    assert plain.activations > divided.activations > whole.activations
    both, dense = (
        learner_memory(shape, ParallelSizes(tensor=2, expert=size), processes=8, tokens=4096) for size in (2, 10**9)
    )
    assert (both.activations - dense.activations) * GIB == pytest.approx(layers / 2)  # experts are not cut by tensor


def test_expert_groups_exchange_tokens_and_not_experts():
    shape = shape_from_config(MODELS[4].values[0])
    plain, divided, whole = (
        learner_traffic(shape, MeshSizes(shard=8, expert=size), tokens=4096, rounds=1) for size in (1, 2, 8)
    )
    bytes_of_experts = shape.expert_parameters * (2 + 2 + 4)
    assert plain.expert == 0
    assert plain.fsdp - whole.fsdp == pytest.approx(7 / 8 * bytes_of_experts)
    assert plain.fsdp - divided.fsdp == pytest.approx((7 / 8 - 3 / 4 / 2) * bytes_of_experts)
    # Each of 4,096 tokens goes to 8 experts and back, in 48 layers and 3 passes, 7 of 8 times to another rank.
    assert whole.expert == pytest.approx(4096 * 8 * 2048 * 2 * 2 * 48 * 3 * 7 / 8)
    assert whole.total == pytest.approx(whole.fsdp + whole.expert)


LLAMA_1B = config("llama", 2048, 24, 16, 4, 5632, 32_000)
QWEN_7B = config("qwen2", 3584, 28, 28, 4, 18944, 152_064)


@pytest.mark.parametrize(
    ("described", "rollout", "train", "peaks"),
    [
        pytest.param(LLAMA_1B, {}, {}, {"score": 18.7, "learn": 24.0, "sync": 19.8}, id="1.2B, sleep"),
        pytest.param(
            LLAMA_1B,
            {"enable_sleep_mode": False},
            {},
            {"score": 17.8, "learn": 23.05, "sync": 14.59},
            id="1.2B, restart",
        ),
        pytest.param(
            QWEN_7B,
            {},
            {"optimizer_cpu_offload": True},
            {"score": 47.85, "learn": 83.69, "sync": 48.83},
            id="7.6B, optimizer state on the host",
        ),
    ],
)
def test_memory_of_collocated_runs(described, rollout, train, peaks, tmp_path):
    """Peaks in GiB that runs of two steps had on an H200; the engine has 40 % of it."""
    (tmp_path / "config.json").write_text(json.dumps(described))
    offloads = {f"offload_{part}": True for part in ("weight", "grad", "optimizer")}
    job = {
        "cluster": {"num_nodes": 1, "num_gpus_per_node": 1, "component_placement": {"actor,rollout": 0}},
        "actor": {"model": {"model_path": str(tmp_path)}, **offloads},
        "rollout": {"gpu_memory_utilization": 0.4, **rollout},
        "train": {
            "task": {"_target_": "my_tasks.Sums"},
            "compute_dtype": "bfloat16",
            "compile": False,
            "activation_checkpointing": True,
            "micro_batch_tokens": 4096,
            "engine_options": {"max_context": 512},
            **train,
        },
    }
    [held] = roost.plan(job, {"nodes": [{"accelerators": 1, "memory_gb": 139.8}]}).residency.classes
    found = {
        "score": held.used_gib(Phase.INFER),
        "learn": held.used_gib(Phase.LEARN),
        "sync": held.overlapped_sync_gib,
    }
    assert found == pytest.approx(peaks, rel=0.1)


def test_state_on_the_host_comes_by_whole_weights(tmp_path):
    """The gates of a layer's 128 experts are one weight, larger than the embedding."""
    shape = shape_from_config(MODELS[4].values[0])
    (tmp_path / "config.json").write_text(json.dumps(MODELS[4].values[0]))
    job = {
        "cluster": {"num_nodes": 1, "component_placement": {"actor": "0-1", "rollout": "2-3"}},
        "actor": {"model": {"model_path": str(tmp_path)}},
        "train": {"task": {"_target_": "my_tasks.Sums"}},
    }

    def learning(**train):
        machines = {"nodes": [{"accelerators": 4, "memory_gb": 900}]}
        plan = roost.plan({**job, "train": {**job["train"], **train}}, machines)
        [held] = [each for each in plan.residency.classes if "actor" in each.device_class.components]
        return held.used_gib(Phase.LEARN)

    gates = 128 * 2 * 768 * 2048
    assert gates > shape.vocabulary * shape.hidden
    moved = (shape.parameters - gates) * 8 / 2 / GIB
    assert learning() - learning(optimizer_cpu_offload=True) == pytest.approx(moved)


def test_copies_sum_gradients_at_most_twice_in_a_step():
    shape = shape_from_config(MODELS[0].values[0])
    sent = [learner_traffic(shape, MeshSizes(4, 8), tokens=8192, rounds=count).replicate for count in (1, 2, 16)]
    assert sent[1] == sent[2] == 2 * sent[0] > 0


def test_copies_keep_sums_of_their_shards_in_32_bits(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODELS[0].values[0]))

    def learner(size):
        actor = {"model": {"model_path": str(tmp_path)}, "training_backend": "fsdp", "fsdp_config": {"fsdp_size": 4}}
        placed = {"num_nodes": 1, "num_gpus_per_node": 8, "component_placement": {"actor": f"0-{size - 1}"}}
        return roost.plan({"cluster": placed, "actor": actor})["actor"]

    one, two = (footprint(learner(size), None).active for size in (4, 8))
    parameters = shape_from_config(MODELS[0].values[0]).parameters
    assert (two - one) * GIB == pytest.approx(parameters / 4 * 4)


@pytest.mark.parametrize(
    ("mesh", "keys"),
    [
        pytest.param(MeshSizes(context=2), 2, id="as many KV heads"),
        pytest.param(MeshSizes(context=4), 4, id="repeated"),
        pytest.param(MeshSizes(context=2, tensor=2), 2, id="repeated, of a tensor group"),
    ],
)
def test_context_groups_send_repeated_key_heads(mesh, keys):
    shape = shape_from_config(config("qwen2", 1536, 28, 12, 2, 8960, 151936))
    found = learner_traffic(shape, mesh, tokens=4096, rounds=1).context
    heads = 2 * (12 / mesh.tensor + keys) * 128  # queries and results, keys and values
    assert found == pytest.approx(4096 / mesh.context * heads * 28 * 3 * 2 * (1 - 1 / mesh.context))


def test_a_layer_keeps_repeated_key_heads():
    shape = shape_from_config(config("qwen2", 1536, 28, 12, 2, 8960, 151936))
    plain, even, repeated, divided = (
        layer_values(shape, sizes, False)
        for sizes in (
            ParallelSizes(),
            ParallelSizes(context=2),
            ParallelSizes(context=4),
            ParallelSizes(tensor=2, context=2),
        )
    )
    assert even == plain
    assert repeated - plain == 2 * (4 - 2) * 128
    assert divided - layer_values(shape, ParallelSizes(tensor=2), False) == 2 * (2 - 1) * 128


def test_each_rank_of_a_tensor_group_sends_its_share_to_experts():
    """Copies of a token for 8 experts and their results inside a layer, and three more that are exchanged."""
    shape = shape_from_config(MODELS[4].values[0])
    whole, halved = (
        activation_bytes(shape, ParallelSizes(tensor=size, expert=4), 512, compiles=False) for size in (1, 2)
    )
    of_heads, of_experts = 5 * (32 + 4) * 128, 8 * 4 * 768
    inside = 2 * 512 * (of_heads + of_experts + (2 + 3) * 8 * 2048) / 2
    logits = 512 * 151936 * (LOGIT_BYTES - DIVIDED_LOGIT_BYTES / 2)
    assert whole - halved == pytest.approx(inside + logits)


def one_copy_each(folder, size, **fsdp):
    """A learner of so many ranks that trains Qwen2.5-7B; it has settings of FSDP."""
    (folder / "config.json").write_text(json.dumps(MODELS[1].values[0]))
    context = fsdp.pop("context", 1)
    model = {"model_path": str(folder), "context_parallel_size": context}
    job = {
        "cluster": {"num_nodes": 1, "component_placement": {"actor": f"0-{size - 1}", "rollout": "4-7"}},
        "actor": {"model": model, "training_backend": "fsdp", "fsdp_config": fsdp},
        "train": {
            "task": {"_target_": "my_tasks.Sums"},
            "compute_dtype": "bfloat16",
            "activation_checkpointing": True,
            "micro_batch_tokens": 32768,
        },
    }
    return roost.plan(job, {"nodes": [{"accelerators": 8, "memory_gb": 900}]})["actor"]


def test_copies_of_one_rank_gather_layers(tmp_path):
    """FSDP casts two layers at a time; a process alone has copies of all weights from autocast."""
    alone, copied = (footprint(one_copy_each(tmp_path, size, fsdp_size=1), None) for size in (1, 4))
    vocabulary, parameters = 152064 * 3584, MODELS[1].values[1]
    layer = (parameters - 2 * vocabulary) / 28
    saved = 2 * (parameters - 2 * layer - 2 * vocabulary)
    assert (alone.scoring - copied.scoring) * GIB == pytest.approx(saved)
    # Gradients on their way, and sums of all of them in 32 bits until copies are summed.
    more = 6 * layer + 2 * vocabulary + 4 * parameters - 6 * vocabulary
    assert (copied.active - alone.active) * GIB == pytest.approx(more - saved)


@pytest.mark.parametrize("context", [1, 2])
def test_a_job_that_shards_nothing_trains_copies(context, tmp_path):
    given = one_copy_each(tmp_path, 4, context=context, sharding_strategy="no_shard")
    written = one_copy_each(tmp_path, 4, context=context, fsdp_size=context)
    run = planned_learner(LearnerSettings("m"), given).parallel
    assert MeshSizes.of(run, 4) == given.sharded_mesh == MeshSizes(replicate=4 // context, context=context)
    assert footprint(given, None) == footprint(written, None)


SHARED = 24 * (3 * 2048 * 5632 + 2048)  # of Qwen1.5-MoE-A2.7B, with gates


def test_a_shared_expert_is_whole_on_tensor_ranks():
    """FSDP over 4 shards has each number of it on two of 8 ranks, and gathers all of a layer's."""
    shape = shape_from_config(MODELS[5].values[0])
    one, two = (
        learner_memory(shape, ParallelSizes(tensor=size, expert=2), 8, 512, weight_bytes=4, compiles=False)
        for size in (1, 2)
    )
    assert (two.weights - one.weights) * GIB == pytest.approx(4 * SHARED / 8)
    assert (two.gradients - one.gradients) * GIB == pytest.approx(4 * SHARED / 8)
    assert (two.optimizer - one.optimizer) * GIB == pytest.approx(8 * SHARED / 8)
    divided = (shape.dense_parameters - SHARED - shape.embedding_parameters) / 24  # of a layer
    gathered = 2 * (2 * divided + shape.embedding_parameters) / 2
    inside = 2 * 512 * (2 * 32 * 128 + 4 * 4 * 1408 + (2 + 3) * 4 * 2048) / 2
    logits = 512 * 151936 * (LOGIT_BYTES - DIVIDED_LOGIT_BYTES / 2)
    assert (one.activations - two.activations) * GIB == pytest.approx(gathered + inside + logits)


def test_tensor_ranks_gather_a_whole_shared_expert():
    shape = shape_from_config(MODELS[5].values[0])
    found = learner_traffic(shape, MeshSizes(shard=4, tensor=2, expert=8), tokens=512, rounds=1).fsdp
    root = 2 * 151936 * 2048 + 2048
    layers = (shape.dense_parameters - SHARED - root) / 2 + SHARED
    assert found == pytest.approx(3 / 4 * (layers * (2 + 2 + 4) + root / 2 * (2 + 4)))


def bytes_held(rank, settings):
    """Of all weights, and of those that are the same on each rank of a tensor group without being large."""
    held = {name: local_bytes(weight) for name, weight in Learner(settings, CPU).module.named_parameters()}
    return sum(held.values()), sum(size for name, size in held.items() if "norm" in name or "mlp.gate." in name)


def local_bytes(weight):
    return (weight.to_local() if isinstance(weight, DTensor) else weight).nbytes


@pytest.mark.long
def test_a_learner_holds_a_whole_shared_expert(tmp_path):
    folder = write_tiny_model(tmp_path, "qwen2_moe", shared_expert_intermediate_size=512)
    sizes = ParallelSizes(tensor=2, expert=2)
    shape = shape_from_config(json.loads((folder / "config.json").read_text()))
    planned = learner_memory(shape, sizes, processes=2, tokens=64, weight_bytes=4).weights * GIB
    for held, small in on_ranks(2, bytes_held, settings_of(str(folder), parallel=sizes)):
        assert held == pytest.approx(planned + small / 2)
