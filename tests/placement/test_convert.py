"""The same placements in another notation."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

import roost
from roost.config.findings import Findings
from roost.config.notations.algorithm import estimator_of_train
from roost.config.notations.roll_train import advantage_settings
from roost.config.source import Section, Source
from roost.placement.convert.convert_plan import convert_plan
from roost.placement.diff import diff_plans

LOOP = {
    "rl": {"gpu_allocation": {"learning_gpus": [0, 1, 2], "inference_gpus": [3, 5, 4, 6, 7]}},
    "llm": {"vllm_server": {"gpus_per_vllm_server": 2}},
}
ROLL = {
    "num_gpus_per_node": 8,
    "actor_train": {"device_mapping": "list(range(0,16))"},
    "actor_infer": {"device_mapping": "list(range(0,12))", "num_gpus_per_worker": 2},
    "rewards": {"rule": {"world_size": 2}},
}
STRIDED = {
    "cluster": {"num_nodes": 2, "num_gpus_per_node": 8, "component_placement": {"actor,rollout": "all"}},
    "actor": {"model": {"tensor_model_parallel_size": 4}},
    "rollout": {"tensor_parallel_size": 2},
}


def placements(plan):
    return {part.name: [(p.cluster_node_rank, p.devices) for p in part.table] for part in plan.components}


@pytest.mark.parametrize(
    ("config", "notation"),
    [
        pytest.param(LOOP, "loop", id="loop-to-loop"),
        pytest.param(ROLL, "roll", id="roll-to-roll"),
        pytest.param(ROLL, "rlinf", id="roll-to-rlinf"),
        pytest.param(STRIDED, "rlinf", id="strided-to-rlinf"),
        pytest.param(STRIDED, "roll", id="strided-to-roll"),
    ],
)
def test_converted_configs_give_the_same_plan(config, notation):
    plan = roost.plan(config)
    findings = Findings()
    written = convert_plan(plan, roost.Notation(notation), findings)
    assert written is not None, [str(finding) for finding in findings.errors]
    assert placements(roost.plan(written.values)) == placements(plan)


def cluster(nodes=1, groups=None, **placement):
    described = {"num_nodes": nodes, "num_gpus_per_node": 8, "component_placement": placement}
    return {"cluster": described | ({"node_groups": groups} if groups else {})}


ROBOT = [{"label": "arm", "node_ranks": 0, "hardware": {"type": "Turtle2", "configs": [{"node_rank": 0}]}}]
PYTHON = [{"label": "a", "node_ranks": 0, "env_configs": [{"node_ranks": 0, "python_interpreter_path": "/opt/python"}]}]


@pytest.mark.parametrize(
    ("config", "notation", "named"),
    [
        pytest.param(LOOP, "rlinf", "has others", id="unordered-servers"),
        pytest.param(LOOP, "roll", "the same number of devices", id="ragged-servers"),
        pytest.param(ROLL, "loop", "one machine", id="two-machines"),
        pytest.param(cluster(env={"node_group": "arm", "placement": 0}, groups=ROBOT), "roll", "Turtle2", id="robot"),
        pytest.param(
            cluster(actor={"node_group": "a", "placement": "all"}, groups=PYTHON),
            "roll",
            "interpreter",
            id="interpreter",
        ),
        pytest.param(cluster(actor="0-3:0-1", rollout="4-7"), "loop", "one GPU", id="learner-of-two"),
        pytest.param(cluster(actor="0-3", rollout="4-7", env="0"), "loop", "servers only", id="env"),
        pytest.param(
            cluster(nodes=2, agent={"node_group": "node", "placement": "1:0-3"}),
            "roll",
            "cannot express this placement",
            id="cpu-block",
        ),
    ],
)
def test_what_cannot_be_said_is_named(config, notation, named):
    findings = Findings()
    assert convert_plan(roost.plan(config), roost.Notation(notation), findings) is None
    assert any(named in finding.what for finding in findings.errors)


@pytest.mark.parametrize("notation", ["verl", "slime", "openrlhf"])
def test_permuted_gpus_are_a_loss_and_no_error(notation):
    learner = {"device_mapping": "[0,1,2,3]", "strategy_args": {"strategy_name": "fsdp2_train"}}
    engines = {"device_mapping": "[1,0,3,2]", "strategy_args": {"strategy_name": "vllm"}}
    job = {"num_gpus_per_node": 4, "pretrain": "Qwen/Qwen3-4B", "actor_train": learner, "actor_infer": engines}
    findings = Findings()
    written = convert_plan(roost.plan(job), roost.Notation(notation), findings)
    assert written is not None, [str(finding) for finding in findings.errors]
    (named,) = [finding.what for finding in findings.warnings if "order of its own" in finding.what]
    assert named.startswith(f"{notation} has an order of its own for GPUs: components keep theirs")


def test_robots_and_software_are_written_out():
    config = cluster(nodes=1, env={"node_group": "arm", "placement": "0:0-1"}, groups=[*ROBOT, *PYTHON])
    plan = roost.plan(config)
    written = convert_plan(plan, roost.Notation.RLINF, Findings())
    assert roost.plan(written.values).inventory == plan.inventory


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(1, 3), st.booleans())
def test_every_rlinf_placement_without_groups_goes_to_roll_and_back(sizes, per_process, is_shared):
    """Segments of slices or of shared devices, on one node of 64."""
    segments, rank, process = [], 0, 0
    for size in sizes:
        ranks, processes = (size, size * per_process) if is_shared else (size * per_process, size)
        segments.append(f"{rank}-{rank + ranks - 1}:{process}-{process + processes - 1}")
        rank, process = rank + ranks + 1, process + processes
    config = {
        "cluster": {"num_nodes": 1, "num_gpus_per_node": 64, "component_placement": {"actor": ",".join(segments)}}
    }
    plan = roost.plan(config)
    roll = roost.plan(convert_plan(plan, roost.Notation.ROLL, Findings()).values)
    back = roost.plan(convert_plan(roll, roost.Notation.RLINF, Findings()).values)
    assert placements(plan) == placements(roll) == placements(back)
    assert np.array_equal(plan["actor"].table.nodes, back["actor"].table.nodes)


def test_strategies_sizes_and_roles_survive_in_the_same_notation():
    def role(strategy, sizes, devices="0-7"):
        return {"device_mapping": devices, "strategy_args": {"strategy_name": strategy, "strategy_config": sizes}}

    plan = roost.plan(
        {
            "num_gpus_per_node": 8,
            "actor_train": role("megatron_train", {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4}),
            "actor_infer": {**role("sglang", {"tensor_parallel_size": 2}), "num_gpus_per_worker": 2},
            "reference": role("megatron_infer", {"tensor_model_parallel_size": 4}),
            "critic": role("fsdp2_train", {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4}),
            "sft_train": role("fsdp2_train", {}),
        }
    )
    findings = Findings()
    again = roost.plan(convert_plan(plan, roost.Notation.ROLL, findings).values)
    assert [str(finding) for finding in findings.found] == []
    for part in plan.components:
        other = again[part.name]
        assert (other.parallel, other.role, other.model.strategy) == (part.parallel, part.role, part.model.strategy)


def losses(config, notation):
    """The converted config and what is lost in it."""
    findings = Findings()
    written = convert_plan(roost.plan(config), roost.Notation(notation), findings)
    assert not findings.errors, [str(finding) for finding in findings.errors]
    assert {finding.code for finding in findings.warnings} <= {"RST-N046"}
    return written.values, " | ".join(finding.what for finding in findings.warnings)


SHARED_SIZES = {
    "num_gpus_per_node": 8,
    "actor_train": {
        "device_mapping": "0-7",
        "strategy_args": {"strategy_name": "megatron_train", "strategy_config": {"tensor_model_parallel_size": 4}},
    },
    "actor_infer": {
        "device_mapping": "0-7",
        "strategy_args": {"strategy_name": "vllm", "strategy_config": {"tensor_parallel_size": 2}},
    },
}


def test_rlinf_says_sizes_where_its_layout_gives_the_same_processes():
    written, lost = losses({key: SHARED_SIZES[key] for key in ("num_gpus_per_node", "actor_train")}, "rlinf")
    assert written["actor"]["model"]["tensor_model_parallel_size"] == 4
    assert lost == ""


def test_sizes_that_would_move_processes_are_lost_and_named():
    written, lost = losses(SHARED_SIZES, "rlinf")
    assert "tensor_parallel_size" not in written["rollout"]
    assert "rlinf cannot express these sizes with this placement: rollout: tensor 2" in lost


def reasoning(**rollout):
    config = cluster(actor="all", rollout="all")
    return config | {"rollout": {"tensor_parallel_size": 2, **rollout}, "runner": {"task_type": "reasoning"}}


def test_the_engine_of_an_rlinf_config_is_kept():
    written, lost = losses(reasoning(rollout_backend="sglang", gpu_memory_utilization=0.6), "roll")
    role = written["actor_infer"]
    assert role["strategy_args"]["strategy_name"] == "sglang"
    assert role["strategy_args"]["strategy_config"] == {"tensor_parallel_size": 2, "mem_fraction_static": 0.6}
    assert role["num_gpus_per_worker"] == 2
    assert "rollout" not in lost.replace("memory between phases of rollout: keep", "")


def test_a_policy_in_an_environment_is_not_served_by_vllm():
    config = cluster(actor="0-3", rollout="4-5", env="6-7") | {"runner": {"task_type": "embodied"}}
    written, _ = losses(config, "roll")
    assert written["actor_infer"]["strategy_args"]["strategy_name"] == "hf_infer"


def test_variables_of_all_components_are_those_of_a_node_group():
    config = ROLL | {"system_envs": {"A": "1"}, "rewards": {"rule": {"world_size": 3}}}
    written, lost = losses(config, "rlinf")
    assert [group["env_configs"] for group in written["cluster"]["node_groups"]] == [
        [{"node_ranks": "0-1", "env_vars": [{"A": "1"}]}]
    ]
    process = roost.plan(written)["actor"].process(0)
    assert process.start_env["A"] == "1"
    assert "does not set these variables: A=1" in lost
    assert "does not place workers round-robin over the nodes" in lost


def test_facts_of_models_are_kept_or_named():
    model = {"model_path": "/models/q", "precision": "fp32", "is_lora": True, "lora_rank": 8}
    actor = {"micro_batch_size": 4, "training_backend": "fsdp", "offload_weight": True, "model": model}
    config = cluster(actor="0-3") | {"actor": actor, "runner": {"seq_length": 1024}}
    same, lost = losses(config, "rlinf")
    assert (same["actor"], same["runner"], lost) == (actor, {"seq_length": 1024}, "")
    written, lost = losses(config, "roll")
    assert written["actor_train"]["model_args"] == {"model_name_or_path": "/models/q", "dtype": "fp32", "lora_rank": 8}
    assert (written["sequence_length"], written["actor_train"]["training_args"]) == (
        1024,
        {"per_device_train_batch_size": 4},
    )
    assert lost == "roll cannot express this: offloaded parts weight -> weight+grad+optimizer"
    assert "sequence" not in losses(config, "slime")[1]


def test_the_machine_of_a_loop_plan_stays_as_it_is():
    config = {"rl": {"gpu_allocation": {"learning_gpus": [0, 1], "inference_gpus": [2]}}}
    plan = roost.plan(config, {"nodes": [{"accelerators": 4}]})
    assert convert_plan(plan, roost.Notation.LOOP, Findings()) is not None


def test_context_groups_of_fsdp_are_kept():
    strategy = {"strategy_name": "fsdp2_train", "strategy_config": {}}
    role = {"device_mapping": "0-7", "strategy_args": strategy, "model_args": {"ulysses_size": 2}}
    written, lost = losses({"num_gpus_per_node": 8, "actor_train": role}, "roll")
    assert (written["actor_train"]["model_args"], lost) == ({"ulysses_size": 2}, "")


def test_machines_of_an_inventory_are_no_loss():
    plan = roost.plan(SHARED_SIZES, {"nodes": [{"accelerators": 8, "memory_gb": 80}]})
    for target in (roost.Notation.ROLL, roost.Notation.VERL):
        with_it, without = Findings(), Findings()
        convert_plan(plan, target, with_it, plan.inventory)
        convert_plan(plan, target, without)
        assert not any("node 0: 8 x" in finding.what for finding in with_it.found)
        assert any("node 0: 8 x" in finding.what for finding in without.found)


def test_engines_with_variables_lose_process_ranks_that_rlinf_does_not_use():
    roles = {
        "actor_train": SHARED_SIZES["actor_train"] | {"device_mapping": "0-3"},
        "actor_infer": SHARED_SIZES["actor_infer"] | {"device_mapping": "4-7"},
    }
    written, _ = losses({"num_gpus_per_node": 8, "system_envs": {"A": "1"}, **roles}, "rlinf")
    assert written["cluster"]["component_placement"]["rollout"] == {"node_group": "env_1", "placement": "4-7"}


ENVS = {"train_env_manager": {"world_size": 2}}


@pytest.mark.parametrize(
    ("keys", "estimator", "target_word"),
    [
        ({"adv_estimator": "reinforce"}, "reinforce", None),
        ({"adv_estimator": "reinforce", "whiten_advantages": True}, "reinforce", "reinforce_plus_plus"),
        ({"adv_estimator": "grpo"}, "grpo", "grpo"),
        ({"adv_estimator": "grpo", **ENVS}, "reinforce", None),
        ({"adv_estimator": "step_reinforce", "reward_normalization": {"method": "mean_std"}, **ENVS}, None, None),
        (
            {
                "adv_estimator": "grpo",
                "reward_normalization": {"grouping": "traj_group_id", "method": "mean_std"},
                **ENVS,
            },
            "grpo",
            "grpo",
        ),
    ],
)
def test_roll_says_by_other_keys_what_reinforce_and_grpo_normalise(keys, estimator, target_word):
    plan = roost.plan({**SHARED_SIZES, **keys})
    assert estimator is None or plan.settings["advantage_estimator"] == estimator
    same = Findings()
    convert_plan(plan, roost.Notation.ROLL, same)
    assert [finding.what for finding in same.warnings] == []
    findings = Findings()
    written = convert_plan(plan, roost.Notation.VERL, findings)
    if target_word:
        assert written.values["algorithm"]["adv_estimator"] == target_word
    named = [finding.what for finding in findings.warnings if "advantage_estimator" in finding.what]
    assert bool(named) == (target_word is None and estimator is not None)


@pytest.mark.parametrize("estimator", ["step_reinforce", "agentic_reinforce", "reinforce"])
def test_estimators_of_rolls_environments_are_kept_or_named(estimator):
    plan = roost.plan({**SHARED_SIZES, **ENVS, "adv_estimator": estimator})
    written = convert_plan(plan, roost.Notation.ROLL, Findings())
    assert written.values["adv_estimator"] == estimator
    findings = Findings()
    convert_plan(plan, roost.Notation.RLINF, findings)
    own = {"step_reinforce": "step_rewards", "agentic_reinforce": "discount_by_turn"}.get(estimator)
    named = [finding.what for finding in findings.warnings if "step_rewards" in finding.what or "turn" in finding.what]
    assert named == ([f"rlinf cannot express this: {own}: true -> nothing"] if own else [])


@pytest.mark.parametrize(
    ("target", "keys"),
    [("rlinf", ("actor", "fsdp_config", "gradient_checkpointing")), ("roll", ("actor_train", "model_args"))],
)
def test_recomputed_activations_go_over_as_far_as_the_job_says_them(target, keys):
    shared = {name: SHARED_SIZES[name] for name in SHARED_SIZES if name != "actor_train"}
    learner = SHARED_SIZES["actor_train"] | {"strategy_args": {"strategy_name": "fsdp2_train"}}
    for disables, recomputes in ((True, False), (False, True), (None, None)):
        arguments = {} if disables is None else {"model_args": {"disable_gradient_checkpointing": disables}}
        plan = roost.plan({**shared, "actor_train": learner | arguments})
        assert plan["actor"].model.recomputes is (recomputes is not False)
        written = convert_plan(plan, roost.Notation(target), Findings())
        found = written.values
        for key in keys:
            found = (found or {}).get(key)
        if target == "roll":
            found = None if not found else not found["disable_gradient_checkpointing"]
        assert found is recomputes
        assert roost.plan(written.values)["actor"].model.recomputes is plan["actor"].model.recomputes


@pytest.mark.parametrize(
    ("saying", "others", "written_as"),
    [
        pytest.param("actor_train", ["critic"], "actor_train", id="actor"),
        pytest.param("critic", ["actor_train"], "critic", id="critic"),
        pytest.param("student", [], "actor_train", id="student"),
        pytest.param("sft_train", [], "sft_train", id="supervised"),
    ],
)
def test_each_learner_says_for_itself_whether_it_recomputes(saying, others, written_as):
    def learner(**config):
        return {"device_mapping": [0], "strategy_args": {"strategy_name": "megatron_train", "strategy_config": config}}

    roles = {saying: learner(recompute_granularity="full")} | {role: learner() for role in others}
    plan = roost.plan({"num_gpus_per_node": 1, "pretrain": "m", "adv_estimator": "gae", **roles})
    values = convert_plan(plan, roost.Notation.ROLL, Findings()).values
    assert [role for role in values if "recompute_granularity" in str(values[role])] == [written_as]
    assert values[written_as]["strategy_args"]["strategy_config"]["recompute_granularity"] == "full"


def block(**keys):
    return {"reward_normalization": keys, **ENVS}


DOMAINS = {"rewards": {"math": {"world_size": 1}, "code": {"world_size": 1}}}
BY_GROUP = {"grouping": "traj_group_id", "method": "mean_std"}
RUNNING, BATCH, GROUP = (
    dict.fromkeys(("norm_mean_type", "norm_std_type"), word) for word in ("running", "batch", "group")
)


@pytest.mark.parametrize("whitens", [None, False, True])
@pytest.mark.parametrize(
    ("estimator", "keys", "trained"),
    [
        ("grpo", block(grouping="tags", method="mean_std"), ("reward", "tag", "tag")),
        ("grpo", block(grouping="tags", norm_std_type="group"), ("reward", "none", "tag")),
        ("reinforce", block(**RUNNING), ("reinforce++", "none", "none")),
        ("reinforce", BATCH, ("reinforce++", "none", "none")),
        ("reinforce", RUNNING, ("reinforce++", "none", "none")),
        ("reinforce", GROUP, ("grpo", "none", "none")),
        ("reinforce", {"norm_mean_type": "group"}, ("group_mean", "none", "none")),
        ("reinforce", {"norm_std_type": "batch"}, ("reward", "none", "batch")),
        ("reinforce", BATCH | DOMAINS, ("reward", "tag", "tag")),
        ("gae", BATCH, ("gae", "batch", "batch")),
        ("gae", block(grouping="tags", method="mean"), ("gae", "tag", "none")),
        ("gigpo", {}, ("reward", "none", "none")),
        ("step_reinforce", GROUP, ("grpo", "none", "none")),
        ("gae", {"is_pure_opd": True, "teacher": {"device_mapping": "0-7"}}, ("teacher", "none", "none")),
        # Of shipped files.
        ("grpo", DOMAINS, ("grpo", "none", "none")),
        ("grpo", block(grouping="tags", method="identity"), ("reward", "none", "none")),
        ("grpo", block(**BY_GROUP), ("grpo", "none", "none")),
        ("grpo", block(grouping="traj_group_id", **GROUP), ("grpo", "none", "none")),
        ("gae", {}, ("gae", "none", "none")),
        ("gigpo", block(**BY_GROUP), ("gigpo", "group", "group")),
        ("gigpo", block(grouping="traj_group_id", method="mean"), ("gigpo", "group", "none")),
        ("reinforce", DOMAINS | dict.fromkeys(BATCH), ("reward", "none", "none")),
        ("reinforce", block(grouping="batch", method="identity"), ("reward", "none", "none")),
        ("step_reinforce", block(grouping="batch", method="mean_std"), ("reinforce++", "none", "none")),
        ("step_reinforce", block(grouping="traj_group_id", method="mean"), ("group_mean", "none", "none")),
        ("step_reinforce", block(grouping="traj_group_id", method="identity"), ("reward", "none", "none")),
        (
            "step_reinforce",
            block(grouping="traj_group_id", norm_mean_type="group", norm_std_type="batch"),
            ("reward", "group", "batch"),
        ),
    ],
)
def test_plan_and_training_have_the_same_normalisation_of_roll(estimator, keys, trained, whitens):
    config = {**SHARED_SIZES, "adv_estimator": estimator, **keys} | (
        {} if whitens is None else {"whiten_advantages": whitens}
    )
    names = ("advantage_estimator", "reward_baseline", "reward_std")

    def both(values):
        read = advantage_settings(Section(values, (), Source(values), Findings()))
        said = roost.plan(values).settings
        said = said | {"advantage_estimator": estimator_of_train(said["advantage_estimator"])}
        return [tuple(str(one.get(name, "none")) for name in names) for one in (read, said)]

    assert both(config) == [trained, trained]
    findings = Findings()
    written = convert_plan(roost.plan(config), roost.Notation.ROLL, findings)
    assert [finding.what for finding in findings.warnings] == []
    assert both(written.values) == [trained, trained]


def test_statistics_of_rewards_that_verl_lacks_are_named():
    findings = Findings()
    config = {**SHARED_SIZES, "adv_estimator": "grpo", **block(grouping="tags", method="mean_std")}
    convert_plan(roost.plan(config), roost.Notation.VERL, findings)
    lost = [finding.what for finding in findings.warnings]
    assert "verl cannot express this: advantage_estimator: reinforce -> grpo" in lost
    assert "verl cannot express this: reward_baseline: tag -> nothing" in lost
    converted = convert_plan(
        roost.plan({**SHARED_SIZES, "adv_estimator": "reinforce", **GROUP}), roost.Notation.VERL, Findings()
    )
    assert converted.values["algorithm"]["adv_estimator"] == "grpo"


def test_whitening_of_generalised_advantages_is_a_switch_in_roll_and_always_on_in_verl(tmp_path):
    critic = {"critic": {"device_mapping": "0-7", "strategy_args": SHARED_SIZES["actor_train"]["strategy_args"]}}
    plain = roost.plan({**SHARED_SIZES, **critic, "adv_estimator": "gae"})
    whitened = roost.plan({**SHARED_SIZES, **critic, "adv_estimator": "gae", "whiten_advantages": True})
    assert [str(change) for change in diff_plans(plain, whitened)] == ["whiten_advantages: nothing -> true"]

    def converted(plan, target):
        findings = Findings()
        written = convert_plan(plan, roost.Notation(target), findings)
        assert written is not None
        return written, [finding.what for finding in findings.warnings if "whiten" in finding.what]

    for target in ("verl", "openrlhf"):
        (named,) = converted(plain, target)[1]
        assert "whiten_advantages true" in named and named.endswith("which the job does not set")
        assert converted(whitened, target)[1] == []
    assert converted(plain, "slime")[1] == []
    assert converted(whitened, "slime")[1] == []
    (tmp_path / "run.sh").write_text(converted(plain, "verl")[0].text)
    verl = roost.plan(tmp_path / "run.sh")
    written, named = converted(verl, "roll")
    assert written.values["whiten_advantages"] is True and named == []


@pytest.mark.parametrize(("word", "named"), [("bf16", "bf16"), ("fp32", "fp32")])
def test_the_type_of_passes_is_kept_though_weights_are_trained_in_32_bits(word, named):
    job = cluster(actor="0-3", rollout="0-3")
    job["actor"] = {"training_backend": "fsdp", "model": {"model_path": "models/q", "precision": word}}
    trained = job | {"train": {"task": {"_target_": "roost.rollout.arithmetic.Arithmetic"}}}
    written, _ = losses(trained, "rlinf")
    assert written["actor"]["model"]["precision"] == named
    written, _ = losses(trained, "roll")
    assert written["actor_train"]["model_args"]["dtype"] == named
    other = {"bf16": "fp32", "fp32": "bf16"}[word]
    job["actor"] = {"training_backend": "fsdp", "model": {"model_path": "models/q", "precision": other}}
    named_changes = [str(change) for change in diff_plans(roost.plan(trained), roost.plan(job))]
    size, changed = {"bf16": (2, 4), "fp32": (4, 2)}[word]
    assert f"actor: bytes per weight {size} -> bytes per weight {changed}" in named_changes


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("target", ["rlinf", "roll", "verl"])
def test_keys_about_training_of_any_source_are_listed_where_they_are_not_converted(target, trains):
    job = cluster(actor="0-3", rollout="0-3") | {
        "actor": {"training_backend": "fsdp", "model": {"model_path": "models/q"}, "optim": {"lr": 1e-5}},
        "algorithm": {"adv_type": "grpo", "group_size": 4},
    }
    task = {"_target_": "roost.rollout.arithmetic.Arithmetic"}
    train = {"train": {"task": task, "kl_coef": 0.1, "compute_dtype": "bfloat16"}} if trains else {}
    written = convert_plan(roost.plan(job | train), roost.Notation(target), Findings())
    listed = written.text.partition("about training not converted: ")[2].partition("\n")[0]
    keys = ["actor.optim.lr", "algorithm.group_size", *(["train.task", "train.kl_coef"] if trains else [])]
    assert sorted(listed.split(", ")) == sorted(keys)
    if trains:
        job["algorithm"] = {}
        train["train"]["advantage_estimator"] = "grpo"
        written = convert_plan(roost.plan(job | train), roost.Notation(target), Findings())
        is_written = "algorithm.adv_estimator=grpo" in written.text
        assert is_written == ("train.advantage_estimator" not in written.text) == (target == "verl")
