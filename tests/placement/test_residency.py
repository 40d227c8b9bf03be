"""Residency: ml-loop's rule, computed figures, offloading, and the rules about whole plans."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

import roost
from roost.config.findings import Findings
from roost.config.train import LearnerSettings
from roost.placement.memory.model import RESERVED_FRACTION, footprint, with_recomputed
from roost.placement.memory.phases import Phase, State
from roost.placement.memory.residency import Decision, checkpointed_layers
from roost.placement.memory.sharing import MemoryRefused, share_device
from roost.placement.planner import try_plan
from roost.placement.rescale import without_nodes
from roost.trainer.setup import planned_learner
from tests.grid import grid

GOLDEN = Path(__file__).parents[1] / "golden"
QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
}


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    return str(tmp_path)


def machines(memory=80, nodes=1, per_node=8, **fields):
    return {"nodes": [{"count": nodes, "accelerators": per_node, "memory_gb": memory, **fields}]}


def test_a_plan_without_train_counts_the_tokens_of_one_with_it(model):
    config = rlinf({"actor": "0-3"}, {"model": {"model_path": model, "precision": "bf16"}})
    trained = config | {"train": {"task": {"_target_": "my_tasks.Sums"}, "objective": "sft"}}
    footprints = [footprint(roost.plan(each, machines())["actor"], 80) for each in (config, trained)]
    assert footprints[0] == footprints[1] and footprints[0].active is not None


@grid(("memory", "decision", "reason"), [(1000, "keep", "Roost keeps what fits"), (None, "sleep", "ROLL offloads")])
def test_what_roll_would_offload(memory, decision, reason, model):
    engine = {"strategy_name": "vllm", "strategy_config": {"gpu_memory_utilization": 0.1}}
    config = {
        "num_gpus_per_node": 8,
        "pretrain": model,
        "actor_train": {"device_mapping": "list(range(0,8))", "strategy_args": {"strategy_name": "megatron_train"}},
        "actor_infer": {"device_mapping": "list(range(0,8))", "strategy_args": engine},
    }
    (held,) = roost.plan(config, machines(memory) if memory else None).residency.of("actor")
    assert held.decision.value == decision
    assert reason in held.reason


def states(plan, component):
    """The states of a component through the phases, for each class of devices that it holds."""
    return [
        [share.state.value for phase in Phase for share in held.phases[phase] if share.component == component]
        for held in plan.residency.of(component)
    ]


def rlinf(placement, actor=None, rollout=None, **rest):
    return {
        "cluster": {"num_nodes": 1, "component_placement": placement},
        "actor": actor or {},
        "rollout": rollout or {},
        **rest,
    }


@grid("line", (GOLDEN / "loop_memory.jsonl").read_text().splitlines())
def test_loop_memory(line):
    row = json.loads(line)
    figures = [row[key] for key in ("inference_requires_memory_gb", "learning_requires_memory_gb", "total_gb")]
    expected = row["expect"]

    def decide():
        return share_device(row["overlap"], *figures, row["async_rollouts"], row["max_gpu_mem_utilization"])

    if "error" in expected:
        with pytest.raises(MemoryRefused) as caught:
            decide()
        assert caught.value.what == expected["error"]
    else:
        sharing = decide()
        assert sharing.keeps_both == (expected["residency"] == "keep")
        assert sharing.inference_fraction == pytest.approx(expected["inference_fraction"], abs=1e-6)
        assert sharing.learning_fraction == pytest.approx(expected["learning_fraction"], abs=1e-6)


def loop(learning, inference, memory=79.15, server=None, **rl):
    config = {"rl": {"gpu_allocation": {"learning_gpus": learning, "inference_gpus": inference}, **rl}}
    if server:
        config["llm"] = {"vllm_server": server}
    return roost.plan(config, machines(memory))


BOTH = {"inference_requires_memory_gb": 75, "learning_requires_memory_gb": 75}
ENGINE = {"strategy_name": "vllm"}


class TestMlLoop:
    """Document: ml-loop, RL trainer."""

    def test_separate_gpus_keep_their_servers(self):
        plan = loop([0, 1, 2, 3, 4, 5], [6, 7], async_rollouts=True)
        assert {held.decision for held in plan.residency.classes} == {Decision.KEEP}
        assert states(plan, "rollout") == [["runs"] * 4], "rollouts are collected while the learners learn"

    def test_shared_gpus_take_turns(self):
        plan = loop(range(8), range(8), **BOTH)
        assert [held.decision for held in plan.residency.classes] == [Decision.SLEEP]
        assert states(plan, "rollout") == [["runs", "sleeps", "sleeps", "runs"]]
        assert states(plan, "actor") == [["offloaded", "runs", "runs", "runs"]]

    def test_servers_that_cannot_sleep_are_restarted(self):
        plan = loop(range(8), range(8), server={"enable_sleep_mode": False}, **BOTH)
        assert [held.decision for held in plan.residency.classes] == [Decision.RESTART]
        assert states(plan, "rollout") == [["runs", "stopped", "stopped", "runs"]]

    def test_what_fits_is_kept_with_its_share(self):
        plan = loop(range(8), range(8), inference_requires_memory_gb=20, learning_requires_memory_gb=40)
        (held,) = plan.residency.classes
        assert held.decision is Decision.KEEP
        assert held.sharing.learning_fraction == pytest.approx(0.6333, abs=1e-4)
        assert held.used_gib(Phase.LEARN) == pytest.approx(0.316667 * 79.15 + 40), (
            "servers take their share, not their figure"
        )

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            pytest.param({**BOTH, "async_rollouts": True}, "cannot be asynchronous", id="async-that-does-not-fit"),
            pytest.param({"async_rollouts": True}, "need both memory figures", id="async-without-figures"),
            pytest.param({"learning_requires_memory_gb": 75}, "both memory figures or neither", id="one-figure"),
        ],
    )
    def test_refused(self, settings, message):
        with pytest.raises(roost.ConfigError, match=message) as caught:
            loop(range(8), range(8), **settings)
        assert caught.value.findings[0].where.key_path.startswith("rl.")


def learning_actor(model, **train):
    """The actor's share of a device while it learns, on 8 of 16 devices."""
    train = {"task": {"_target_": "a.Task"}, "micro_batch_tokens": 1024, **train}
    config = rlinf({"actor": "0-7", "rollout": "8-15"}, {"model": {"model_path": model}})
    config["cluster"]["num_nodes"] = 2
    plan = roost.plan({**config, "train": train}, machines(80, nodes=2))
    held = next(each for each in plan.residency.classes if "actor" in each.device_class.components)
    return held.phases[Phase.LEARN][0]


class TestComputed:
    def test_both_kept_where_they_fit(self, model):
        config = rlinf(
            {"actor,rollout": "all"},
            {"model": {"model_path": model}},
            {"gpu_memory_utilization": 0.5},
            runner={"seq_length": 4096},
        )
        plan = roost.plan(config, machines(80))
        (held,) = plan.residency.classes
        assert held.decision is Decision.KEEP
        assert states(plan, "rollout") == [["runs", "stays", "stays", "runs"]]
        assert held.used_gib(Phase.LEARN) == pytest.approx(40 + 22.8, abs=1)

    def test_turns_where_they_do_not(self, model):
        config = {
            "num_gpus_per_node": 8,
            "pretrain": model,
            "prompt_length": 1024,
            "response_length": 1024,
            "actor_train": {"device_mapping": "0-7", "strategy_args": {"strategy_name": "fsdp2_train"}},
            "actor_infer": {"device_mapping": "0-7", "strategy_args": {"strategy_name": "vllm"}},
        }
        plan = roost.plan(config, machines(40))
        (held,) = plan.residency.classes
        assert held.decision is Decision.SLEEP
        assert held.used_gib(Phase.GENERATE) == pytest.approx(36.5), "the engine's 90 % and the learner's context"
        engine = next(share for share in held.phases[Phase.LEARN] if share.component == "rollout")
        assert engine.host_gib == pytest.approx(7_615_616_512 * 2 / 2**30), (
            "a sleeping engine keeps its weights on the host"
        )

    def test_an_over_full_device_shows_the_sum(self, model):
        config = rlinf(
            {"actor,rollout": "0"},
            {"model": {"model_path": model}, "enable_offload": True},
            runner={"seq_length": 1024},
        )
        with pytest.raises(roost.ConfigError, match=r"does not fit: .* in the phase learn") as caught:
            roost.plan(config, machines(80))
        assert "actor 1" in caught.value.findings[0].why
        assert caught.value.findings[0].why.endswith("GiB")

    def test_offloading_a_user_asked_for_is_done_even_where_both_would_fit(self, model):
        actor = {
            "model": {"model_path": model},
            "offload_weight": True,
            "offload_grad": True,
            "offload_optimizer": True,
        }
        config = rlinf({"actor,rollout": "all"}, actor, {"gpu_memory_utilization": 0.3}, runner={"seq_length": 1024})
        (held,) = roost.plan(config, machines(80)).residency.classes
        assert held.decision is Decision.SLEEP
        assert "though both would fit" in held.reason
        learner = next(share for share in held.phases[Phase.GENERATE] if share.component == "actor")
        assert learner.state is State.OFFLOADED
        assert learner.host_gib == pytest.approx(7_615_616_512 * (2 + 12) / 8 / 2**30), "gradients are freed, not moved"

    def test_the_state_of_each_optimizer_is_counted(self, model):
        count, embeddings = 7_615_616_512, 2 * 152_064 * 3_584

        def actor_of(**train):
            return learning_actor(model, weight_dtype="float32", **train)

        exact = actor_of()
        saved = count * 8 / 8 / 2**30 - np.array(
            [exact.device_gib - actor_of(optimizer=kind).device_gib for kind in ("muon", "adamw_8bit")]
        )
        rounded = (count - embeddings / 2) * 2 * (1 + 1 / 64) + embeddings / 2 * 8  # the input embedding's are exact
        assert saved * 2**30 == pytest.approx([(count + embeddings) * 4 / 8, rounded / 8])
        offloaded = actor_of(optimizer_cpu_offload=True)
        assert (exact.host_gib, offloaded.host_gib) == (0.0, pytest.approx(count * 8 / 8 / 2**30))
        streamed = embeddings / 2 * 8 / 8  # the largest weight's state is on the device for its step
        assert exact.device_gib - offloaded.device_gib == pytest.approx((count * 8 / 8 - streamed) / 2**30)

    def test_an_adapter_of_the_train_section_is_counted(self, model):
        def learning(**train):
            train = {"compute_dtype": "bfloat16", "micro_batch_tokens": 8192, **train}
            return learning_actor(model, **train).device_gib

        whole = 7_615_616_512 * (4 + 4 + 8) / 8 / 2**30
        frozen = 7_615_616_512 * 2 / 8 / 2**30
        summed = 2.32  # gradients of a layer in 16 and 32 bits, and of the last one in 16
        assert learning() - learning(lora_rank=8) == pytest.approx(whole - frozen + summed, rel=0.02)

    def test_a_scorer_holds_what_a_pass_does_beside_its_shards(self, model):
        """Inference of its own on 8 devices: gathered weights, one layer's activations and a chunk of logits."""
        config = rlinf({"actor": "0-7", "rollout": "8-15", "inference": "16-23"}, {"model": {"model_path": model}})
        config["cluster"]["num_nodes"] = 3
        found = []
        for tokens in (4096, 32768):
            train = {"task": {"_target_": "a.Task"}, "compute_dtype": "bfloat16", "micro_batch_tokens": tokens}
            plan = roost.plan({**config, "train": train}, machines(80, nodes=3))
            [held] = plan.residency.of("inference")
            found.append([held.used_gib(phase) for phase in (Phase.INFER, Phase.LEARN)])
        shards, gathered, logits = 7.6156 * 2 / 8 / 1.0737, 2.9, 0.75
        assert [each[1] for each in found] == pytest.approx([shards + 0.5] * 2, rel=0.01)
        of_token = (158_819 + 2 * 3584) / 2**30
        of_pass = [shards + 0.5 + gathered + logits + tokens * of_token for tokens in (4096, 32768)]
        assert [each[0] for each in found] == pytest.approx(of_pass, rel=0.02)

    def test_a_critic_beside_an_adapter_is_trained_whole(self, model):
        def learning(**train):
            train = {"task": {"_target_": "a.Task"}, "compute_dtype": "bfloat16", "advantage_estimator": "gae", **train}
            config = rlinf({"actor": "0-7", "rollout": "8-15", "critic": "16-23"}, {"model": {"model_path": model}})
            config["cluster"]["num_nodes"] = 3
            config["critic"] = {"model": {"model_path": model}}
            plan = roost.plan({**config, "train": train}, machines(80, nodes=3))
            held = next(each for each in plan.residency.classes if "critic" in each.device_class.components)
            return plan["critic"].model, held.phases[Phase.LEARN][0].device_gib

        (alone, alone_gib), (beside, beside_gib) = learning(), learning(lora_rank=8)
        assert beside_gib == alone_gib > 7_615_616_512 * (4 + 4 + 8) / 8 / 2**30
        assert (beside.weight_bytes, beside.lora_rank) == (alone.weight_bytes, None)

    def test_host_memory(self, model):
        actor = {"model": {"model_path": model}, "enable_offload": True}
        config = rlinf({"actor,rollout": "all"}, actor, {"gpu_memory_utilization": 0.5}, runner={"seq_length": 1024})
        roost.plan(config, machines(80, host_memory_gb=512))
        with pytest.raises(roost.ConfigError, match="GiB of host memory in the phase generate, and has 64 GiB"):
            roost.plan(config, machines(80, host_memory_gb=64))

    def test_without_any_figure_nothing_is_claimed(self):
        plan = roost.plan(rlinf({"actor,rollout": "all"}), machines(80))
        (held,) = plan.residency.classes
        assert held.used_gib(Phase.LEARN) is None


class TestRollLayouts:
    """The three acceptance layouts: the seed's complete example, a judge on the rest, and partial asynchrony."""

    def test_seed_example(self):
        plan = roost.plan(
            {
                "num_gpus_per_node": 8,
                "actor_train": {"device_mapping": "list(range(0,16))"},
                "actor_infer": {"num_gpus_per_worker": 2, "device_mapping": "list(range(0,12))"},
                "rewards": {"code_sandbox": {"world_size": 8}},
            }
        )
        assert [(held.device_class.components, len(held.device_class.devices)) for held in plan.residency.classes] == [
            (("actor", "rollout"), 12),
            (("actor",), 4),
        ]
        assert plan["rollout"].table[5].devices == [(1, 2), (1, 3)]

    def test_judge_on_the_rest(self):
        plan = roost.plan(
            {
                "num_gpus_per_node": 8,
                "actor_train": {"device_mapping": "0-7"},
                "actor_infer": {"device_mapping": "0-5", "strategy_args": ENGINE},
                "rewards": {"llm_judge": {"device_mapping": "6-7", "strategy_args": ENGINE}},
            }
        )
        generating = {
            share.component: len(held.device_class.devices)
            for held in plan.residency.classes
            for share in held.phases[Phase.GENERATE]
            if share.state is State.RUNS
        }
        learning = sum(
            len(held.device_class.devices)
            for held in plan.residency.classes
            for share in held.phases[Phase.LEARN]
            if share.state is State.RUNS
        )
        assert generating == {"rollout": 6, "reward.llm_judge": 2}
        assert learning == 8

    def test_partial_asynchrony(self):
        plan = roost.plan(
            {
                "num_gpus_per_node": 8,
                "async_generation_ratio": 1,
                "actor_train": {"device_mapping": "0-3"},
                "actor_infer": {"device_mapping": "0-7", "strategy_args": ENGINE},
            }
        )
        assert states(plan, "rollout") == [["runs", "sleeps", "sleeps", "runs"], ["runs", "runs", "runs", "runs"]]


def roll(model, memory=80, **roles):
    """A ROLL job on eight devices of one node."""
    config = {"num_gpus_per_node": 8, "pretrain": model, "sequence_length": 2048}
    for role, (devices, strategy, sizes) in roles.items():
        config[role] = {
            "device_mapping": devices,
            "strategy_args": {"strategy_name": strategy, "strategy_config": sizes},
        }
    return roost.plan(config, machines(memory))


class TestTurns:
    """Layouts of language-model jobs that fit because their parts take turns."""

    def test_only_weights_are_awake_while_new_ones_arrive(self, model):
        plan = roll(model, actor_train=("0-7", "megatron_train", {}), actor_infer=("0-7", "vllm", {}))
        (held,) = plan.residency.classes
        weights = 7_615_616_512 * 2 / 2**30
        assert dict(held.parts(Phase.SYNC)) == {
            "actor": pytest.approx(weights + 0.5),
            "rollout": pytest.approx(weights + 2),
            "weights in flight": pytest.approx(2 * 152064 * 3584 * 2 / 2**30 + 0.5),  # the embedding, and a bucket
        }

    def test_an_engine_sleeps_until_it_is_needed_again(self, model):
        plan = roll(
            model,
            actor_train=("0-3", "fsdp2_train", {}),
            actor_infer=("4-7", "vllm", {}),
            reference=("4-7", "megatron_infer", {}),
        )
        assert states(plan, "rollout") == [["runs", "sleeps", "sleeps", "runs"]]
        assert states(plan, "reference") == [["offloaded", "runs", "offloaded", "offloaded"]]

    def test_learners_on_the_same_devices_learn_one_after_the_other(self, model):
        learner = ("0-7", "fsdp2_train", {})
        alone = roll(model, actor_train=learner).residency.classes[0].used_gib(Phase.LEARN)
        together, in_turn = (
            roll(model, memory, actor_train=learner, critic=learner).residency.classes[0] for memory in (80, 24)
        )
        assert together.used_gib(Phase.LEARN) == pytest.approx(2 * alone)
        assert in_turn.used_gib(Phase.LEARN) == pytest.approx(alone + 0.5), "the other leaves its context only"

    def test_models_that_are_not_cut_are_whole_on_every_device(self, model):
        with pytest.raises(roost.ConfigError, match="does not fit"):
            roll(model, 12, actor_train=("0-7", "fsdp2_train", {}), reference=("0-7", "hf_infer", {}))

    def test_several_engines_on_one_device_add_up(self, model):
        with pytest.raises(roost.ConfigError, match=r"144\.0 GiB on a device of 80"):
            roll(model, actor_train=("4-7", "fsdp2_train", {}), actor_infer=([0, 0, 1, 1], "vllm", {}))

    def test_an_engine_over_shared_and_own_devices_sleeps_as_a_whole(self):
        engine = {"strategy_name": "vllm", "strategy_config": {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}}
        config = {
            "num_gpus_per_node": 8,
            "actor_train": {"device_mapping": "0-3"},
            "actor_infer": {"device_mapping": "0-7", "strategy_args": engine},
        }
        assert states(roost.plan(config), "rollout") == [["runs", "sleeps", "sleeps", "runs"]] * 2
        with pytest.raises(roost.ConfigError, match="every engine shares its devices"):
            roost.plan({**config, "async_generation_ratio": 1})

    def test_student_and_teacher_jobs_synchronise_too(self, model):
        plan = roll(model, student_train=("0-7", "fsdp2_train", {}), student_infer=("0-7", "vllm", {}))
        assert states(plan, "rollout") == [["runs", "sleeps", "sleeps", "runs"]]
        assert plan.mode.value == "collocated"

    def test_an_adapter_has_little_to_learn_with(self, model):
        allocation = {"learning_gpus": [0, 1, 2, 3], "inference_gpus": [4, 5, 6, 7]}
        config = {"rl": {"gpu_allocation": allocation}, "llm": {"base_model_path": model}}
        adapter = roost.plan(config, machines(24)).residency.of("actor")[0].used_gib(Phase.LEARN)
        assert adapter < 12, "the base is frozen: its gradients and moments do not exist"

    def test_asynchronous_servers_that_fit_never_pause(self):
        plan = loop(
            range(8), range(8), inference_requires_memory_gb=20, learning_requires_memory_gb=40, async_rollouts=True
        )
        assert states(plan, "rollout") == [["runs"] * 4]

    @pytest.mark.parametrize("fraction", [0, -1, "0.9", "abc", 5, True])
    def test_a_memory_fraction_is_above_0_and_at_most_1(self, fraction):
        config = rlinf({"actor": "0-3", "rollout": "4-7"}, rollout={"gpu_memory_utilization": fraction})
        with pytest.raises(roost.ConfigError, match="must be a fraction above 0"):
            roost.plan(config, machines(80))


class TestRules:
    def test_asynchrony_on_shared_devices(self):
        config = {
            "num_gpus_per_node": 8,
            "async_generation_ratio": 1,
            "actor_train": {"device_mapping": "0-7"},
            "actor_infer": {"device_mapping": "0-7"},
        }
        with pytest.raises(roost.ConfigError, match="every engine shares its devices with the learner"):
            roost.plan(config)

    def test_a_component_that_nothing_uses(self):
        config = {
            "num_gpus_per_node": 8,
            "adv_estimator": "reinforce",
            "actor_train": {"device_mapping": "0-3"},
            "critic": {"device_mapping": "4-7", "strategy_args": {"strategy_name": "megatron_train"}},
        }
        plan = roost.plan(config)
        assert [warning.what for warning in plan.warnings] == ["is placed, but no phase ever uses it"]
        assert states(plan, "critic") == [["unused"] * 4]

    def test_an_engine_across_nodes(self):
        engine = {"strategy_name": "vllm", "strategy_config": {"tensor_parallel_size": 4}}
        plan = roost.plan(
            {"num_gpus_per_node": 8, "actor_infer": {"device_mapping": "list(range(6,14))", "strategy_args": engine}}
        )
        assert plan.warnings[0].what == "process 0 spans nodes 0, 1"

    def test_a_tensor_group_across_nodes(self):
        learner = {"strategy_name": "megatron_train", "strategy_config": {"tensor_model_parallel_size": 4}}
        plan = roost.plan(
            {"num_gpus_per_node": 8, "actor_train": {"device_mapping": "list(range(6,14))", "strategy_args": learner}}
        )
        assert plan.warnings[0].what == "the tensor-parallel group of processes 0-3 spans nodes"

    def test_sizes_that_cannot_be_synchronised(self):
        actor = {"model": {"tensor_model_parallel_size": 4}}
        config = rlinf({"actor": "0-3", "rollout": "4-6"}, actor, {"tensor_parallel_size": 3})
        config["cluster"]["num_gpus_per_node"] = 8
        with pytest.raises(roost.ConfigError, match=r"tensor sizes 4 \(actor\) and 3 \(rollout\) cannot be"):
            roost.plan(config)

    def test_heads_that_cannot_be_divided(self, model):
        config = rlinf(
            {"actor": "0-3", "rollout": "4-7"}, {"model": {"model_path": model}}, {"tensor_parallel_size": 4}
        )
        config["cluster"]["num_gpus_per_node"] = 8
        roost.plan(config)
        config["rollout"]["tensor_parallel_size"] = 8
        config["cluster"]["component_placement"] = {"actor,rollout": "all"}
        with pytest.raises(roost.ConfigError, match="28 attention heads cannot be split over tensor parallel size 8"):
            roost.plan(config)

    def test_no_room_for_a_kv_cache(self, model):
        config = rlinf(
            {"actor": "0-3", "rollout": "4-7"}, {"model": {"model_path": model}}, {"gpu_memory_utilization": 0.2}
        )
        with pytest.raises(roost.ConfigError, match="leaves room for 0 tokens of KV cache"):
            roost.plan(config, machines(80))

    @pytest.mark.parametrize(("devices", "memory", "code"), [("4-7", 12, "RST-M003"), ("0-3", 40, "RST-M004")])
    def test_a_model_in_float32_is_named(self, model, devices, memory, code):
        config = rlinf({"actor": "0-3", "rollout": devices}, {"model": {"model_path": model}})
        for dtype in ("float32", "bfloat16"):
            train = {"task": {"_target_": "my_tasks.Sums"}, "compute_dtype": dtype}
            findings = Findings()
            try_plan(config | {"train": train}, findings, inventory=machines(memory))
            found = [finding for finding in findings.found if finding.code == code]
            assert found and all(("float32" in each.why + each.fix) == (dtype == "float32") for each in found)

    def test_a_model_that_cannot_be_counted(self, tmp_path):
        (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
        config = rlinf({"actor,rollout": "all"}, {"model": {"model_path": str(tmp_path)}})
        plan = roost.plan(config, machines(80))
        assert "cannot be computed" in plan.warnings[0].what


def test_training_settings_decide_the_memory_of_a_job_that_trains(model):
    """Master weights are in float32, and one device has 7.6 billion of them: 28.4 GiB."""

    def used(phase, **train):
        offloads = {f"offload_{part}": True for part in ("weight", "grad", "optimizer")}
        config = rlinf({"actor,rollout": "0"}, actor={"model": {"model_path": model}, **offloads})
        config["train"] = {"task": {"_target_": "my_tasks.Sums"}, **train}
        [held] = roost.plan(config, machines(memory=200, per_node=1)).residency.classes
        return held.used_gib(phase)

    assert used(Phase.LEARN) > 4 * 28.4  # weights, gradients and two moments
    assert used(Phase.GENERATE, engine_options={"memory_fraction": 0.3}) == pytest.approx(60, abs=2)
    assert used(Phase.LEARN, micro_batch_tokens=16_384) > used(Phase.LEARN, micro_batch_tokens=4096) + 2
    assert used(Phase.LEARN, activation_checkpointing=False) > used(Phase.LEARN) + 20


@grid(
    ("train", "tokens"),
    [
        ({"max_new_tokens": 20_000}, 20_000),
        ({"max_new_tokens": 8000, "engine_options": {"max_context": 16_384}}, 16_384),
        ({"max_new_tokens": 5000, "data": {"path": "a.jsonl", "max_prompt_tokens": 1000}}, 6000),
    ],
)
def test_a_sample_longer_than_a_micro_batch_counts(model, train, tokens):
    """It is a micro-batch of its own, for the learner and for the reference."""

    def sizes(**train):
        config = rlinf({"actor": "0", "rollout": "1", "reference": "2"}, actor={"model": {"model_path": model}})
        config["reference"] = {"model": {"model_path": model}}
        config["train"] = {"micro_batch_tokens": 2048, "kl_coef": 0.1, **train}
        if "data" in train:
            config["train"]["rewards"] = {"exact": {"_target_": "a.B"}}
        else:
            config["train"]["task"] = {"_target_": "my_tasks.Sums"}
        plan = roost.plan(config, machines(memory=900, per_node=3))
        return [footprint(plan[name], 900).active for name in ("actor", "reference")]

    assert sizes(**train) == sizes(micro_batch_tokens=tokens) > sizes()


def test_a_limit_of_the_notation_bounds_samples(model):
    config = rlinf({"actor": "0-3", "rollout": "4-7"}, actor={"model": {"model_path": model}})
    train = {"task": {"_target_": "my_tasks.Sums"}, "max_new_tokens": 8000}
    plan = roost.plan(config | {"runner": {"seq_length": 30_000}, "train": train}, machines(900))
    assert plan["actor"].model.longest == 30_000
    train["max_sequence_tokens"] = 9000
    supervised = roost.plan(config | {"train": {**train, "objective": "sft"}}, machines(900))
    assert supervised["actor"].model.longest == 9000


@pytest.mark.parametrize("keys", [{"max_context": 32_768}, {"max_context": 1024}, {}])
def test_a_kv_cache_holds_a_context(model, keys):
    """0.22 of 80 GiB leave 1.4 GiB for keys and values: 26,000 tokens."""
    config = rlinf(
        {"actor": "0-3", "rollout": "4-7"}, {"model": {"model_path": model}}, {"gpu_memory_utilization": 0.22}
    )
    train = {"task": {"_target_": "my_tasks.Sums"}, "compute_dtype": "bfloat16", "engine_options": keys}
    findings = Findings()
    try_plan(config | {"train": train}, findings, machines(80))
    found = [finding for finding in findings.found if finding.code == "RST-M003"]
    assert [("32,768" in finding.what) for finding in found] == ([True] if keys.get("max_context") == 32_768 else [])


@pytest.mark.parametrize(("memory", "has_room"), [(80, True), (30, False)])
def test_a_sync_overlaps_offloading_where_the_device_has_room(model, memory, has_room):
    offloads = {f"offload_{part}": True for part in ("weight", "grad", "optimizer")}
    values = rlinf({"actor,rollout": "all"}, {"model": {"model_path": model}, **offloads})
    [held] = roost.plan(values, machines(memory)).residency.classes
    assert held.decision is Decision.SLEEP
    away, syncing = (
        next(share for share in held.phases[phase] if share.component == "actor")
        for phase in (Phase.GENERATE, Phase.SYNC)
    )
    # Weights are on the device in any case; gradients and moments, too, while they are copied.
    rest = away.device_gib + away.host_gib - syncing.device_gib
    assert rest > 0
    assert held.overlapped_sync_gib == pytest.approx(held.used_gib(Phase.SYNC) + rest)
    assert held.overlaps_sync is has_room


def test_an_engine_that_sleeps_takes_what_its_sequences_need(model):
    def fraction(offloads=True, engine_options=None, memory=140, **train):
        defaults = {"prompts_per_step": 64, "num_generations": 8, "compute_dtype": "bfloat16"}
        train = {**defaults, "task": {"_target_": "a.B"}, **train}
        train["engine_options"] = {"max_context": 1024} if engine_options is None else engine_options
        parts = dict.fromkeys(("offload_weight", "offload_grad", "offload_optimizer"), offloads)
        actor = {"model": {"model_path": model}, **parts}
        config = rlinf({"actor,rollout": "0-1"}, actor, {"model": {"model_path": model}}, train=train)
        config["cluster"]["num_gpus_per_node"] = 2
        [held] = roost.plan(config, machines(memory, per_node=2)).residency.classes
        return held.sharing and held.sharing.inference_fraction

    # 256 sequences of 1,024 tokens on each device, 56 KiB each: 14 GiB, beside weights of 14.2 GiB and 4 GiB.
    assert fraction() == 0.23
    assert fraction(compute_dtype="float32") == 0.44  # 28 GiB, beside 28.4 GiB and 4 GiB
    assert fraction(engine_options={"max_context": 8192}) == 0.9  # 112 GiB
    assert fraction(max_concurrent_episodes=256) == 0.2
    assert fraction(eval_tasks=1024) == fraction(eval_tasks=0) == 0.33  # twice as many sequences
    # An engine has whole sequences: two of three, of 7 GiB each.
    few = {"prompts_per_step": 1, "num_generations": 3, "eval_tasks": 1}
    assert fraction(engine_options={"max_context": 131072}, **few) == 0.23
    assert fraction(engine_options={"max_context": 1024, "memory_fraction": 0.5}) is None
    assert fraction(engine_options={}) is None  # the length of sequences is not known
    assert fraction(dynamic_sampling=True) is None
    assert fraction(offloads=False, memory=4000) is None  # both stay


class TestCheckpoints:
    def planned(self, model, memory, tokens=4096, **train):
        config = rlinf({"actor": "0-3", "rollout": "4-7"}, actor={"model": {"model_path": model}})
        config["train"] = {"task": {"_target_": "my_tasks.Sums"}, "micro_batch_tokens": tokens, **train}
        inventory = machines(memory=memory, per_node=8) if memory else None
        config["cluster"]["num_gpus_per_node"] = 8
        return roost.plan(config, inventory)

    def used(self, plan):
        [held] = plan.residency.of("actor")
        return held.used_gib(Phase.LEARN)

    def test_as_few_layers_as_fit(self, model):
        plans = {
            memory: self.planned(model, memory, tokens=16_384, activation_checkpointing="auto")
            for memory in (60, 80, 100, 300)
        }
        counts = [plan["actor"].model.recomputed_layers for plan in plans.values()]
        assert counts == sorted(counts, reverse=True)
        assert len(set(counts)) == len(counts)
        assert counts[-1] == 0
        for memory, plan in plans.items():
            assert self.used(plan) <= 0.95 * memory
        assert not plans[300]["actor"].model.recomputes
        model_use = plans[80]["actor"].model
        fewer = replace(model_use, recomputed_layers=model_use.recomputed_layers - 1)
        others = tuple(replace(part, model=fewer) if part.name == "actor" else part for part in plans[80].components)
        assert self.used(replace(plans[80], components=others)) > 0.95 * 80

    @pytest.mark.parametrize("train", [{}, {"lora_rank": 8}, {"compute_dtype": "float32"}], ids=str)
    def test_more_free_memory_never_recomputes_more(self, model, train):
        part = self.planned(model, 80, activation_checkpointing=True, **train)["actor"]
        layers = QWEN_7B["num_hidden_layers"]
        needed = [footprint(with_recomputed(part, count), 80).active for count in (*range(layers + 1), None)]
        most = needed[-1]
        assert needed[layers] == most, "all layers, by their number"
        found = {free: checkpointed_layers(part, free) for free in np.linspace(-1, needed[0] - most + 1, 500)}
        assert list(found.values()) == sorted(found.values(), reverse=True)
        assert set(found.values()) == set(range(layers + 1))
        for free, count in found.items():
            assert count == layers or needed[count] <= most + free
            assert count == 0 or needed[count - 1] > most + free, "one layer fewer does not fit"
        assert with_recomputed(part, 0).model.recomputes is False

    def test_scoring_needs_no_more(self, model):
        auto, all_layers = (self.planned(model, 300, activation_checkpointing=choice) for choice in ("auto", True))
        scoring = [each.residency.of("actor")[0].used_gib(Phase.INFER) for each in (auto, all_layers)]
        assert scoring[0] == scoring[1]

    def test_all_layers_where_memory_is_not_known(self, model):
        plan = self.planned(model, None, activation_checkpointing="auto")
        assert plan["actor"].model.recomputed_layers is None
        assert plan["actor"].model.recomputes
        [warning] = [each for each in plan.warnings if each.code == "RST-M011"]
        assert warning.what == "is auto, but actor recomputes all layers"

    def test_chosen_again_for_fewer_devices(self, model):
        config = rlinf({"actor": "0-13", "rollout": "14-15"}, actor={"model": {"model_path": model}})
        config["cluster"]["num_nodes"] = 2
        train = {"micro_batch_tokens": 16_384, "activation_checkpointing": "auto"}
        config["train"] = {"task": {"_target_": "my_tasks.Sums"}, **train}
        before = roost.plan(config, machines(60, nodes=2))
        after = without_nodes(before, [0]).plan
        assert after["actor"].world_size < before["actor"].world_size
        assert after["actor"].model.recomputed_layers > before["actor"].model.recomputed_layers

    def test_a_saved_plan_keeps_them(self, model):
        plan = self.planned(model, 80, tokens=16_384, activation_checkpointing="auto")
        assert roost.Plan.from_json(plan.to_json())["actor"].model == plan["actor"].model

    def test_learners_obey_the_plan(self, model):
        plan = self.planned(model, 80, tokens=16_384, activation_checkpointing="auto")
        settings = planned_learner(LearnerSettings("m", activation_checkpointing="auto"), plan["actor"])
        assert settings.activation_checkpointing is True
        assert settings.recomputed_layers == plan["actor"].model.recomputed_layers
        written = LearnerSettings("m", activation_checkpointing=False)
        assert planned_learner(written, plan["actor"]).activation_checkpointing is False


@grid(
    ("memory", "settings", "fix"),
    [
        (50, {}, "write optimizer_cpu_offload: true"),
        (40, {"optimizer_cpu_offload": True}, "write micro_batch_tokens: "),
        (70, {"activation_checkpointing": False}, "write activation_checkpointing: true"),
        (12, {}, "use more devices or larger parallel sizes"),
    ],
)
def test_a_learner_that_is_too_large_gets_a_fix_that_fits(model, memory, settings, fix):
    """Engines sleep while it learns, so that their fraction of the device does not matter."""
    train = {"task": {"_target_": "my_tasks.Sums"}, "micro_batch_tokens": 65536, "compute_dtype": "bfloat16"}
    offloads = {"offload_weight": True, "offload_grad": True, "offload_optimizer": True}

    def found(settings):
        config = {
            "cluster": {"num_nodes": 1, "component_placement": {"actor,rollout": "0-3"}},
            "runner": {"seq_length": 2048},
            "actor": {"model": {"model_path": model}, "training_backend": "fsdp", **offloads},
            "train": {**train, **settings},
        }
        findings = Findings()
        try_plan(config, findings, {"nodes": [{"accelerators": 4, "memory_gb": memory}]})
        return [each for each in findings.errors if each.code == "RST-M004"]

    (finding,) = found(settings)
    assert finding.fix.startswith(fix) and "learn" in finding.what and "engines" not in finding.fix
    if fix.startswith("write "):
        key, _, value = finding.fix.removeprefix("write ").removesuffix(" in train").partition(": ")
        assert not found({**settings, key: yaml.safe_load(value)})


def test_no_fix_is_below_the_longest_sample(model):
    config = rlinf({"actor": "0-3", "rollout": "4-7"}, actor={"model": {"model_path": model}})
    train = {"task": {"_target_": "my_tasks.Sums"}, "micro_batch_tokens": 65_536, "optimizer_cpu_offload": True}
    for longest, advises in ((1024, True), (40_000, False)):
        findings = Findings()
        try_plan(config | {"train": {**train, "max_new_tokens": longest}}, findings, machines(46))
        (finding,) = (each for each in findings.errors if each.code == "RST-M004")
        assert ("write micro_batch_tokens" in finding.fix) == advises


def test_a_megatron_job_is_trained_with_the_memory_of_fsdp(model):
    def planned(backend, trains, memory=900):
        config = rlinf(
            {"actor": "0-3", "rollout": "4-7"}, {"model": {"model_path": model}, "training_backend": backend}
        )
        config["train"] = {"task": {"_target_": "my_tasks.Sums"}}
        findings = Findings()
        return try_plan(config, findings, machines(memory), trains=trains), findings

    def needed(backend, trains):
        plan, _ = planned(backend, trains)
        return footprint(plan["actor"], None).active

    assert needed("megatron", trains=True) == needed("fsdp", trains=True) == needed("fsdp", trains=False)
    assert needed("megatron", trains=False) > needed("fsdp", trains=True) + 20
    for trains in (False, True):
        _, findings = planned("megatron", trains, memory=30)
        (finding,) = (each for each in findings.errors if each.code == "RST-M004")
        assert ("roost train uses FSDP" in finding.why) is not trains


OFFLOAD = {"offload_weight": True, "offload_grad": True, "offload_optimizer": True}


def refused(model, memory, devices=8, **parts):
    """The fix of a PPO job's full devices; a part is None where it is not placed."""
    _, findings = planned_ppo(model, memory, devices, **parts)
    return [each.fix for each in findings.errors if each.code == "RST-M004"]


def planned_ppo(model, memory, devices, **parts):
    parts = {"actor": {}, "critic": {}, "rollout": {}} | parts
    held = {name: f"0-{devices - 1}" for name, part in parts.items() if part is not None}
    train = {"task": {"_target_": "my_tasks.Sums"}, "compute_dtype": "bfloat16", **parts.pop("train", {})}
    held.pop("train", None)
    config = {
        "cluster": {"num_nodes": 1, "component_placement": held},
        "algorithm": {"adv_type": "gae" if "critic" in held else "grpo"},
        "runner": {"seq_length": 2048},
        "train": train,
        **{
            name: {**part, "model": {"model_path": model, **part.get("model", {})}}
            for name, part in parts.items()
            if part is not None
        },
    }
    findings = Findings()
    return try_plan(config, findings, machines(memory, per_node=devices)), findings


def suggested_fraction(fix):
    return float(fix.partition("memory fraction of ")[2].partition(", ")[0])


def most_used(plan):
    return max(one.used_gib(phase) for one in plan.residency.classes for phase in Phase)


def test_a_critic_that_stays_is_named(model):
    (both,) = refused(model, 80)
    assert both.startswith("let the actor and critic offload (offload_weight, offload_grad, offload_optimizer), or ")
    (critic,) = refused(model, 80, actor=OFFLOAD)
    assert critic.startswith("let the critic offload")
    assert not refused(model, 80, actor=OFFLOAD, critic=OFFLOAD)
    assert not refused(model, 80, rollout={"gpu_memory_utilization": suggested_fraction(both)})


@grid(("memory", "devices", "fraction", "learner"), [(80, 8, 0.9, {}), (64, 4, 0.99, OFFLOAD)])
def test_a_suggested_fraction_leaves_what_plans_reserve(model, memory, devices, fraction, learner):
    """It led to 99.4 % of the device, where other plans count 95 % as full."""
    (fix,) = refused(model, memory, devices, rollout={"gpu_memory_utilization": fraction})
    assert ("offload_optimizer), and give the engines" in fix) == (learner is OFFLOAD)
    rollout = {"gpu_memory_utilization": suggested_fraction(fix)}
    plan, _ = planned_ppo(model, memory, devices, actor=learner, critic=learner, rollout=rollout)
    assert 0.9 * memory < most_used(plan) <= RESERVED_FRACTION * memory


def test_a_suggested_fraction_just_fits_where_less_has_no_room_for_a_sequence(model):
    (fix,) = refused(model, 78, 4)
    plan, findings = planned_ppo(model, 78, 4, rollout={"gpu_memory_utilization": suggested_fraction(fix)})
    assert not findings.errors
    assert RESERVED_FRACTION * 78 < most_used(plan) <= 78


def test_copies_are_the_cause(model):
    halves = {**OFFLOAD, "fsdp_config": {"fsdp_size": 4}}
    train = {"optimizer_cpu_offload": True, "micro_batch_tokens": 2048}
    (fix,) = refused(model, 24, critic=None, actor=halves, train=train)
    assert fix.startswith("shard the actor over all 8 ranks, not 4 (fsdp_size)")
    assert not refused(model, 24, critic=None, actor=OFFLOAD, train=train)


def test_two_changes_where_one_is_not_enough(model):
    halves = {**OFFLOAD, "fsdp_config": {"fsdp_size": 4}}
    (fix,) = refused(model, 23, critic=None, actor=halves, train={"micro_batch_tokens": 2048})
    assert fix == "shard the actor over all 8 ranks, not 4 (fsdp_size), and write optimizer_cpu_offload: true in train"
    assert not refused(
        model, 23, critic=None, actor=OFFLOAD, train={"micro_batch_tokens": 2048, "optimizer_cpu_offload": True}
    )


def test_a_learner_of_another_program_that_is_too_large_gets_a_fix_that_fits(model, tmp_path):
    """The fix was to use more devices, also where fewer samples of a pass are enough."""
    actor = "actor_rollout_ref.actor"
    keys = f"trainer.n_gpus_per_node=4 {actor}.strategy=fsdp2 algorithm.adv_estimator=grpo {actor}.use_dynamic_bsz=True"
    lengths = "data.max_prompt_length=1024 data.max_response_length=3072 actor_rollout_ref.rollout.name=vllm"
    file = tmp_path / "run.sh"
    file.write_text(f'python3 -m verl.trainer.main_ppo {keys} {lengths} actor_rollout_ref.model.path={model} "$@"\n')

    def fixes(memory, *overrides):
        findings = Findings()
        try_plan(file, findings, {"nodes": [{"accelerators": 4, "memory_gb": memory}]}, overrides=overrides)
        return [each.fix for each in findings.errors if each.code == "RST-M004"]

    tokens = f"{actor}.ppo_max_token_len_per_gpu"
    offload = tuple(f"{actor}.fsdp_config.{part}_offload=true" for part in ("param", "optimizer"))
    smaller = "make micro-batches 8 times smaller: at most 8,192 tokens"
    assert fixes(40, *offload, f"{tokens}=65536") == [smaller]
    (fix,) = fixes(40, f"{tokens}=65536")
    assert fix == f"let the actor offload ({actor}.fsdp_config.{{param,optimizer}}_offload), and {smaller}"
    assert fixes(40, *offload, f"{tokens}=8192") == []


@pytest.mark.parametrize(
    ("backend", "keys", "offloads"),
    [
        ("megatron", "actor_rollout_ref.actor.megatron.{param,grad,optimizer}_offload", ("param", "grad", "optimizer")),
        ("fsdp", "actor_rollout_ref.actor.fsdp_config.{param,optimizer}_offload", ("param", "optimizer")),
    ],
)
def test_keys_that_offload_are_those_of_verl(model, backend, keys, offloads, tmp_path):
    def refused_with(*words):
        line = (
            f"python3 -m verl.trainer.main_ppo model_engine={backend} algorithm.adv_estimator=grpo "
            f"actor_rollout_ref.model.path={model} actor_rollout_ref.rollout.name=vllm trainer.n_gpus_per_node=8 "
            f"actor_rollout_ref.rollout.gpu_memory_utilization=0.9 {' '.join(words)}"
        )
        (tmp_path / "run.sh").write_text(line + "\n")
        findings = Findings()
        try_plan(str(tmp_path / "run.sh"), findings, machines(80, per_node=8))
        return [each.fix for each in findings.errors if each.code == "RST-M004"]

    (fix,) = refused_with()
    assert f"let the actor offload ({keys})" in fix
    section = keys.partition(".{")[0]
    assert not refused_with(*(f"{section}.{part}_offload=True" for part in offloads))
