"""Jobs that the frameworks ship become the processes that their own layout gives."""

import json
import re
import shlex
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
import yaml

import roost
from roost.config.compose import load
from roost.config.findings import ConfigError, Findings
from roost.config.frameworks.registry import ENTRIES
from roost.config.job import Notation
from roost.config.notations.notation import read_job
from roost.config.ranks import spell_ranks
from roost.placement.convert.convert_plan import convert_plan
from tests.cli.terminal import run
from tests.grid import grid

JOBS = yaml.safe_load((Path(__file__).parent / "jobs.yaml").read_text())
PROGRAMS = {
    "verl": "verl.trainer.main_ppo",
    "slime": "train.py",
    "miles": "train.py",
    "openrlhf": "openrlhf.cli.train_ppo_ray",
    "skyrl": "skyrl.train.entrypoints.main_base",
}
CASES = [pytest.param(name, job, id=f"{name}-{job['source']}") for name, jobs in JOBS.items() for job in jobs]


def script_of(folder, framework, job):
    """A script with the job's arguments in an array, as people write them; or its commands, where there are several."""
    file = folder / "run.sh"
    if "script" in job:
        file.write_text(f"#!/bin/bash\n{job['script']}")
        return file
    program = job.get("program", PROGRAMS[framework])
    call = f"python3 {program}" if program.endswith(".py") else f"python3 -m {program}"
    words = "\n  ".join(shlex.split(job["args"]))
    prefix = "MILES_EXPERIMENT=1 " if framework == "miles" else ""
    file.write_text(f'#!/bin/bash\nARGS=(\n  {words}\n)\n{prefix}ray job submit -- {call} "${{ARGS[@]}}"\n')
    return file


def processes_of(plan):
    found = {}
    for part in plan.components:
        devices = [int(device) for device in part.table.device_numbers]
        found[part.name] = f"{part.world_size} x {len(devices) // part.world_size} on {spell_ranks(devices)}"
    return found


@grid(("framework", "job"), CASES)
def test_a_shipped_job(framework, job, tmp_path):
    plan = roost.plan(script_of(tmp_path, framework, job))
    assert plan.notation == framework
    assert processes_of(plan) == job["processes"]


def script_with(folder, command):
    (folder / "run.sh").write_text(f"#!/bin/bash\n{command}\n")
    return folder / "run.sh"


def plan_of(folder, command, **files):
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return roost.plan(script_with(folder, command))


_VERL = "python3 -m verl.trainer.main_ppo trainer.n_gpus_per_node=8 data.max_prompt_length=2048 "
_VERL += "data.max_response_length=4096 critic.ppo_micro_batch_size_per_gpu=2 "
_ULYSSES = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
_SKYRL = "python3 -m skyrl.train.entrypoints.main_base trainer.placement.policy_num_gpus_per_node=8 "
_SKYRL += "trainer.algorithm.use_kl_loss=false generator.inference_engine.num_engines=8 "
_OPENRLHF = "python3 -m openrlhf.cli.train_ppo_ray --vllm.num_engines 8"


@grid(
    ("command", "tokens"),
    [
        pytest.param(f"{_VERL} actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8", 8 * 6144, id="verl"),
        pytest.param(
            f"{_VERL} actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 {_ULYSSES}", 8 * 6144, id="verl-ulysses"
        ),
        pytest.param(
            f"{_VERL} actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 {_ULYSSES} "
            "actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=9000",
            2 * 9000,
            id="verl-dynamic",
        ),
        pytest.param(f"{_VERL} actor_rollout_ref.actor.use_dynamic_bsz=True", 16384, id="verl-dynamic-default"),
        pytest.param(f"{_VERL} actor_rollout_ref.actor.ppo_max_token_len_per_gpu=9000", 9000, id="verl-tokens-only"),
        pytest.param(f"{_SKYRL} trainer.micro_train_batch_size_per_gpu=4", 4 * 1536, id="skyrl"),
        pytest.param(f"{_SKYRL} trainer.max_tokens_per_microbatch=-1", 1536, id="skyrl-default"),
        pytest.param(f"{_SKYRL} trainer.max_tokens_per_microbatch=5000", 5000, id="skyrl-tokens"),
        pytest.param(f"{_OPENRLHF} --train.micro_batch_size 8 --data.max_len 4096", 8 * 4096, id="openrlhf"),
        pytest.param(
            f"{_OPENRLHF} --train.dynamic_batch_enable --ds.ring_attn_size 2", 2 * 16192, id="openrlhf-dynamic"
        ),
        pytest.param(
            "python3 -m openrlhf.cli.train_ppo_ray --vllm_num_engines 8 --max_len 1000", 4 * 1000, id="openrlhf-flat"
        ),
    ],
)
def test_tokens_of_a_micro_batch(command, tokens, tmp_path):
    assert plan_of(tmp_path, command)["actor"].model.tokens == tokens


def test_a_critic_of_verl_has_its_own_micro_batch(tmp_path):
    assert plan_of(tmp_path, f"{_VERL} critic.enable=True")["critic"].model.tokens == 2 * 6144


def test_an_actor_that_offloads_beside_a_reference(tmp_path):
    keys = "rollout.nnodes=1 actor_rollout_ref.actor.use_kl_loss=True algorithm.adv_estimator=grpo "
    keys += "actor_rollout_ref.actor.fsdp_config.param_offload=True"
    plan = plan_of(tmp_path, f"python3 -m verl.experimental.fully_async_policy.fully_async_main {keys}")
    (held,) = plan.residency.of("actor")
    assert (held.decision.value, held.reason) == ("sleep", "the config offloads between phases")


@grid(
    ("command", "code", "fix"),
    [
        pytest.param("python3 -m verl.trainer.main_ppo", "RST-H009", "write trainer.n_gpus_per_node=4, or", id="verl"),
        pytest.param(
            "python3 -m verl.trainer.main_ppo trainer.nnodes=2", "RST-H007", "write trainer.nnodes=1, or", id="nodes"
        ),
        pytest.param(
            "python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate",
            "RST-H009",
            "write --num-gpus-per-node 4, or",
            id="slime",
        ),
        pytest.param(
            "python3 train.py --num-gpus-per-node 4 --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate",
            "RST-H009",
            "write --actor-num-gpus-per-node 4, or",
            id="slime-learner",
        ),
    ],
)
def test_a_fix_for_an_inventory_names_the_jobs_own_key(command, code, fix, tmp_path):
    with pytest.raises(ConfigError) as caught:
        roost.plan(script_with(tmp_path, command), {"nodes": [{"accelerators": 4}]})
    (found,) = [finding for finding in caught.value.findings if finding.code == code]
    assert found.fix.startswith(fix)
    key, _, _ = fix.removeprefix("write ").partition("=" if "=" in fix else " ")
    assert found.where.key_path == key


_ASYNC = "python3 -m verl.experimental.fully_async_policy.fully_async_main"


@grid(
    ("command", "nodes", "code", "what", "fix"),
    [
        pytest.param(
            f"{_ASYNC} trainer.nnodes=4 rollout.nnodes=1",
            [8] * 4,
            "RST-H007",
            "the job takes 5 nodes, but the inventory has 4",
            "write trainer.nnodes=3, or give the inventory",
            id="more",
        ),
        pytest.param(
            f"{_ASYNC} trainer.nnodes=1 rollout.nnodes=1",
            [8] * 4,
            "RST-H008",
            "the first 2 nodes of the inventory's 4 are used",
            "write trainer.nnodes=3 to use all",
            id="fewer",
        ),
        pytest.param(
            f"{_ASYNC} trainer.nnodes=1 rollout.nnodes=4",
            [8] * 4,
            "RST-H007",
            "the job takes 5 nodes, but the inventory has 4",
            "use fewer nodes, or give the inventory",
            id="others-need-all",
        ),
        pytest.param(
            "python3 train.py --actor-num-nodes 8 --actor-num-gpus-per-node 8 --rollout-num-gpus 64",
            [8, 8],
            "RST-H007",
            "the job takes 16 nodes, but the inventory has 2",
            "use fewer nodes, or give the inventory",
            id="slime",
        ),
        pytest.param(
            "python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4",
            [8, 8],
            "RST-H008",
            "the first 1 node of the inventory's 2 are used",
            "use more nodes, or give an inventory of 1 node",
            id="part-of-a-node",
        ),
        pytest.param(
            "python3 -m verl.trainer.main_ppo",
            [8, 8, 4, 0],
            "RST-H008",
            "the first 1 node of the inventory's 4 are used",
            "write trainer.nnodes=2 to use the first 2",
            id="mixed",
        ),
        pytest.param(
            "python3 -m verl.trainer.main_ppo",
            [8, 4, 8],
            "RST-H008",
            "the first 1 node of the inventory's 3 are used",
            "use more nodes, or give an inventory of 1 node",
            id="others-differ",
        ),
    ],
)
def test_numbers_of_nodes_count_those_beside_the_learners(command, nodes, code, what, fix, tmp_path):
    inventory = {"nodes": [{"accelerators": count} for count in nodes]}
    try:
        findings = roost.plan(script_with(tmp_path, command), inventory).warnings
    except ConfigError as error:
        findings = error.findings
    (found,) = [finding for finding in findings if finding.code == code]
    assert found.what == what
    assert found.fix.startswith(fix)


def test_an_engine_over_many_nodes_is_one_line(tmp_path):
    command = "python3 train.py --actor-num-nodes 4 --actor-num-gpus-per-node 8 --colocate "
    text = run("plan", script_with(tmp_path, f"{command} --rollout-num-gpus-per-engine 32"), width=200).output
    assert "0-7 of each of 4 nodes" in text and "of the next node" not in text


def codes(folder, command):
    try:
        plan = plan_of(folder, command)
    except ConfigError as error:
        return {finding.code: finding for finding in error.findings}
    return {finding.code: finding for finding in (*plan.warnings, *plan.notes)}


def check_layout(folder, command, layout, refusals):
    """Compare a plan with `[processes, GPUs of each, group]` of each component; a letter in common is shared GPUs."""
    if layout == "refused":
        with pytest.raises(ConfigError) as caught:
            plan_of(folder, command)
        assert {finding.code for finding in caught.value.findings} <= refusals
        return
    found = {}
    for part in plan_of(folder, command).components:
        name = "rollout" if part.name.startswith("rollout") else part.name  # engines for prefill and decode are one
        devices = [int(device) for device in part.table.device_numbers]
        count, _, before = found.get(name, (0, 0, set()))
        found[name] = (count + part.world_size, len(devices) // part.world_size, before | set(devices))
    assert {name: part[:2] for name, part in found.items()} == {name: tuple(part[:2]) for name, part in layout.items()}
    for one, other in combinations(layout, 2):
        assert bool(found[one][2] & found[other][2]) == bool(set(layout[one][2]) & set(layout[other][2]))


VERL = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo"
TENSOR = "actor_rollout_ref.rollout.tensor_model_parallel_size"
SLIME = "python3 train.py --actor-num-nodes 1"


OF_SLIME = [json.loads(line) for line in (Path(__file__).parent / "golden" / "slime.jsonl").read_text().splitlines()]


def layout_of_slime(plan):
    """GPUs of learners, and those of each engine, of all components that serve alike."""
    found = {}
    for part in plan.components:
        devices = [int(device) for device in part.table.device_numbers]
        if part.name in ("actor", "critic"):
            found[part.name] = len(devices)
            continue
        kind = next((kind for kind in ("prefill", "decode") if kind in part.name), None)
        size = len(devices) // part.world_size
        engines = [spell_ranks(devices[first : first + size]) for first in range(0, len(devices), size)]
        found.setdefault(f"rollout.{kind}" if kind else "rollout", []).extend(engines)
    return found


@grid("case", [pytest.param(case, id=f"golden-{index}") for index, case in enumerate(OF_SLIME)])
def test_a_layout_by_slimes_own_code(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = " --sglang-config engines.yaml" if "sglang" in case else ""
    files = {"engines_yaml": json.dumps({"sglang": case["sglang"]})} if config else {}
    command, layout = f"python3 train.py {case['args']}{config}", case["layout"]
    if layout is None or case.get("empty"):
        with pytest.raises(ConfigError) as caught:
            plan_of(tmp_path, command, **files)
        # Where no engine fits into its GPUs, slime starts none and waits for it.
        causes = {"RST-N062", "RST-N063"} if layout is None else {"RST-N057"}
        assert causes & {finding.code for finding in caught.value.findings}
        return
    found = layout_of_slime(plan_of(tmp_path, command, **files))
    assert {name: sorted(part) if isinstance(part, list) else part for name, part in found.items()} == {
        name: sorted(part) if isinstance(part, list) else part for name, part in layout.items()
    }


def test_groups_of_engines_with_a_placeholder(tmp_path, monkeypatch):
    # slime/ray/placement_group.py: groups take slots one after another, and a placeholder leaves a gap
    monkeypatch.chdir(tmp_path)
    group = "{worker_type: %s, num_gpus: %d, num_gpus_per_engine: 2}"
    groups = [group % ("regular", 4), group % ("placeholder", 2), group % ("regular", 2)]
    listed = "\n".join(f"      - {one}" for one in groups)
    text = f"sglang:\n  - name: default\n    server_groups:\n{listed}\n"
    flags = "--actor-num-gpus-per-node 4 --colocate --rollout-num-gpus 8 --sglang-config engines.yaml"
    plan = plan_of(tmp_path, f"{SLIME} {flags}", engines_yaml=text)
    assert processes_of(plan) == {"actor": "4 x 1 on 0-3", "rollout": "3 x 2 on 0-3,6-7"}


SKYRL = "python3 -m skyrl.train.entrypoints.main_base trainer.algorithm.use_kl_loss=false"
ENGINES = "generator.inference_engine"


@pytest.mark.parametrize(
    ("command", "mode"),
    [
        (f"{SLIME} --actor-num-gpus-per-node 4 --rollout-num-gpus 4 --prefill-num-servers 1", "disaggregated"),
        (f"{SLIME} --actor-num-gpus-per-node 4 --num-gpus-per-node 4 --colocate --prefill-num-servers 1", "collocated"),
        (
            f"{SKYRL} trainer.placement.policy_num_gpus_per_node=4 trainer.placement.colocate_all=false "
            f"{ENGINES}.num_engines=4 {ENGINES}.enable_pd=true {ENGINES}.num_prefill=1",
            "disaggregated",
        ),
    ],
    ids=["slime", "slime-shared", "skyrl"],
)
def test_engines_for_prefill_and_decode_are_parts_of_the_rollout(command, mode, tmp_path):
    plan = plan_of(tmp_path, command)
    first = 4 if mode == "disaggregated" else 0
    assert processes_of(plan) == {
        "actor": "4 x 1 on 0-3",
        "rollout.prefill": f"1 x 1 on {first}",
        "rollout.decode": f"3 x 1 on {first + 1}-{first + 3}",
    }
    assert plan.mode.value == mode


def test_groups_of_engines_for_prefill_and_decode(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    group = "{worker_type: %s, num_gpus: 4, num_gpus_per_engine: %d}"
    text = f"sglang:\n  - server_groups:\n      - {group % ('prefill', 4)}\n      - {group % ('decode', 2)}\n"
    flags = "--actor-num-gpus-per-node 8 --rollout-num-gpus 8 --sglang-config engines.yaml"
    found = processes_of(plan_of(tmp_path, f"{SLIME} {flags}", engines_yaml=text))
    assert (found["rollout.prefill"], found["rollout.decode"]) == ("1 x 4 on 8-11", "2 x 2 on 12-15")


def test_a_variable_that_is_not_set_in_an_array_of_flags(tmp_path):
    script = f'ARGS=(\n  --actor-num-nodes $NODES_OF_JOB\n  --colocate\n)\n{SLIME.split(" --")[0]} "${{ARGS[@]}}"'
    found = codes(tmp_path, script)["RST-C022"]
    assert (found.where.line, found.where.path) == (3, ("--actor-num-nodes",))
    assert "NODES_OF_JOB=" in found.fix


def test_a_job_without_engines_has_no_settings_of_theirs(tmp_path):
    plan = plan_of(tmp_path, "python3 train_async.py --actor-num-nodes 1 --debug-train-only")
    assert (processes_of(plan), dict(plan.settings)) == ({"actor": "8 x 1 on 0-7"}, {"advantage_estimator": "grpo"})


@pytest.mark.parametrize(("tensor", "data", "is_wrong"), [(8, 2, False), (16, 1, True)])
def test_engines_over_nodes_whose_tensor_groups_are_not(tensor, data, is_wrong, tmp_path):
    rollout = "actor_rollout_ref.rollout"
    sizes = f"{rollout}.tensor_model_parallel_size={tensor} {rollout}.data_parallel_size={data}"
    assert ("RST-P032" in codes(tmp_path, f"{VERL} trainer.nnodes=2 {sizes}")) == is_wrong


def test_prefill_and_decode_parts_make_one_engine(tmp_path):
    rollout = "actor_rollout_ref.rollout"
    parts = f"{rollout}.disaggregation.enabled=true {rollout}.disaggregation.decode_replicas=3"
    plan = plan_of(tmp_path, f"{VERL} {rollout}.tensor_model_parallel_size=2 {parts}")
    assert processes_of(plan)["rollout"] == "1 x 8 on 0-7"


ASYNC = "python3 -m verl.experimental.fully_async_policy.fully_async_main algorithm.adv_estimator=grpo"
TEACHER_POOL = "distillation.enabled=True distillation.nnodes=1 distillation.n_gpus_per_node=2"


def pools(trainer, rollout, tensor):
    (nodes, width), (own, own_width) = trainer, rollout
    sizes = f"trainer.nnodes={nodes} trainer.n_gpus_per_node={width} rollout.nnodes={own}"
    engines = f"actor_rollout_ref.rollout.tensor_model_parallel_size={tensor}"
    return f"{ASYNC} {sizes} rollout.n_gpus_per_node={own_width} {engines}"


@pytest.mark.parametrize(
    ("trainer", "rollout", "tensor", "machines", "processes"),
    [
        ((1, 4), (1, 8), 8, (2, 8), {"actor": "4 x 1 on 0-3", "rollout": "1 x 8 on 8-15"}),
        ((2, 2), (2, 6), 2, (2, 8), {"actor": "4 x 1 on 0-1,8-9", "rollout": "6 x 2 on 2-7,10-15"}),
        ((2, 4), (1, 8), 8, (3, 8), {"actor": "8 x 1 on 0-3,8-11", "rollout": "1 x 8 on 16-23"}),
        ((1, 4), (1, 4), 2, (1, 8), {"actor": "4 x 1 on 0-3", "rollout": "2 x 2 on 4-7"}),
    ],
    ids=["wider-engines", "per-node", "rests-stay-free", "one-machine"],
)
def test_pools_of_different_width(trainer, rollout, tensor, machines, processes, tmp_path):
    plan = plan_of(tmp_path, pools(trainer, rollout, tensor))
    assert processes_of(plan) == processes
    assert (len(plan.inventory.nodes), plan.inventory.nodes[0].accelerators) == machines
    found = {finding.code: finding for finding in (*plan.warnings, *plan.notes)}
    assert f"of {machines[1]} GPUs" in found["RST-N065"].what
    assert "RST-P032" not in found


def test_pools_that_fill_their_nodes_assume_nothing(tmp_path):
    assert "RST-N065" not in codes(tmp_path, pools((2, 8), (1, 8), 8))


def test_engines_of_a_pool_are_each_on_one_node(tmp_path):
    plan = plan_of(tmp_path, pools((1, 5), (2, 5), 4))
    assert processes_of(plan)["rollout"] == "2 x 4 on 5-8,10-13"
    assert "2 GPUs without an engine" in codes(tmp_path, pools((1, 5), (2, 5), 4))["RST-N055"].what
    found = codes(tmp_path, pools((1, 6), (2, 6), 4))["RST-N057"]
    assert (found.where.path[-1], "starts 3" in found.what) == ("n_gpus_per_node", True)


SEPARATE = f"{VERL} trainer.v1.trainer_mode=separate_async actor_rollout_ref.rollout.nnodes=1"
A = "actor_rollout_ref."
ACTOR = f"{A}actor"


@grid(
    ("command", "path"),
    [
        pytest.param(f"{SEPARATE} data.train_batch_size=1024", "", id="steps"),
        pytest.param(f"{SEPARATE} data.train_batch_size=512", "train_batch_size", id="other-steps"),
        pytest.param(
            f"{SEPARATE} data.train_batch_size=512 trainer.v1.separate_async.parameter_sync_step=2", "", id="sync-step"
        ),
        pytest.param(f"{SEPARATE} actor_rollout_ref.rollout.checkpoint_engine.backend=naive", "backend", id="naive"),
        pytest.param(f"{SEPARATE} reward.reward_model.enable=True", "enable", id="reward"),
    ],
)
def test_what_verl_asserts(command, path, tmp_path):
    found = codes(tmp_path, command).get("RST-N068")
    assert (found.where.path[-1] if found is not None else "") == path


@grid(
    ("words", "place"),
    [
        ("+trainer.nnodes=2", ":3:{} trainer.nnodes"),
        ("trainer.nnodes=1 +trainer.nnodes=$N", ":3:{} trainer.nnodes"),
        ("~trainer.nnodes", ":3:{} trainer.nnodes"),
        ("~data.train_batch_size=1024", ":3:{} data.train_batch_size"),
        (f"+{A}rollout.n=2", ":3:{} actor_rollout_ref.rollout.n"),
        ("~trainer.nnodes +trainer.nnodes=2", ""),
        (f"~{A}rollout.n", ""),
        ("++trainer.nnodes=2 +trainer.nnodes_of_mine=3 +data.train_files=[a,b]", ""),
        ("--config-name mine +trainer.nnodes=2", ""),
    ],
)
def test_keys_of_verl_that_are_added_or_removed(words, place, tmp_path):
    """`~trainer.nnodes` was planned as one node, and a + on a key that verl has was taken."""
    command = f"{VERL} trainer.n_gpus_per_node=8 {words}"
    found = codes(tmp_path, f"N=2\n{command}").get("RST-N068")
    column = max(command.rfind("+"), command.rfind("~")) + 1
    assert str(found.where if found else "").endswith(place.format(column)) and bool(found) == bool(place)


MINI, MICRO, DYNAMIC = (
    f"{ACTOR}.{key}" for key in ("ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu=2", "use_dynamic_bsz=True")
)
HALVED = f"model_engine=megatron {ACTOR}.megatron.tensor_model_parallel_size=2"
OF_SLIME_BATCH = "--colocate --rollout-batch-size 30 --n-samples-per-prompt 8 --global-batch-size"
OF_SKYRL_BATCH = "trainer.train_batch_size=100 trainer.policy_mini_batch_size"
OF_SKYRL_MINIBATCH = f"trainer.placement.policy_num_gpus_per_node=4 {ENGINES}.num_engines=4 "
OF_SKYRL_MINIBATCH += "trainer.train_batch_size=24 trainer.policy_mini_batch_size"  # of 5 samples each
SKYRL_MICRO = "trainer.micro_train_batch_size_per_gpu"
TRL_BATCH = "accelerate launch --num_processes 4 train_grpo.py --use_vllm --per_device_train_batch_size"


@grid(
    ("command", "severity", "key"),
    [
        pytest.param(f"{VERL} data.train_batch_size=12 {MICRO}", "error", "train_batch_size", id="batch"),
        pytest.param(f"{VERL} data.train_batch_size=12 {DYNAMIC}", None, "", id="dynamic"),
        pytest.param(f"{VERL} data.train_batch_size=12 {A}rollout.n=2 {MINI}=8 {MICRO}", None, "", id="samples"),
        pytest.param(f"{VERL} data.train_batch_size=24 {MINI}=8 {MICRO} {HALVED}", None, "", id="megatron"),
        pytest.param(
            f"{VERL} data.train_batch_size=12 {MINI}=8 {MICRO} {HALVED}",
            "error",
            "train_batch_size",
            id="megatron-rest",
        ),
        pytest.param(f"{VERL} data.train_batch_size=256 {MICRO}", None, "", id="default-minibatch"),
        pytest.param(f"{VERL} data.train_batch_size=64 {MICRO}", "warning", "train_batch_size", id="below-the-default"),
        pytest.param(f"{VERL} data.train_batch_size=64 {MINI}=128 {MICRO}", "error", "train_batch_size", id="smaller"),
        pytest.param(f"{VERL} data.train_batch_size=64 {MINI}=128 {DYNAMIC}", None, "", id="smaller-dynamic"),
        pytest.param(f"{VERL} data.train_batch_size=64 {MINI}=$N {MICRO}", None, "", id="not-known"),
        pytest.param(f"{VERL} {MINI}=100 {DYNAMIC}", "warning", "ppo_mini_batch_size", id="minibatch"),
        pytest.param(f"{VERL} {MINI}=100 {DYNAMIC} {A}rollout.n=2", None, "", id="minibatch-of-samples"),
        pytest.param(f"{VERL} {MINI}=100 {DYNAMIC} {HALVED}", None, "", id="minibatch-of-replicas"),
        pytest.param(f"{VERL} {MINI}=100 {DYNAMIC} trainer.use_v1=False", None, "", id="older-trainer"),
        pytest.param(f"{VERL} {MINI}=128", "warning", "ppo_micro_batch_size_per_gpu", id="no-micro-batch"),
        pytest.param(f"{VERL} {MINI}=24 {MICRO}", "warning", "ppo_micro_batch_size_per_gpu", id="micro-batch"),
        pytest.param(f"{VERL} {MINI}=24 {MICRO} {A}rollout.n=2", None, "", id="micro-batch-of-samples"),
        pytest.param(f"{VERL} {MINI}=24 {MICRO} {DYNAMIC}", None, "", id="micro-batch-dynamic"),
        pytest.param(f"{VERL} {MICRO} {ACTOR}.ppo_micro_batch_size=8", "error", "ppo_micro_batch_size", id="two-micro"),
        pytest.param(f"{VERL} {MICRO} {ACTOR}.ppo_micro_batch_size=null", None, "", id="one-micro"),
        pytest.param(f"{VERL} {MICRO} {ACTOR}.ppo_micro_batch_size=8 {DYNAMIC}", None, "", id="two-micro-dynamic"),
        pytest.param(VERL, None, "", id="no-batches"),
        pytest.param(f"{SLIME} {OF_SLIME_BATCH} 256", "error", "--global-batch-size", id="slime"),
        pytest.param(f"{SLIME} {OF_SLIME_BATCH} 64", "warning", "--global-batch-size", id="slime-rest"),
        pytest.param(f"{SLIME} {OF_SLIME_BATCH} 120", None, "", id="slime-divides"),
        pytest.param(f"{SLIME} {OF_SLIME_BATCH} 64 --use-dynamic-global-batch-size", None, "", id="slime-dynamic"),
        pytest.param(f"{SLIME} {OF_SLIME_BATCH} 64 --rollout-function-path a.b", None, "", id="slime-own"),
        pytest.param(f"{SKYRL} {OF_SKYRL_BATCH}=64", "error", "train_batch_size", id="skyrl"),
        pytest.param(f"{SKYRL} {OF_SKYRL_BATCH}=50", None, "", id="skyrl-divides"),
        pytest.param(f"{SKYRL} trainer.train_batch_size=100", "error", "train_batch_size", id="skyrl-default"),
        pytest.param(f"{SKYRL} {OF_SKYRL_MINIBATCH}=6", "error", "policy_mini_batch_size", id="skyrl-replicas"),
        pytest.param(
            f"{SKYRL} {OF_SKYRL_MINIBATCH}=24 {SKYRL_MICRO}=4",
            "error",
            "micro_train_batch_size_per_gpu",
            id="skyrl-micro",
        ),
        pytest.param(f"{SKYRL} {OF_SKYRL_MINIBATCH}=24 {SKYRL_MICRO}=5", None, "", id="skyrl-micro-divides"),
        pytest.param(f"{TRL_BATCH} 3 --num_generations 8", "error", "--num_generations", id="trl"),
        pytest.param(f"{TRL_BATCH} 3 --num_generations 6", None, "", id="trl-divides"),
        pytest.param(f"{TRL_BATCH} 3 --num_generations $N", None, "", id="trl-not-known"),
        pytest.param(f"{TRL_BATCH} 3 --gradient_accumulation_steps 2", None, "", id="trl-steps"),
        pytest.param(
            f"{TRL_BATCH} 3 --generation_batch_size 20", "error", "--per_device_train_batch_size", id="trl-own"
        ),
    ],
)
def test_batches_that_do_not_divide(command, severity, key, tmp_path):
    found = codes(tmp_path, command).get("RST-N088")
    assert (found and found.severity.value) == severity
    assert found is None or found.where.path[-1] == key


@grid(
    ("sizes", "is_wrong"),
    [("fsdp_size=3", True), ("fsdp_size=4", False), ("fsdp_size=-1", False), ("fsdp_size=12", False)],
)
def test_groups_of_fsdp_divide_the_gpus(sizes, is_wrong, tmp_path):
    for part in (f"{ACTOR}.fsdp_config", f"{A}ref.fsdp_config", "critic.fsdp"):
        found = codes(tmp_path, f"{VERL} trainer.n_gpus_per_node=8 {part}.{sizes}")
        assert ("RST-N056" in found) == is_wrong, part


def test_replicas_of_teachers_beyond_their_pool(tmp_path):
    teacher = "distillation.teacher_models.math"
    one = f"+{teacher}.num_replicas=4 +{teacher}.inference.tensor_model_parallel_size=2"
    found = codes(tmp_path, f"{VERL} {TEACHER_POOL} {one}")
    assert found["RST-N056"].where.path[-1] == "num_replicas"
    assert "4 replicas * 2 GPUs = 8" in found["RST-N056"].why


@pytest.mark.parametrize(
    ("extra", "has_reference"),
    [
        ("actor_rollout_ref.actor.use_kl_loss=True", True),
        ("algorithm.use_kl_in_reward=True", True),
        ("", False),
        ("actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.model.lora_rank=32", False),
    ],
    ids=["loss", "reward", "none", "adapter"],
)
def test_a_reference_exists_where_a_divergence_is_used(extra, has_reference, tmp_path):
    assert ("reference" in processes_of(plan_of(tmp_path, f"{VERL} {extra}"))) == has_reference


MEGATRON = f"model_engine=megatron {A}actor.megatron.tensor_model_parallel_size=2"
PPO = f"python3 -m verl.trainer.main_ppo {A}model.path=a {A}actor.use_kl_loss=true"
SKYRL_PPO = (
    "python3 -m skyrl.train.entrypoints.main_base generator.inference_engine.num_engines=8 trainer.critic.model.path=a "
    + " ".join(f"trainer.placement.{role}_num_gpus_per_node=8" for role in ("policy", "ref", "critic"))
)
SIZES = [
    ("the-actors", f"{PPO} {MEGATRON}", (2, 1, 1), (2, 1, 1), (1, 1, 1)),
    ("critic", f"{PPO} {MEGATRON} critic.megatron.{{tensor,pipeline}}_model_parallel_size=2", (2,), (2,), (2, 2)),
    ("reference", f"{PPO} {MEGATRON} {A}ref.megatron.tensor_model_parallel_size=4", (2,), (4,), (1,)),
    ("ulysses", f"{PPO} {A}actor.ulysses_sequence_parallel_size=4", (1, 1, 4), (1, 1, 4), (1, 1, 1)),
    (
        "own-ulysses",
        f"{PPO} {A}{{actor,ref}}.ulysses_sequence_parallel_size=2 critic.ulysses_sequence_parallel_size=4",
        *((1, 1, 2), (1, 1, 2), (1, 1, 4)),
    ),
    ("engine-section", f"{PPO} critic.fsdp.ulysses_sequence_parallel_size=8", (1,), (1,), (1, 1, 8)),
    (
        "skyrl",
        f"{SKYRL_PPO} trainer.policy.sequence_parallel_size=4 trainer.critic.sequence_parallel_size=2",
        *((1, 1, 4), (1, 1, 1), (1, 1, 2)),
    ),
]


@pytest.mark.parametrize(
    ("command", "actor", "reference", "critic"), [one[1:] for one in SIZES], ids=[one[0] for one in SIZES]
)
def test_each_model_has_the_sizes_of_its_own_keys(command, actor, reference, critic, tmp_path):
    parts = {part.name: part.parallel for part in plan_of(tmp_path, command).components}
    sizes = {name: (part.tensor, part.pipeline, part.context) for name, part in parts.items() if name != "rollout"}
    expected = {"actor": actor, "reference": reference, "critic": critic}
    assert sizes == {name: (*given, 1, 1)[:3] for name, given in expected.items()}


@pytest.mark.parametrize(
    ("command", "key"),
    [
        (
            f"{PPO} {MEGATRON} critic.megatron.tensor_model_parallel_size=3",
            "critic.megatron.tensor_model_parallel_size",
        ),
        (f"{PPO} {A}ref.ulysses_sequence_parallel_size=3", f"{A}ref.ulysses_sequence_parallel_size"),
        (f"{SKYRL_PPO} trainer.critic.sequence_parallel_size=3", "trainer.placement.critic_num_gpus_per_node"),
    ],
    ids=["critic", "reference", "skyrl"],
)
def test_sizes_of_each_model_divide_its_devices(command, key, tmp_path):
    assert codes(tmp_path, command)["RST-N056"].where.key_path == key


COLOCATED = "python3 train.py --colocate --actor-num-gpus-per-node 8 --rollout-num-gpus-per-engine"
APART = "python3 train.py --actor-num-nodes 1 --rollout-num-gpus-per-engine"


@grid(
    ("command", "is_cut"),
    [
        (f"{COLOCATED} 12 --actor-num-nodes 3", True),
        (f"{COLOCATED} 6 --actor-num-nodes 2", True),
        (f"{COLOCATED} 6 --actor-num-nodes 1", False),
        (f"{COLOCATED} 16 --actor-num-nodes 2", False),
        (f"{APART} 16 --actor-num-gpus-per-node 4 --rollout-num-gpus 16", True),
        (f"{APART} 16 --actor-num-gpus-per-node 8 --rollout-num-gpus 16", False),
        (f"{APART} 2 --actor-num-gpus-per-node 4 --rollout-num-gpus 8", False),
        (f"{VERL} trainer.nnodes=3 {TENSOR}=6", True),
        (f"{VERL} trainer.nnodes=1 {TENSOR}=6", False),
        (f"{VERL} trainer.nnodes=4 {TENSOR}=16", False),
        (f"{VERL} trainer.nnodes=3 {TENSOR}=12", True),
    ],
)
def test_engines_that_a_nodes_end_cuts_are_named(command, is_cut, tmp_path):
    assert ("RST-N056" in codes(tmp_path, command)) == is_cut


def test_tokens_of_slime_count_beside_dynamic_batches_only(tmp_path):
    command = "python3 train.py --colocate --actor-num-nodes 1 --max-tokens-per-gpu 4096"
    assert plan_of(tmp_path, f"{command} --use-dynamic-batch-size")["actor"].model.tokens == 4096
    assert plan_of(tmp_path, command)["actor"].model.tokens is None
    of_context = f"{command} --use-dynamic-batch-size --context-parallel-size 2"
    assert plan_of(tmp_path, of_context)["actor"].model.tokens == 2 * 4096
    assert codes(tmp_path, command)["RST-N068"].where.key_path == "--max-tokens-per-gpu"


@pytest.mark.parametrize("sign", ["", "--eval-num-gpus 4"], ids=["slime", "miles"])
def test_fsdp_is_a_backend_of_miles_and_of_older_slimes(sign, tmp_path):
    command = f"python3 train.py --colocate --actor-num-nodes 1 {sign}"
    assert "RST-N087" not in codes(tmp_path, command)
    found = codes(tmp_path, f"{command} --train-backend fsdp").get("RST-N087")
    assert (found is None) == bool(sign)
    assert found is None or found.where.key_path == "--train-backend"
    assert plan_of(tmp_path, f"{command} --train-backend fsdp")["actor"].model.strategy == "fsdp"


@grid(
    ("text", "code", "words"),
    [
        (f"exit 3\n{VERL}", "RST-C038", "it ends in line 2, by its own exit"),
        (
            "set -x\nsrun -N 2 deepspeed --num_gpus 2 --module my.tune --lr 1",
            "RST-C038",
            "it starts 1 program: srun my.tune",
        ),
        (
            'A=$B\ncat x.py\n. no.sh\npython3 "$A/run.py" go',
            "RST-C038",
            "it starts 1 program: python3 $B/run.py",
        ),
        (f"show it\nexit 3\n{VERL}", "RST-C038", "it starts 1 command: show it; it ends in line 3, by its own exit"),
        (f"{SLIME} --rollout-num-gpus --rollout-num-gpus-per-engine 4", "RST-C024", "has no value; it must be"),
        (f"export CUDA_VISIBLE_DEVICES=4,5\n{SLIME} --colocate", "RST-N082", "shows 2 GPUs to 8 processes"),
    ],
)
def test_a_mistake_in_a_script_is_said_as_it_is(text, code, words, tmp_path):
    finding = codes(tmp_path, text)[code]
    assert words in f"{finding.what} {finding.why}"


@grid(
    "text",
    [
        'for one in "$@"; do O="$O $one"; done',
        'for one in "$@"; do O+=" $one"; done',
        "[[ -n $1 ]] && O=trainer.nnodes=2",
        "read O <<< $1",
        "O=trainer.nnodes=$((${#1} / 7))",
        "O=$(cat <<END\n$1\nEND\n)",
    ],
    ids=["loop", "appends", "condition", "input", "arithmetic", "text"],
)
def test_arguments_of_a_script_are_used_wherever_it_reads_them(text, tmp_path):
    file = script_with(tmp_path, f"{text}\npython3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo $O")
    findings = Findings()
    job = read_job(load(file, ("trainer.nnodes=2",), findings), findings)
    assert job.num_nodes == 2 and "RST-C043" not in {finding.code for finding in findings.found}


def test_arguments_of_a_script_that_is_not_closed_may_be_read(tmp_path):
    file = script_with(tmp_path, f'if [ "$1" = x ]; then\n{VERL}')
    with pytest.raises(ConfigError) as caught:
        roost.plan(file, overrides=["x"])
    assert {finding.code for finding in caught.value.findings} == {"RST-C037"}


def test_a_script_of_python_is_no_config(tmp_path):
    (tmp_path / "train.py").write_text("args = {a: b: c}\n")
    with pytest.raises(ConfigError) as caught:
        roost.plan(tmp_path / "train.py")
    (error,) = caught.value.findings
    assert "is a Python script" in error.what and "the shell script that starts it" in error.fix


def test_a_finding_about_engines_names_a_flag_that_is_there(tmp_path):
    found = codes(tmp_path, "python3 train.py --colocate --actor-num-nodes 2 --rollout-num-gpus-per-engine 16")
    assert found["RST-P032"].where.key_path == "--rollout-num-gpus-per-engine"


def test_keys_of_megatron_need_verls_config_of_it(tmp_path):
    """As verl's Hydra, which knows no key megatron in its usual config, whatever actor.strategy says."""
    key = f"{A}actor.megatron.tensor_model_parallel_size"
    sizes = f"{A}actor.strategy=megatron {key}=2"
    assert codes(tmp_path, f"{PPO} {sizes}")["RST-N068"].where.key_path == key
    assert codes(tmp_path, f"{PPO} critic.megatron.param_offload=True")["RST-N068"].where.key_path.startswith("critic")
    accepted = (
        "model_engine=megatron",
        "--config-name=ppo_megatron_trainer",
        "actor@actor_rollout_ref.actor=m",
        "$(cat more)",
    )
    for extra in accepted:
        assert "RST-N068" not in codes(tmp_path, f"{PPO} {sizes} {extra}"), extra


def test_memory_of_the_critic_follows_its_own_keys(tmp_path):
    keys = f"{A}model.lora_rank=32 {A}actor.fsdp_config.fsdp_size=2 {A}actor.fsdp_config.param_offload=true"
    own = "critic.model.lora_rank=8 critic.fsdp.fsdp_size=4 critic.fsdp.param_offload=false"
    for extra, rank, shard, offloads in (("", None, None, ("weight",)), (own, 8, 4, ())):
        critic = next(part for part in plan_of(tmp_path, f"{PPO} {keys} {extra}").components if part.name == "critic")
        assert (critic.model.lora_rank, critic.parallel.shard, critic.model.offloads) == (rank, shard, offloads)


def test_verl_config_file_of_the_user(tmp_path):
    own = "trainer: {nnodes: 3}\nactor_rollout_ref: {rollout: {tensor_model_parallel_size: 8}}\n"
    command = f"{VERL} --config-path=. --config-name=mine trainer.n_gpus_per_node=8"
    plan = plan_of(tmp_path, command, mine_yaml=own)
    assert processes_of(plan)["rollout"] == "3 x 8 on 0-23"


@pytest.mark.parametrize(
    ("command", "place"),
    [
        ("-m agents.start --config-path=conf --config-name=mine", "agents/conf"),
        ("-m agents.deep.start --config-path ../../shared --config-name mine.yaml", "shared"),
        ("-m agents.start --config-name=mine", "agents/config"),
        ("tools/start.py -cn mine", "tools/config"),
        ("-m verl.trainer.main_ppo --config-dir=more --config-name=mine", "more"),
        ("-m verl.trainer.main_ppo -cd $PWD/more/inner -cn mine", "more/inner"),
    ],
)
def test_folders_in_which_hydra_looks_for_a_config(command, place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / place / "mine.yaml").write_text("trainer: {nnodes: 3, n_gpus_per_node: 4}\n")
    plan = plan_of(tmp_path, f"python3 {command} actor_rollout_ref.rollout.tensor_model_parallel_size=4")
    assert processes_of(plan)["rollout"] == "3 x 4 on 0-11"


@pytest.mark.parametrize(
    ("program", "has_file", "is_named"),
    [("-m agents.start", True, False), ("agents/start.py", True, False), ("-m agents.start", False, True)],
)
def test_a_program_of_a_project_built_on_verl(program, has_file, is_named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if has_file:
        (tmp_path / "agents" / "conf").mkdir(parents=True)
        (tmp_path / "agents" / "conf" / "turns.yaml").write_text("algorithm: {adv_estimator: rloo}\n")
        main = '@hydra.main(version_base=None, config_path="conf", config_name="turns")\n'
        (tmp_path / "agents" / "start.py").write_text(f"import hydra\n{main}def main(config): ...\n")
    command = f"python -u {program} trainer.nnodes=2 +actor_rollout_ref.model.lora.rank=8"
    plan = plan_of(tmp_path, command)
    assert processes_of(plan)["actor"] == "16 x 1 on 0-15"
    assert ("critic" not in processes_of(plan)) == has_file
    assert ("RST-N060" in codes(tmp_path, command)) == is_named


@pytest.mark.parametrize(("program", "is_refused"), [("verl.trainer.main_ppo", True), ("agents.train", False)])
def test_a_batch_that_verls_own_trainer_asserts(program, is_refused, tmp_path):
    command = f"python -m {program} data.train_batch_size=1 actor_rollout_ref.rollout.n=1"
    assert ("RST-N088" in codes(tmp_path, command)) == is_refused


def test_engines_of_a_project_built_on_verl_with_nodes_of_their_own(tmp_path):
    command = "python3 -m main_distill trainer.n_gpus_per_node=4 rollout.n_gpus_per_node=2 rollout.nnodes=1"
    plan = plan_of(tmp_path, f"{command} actor_rollout_ref.rollout.tensor_model_parallel_size=1")
    assert (processes_of(plan)["actor"], processes_of(plan)["rollout"]) == ("4 x 1 on 0-3", "2 x 1 on 4-5")


def test_a_yaml_of_verl_is_recognised(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text("actor_rollout_ref: {rollout: {tensor_model_parallel_size: 4}}\nalgorithm: {adv_estimator: grpo}\n")
    assert processes_of(roost.plan(file)) == {"actor": "8 x 1 on 0-7", "rollout": "2 x 4 on 0-7"}


def test_engines_sleep_beside_the_learner(tmp_path):
    plan = plan_of(tmp_path, f"{VERL}")
    assert {held.decision.value for held in plan.residency.classes} == {"sleep"}
    plan = plan_of(tmp_path, f"{VERL} actor_rollout_ref.rollout.free_cache_engine=False")
    assert {held.decision.value for held in plan.residency.classes} == {"keep"}


@grid(
    ("script", "where"),
    [
        pytest.param(f"ray start --head --num-cpus=16\n{VERL}", (2, "ray_start.num_cpus"), id="start"),
        pytest.param(f"{VERL} ray_kwargs.ray_init.num_cpus=23", (2, "ray_kwargs.ray_init.num_cpus"), id="init"),
        pytest.param(
            f'#SBATCH --cpus-per-task=8\nsrun -N1 ray start --num-cpus "$SLURM_CPUS_PER_TASK" --block &\n{VERL}',
            (3, "ray_start.num_cpus"),
            id="slurm",
        ),
        pytest.param(
            f"ray start --head --num-cpus=0\nray start --num-cpus=16\n{VERL}", (3, "ray_start.num_cpus"), id="head"
        ),
        pytest.param(f"{VERL} ray_kwargs.ray_init.num_cpus=24", None, id="enough"),
        pytest.param(f"{VERL} ray_kwargs.ray_init.num_cpus=null", None, id="null"),
        pytest.param(f"ray start --num-cpus=$(nproc)\n{VERL}", None, id="unknown"),
        pytest.param(f"ray start --head --num-cpus 4\nray start --address $HEAD\n{VERL}", None, id="workers"),
        pytest.param(f"{VERL} trainer.n_gpus_per_node=2 ray_kwargs.ray_init.num_cpus=6", None, id="narrow"),
    ],
)
def test_ray_needs_three_cpus_for_each_gpu_of_verl(script, where, tmp_path):
    found = codes(tmp_path, script).get("RST-N089")
    assert (None if found is None else (found.where.line, found.where.key_path)) == where


@grid(
    ("script", "name", "line"),
    [
        pytest.param('if [ "$NODE_RANK" = 0 ]; then\nJOB\nelse\nray start --address x\nfi', "NODE_RANK", 2, id="if"),
        pytest.param('cd .\n[[ "$SLURM_NODEID" == "0" ]] && JOB', "SLURM_NODEID", 3, id="and"),
        pytest.param('case "$RANK" in 0) JOB;; *) sleep 9;; esac', "RANK", 2, id="case"),
        pytest.param('R=$TASK\nif [ "$R" != 0 ]; then exit 0; fi\nJOB', "TASK", 3, id="exit"),
        pytest.param('if [ "$1" = train ]; then\nJOB\nfi', "$1", 2, id="argument"),
        pytest.param('if [ "${RANK:-1}" = 0 ]; then\nJOB\nfi', "RANK", 2, id="default"),
    ],
)
def test_a_script_whose_job_waits_for_a_variable_says_which(script, name, line, tmp_path):
    script = script.replace("JOB", VERL)
    found = codes(tmp_path, script)["RST-C038"]
    assert f"looks at {name}, which has no value" in found.why
    assert found.where.line == line
    fix = "give the script its arguments: roost plan SCRIPT -- ..." if name == "$1" else f"give {name}=... before roost"
    assert found.fix.startswith(f"{fix}, or ")


def test_conditions_on_variables_with_a_value_are_not_named(tmp_path):
    found = codes(tmp_path, f'RANK=\nif [ "$RANK" = 0 ]; then\n{VERL}\nfi')["RST-C038"]
    assert (found.why, found.where.line) == ("it starts nothing", None)


@pytest.mark.parametrize(
    ("flags", "is_narrow"),
    [
        ("--actor-num-nodes 1 --actor-num-gpus-per-node 4 --colocate", True),
        ("--actor-num-nodes 2 --actor-num-gpus-per-node 4 --rollout-num-gpus 8", True),
        ("--actor-num-nodes 2 --actor-num-gpus-per-node 4 --rollout-num-gpus 8 --num-gpus-per-node 4", False),
        ("--actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4", False),
        ("--actor-num-nodes 2 --actor-num-gpus-per-node 4 --debug-train-only", False),
        ("--actor-num-nodes 2 --actor-num-gpus-per-node 8 --rollout-num-gpus 8", False),
    ],
)
def test_engines_of_slime_take_nodes_to_have_8_gpus(flags, is_narrow, tmp_path):
    assert ("RST-N061" in codes(tmp_path, f"python3 train.py {flags}")) is is_narrow


NARROW = {"nodes": [{"count": 4, "accelerators": 4}]}
OF_FOUR = "trainer.nnodes=2 trainer.n_gpus_per_node=4 rollout.nnodes=2 rollout.n_gpus_per_node=4"


@pytest.mark.parametrize(
    ("command", "processes"),
    [
        (f"{VERL} {OF_FOUR}", {"actor": "8 x 1 on 0-7", "rollout": "4 x 2 on 8-15"}),
        (
            f"{SKYRL} trainer.placement.colocate_all=false trainer.placement.policy_num_gpus_per_node=4 "
            "trainer.placement.policy_num_nodes=2 generator.inference_engine.num_engines=8",
            {"actor": "8 x 1 on 0-7", "rollout": "8 x 1 on 8-15"},
        ),
    ],
    ids=["verl", "skyrl"],
)
def test_pools_are_planned_on_the_machines_that_are_known(command, processes, tmp_path):
    file = script_with(tmp_path, command)
    assumed = roost.plan(file)  # on two machines of 8
    assert "RST-N065" in {note.code for note in assumed.notes}
    assert processes_of(assumed)["actor"] == "8 x 1 on 0-3,8-11"
    for known in ({"inventory": NARROW}, {"accelerators_per_node": 4}):
        plan = roost.plan(file, **known)
        assert (plan.inventory.num_nodes, processes_of(plan)) == (4, processes)
        assert "RST-N065" not in {note.code for note in plan.notes}


def test_mappings_on_the_command_line_are_merged_as_hydra_does(tmp_path):
    command = f"{VERL} trainer.nnodes=2 'trainer={{n_gpus_per_node:4,logger:[console]}}'"
    command += " '+reward.reward_model={enable: true, rollout: {tensor_model_parallel_size: 1}}' '+empty={}'"
    found = {"actor": "8 x 1 on 0-7", "rollout": "4 x 2 on 0-7", "reward": "8 x 1 on 0-7"}
    plan = plan_of(tmp_path, command)
    assert (plan.inventory.num_nodes, processes_of(plan)) == (2, found)


@pytest.mark.parametrize("value", ["{n_gpus_per_node:$WIDTH}", "{n_gpus_per_node:$(nvidia-smi -L | wc -l)}"])
def test_a_mapping_with_an_unknown_value_for_placing_is_an_error(value, tmp_path):
    finding = codes(tmp_path, f'{VERL} trainer.nnodes=2 "trainer={value}"')["RST-C022"]
    assert (finding.where.line, finding.where.key_path) == (2, "trainer")
    training = f'{VERL} "data.apply_chat_template_kwargs={{enable_thinking:$THINK}}"'
    assert "RST-C022" not in codes(tmp_path, training)


@pytest.mark.parametrize(
    ("keys", "section"),
    [
        ("reward.reward_model.enable=True reward.reward_model.enable_resource_pool=True", "reward.reward_model"),
        (
            "reward_model.enable=True reward_model.enable_resource_pool=True reward_model.nnodes=0",
            "reward_model",
        ),
        ("distillation.enabled=True", "distillation"),
    ],
)
def test_a_pool_of_verl_without_nodes_is_an_error(keys, section, tmp_path):
    finding = codes(tmp_path, f"{VERL} {keys}")["RST-N070"]
    assert (finding.where.key_path, finding.fix) == (f"{section}.nnodes", f"write {section}.nnodes=1")
    assert "RST-N070" not in codes(tmp_path, f"{VERL} {keys.replace('nnodes=0', '')} {section}.nnodes=1")


@pytest.mark.parametrize(
    ("extra", "sleeps"),
    [
        ("rollout.nnodes=1", False),
        ("rollout.nnodes=1 async_training.use_dynamic_resource_scheduling=True", True),
        ("rollout.nnodes=1 reward.reward_model.enable=True", True),
        (
            "trainer.v1.trainer_mode=separate_async actor_rollout_ref.rollout.nnodes=1 data.train_batch_size=1024 "
            "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
            True,
        ),
    ],
    ids=["own", "lent", "reward-model-on-the-pool", "both"],
)
def test_verl_engines_on_gpus_of_their_own_do_not_sleep(extra, sleeps, tmp_path):
    plan = plan_of(tmp_path, f"{VERL} {extra}")
    assert plan.settings["engines_sleep"] is sleeps
    if not sleeps:
        assert "--offload-rollout" not in convert_plan(plan, Notation.SLIME, Findings()).text
        assert "free_cache_engine" not in convert_plan(plan, Notation.VERL, Findings()).text


def test_experts_of_verl_engines_are_divided(tmp_path):
    sizes = "actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.data_parallel_size=2"
    key = "actor_rollout_ref.rollout.expert_parallel_size"
    plan = plan_of(tmp_path, f"{VERL} {sizes} {key}=4")
    assert {part.name: part.parallel.expert for part in plan.components}["rollout"] == 4
    findings = Findings()
    assert f"{key}=4" in convert_plan(plan, Notation.VERL, findings).text
    assert not [one for one in findings.warnings if "expert" in one.what]
    assert codes(tmp_path, f"{VERL} {sizes} {key}=2")["RST-N056"].fix == f"write {key}=4"
    assert "RST-N056" not in codes(tmp_path, f"{VERL} {sizes} {key}=2 actor_rollout_ref.rollout.name=trtllm")


def test_findings_stand_at_the_line_of_the_argument(tmp_path):
    found = codes(tmp_path, f"{VERL} \\\n  actor_rollout_ref.rollout.tensor_model_parallel_size=3")
    assert found["RST-N055"].where.line == 3
    assert found["RST-N055"].where.column == 3
    assert "8 GPUs % 3" in found["RST-N055"].why


def test_a_reference_of_an_unset_variable_says_how_to_give_it(tmp_path, monkeypatch):
    monkeypatch.delenv("MY_NODES", raising=False)
    found = codes(tmp_path, f"{VERL} trainer.nnodes=$MY_NODES")
    assert found["RST-C022"].fix == "give it: MY_NODES=... before roost"
    assert codes(tmp_path, f"{VERL} trainer.nnodes=$2")["RST-C022"].fix.startswith(
        "give it as argument 2 of the script"
    )
    monkeypatch.setenv("MY_NODES", "2")
    assert processes_of(plan_of(tmp_path, f"{VERL} trainer.nnodes=$MY_NODES"))["actor"] == "16 x 1 on 0-15"


@grid(
    ("default", "fix"),
    [
        ("${COUNT:-$(hostname)}", "give it: COUNT=... before roost"),
        ("${COUNT:=$(hostname)}", "give it: COUNT=... before roost"),
        ("$((${COUNT:-$(hostname)} * 2))", "give it: COUNT=... before roost"),
        ("${1:-$(hostname)}", "give it as argument 1 of the script: roost plan SCRIPT -- ..."),
    ],
    ids=["default", "assigned", "arithmetic", "argument"],
)
def test_a_default_that_is_not_known_is_given_by_its_variable(default, fix, tmp_path, monkeypatch):
    command = f"python3 -m verl.trainer.main_ppo trainer.nnodes={default}"
    (found,) = [each for code, each in codes(tmp_path, command).items() if code == "RST-C022"]
    assert found.fix == fix
    if "argument" not in fix:
        with monkeypatch.context() as patch:
            patch.setenv("COUNT", "2")
            assert plan_of(tmp_path, command).inventory.num_nodes == (4 if "*" in default else 2)


@grid(("declared", "name"), [("${SIZE:-$(nproc)}", "SIZE"), ("$(nproc)*2", "COUNT")], ids=["default", "command"])
def test_a_variable_that_is_declared_a_number_may_be_given(declared, name, tmp_path, monkeypatch):
    command = f"declare -i COUNT={declared}\npython3 -m verl.trainer.main_ppo trainer.nnodes=$COUNT"
    (found,) = [each for code, each in codes(tmp_path, command).items() if code == "RST-C022"]
    assert found.fix == f"give it: {name}=... before roost"
    with monkeypatch.context() as patch:
        patch.setenv(name, "3")
        assert plan_of(tmp_path, command).inventory.num_nodes == 3


def test_an_argument_of_the_script_that_is_not_given(tmp_path):
    missing = codes(tmp_path, f"NODES=$1\n{VERL} trainer.nnodes=$NODES")["RST-C022"]
    stopped = codes(tmp_path, f'NAME=$1\nif [ -z "$NAME" ]; then exit 1; fi\n{VERL}')["RST-C041"]
    for finding in (missing, stopped):
        assert "roost plan SCRIPT -- ..." in finding.fix
    assert "NAME=..." not in stopped.fix


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("python3 -m verl.trainer.main config=a.yaml worker.rollout.n=4", "EasyR1"),
        ("ray job submit -- python3 -m verl.trainer.main config=a.yaml", "EasyR1"),
        ("torchrun --nproc_per_node=2 -m verl.trainer.sft_trainer model.path=m", "supervised training"),
        ("python3 -m verl.trainer.main_generation_server actor_rollout_ref.model.path=m", "generation"),
        ("python3 -u -X dev -m tools.later --size 3", "python3 tools.later"),
    ],
)
def test_why_a_program_is_no_job(command, why, tmp_path):
    assert why in codes(tmp_path, command)["RST-C038"].why


def test_commands_are_shown_up_to_what_is_not_known(tmp_path):
    command = "accelerate launch --config_file acc.yaml --num_processes 4 $(which trl) grpo"
    found = codes(tmp_path, command)["RST-C038"]
    assert found.why.endswith("accelerate launch --config_file acc.yaml --num_processes 4 $(which trl)")


def test_a_script_that_is_too_long_has_the_line_that_is_reached(tmp_path):
    found = codes(tmp_path, "for a in {1..200}; do for b in {1..200}; do\ntrue\ndone; done")["RST-C037"]
    assert found.where.line == 3


def test_a_script_that_would_start_the_job_and_is_not_here(tmp_path):
    found = codes(tmp_path, "export N=2\nbash jobs/later.sh")["RST-C038"]
    assert "jobs/later.sh of line 3 is not here" in found.why
    assert found.fix.startswith("plan from the folder")


def test_what_is_not_needed_may_be_unknown(tmp_path):
    plan = plan_of(tmp_path, f"{VERL} trainer.experiment_name=$(date +%s) data.train_files=$NO_SUCH/x")
    assert not plan.warnings


@pytest.mark.parametrize(
    "line",
    [
        "ps -ef | grep main_ppo | awk '{print $2}' | xargs kill",
        "pgrep -f verl.trainer.main_ppo && exit 1",
        "cp verl/trainer/main_ppo.py /tmp/x",
        "git commit -m main_ppo",
        "sudo pkill -f verl.trainer.main_ppo",
        "python3 tools/warm_up.py verl/trainer/main_ppo.py",
        "python3 -m verl.trainer.main_ppo",
        "python3 tools/merge_shards.py actor_rollout_ref.model.path=m",
        "./later.sh actor_rollout_ref.model.path=m",
    ],
)
def test_a_program_that_is_only_named_is_no_job(line, tmp_path):
    plan = plan_of(tmp_path, f"{line}\n{VERL} trainer.nnodes=4")
    assert processes_of(plan)["actor"] == "32 x 1 on 0-31"


@pytest.mark.parametrize(
    "launcher",
    [
        "python3 -u -m verl.trainer.main_ppo",
        "torchrun --nproc_per_node 8 -m verl.trainer.main_ppo",
        "srun --job-name main_ppo --nodes 4 .venv/bin/python -m verl.trainer.main_ppo",
        "uv run verl/trainer/main_ppo.py",
        "$NO_SUCH_PYTHON -m verl.trainer.main_ppo",
        "$(which python) -m verl.trainer.main_ppo",
        "verl/trainer/main_ppo.py",
        "nohup env A=1 python -m torch.distributed.run --nproc-per-node 8 verl/trainer/main_ppo.py",
    ],
)
def test_a_program_is_started_by_its_path_or_a_launcher(launcher, tmp_path):
    plan = plan_of(tmp_path, f"{launcher} algorithm.adv_estimator=grpo trainer.nnodes=4")
    assert processes_of(plan)["actor"] == "32 x 1 on 0-31"


@pytest.mark.parametrize(("defaults", "is_named"), [("[base, _self_]", True), ("[ppo_trainer, _self_]", False)])
def test_defaults_of_ones_own_config_are_not_passed_over(defaults, is_named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(f"defaults: {defaults}\ntrainer: {{nnodes: 2}}\n")
    assert ("RST-N060" in codes(tmp_path, f"{VERL} --config-path=. --config-name=mine")) == is_named


@pytest.mark.parametrize(
    ("path", "is_missing"), [("/mine/cfg", True), ("config", False), ("/verl/trainer/config/", False)]
)
def test_a_config_with_verls_name_in_another_folder_is_ones_own(path, is_missing, tmp_path):
    found = codes(tmp_path, f"{VERL} --config-path={path} --config-name=ppo_trainer")
    assert ("RST-N060" in found) == is_missing


def test_other_jobs_are_named_once_by_their_lines(tmp_path):
    found = codes(tmp_path, f"{VERL}\nfor n in 2 3 4 5; do\n{VERL} trainer.nnodes=$n\ndone")
    assert found["RST-C044"].why == "others are in line 4"
    found = codes(tmp_path, f"for n in 2 3 4 5; do\n{VERL} trainer.nnodes=$n\ndone")
    assert found["RST-C044"].fix == "plan a copy of the script whose loop has one value"
    assert "RST-C044" not in codes(tmp_path, f"for seed in 1 2 3; do\n{VERL} data.seed=$seed\ndone")
    trl = "--num_processes 4 train_grpo.py --output_dir out"
    for flag in ("--main_process_port $p", "--main-process-port=$p", "--rdzv-endpoint localhost:$p"):
        assert "RST-C044" not in codes(tmp_path, f"for p in 1 2; do\naccelerate launch {flag} {trl}\ndone")
    assert "RST-C044" in codes(tmp_path, "for n in 2 4; do\naccelerate launch --num_processes $n train_grpo.py\ndone")


def test_a_reference_to_an_unknown_value_says_what_is_not_known(tmp_path, monkeypatch):
    monkeypatch.delenv("MY_NODES", raising=False)
    (tmp_path / "run.sh").write_text(
        f"{VERL} trainer.nnodes=${{MY_NODES}} trainer.n_gpus_per_node='${{trainer.nnodes}}'"
    )
    with pytest.raises(ConfigError) as caught:
        roost.plan(tmp_path / "run.sh")
    assert {finding.why for finding in caught.value.findings} == {"MY_NODES is not set"}


@pytest.mark.parametrize(
    ("command", "key"),
    [
        ("python3 -m openrlhf.cli.train_ppo_ray --actor.num_nodes $MY_NODES --vllm.num_engines 8", "--actor.num_nodes"),
        ("python3 train.py --actor-num-nodes $MY_NODES --colocate", "--actor-num-nodes"),
    ],
)
def test_a_flag_before_a_variable_that_is_not_set(command, key, tmp_path, monkeypatch):
    monkeypatch.delenv("MY_NODES", raising=False)
    found = codes(tmp_path, command)["RST-C022"]
    assert (found.where.path, found.why) == ((key,), "MY_NODES is not set")
    assert "RST-C024" not in codes(tmp_path, command)


def test_a_switch_before_a_variable_that_is_not_set(tmp_path, monkeypatch):
    monkeypatch.delenv("MORE", raising=False)
    plan = plan_of(tmp_path, f"{SLIME} --actor-num-gpus-per-node 8 --rollout-num-gpus-per-engine 8 --colocate $MORE")
    assert processes_of(plan)["rollout"] == "1 x 8 on 0-7"


def test_a_value_in_doubt_is_not_to_be_given_by_its_own_name(tmp_path):
    found = codes(tmp_path, f"grep -q H200 gpus && NNODES=4\n{VERL} trainer.nnodes=$NNODES")
    assert "condition in line 2" in found["RST-C022"].why
    assert found["RST-C022"].fix.startswith("write the value in the script")


@pytest.mark.parametrize(("available", "is_refused"), [(8, False), (2, True)])
def test_a_pool_on_one_node_need_not_fill_it(available, is_refused, tmp_path):
    file = tmp_path / "run.sh"
    file.write_text(f"{VERL} trainer.n_gpus_per_node=4\n")
    machines = {"nodes": [{"accelerators": available}]}
    if is_refused:
        with pytest.raises(ConfigError, match="n_gpus_per_node"):
            roost.plan(file, machines)
    else:
        assert processes_of(roost.plan(file, machines)) == {"actor": "4 x 1 on 0-3", "rollout": "2 x 2 on 0-3"}


LOADED = """
import sys, roost
roost.plan(sys.argv[1])
print(*sorted(name.rpartition(".")[2] for name in sys.modules if name.startswith("roost.config.frameworks.")))
"""


@pytest.mark.parametrize("framework", ["verl", "slime", "openrlhf"])
def test_only_the_framework_of_the_job_is_loaded(framework, tmp_path):
    script = script_of(tmp_path, framework, JOBS[framework][0])
    ran = subprocess.run([sys.executable, "-c", LOADED, script], capture_output=True, text=True, check=True)
    loaded = set(ran.stdout.split()) & {*(entry.module for entry in ENTRIES), "verl_train", "trl_train"}
    assert loaded == {framework}


def test_the_fix_of_engines_by_verls_default_size_is_an_override_that_works(tmp_path):
    command = f"{VERL} trainer.n_gpus_per_node=1"
    finding = codes(tmp_path, command)["RST-N057"]
    assert finding.where.line == 2
    assert "verl's default of tensor_model_parallel_size is 2" in finding.why
    override = finding.fix.removeprefix("write ").split(",")[0]
    assert override == "actor_rollout_ref.rollout.tensor_model_parallel_size=1"
    assert processes_of(plan_of(tmp_path, f"{command} {override}"))["rollout"] == "1 x 1 on 0"
    assert "default" not in codes(tmp_path, f"{command} {override.replace('=1', '=4')}")["RST-N057"].why


STRAY = ("trainer.nnodes= 2", "trainer.nnodes = 2", "trainer.nnodes: 2", "--trainer.nnodes=2", "trainer.nnodes 2")


@pytest.mark.parametrize("words", STRAY)
def test_words_that_are_no_overrides(words, tmp_path):
    found = codes(tmp_path, f"{VERL} \\\n  {words}")["RST-C051"]
    assert (found.where.line, found.severity.value) == (3, "error")
    assert found.what.removesuffix(" is not an override").strip("'\"") in words


@pytest.mark.parametrize("command", [VERL, f"{SLIME} --colocate", f"{SLIME} --colocate --lr 1"])
def test_a_second_file_is_no_argument_of_the_job(command, tmp_path):
    file = tmp_path / "run.sh"
    file.write_text(f'{command} "$@"\n')
    with pytest.raises(ConfigError, match=r"grpo\.yaml"):
        roost.plan(file, overrides=["grpo.yaml"])


def test_a_flag_of_the_command_line_may_have_several_values(tmp_path):
    file = tmp_path / "run.sh"
    file.write_text(f'{SLIME} --colocate "$@"\n')
    roost.plan(file, overrides=["--eval-prompt-data", "aime", "aime.jsonl"])


@pytest.mark.parametrize(
    ("words", "is_empty"),
    [
        ("trainer.nnodes=", True),
        ("trainer.nnodes=$EMPTY", True),
        ("trainer.nnodes= trainer.nnodes=2", False),
        ("trainer.experiment_name=", False),
        ("trainer.nnodes=null", False),
    ],
)
def test_a_key_of_the_placement_without_a_value(words, is_empty, tmp_path):
    assert ("RST-C052" in codes(tmp_path, f"EMPTY=\n{VERL} {words}")) == is_empty


@pytest.mark.parametrize(
    ("text", "severity", "why"),
    [
        (f"{VERL} \\ \n  trainer.nnodes=2", "error", "a blank stands after the \\ in line 2"),
        (f"{VERL}\n  trainer.nnodes=2", "error", "a comment"),
        (f"{VERL}\n  trainer.test_freq=2", "warning", "a comment"),
    ],
    ids=["blank", "placing", "training"],
)
def test_arguments_after_the_end_of_the_command(text, severity, why, tmp_path):
    found = codes(tmp_path, text)
    assert found["RST-C045"].severity.value == severity
    assert found["RST-C045"].why.startswith(why)
    assert "RST-C051" not in found


@pytest.mark.parametrize(
    ("before", "extra", "is_short"),
    [
        ("export CUDA_VISIBLE_DEVICES=0,1; ", "", True),
        ("CUDA_VISIBLE_DEVICES=0,1 ", "trainer.n_gpus_per_node=2", False),
        ("CUDA_VISIBLE_DEVICES=0,1 ray job submit -- ", "", False),
        ("CUDA_VISIBLE_DEVICES=0,1 ", "trainer.nnodes=2", False),
    ],
)
def test_visible_devices_of_a_verl_job_are_enough(before, extra, is_short, tmp_path):
    assert ("RST-N082" in codes(tmp_path, f"{before}{VERL} {extra}")) == is_short


@pytest.mark.parametrize(
    ("flags", "processes", "offloads", "sleeps"),
    [
        ("--rollout-num-gpus 4 --load-debug-rollout-data x.pt", {"actor": "8 x 1 on 0-7"}, (), None),
        ("--colocate --debug-rollout-only", {"rollout": "8 x 1 on 0-7"}, None, False),
        (
            "--colocate --advantage-estimator ppo --no-offload-train",
            {"actor": "8 x 1 on 0-7", "critic": "8 x 1 on 0-7", "rollout": "8 x 1 on 0-7"},
            *(("weight", "grad", "optimizer"), True),
        ),
    ],
    ids=["saved-rollouts", "rollouts-only", "critic"],
)
def test_flags_of_slime_that_follow_from_others(flags, processes, offloads, sleeps, tmp_path):
    plan = plan_of(tmp_path, f"{SLIME} {flags}")
    actor = next((part.model.offloads for part in plan.components if part.name == "actor"), None)
    assert (processes_of(plan), actor, plan.settings.get("engines_sleep")) == (processes, offloads, sleeps)


@pytest.mark.parametrize(
    ("flags", "sizes", "spans"),
    [
        ("", (16, 1, 1), True),
        ("--sglang-pp-size 2", (8, 2, 1), False),
        ("--sglang-pipeline-parallel-size 2", (8, 2, 1), False),
        ("--sglang-ep-size 16", (16, 1, 16), True),
        ("--sglang-enable-dp-attention --sglang-dp-size 2", (8, 1, 16), False),
        ("--sglang-enable-dp-attention --sglang-dp-size 16 --sglang-ep-size 16", (1, 1, 16), False),
        ("--sglang-enable-dp-attention --sglang-dp-size 4 --sglang-pp-size 2", (2, 2, 8), False),
    ],
)
def test_stages_and_copies_of_an_engine_of_slime_stay_on_a_node(flags, sizes, spans, tmp_path):
    command = f"{SLIME} --actor-num-nodes 2 --colocate --rollout-num-gpus-per-engine 16"
    plan = plan_of(tmp_path, f"{command} {flags}")
    rollout = next(part for part in plan.components if part.name == "rollout")
    assert (rollout.parallel.tensor, rollout.parallel.pipeline, rollout.parallel.expert) == sizes
    assert [finding.code for finding in plan.warnings].count("RST-P032") == spans
    again = plan_of(tmp_path, convert_plan(plan, Notation.SLIME, Findings()).text)
    assert next(part for part in again.components if part.name == "rollout").parallel == rollout.parallel


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ("--sglang-pp-size 3", "RST-N056"),
        ("--sglang-enable-dp-attention --sglang-dp-size 3", "RST-N056"),
        ("--sglang-dp-size 2", "RST-N068"),
    ],
)
def test_sizes_that_an_engine_of_slime_refuses(flags, code, tmp_path):
    command = f"{SLIME} --colocate --rollout-num-gpus-per-engine 8"
    assert code in codes(tmp_path, f"{command} {flags}")


def test_an_asynchronous_job_of_slime_has_engines_of_its_own(tmp_path):
    found = codes(tmp_path, f"{SLIME.replace('train.py', 'train_async.py')} --colocate")
    assert "RST-P034" not in found
    assert (found["RST-N058"].where.key_path, found["RST-N058"].fix) == (
        *("--colocate", "start train.py, or write --rollout-num-gpus 8 instead"),
    )


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (f"{VERL} trainer.n_gpus_per_node=$(f) actor_rollout_ref.rollout.tensor_model_parallel_size=16", "RST-C022"),
        (f"{VERL} trainer.nnodes=$(f) rollout.nnodes=2 rollout.n_gpus_per_node=4", "RST-C022"),
        (f"{VERL} trainer.n_gpus_per_node=$(f) data.train_batch_size=9", "RST-C022"),
        ("torchrun --nproc-per-node=$(f) train_grpo.py --use_vllm --vllm_tensor_parallel_size 4", "RST-C022"),
        (
            "uv run examples/run_grpo.py --config no.yaml cluster.num_nodes=2 "
            "policy.generation.vllm_cfg.tensor_parallel_size=4",
            "RST-N060",
        ),
    ],
)
def test_numbers_that_are_not_known_are_not_compared(command, code, tmp_path):
    file, findings = script_with(tmp_path, command), Findings()
    read_job(load(file, (), findings), findings)
    about_placement = [finding.code for finding in findings.found if finding.code[4] in "CN"]
    assert about_placement == [code]


SKYRL = "python3 -m skyrl.train.entrypoints.main_base trainer.algorithm.use_kl_loss=false"
OPENRLHF = "python3 -m openrlhf.cli.train_ppo_ray --vllm.num_engines 8 --train.colocate_all"
NEMO = {"cluster": {"num_nodes": 1, "gpus_per_node": 8}, "policy": {"generation": {"backend": "vllm"}}}
AREAL = {"rollout": {"backend": "sglang:d4"}, "actor": {"backend": "fsdp:d4"}}
PRIME = {"deployment": {"num_train_gpus": 4, "num_infer_gpus": 4}, "trainer": {}, "orchestrator": {}, "inference": {}}


def wrong_keys(file):
    findings = Findings()
    read_job(load(file, (), findings), findings)
    return {found.where.key_path: found.why for found in findings.found if found.code == "RST-C023"}


@grid(
    ("command", "key", "meant"),
    [
        (
            f"{VERL} actor_rollout_ref.rollout.tensor_parallel_size=8",
            "tensor_parallel_size",
            "tensor_model_parallel_size",
        ),
        (f"{VERL} actor_rollout_ref.rollout.tp_size=8", "tp_size", "tensor_model_parallel_size"),
        (f"{VERL} ++trainer.num_nodes=4", "trainer.num_nodes", "trainer.nnodes"),
        (f"{VERL} nnodes=4", "nnodes", "trainer.nnodes"),
        (f"{SKYRL} trainer.placement.num_nodes=2", "num_nodes", "trainer.placement.policy_num_nodes"),
        (f"{SKYRL} trainer.placement.num_gpus_per_node=8", "num_gpus_per_node", "placement.policy_num_gpus_per_node"),
        (f"{SKYRL} generator.inference_engine.tp=2", "tp", "generator.inference_engine.tensor_parallel_size"),
        (f"{OPENRLHF} --vllm.tp 2", "--vllm.tp", "--vllm.tensor_parallel_size"),
        (f"{OPENRLHF} --num_nodes 4", "--num_nodes", "--actor.num_nodes"),
        (f"{SLIME} --colocate --num-nodes 4", "--num-nodes", "--actor-num-nodes"),
        (f"{SLIME} --colocate --rollout-tp 4", "--rollout-tp", "--rollout-num-gpus-per-engine"),
        ("torchrun train_grpo.py --use_vllm --vllm_tp 2", "--vllm_tp", "--vllm_tensor_parallel_size"),
    ],
)
def test_a_key_of_another_name_does_not_place(command, key, meant, tmp_path):
    ((written, why),) = wrong_keys(script_with(tmp_path, command)).items()
    assert written.endswith(key)
    assert why.startswith("did you mean ")
    assert why.endswith(f"{meant}?")


@grid(
    ("config", "section", "key", "meant"),
    [
        (NEMO, "policy.generation.colocated", "enable", "enabled"),
        (NEMO, "cluster", "n_gpus", "cluster.gpus_per_node"),
        (AREAL, "cluster", "num_nodes", "cluster.n_nodes"),
        (AREAL, "rollout", "tp", "rollout.backend"),
        (PRIME, "inference", "tp", "inference.vllm.tensor_parallel_size"),
        (PRIME, "deployment", "colocate", ""),
    ],
)
def test_a_key_of_another_name_in_a_config_does_not_place(config, section, key, meant, tmp_path):
    values = json.loads(json.dumps(config))
    inner = values
    for part in section.split("."):
        inner = inner.setdefault(part, {})
    inner[key] = 2
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(values))
    expected = f"did you mean {meant}?" if meant else "prime-rl reads no such key"
    assert wrong_keys(tmp_path / "job.yaml") == {f"{section}.{key}": expected}


@grid(
    "command",
    [
        f"{VERL} +trainer.num_nodes=4 search.num_gpus=1 actor_rollout_ref.actor.torchtitan.tensor_parallel_size=2",
        f"{VERL} actor_rollout_ref.actor.megatron.override_transformer_config.context_parallel_size=2",
        f"{VERL} +actor_rollout_ref.rollout.engine_kwargs.vllm.data_parallel_size=2 ray_kwargs.ray_init.num_gpus=8",
        f"{VERL} actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=9 trainer.device=npu",
        f"{VERL} actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=2",
        f"{SLIME} --colocate --sglang-moe-dense-tp-size 1 --tp-comm-overlap --num-layers-per-virtual-pipeline-stage 2",
        f"{SLIME} --colocate --critic-num-nodes 1 --sequence-parallel --sglang-enable-dp-lm-head --allgather-cp",
        f"{OPENRLHF} --rollout.max_tokens_per_gpu 4096",
        f"{SKYRL} trainer.micro_forward_batch_size_per_gpu=2 environment.search.num_gpus=1 "
        "trainer.placement.colocate_critic_reward=false",
    ],
)
def test_keys_that_only_sound_like_placing_are_not_reported(command, tmp_path):
    assert wrong_keys(script_with(tmp_path, command)) == {}


INNER = VERL + " trainer.nnodes=2"


@pytest.mark.parametrize(
    "text",
    [
        f'sbatch -N 2 --wrap="{INNER}"',
        f"sbatch <<EOT\n#!/bin/bash\n#SBATCH -N 2\n{INNER}\nEOT",
        f'ssh -p 22 node1 "cd /w && {INNER}"',
        f"ssh node1 <<'EOF'\n{INNER}\nEOF",
        f'tmux new-session -d -s x "{INNER}"',
        f'script -q -c "{INNER}" log.txt',
        f"cat > inner.sh <<'EOT'\n{INNER}\nEOT\nsbatch inner.sh",
        f"cat <<'EOT' > inner.sh\n{INNER}\nEOT\nchmod +x inner.sh; ./inner.sh",
    ],
    ids=["wrap", "sbatch", "ssh", "ssh-input", "tmux", "script", "file", "program"],
)
def test_a_job_inside_another_command(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert processes_of(plan_of(tmp_path, text))["actor"] == "16 x 1 on 0-15"


@pytest.mark.parametrize("given", ["docker run --env-file job.env img", "ray job submit --runtime-env job.yaml --"])
def test_a_number_of_nodes_from_a_file_beside_the_script(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inner.sh").write_text(f"{VERL} trainer.nnodes=${{NNODES:-1}}\n")
    command = f"{given} bash inner.sh"
    found = codes(tmp_path, command)["RST-C022"]
    assert found.where.path == ("trainer", "nnodes")
    assert re.fullmatch(r"job\.(env|yaml), which is not here, may give it", found.why)
    assert found.fix == "give it: NNODES=... before roost"
    (tmp_path / "job.env").write_text("NNODES=2\n")
    (tmp_path / "job.yaml").write_text("env_vars: {NNODES: '2'}\n")
    assert processes_of(plan_of(tmp_path, command))["actor"] == "16 x 1 on 0-15"
    (tmp_path / "job.env").unlink()
    (tmp_path / "job.yaml").unlink()
    monkeypatch.setenv("NNODES", "4")
    assert processes_of(plan_of(tmp_path, command))["actor"] == "32 x 1 on 0-31"


def test_a_job_whose_number_the_script_keeps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inner.sh").write_text(f"#!/bin/bash\n{INNER}\n")
    text = "jobid=$(sbatch --parsable inner.sh)\nsbatch --dependency=afterany:$jobid --wrap='python3 report.py'"
    assert processes_of(plan_of(tmp_path, text))["actor"] == "16 x 1 on 0-15"


def test_a_number_of_too_many_digits_has_its_maximum(tmp_path):
    found = codes(tmp_path, f"{VERL} trainer.nnodes=12345678901234567890")["RST-C025"]
    assert "more than the 1,048,576" in found.what


SLIME_JOB = "python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4"


def test_keys_outside_sections_are_no_flags(tmp_path):
    assert "(top level 1)" in codes(tmp_path, f"{VERL} '~critic'")["RST-T042"].what
    assert "(flags 1)" in codes(tmp_path, f"{SLIME_JOB} --lr 1e-6")["RST-T042"].what


@pytest.mark.parametrize("start", ["xargs -a arguments.txt", "cat arguments.txt | /usr/bin/xargs -n 9"])
def test_words_that_xargs_adds_are_not_known(start, tmp_path):
    file, findings = script_with(tmp_path, f"{start} {VERL}"), Findings()
    read_job(load(file, (), findings), findings)
    (found,) = [each for each in findings.found if each.code == "RST-C040"]
    assert "arguments from xargs are not known" in found.what
