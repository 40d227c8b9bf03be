"""Jobs that the frameworks ship become the processes that their own layout gives."""

import shlex
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
import yaml

import roost
from roost.config.findings import ConfigError
from roost.config.frameworks.registry import ENTRIES
from roost.config.ranks import spell_ranks
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


def plan_of(folder, command, **files):
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    (folder / "run.sh").write_text(f"#!/bin/bash\n{command}\n")
    return roost.plan(folder / "run.sh")


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
SLIME = "python3 train.py --actor-num-nodes 1"


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


def test_verl_config_file_of_the_user(tmp_path):
    own = "trainer: {nnodes: 3}\nactor_rollout_ref: {rollout: {tensor_model_parallel_size: 8}}\n"
    command = f"{VERL} --config-path=. --config-name=mine trainer.n_gpus_per_node=8"
    plan = plan_of(tmp_path, command, mine_yaml=own)
    assert processes_of(plan)["rollout"] == "3 x 8 on 0-23"


def test_a_yaml_of_verl_is_recognised(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text("actor_rollout_ref: {rollout: {tensor_model_parallel_size: 4}}\nalgorithm: {adv_estimator: grpo}\n")
    assert processes_of(roost.plan(file)) == {"actor": "8 x 1 on 0-7", "rollout": "2 x 4 on 0-7"}


def test_engines_sleep_beside_the_learner(tmp_path):
    plan = plan_of(tmp_path, f"{VERL}")
    assert {held.decision.value for held in plan.residency.classes} == {"sleep"}
    plan = plan_of(tmp_path, f"{VERL} actor_rollout_ref.rollout.free_cache_engine=False")
    assert {held.decision.value for held in plan.residency.classes} == {"keep"}


def test_findings_stand_at_the_line_of_the_argument(tmp_path):
    found = codes(tmp_path, f"{VERL} \\\n  actor_rollout_ref.rollout.tensor_model_parallel_size=3")
    assert found["RST-N055"].where.line == 3
    assert found["RST-N055"].where.column == 3
    assert "8 GPUs % 3" in found["RST-N055"].why


def test_a_reference_of_an_unset_variable_says_how_to_give_it(tmp_path, monkeypatch):
    monkeypatch.delenv("MY_NODES", raising=False)
    found = codes(tmp_path, f"{VERL} trainer.nnodes=$MY_NODES")
    assert found["RST-C022"].fix == "give it: MY_NODES=... before roost"
    monkeypatch.setenv("MY_NODES", "2")
    assert processes_of(plan_of(tmp_path, f"{VERL} trainer.nnodes=$MY_NODES"))["actor"] == "16 x 1 on 0-15"


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
        'ssh node "python -m verl.trainer.main_ppo"',
        "python3 tools/warm_up.py verl/trainer/main_ppo.py",
        "python3 -m verl.trainer.main_ppo",
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


def test_other_jobs_are_named_once_by_their_lines(tmp_path):
    found = codes(tmp_path, f"{VERL}\nfor n in 2 3 4 5; do\n{VERL} trainer.nnodes=$n\ndone")
    assert found["RST-C044"].why == "others are in line 4"


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
