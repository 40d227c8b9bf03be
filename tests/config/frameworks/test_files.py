"""Jobs that frameworks ship as config files become the processes that their own layout gives."""

import contextlib
import json
import random
from dataclasses import astuple
from pathlib import Path

import pytest
import yaml

import roost
from roost.config.findings import ConfigError, Findings
from roost.config.frameworks.allocation import AllocationError, parse_allocations, parse_backend
from roost.config.frameworks.toml import read_toml
from roost.config.job import Notation
from roost.placement.convert.convert_plan import convert_plan
from roost.placement.planner import try_plan
from tests.config.frameworks.test_jobs import processes_of
from tests.grid import grid

HERE = Path(__file__).parent
JOBS = yaml.safe_load((HERE / "files.yaml").read_text())
CASES = [pytest.param(name, job, id=f"{name}-{job['source']}") for name, jobs in JOBS.items() for job in jobs]


def golden(name):
    return [json.loads(line) for line in (HERE / "golden" / f"{name}.jsonl").read_text().splitlines()]


def nested(keys):
    """Mappings from dotted keys."""
    values = {}
    for path, value in keys.items():
        *above, last = path.split(".")
        inner = values
        for key in above:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return values


def findings_of(config, *overrides):
    try:
        plan = roost.plan(config, overrides=overrides)
    except ConfigError as error:
        return {finding.code: finding for finding in error.findings}
    return {finding.code: finding for finding in (*plan.warnings, *plan.notes)}


def file_of(folder, framework, job):
    file = folder / ("job.toml" if framework == "prime" else "job.yaml")
    values = nested(job["keys"])
    file.write_text(toml_of(values) if framework == "prime" else yaml.safe_dump(values))
    return file


@pytest.mark.parametrize(("framework", "job"), CASES)
def test_a_shipped_job(framework, job, tmp_path):
    plan = roost.plan(file_of(tmp_path, framework, job))
    assert plan.notation == framework
    assert processes_of(plan) == job["processes"]


def toml_of(values, path=()):
    """A TOML text of tables and plain values."""
    lines = [f"[{'.'.join(path)}]"] if path else []
    tables = {key: value for key, value in values.items() if isinstance(value, dict)}
    lines += [f"{key} = {json.dumps(value)}" for key, value in values.items() if key not in tables]
    return "\n".join(lines + [toml_of(value, (*path, key)) for key, value in tables.items()])


# --- NeMo-RL


def nemo_config(case):
    (nodes, gpus), (own_nodes, own_gpus), (tensor, pipeline, expert) = case["cluster"], case["engines"], case["sizes"]
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, "expert_parallel_size": expert}
    shared = {"enabled": case["colocated"], "resources": {"num_nodes": own_nodes, "gpus_per_node": own_gpus}}
    config = {
        "cluster": {"num_nodes": nodes, "gpus_per_node": gpus},
        "policy": {
            "dtensor_cfg": {"enabled": True, "tensor_parallel_size": case["learner"]},
            "generation": {"backend": "vllm", "vllm_cfg": sizes, "colocated": shared},
        },
    }
    if case["reward"]:
        resources = {"num_nodes": case["reward"][0], "gpus_per_node": case["reward"][1]}
        config |= {"data": {"default": {"env_name": "reward_model"}}, "env": {"reward_model": {"resources": resources}}}
    return config


@grid("case", golden("nemo"), ids=str)
def test_nemo_lays_out_as_its_own_code(case):
    try:
        plan = roost.plan(nemo_config(case))
    except ConfigError:
        assert case["result"] is None
        return
    result = case["result"]
    assert result is not None, processes_of(plan)
    parts = {part.name: part for part in plan.components}
    assert parts["actor"].world_size == sum(result["learner"])
    assert parts["rollout"].world_size == result["engines"]
    for name, per_node in (("actor", result["learner"]), ("rollout", result["engine_gpus"])):
        nodes = [int(device) // case["cluster"][1] for device in parts[name].table.device_numbers]
        assert sorted(nodes.count(node) for node in set(nodes)) == per_node


CHILD = """\
defaults: ../base.yaml
cluster: {num_nodes: 2}
data:
  _override_: true
  train: {env_name: math}
"""
BASE = """\
grpo: {async_grpo: {enabled: false}}
cluster:
  num_nodes: 1
  gpus_per_node: 8
policy:
  dtensor_cfg: {enabled: true, tensor_parallel_size: 1}
  generation:
    backend: vllm
    max_new_tokens: ${mul:4, ${div:8, 2}}
    vllm_cfg: {tensor_parallel_size: '${policy.dtensor_cfg.tensor_parallel_size}'}
    colocated: {enabled: true, resources: {num_nodes: null, gpus_per_node: null}}
data: {default: {env_name: reward_model}}
"""


AREAL_JOB = 'actor: {backend: "fsdp:d4", path: q}\nrollout: {backend: "sglang:d4"}\ncluster: {n_gpus_per_node: 8}\n'
TRL_JOB = "model_name_or_path: q\noutput_dir: out\nuse_vllm: true\n"


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "base.yaml").write_text(BASE)
    file = tmp_path / "recipes" / "grpo.yaml"
    file.write_text(CHILD)
    return file


def test_a_recipe_is_merged_over_the_file_it_builds_on(recipe):
    # nemo_rl/utils/config.py: parents first, and _override_ replaces a section
    plan = roost.plan(recipe)
    assert processes_of(plan) == {"actor": "16 x 1 on 0-15", "rollout": "16 x 1 on 0-15"}
    plan = roost.plan(recipe, overrides=["policy.dtensor_cfg.tensor_parallel_size=4"])
    assert processes_of(plan)["rollout"] == "4 x 4 on 0-15"


def test_a_finding_names_the_file_of_the_chain_that_has_the_key(recipe):
    found = findings_of(recipe, "policy.generation.colocated.enabled=false")["RST-N070"]
    assert str(found.where).split(":")[:2] == [str(recipe.parent / "../base.yaml"), "11"]
    assert found.where.path[-1] == "num_nodes"


@pytest.mark.parametrize(
    ("text", "code", "line"),
    [
        ("cluster:\n  <<: *own", "RST-N059", 3),
        (
            "cluster: {num_nodes: 2}\npolicy: {generation: {colocated: {enabled: false, resources: *own}}}",
            *("RST-N070", 4),
        ),
    ],
    ids=["merge-key", "alias"],
)
def test_a_value_of_an_alias_is_not_placed_in_the_file_below(text, code, line, recipe):
    recipe.write_text(f"x: &own {{num_nodes: 2, gpus_per_node: 8}}\ndefaults: ../base.yaml\n{text}\n")
    where = findings_of(recipe)[code].where
    assert (where.file, where.line, where.path[-1]) == (str(recipe), line, "num_nodes")


def test_a_parent_that_is_not_here(recipe):
    (recipe.parent.parent / "base.yaml").unlink()
    found = findings_of(recipe)["RST-N060"]
    assert (found.where.line, found.where.path) == (1, ("defaults",))


def test_files_that_build_on_each_other(recipe):
    (recipe.parent.parent / "base.yaml").write_text("defaults: recipes/grpo.yaml\n")
    assert "RST-C019" in findings_of(recipe)


def test_a_script_with_a_config_and_overrides(recipe, monkeypatch):
    folder = recipe.parent.parent
    script = folder / "run.sh"
    script.write_text(
        "#!/bin/bash\nuv run examples/run_grpo.py --config recipes/grpo.yaml \\\n"
        "  cluster.num_nodes=${NODES:-3} policy.generation.colocated.enabled=false \\\n"
        "  policy.generation.colocated.resources.num_nodes=1 policy.generation.colocated.resources.gpus_per_node=8\n"
    )
    monkeypatch.chdir(folder)
    assert processes_of(roost.plan(script)) == {"actor": "16 x 1 on 0-15", "rollout": "8 x 1 on 16-23"}
    monkeypatch.setenv("NODES", "2")
    assert processes_of(roost.plan(script)) == {"actor": "8 x 1 on 0-7", "rollout": "8 x 1 on 8-15"}


NEMO_JOB = """policy:
  model_name: q
  generation: {backend: vllm, vllm_cfg: {tensor_parallel_size: 1}}
  dtensor_cfg: {enabled: true}
cluster: {num_nodes: NODES, gpus_per_node: 8}
"""


@pytest.mark.parametrize(
    ("script", "nodes", "found"),
    [
        ("export N=4", "${oc.decode:${oc.env:N,1}}", 4),
        ("N=4", "${oc.decode:${oc.env:N,2}}", 2),
        ("export N=4; unset N", "${oc.decode:${oc.env:N, '2'}}", 2),
        ("export N=3", "${mul:${oc.env:N},2}", 6),
        ("export N=$(nproc)", "${oc.decode:${oc.env:N}}", "output of a command"),
        ("N=4", "${oc.decode:${oc.env:N}}", "N is not exported"),
    ],
)
def test_a_config_takes_what_its_script_exports(script, nodes, found, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("N", raising=False)
    (tmp_path / "job.yaml").write_text(NEMO_JOB.replace("NODES", f'"{nodes}"'))
    file = tmp_path / "run.sh"
    file.write_text(f"#!/bin/bash\n{script}\nuv run run_grpo.py --config job.yaml\n")
    check_nodes(file, found)


def check_nodes(file, found):
    if isinstance(found, int):
        assert processes_of(roost.plan(file))["actor"].startswith(f"{found * 8} x 1 on ")
    else:
        assert found in findings_of(file)["RST-C022"].why


@pytest.mark.parametrize(("given", "found"), [("N=2", 2), ("N=$(nproc)", "output of a command")])
def test_a_config_that_the_script_writes(given, found, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = NEMO_JOB.replace("NODES", "$N")
    file = tmp_path / "run.sh"
    start = "uv run run_grpo.py --config sub/job.yaml"
    file.write_text(f"#!/bin/bash\n{given}\ncat > sub/job.yaml <<EOF\n{text}EOF\n{start}\n")
    check_nodes(file, found)


@pytest.mark.parametrize(("given", "found"), [("N=2", 2), ("N=$(nproc)", "output of a command")])
def test_a_toml_file_that_the_script_writes(given, found, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sections = "[slurm]\njob_name = 'q'\n[inference]\n[deployment]\ntype = 'multi_node'\n"
    toml = f"{sections}num_infer_nodes = 1\nnum_train_nodes = $N"
    file = tmp_path / "run.sh"
    file.write_text(f"#!/bin/bash\n{given}\ncat <<EOF > rl.toml\n{toml}\nEOF\nuv run rl @ rl.toml\n")
    check_nodes(file, found)


def test_the_engine_groups_of_slime_that_the_script_writes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    group = "{worker_type: regular, num_gpus: 4, num_gpus_per_engine: 2}"
    groups = f"sglang:\n  - name: default\n    server_groups: [{group}]"
    flags = "--actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 --sglang-config groups.yaml"
    file = tmp_path / "run.sh"
    file.write_text(f"#!/bin/bash\ncat > groups.yaml <<EOF\n{groups}\nEOF\npython3 train.py {flags}\n")
    assert processes_of(roost.plan(file))["rollout"] == "2 x 2 on 4-7"


@pytest.mark.parametrize(
    ("command", "config", "notation"),
    [
        ("python3 run_grpo.py --config job.yaml", AREAL_JOB, "areal"),
        ("torchrun --nproc_per_node 8 run_grpo.py --config job.yaml", TRL_JOB, "trl"),
        ("python3 run_sft.py --config job.yaml", "policy: {model_name: q}\ncluster: {gpus_per_node: 2}\n", "nemo"),
        ("python3 run_sft.py --config job.yaml", "model: {name: q}\n", "none"),
        ("torchrun --nproc_per_node 8 run_grpo.py --config other.yaml --use_vllm", "", "trl"),
    ],
)
def test_programs_named_as_nemos_are_told_apart_by_their_config(command, config, notation, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(config)
    script = tmp_path / "run.sh"
    script.write_text(f"#!/bin/bash\n{command}\n")
    if notation == "none":
        assert "RST-C038" in findings_of(script)
    else:
        assert roost.plan(script).notation == notation


@pytest.mark.parametrize("quote", ["'", '"'])
def test_a_command_for_slurm(quote, recipe, monkeypatch):
    """NeMo-RL's ray.sub runs the command that it is given in a variable."""
    folder = recipe.parent.parent
    command = f"{quote}uv run ./examples/run_grpo.py --config recipes/grpo.yaml cluster.num_nodes=4{quote}"
    (folder / "run.sh").write_text(
        f"#!/bin/bash\nCONTAINER=nemo-rl \\\nCOMMAND={command} \\\nsbatch --nodes=4 ray.sub\n"
    )
    monkeypatch.chdir(folder)
    assert processes_of(roost.plan(folder / "run.sh"))["actor"] == "32 x 1 on 0-31"


def test_a_script_whose_config_is_not_known(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("#!/bin/bash\nuv run examples/run_grpo.py --config $(pick).yaml cluster.num_nodes=2\n")
    found = findings_of(script)["RST-N060"]
    assert (found.where.line, "output of a command" in found.why) == (2, True)


def test_a_key_of_an_older_prime_rl_is_refused(tmp_path):
    file = tmp_path / "rl.toml"
    file.write_text("num_inference_nodes = 2\n\n[orchestrator]\nbatch_size = 8\n\n[inference]\n")
    found = findings_of(file)["RST-N069"]
    assert (found.where.line, found.fix) == (1, "write deployment.num_infer_nodes")


def test_a_variable_of_a_config_says_how_to_give_it(tmp_path, monkeypatch):
    monkeypatch.delenv("MY_SIZE", raising=False)
    file = tmp_path / "job.yaml"
    file.write_text("policy: {model_name: m}\ncluster: {gpus_per_node: '${oc.env:MY_SIZE}', num_nodes: 1}\nsft: {}\n")
    found = findings_of(file)["RST-C022"]
    assert (found.why, found.fix) == ("MY_SIZE is not set", "give it: MY_SIZE=... before roost")


def test_nemo_calls_the_learner_without_megatron_automodel_now(tmp_path):
    sizes = {"enabled": True, "tensor_parallel_size": 2, "context_parallel_size": 2, "activation_checkpointing": True}
    config = {
        "policy": {"model_name": "m", "automodel_cfg": sizes, "generation": {"backend": "vllm"}},
        "cluster": {"gpus_per_node": 8},
    }
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump({"grpo": {}} | config))
    actor = next(part for part in roost.plan(file).components if part.name == "actor")
    assert (actor.parallel.tensor, actor.parallel.context, actor.model.recomputes) == (2, 2, True)
    found = findings_of(file, "policy.automodel_cfg.tensor_parallel_size=3")
    assert found["RST-N056"].where.path[-1] == "automodel_cfg"


@pytest.mark.parametrize(
    ("changes", "code", "path"),
    [
        ({"cluster.num_nodes": None}, "RST-N070", "num_nodes"),
        ({"grpo.async_grpo.enabled": True}, "RST-N058", "colocated"),
        ({"policy.generation.vllm_cfg.tensor_parallel_size": 3}, "RST-N056", "tensor_parallel_size"),
        ({"policy.generation.vllm_cfg.tensor_parallel_size": 16}, "RST-N057", "tensor_parallel_size"),
        ({"policy.dtensor_cfg.tensor_parallel_size": 3}, "RST-N056", "dtensor_cfg"),
        ({"env.nemo_gym.num_gpu_nodes": 2}, "RST-N072", "num_gpu_nodes"),
        ({"cluster.segment_size": 2}, "RST-T014", "segment_size"),
    ],
    ids=[
        "no-nodes",
        "asynchronous-and-shared",
        "engine-divides",
        "engine-too-large",
        "learner-divides",
        "gym",
        "segments",
    ],
)
def test_findings_about_a_nemo_job(changes, code, path):
    keys = {
        "cluster.num_nodes": 1,
        "cluster.gpus_per_node": 8,
        "policy.dtensor_cfg.enabled": True,
        "policy.generation.backend": "vllm",
    }
    assert code not in findings_of(nested(keys))
    assert findings_of(nested(keys | changes))[code].where.path[-1] == path


def test_a_name_that_says_other_machines(tmp_path):
    keys = {"cluster.num_nodes": 2, "cluster.gpus_per_node": 8, "policy.dtensor_cfg.enabled": True}
    for name, is_wrong in (("sft-qwen-2n8g-fsdp.yaml", False), ("sft-qwen-4n8g.v2.yaml", True)):
        (tmp_path / name).write_text(yaml.safe_dump(nested(keys)))
        assert ("RST-N071" in findings_of(tmp_path / name)) == is_wrong


# --- prime-rl


@grid("case", golden("prime"), ids=lambda case: json.dumps(case["config"]))
def test_prime_lays_out_as_its_own_code(case, tmp_path):
    file = tmp_path / "rl.toml"
    file.write_text(toml_of(case["config"] | {"orchestrator": {"batch_size": 8}}))
    try:
        plan = roost.plan(file)
    except ConfigError:
        assert case["result"] is None
        return
    result = case["result"]
    assert result is not None, processes_of(plan)
    parts = {part.name: part for part in plan.components}
    trained = [int(device) for device in parts["actor"].table.device_numbers]
    assert (trained[0], len(trained)) == (result["first_train"], result["train"])
    engines = parts.get("rollout")
    assert result["rollout"] == ([engines.world_size, len(engines.table.device_numbers)] if engines else [0, 0])


RL_TOML = (
    """\
# a job
seq_len = 2048
name = """
    + '"""'
    + """
[not.a.table]
"""
    + '"""'
    + """
[model]
name = "Qwen/Qwen3-0.6B"
[deployment]
num_train_gpus = 2  # [inline]
num_infer_gpus = 6
[trainer.optim]
lr = 1e-6
[[orchestrator.train.source]]
name = "a"
[[orchestrator.train.source]]
name = "b"
env = {id = "x", args = {list = [1, {a = 2}], "quoted.key" = 1}}
[inference]
vllm.tensor_parallel_size = 2
"""
)


SHOWN = "2,3,4,5,6,7,8,9"


@pytest.fixture
def rl_toml(tmp_path):
    file = tmp_path / "rl.toml"
    file.write_text(RL_TOML)
    return file


def test_positions_of_toml_keys(rl_toml):
    source = read_toml(rl_toml, Findings())
    places = {path: place[1:] for path, place in source.positions.items()}
    assert places[("deployment",)] == (8, 1)
    assert places[("deployment", "num_infer_gpus")] == (10, 1)
    assert places[("orchestrator", "train", "source", 1, "name")] == (16, 1)
    assert places[("orchestrator", "train", "source", 1, "env", "args", "quoted.key")] == (17, 47)
    assert places[("inference", "vllm", "tensor_parallel_size")] == (19, 1)
    assert not any("not" in path for path in places)


def test_a_toml_file_with_flags_and_further_files(rl_toml):
    # packages/prime-rl-configs: later files and flags win; engines take the first GPUs
    assert processes_of(roost.plan(rl_toml)) == {"rollout": "3 x 2 on 0-5", "actor": "2 x 1 on 6-7"}
    more = rl_toml.parent / "more.toml"
    more.write_text("[deployment]\nnum_infer_gpus = 2\n")
    for given in (["deployment.num_infer_gpus=2"], ["--deployment.num-infer-gpus", "2"], ["@", str(more)]):
        plan = roost.plan(rl_toml, overrides=given)
        assert processes_of(plan) == {"rollout": "1 x 2 on 0-1", "actor": "2 x 1 on 2-3"}


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("uv run rl @ rl.toml --deployment.num_train_gpus 1", {"rollout": "3 x 2 on 0-5", "actor": "1 x 1 on 6"}),
        ("uv run python -m prime_rl.entrypoints.rl @ rl.toml", {"rollout": "3 x 2 on 0-5", "actor": "2 x 1 on 6-7"}),
        ("uv run rl @ rl.toml --inference @ engines.toml", {"rollout": "6 x 1 on 0-5", "actor": "2 x 1 on 6-7"}),
        ("uv run sft @ sft.toml", {"actor": "4 x 1 on 0-3"}),
        ("uv run rl --inference @ engines.toml --trainer @ sft.toml", {"rollout": "1 x 1 on 0", "actor": "1 x 1 on 1"}),
        ("CUDA_VISIBLE_DEVICES=9,1,2,3 uv run sft @ sft.toml", {"actor": "4 x 1 on 9,1-3"}),
        (f"CUDA_VISIBLE_DEVICES={SHOWN} uv run rl @ rl.toml", {"rollout": "3 x 2 on 2-7", "actor": "2 x 1 on 8-9"}),
    ],
    ids=["flags", "module", "section", "fine-tuning", "sections-only", "shown-in-another-order", "shown"],
)
def test_a_script_of_prime_rl(command, expected, rl_toml, monkeypatch):
    folder = rl_toml.parent
    (folder / "engines.toml").write_text("[vllm]\ntensor_parallel_size = 1\n")
    (folder / "sft.toml").write_text('[model]\nname = "x"\n[deployment]\nnum_gpus = 4\n')
    (folder / "run.sh").write_text(f"#!/bin/bash\n{command}\n")
    monkeypatch.chdir(folder)
    plan = roost.plan(folder / "run.sh")
    assert (plan.notation, processes_of(plan)) == ("prime", expected)


def test_fewer_gpus_are_shown_than_a_prime_job_takes(rl_toml, monkeypatch):
    monkeypatch.chdir(rl_toml.parent)
    script = rl_toml.parent / "run.sh"
    script.write_text("#!/bin/bash\nCUDA_VISIBLE_DEVICES=0,1 uv run rl @ rl.toml\n")
    assert findings_of(script)["RST-N082"].where.path == ("CUDA_VISIBLE_DEVICES",)


@pytest.mark.parametrize(
    ("text", "code", "line"),
    [
        ("[deployment]\nnum_train_gpus = 4\nnum_infer_gpus = 8\n[inference]\n[orchestrator]", "RST-N070", 2),
        ("[deployment]\nnum_infer_gpus = 3\n[inference.vllm]\ntensor_parallel_size = 2", "RST-N056", 4),
        ("[deployment]\nnum_infer_gpus = 3\n[orchestrator]", "RST-N067", 2),
        ('[deployment]\ntype = "multi_node"\nnum_train_nodes = 1\nnum_infer_nodes = 1\n[inference]', "RST-N073", 2),
        ("[deployment\nnum_infer_gpus = 3", "RST-C050", 1),
        ("deployment = 3\n[orchestrator]", "RST-C029", 1),
        ("[deployment]\nnum_infer_gpus = 4\n[inference.vllm]\ndata_parallel_size = 2", "RST-T014", 4),
        ("[deployment]\nnum_train_gpus = 3\n[trainer.model]\ncp = 2", "RST-N056", 2),
    ],
    ids=[
        "too-many",
        "engines-divide",
        "no-engines",
        "no-scheduler",
        "no-toml",
        "no-table",
        "replicas",
        "learner-divides",
    ],
)
def test_findings_about_a_prime_job(text, code, line, tmp_path):
    file = tmp_path / "rl.toml"
    file.write_text(text)
    assert findings_of(file)[code].where.line == line


# --- AReaL


@grid("case", golden("areal"), ids=lambda case: case["text"])
def test_allocation_strings_as_areal_parses_them(case):
    try:
        if case["single"]:
            groups = [[parse_backend(case["text"])]]
        else:
            groups = parse_allocations(case["text"], needs_backend=True)
    except AllocationError:
        assert case["result"] is None
        return
    found = [
        [[one.backend, one.name, one.data, *astuple(one.sizes)[:4], one.world] for one in group] for group in groups
    ]
    assert found == case["result"]


def areal(changes=None):
    keys = {
        "cluster.n_nodes": 1,
        "cluster.n_gpus_per_node": 8,
        "rollout.backend": "sglang:d4",
        "actor.backend": "fsdp:d4",
        "actor.kl_ctl": 0.0,
    }
    return nested(keys | (changes or {}))


def beside(target):
    return {"type": "colocation", "target": target}


@pytest.mark.parametrize(
    ("changes", "code", "path"),
    [
        ({"rollout.backend": "sglang:d8"}, "RST-N074", "n_nodes"),
        ({"ref.backend": "fsdp:d4"}, "RST-N067", "ref"),
        ({"actor.backend": "fsdp:p2"}, "RST-N075", "backend"),
        ({"actor.backend": None}, "RST-N075", "backend"),
        ({"allocation_mode": "sglang:d4+fsdp:d4"}, "RST-N069", "allocation_mode"),
        ({"critic.backend": "fsdp:d2", "critic.scheduling_strategy": beside("actor")}, "RST-N066", "target"),
        ({"critic.backend": "fsdp:d2", "critic.scheduling_strategy": beside("rollout")}, "RST-N068", "target"),
        ({"rollout.scheduling_strategy": beside("actor"), "enable_offload": True}, "RST-N068", "actor"),
        ({"rollout.backend": "sglang:t12"}, "RST-N056", "n_gpus_per_node"),
    ],
    ids=[
        "too-few",
        "unused-reference",
        "fsdp",
        "missing",
        "two-ways",
        "unequal",
        "too-early",
        "weights",
        "whole-nodes",
    ],
)
def test_findings_about_an_areal_job(changes, code, path):
    assert code not in findings_of(areal())
    assert findings_of(areal(changes))[code].where.path[-1] == path


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"rollout.backend": "sglang:d3"}, "makes 8 GPUs, of which the roles take 7"),
        ({"cluster.n_nodes": 2}, "makes 16 GPUs, of which the roles take 8"),
        ({}, None),
        ({"rollout.backend": "sglang:d8"}, None),
        ({"cluster.n_nodes": None}, None),
    ],
)
def test_gpus_of_areal_that_no_role_takes_are_a_note(changes, what):
    found = findings_of(areal(changes)).get("RST-N090")
    assert (None if found is None else found.what) == what


@pytest.mark.parametrize(("scheduler", "word"), [(None, "two roles"), ("ray", "Ray waits"), ("slurm", "Slurm gives")])
def test_roles_without_room_fare_as_the_scheduler_has_it(scheduler, word):
    found = findings_of(areal({"rollout.backend": "sglang:d8", "scheduler.type": scheduler}))["RST-N074"]
    assert word in found.why


def norm(mean, std, **others):
    return {"mean_level": mean, "std_level": std} | others


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"advantage_estimator": "reinforce"}),
        ({"actor.reward_norm": norm("group", "group")}, {"advantage_estimator": "grpo"}),
        ({"actor.reward_norm": norm("group", None)}, {"advantage_estimator": "dr_grpo"}),
        ({"actor.reward_norm": norm("group", None, mean_leave1out=True)}, {"advantage_estimator": "rloo"}),
        ({"actor.reward_norm": {"eps": 1e-5}}, {"advantage_estimator": "reinforce_plus_plus"}),
        ({"actor.reward_norm": {}}, {"advantage_estimator": "reinforce_plus_plus"}),
        ({"actor.reward_norm": None}, {"advantage_estimator": "reinforce"}),
        ({"actor.adv_norm": {}}, {"whiten_advantages": True}),
        ({"actor.reward_norm": norm("group", "batch")}, {"reward_baseline": "group", "reward_std": "batch"}),
        ({"actor.adv_norm": norm("batch", "batch")}, {"whiten_advantages": True}),
        ({"actor.adv_norm": norm("group", None)}, {"whiten_advantages": "group/none"}),
        ({"critic.backend": "fsdp:d2"}, {"advantage_estimator": "gae"}),
        ({"gconfig.max_new_tokens": 99}, {"max_new_tokens": 99}),
        ({"train_dataset.max_length": 50}, {"max_prompt_length": 50}),
    ],
)
def test_the_algorithm_of_an_areal_job(changes, expected):
    plan = roost.plan(areal(changes))
    assert {name: plan.settings.get(name) for name in expected} == expected
    again = roost.plan(convert_plan(plan, Notation.AREAL, Findings()).values)
    assert {name: again.settings.get(name) for name in expected} == expected


def test_lengths_of_an_areal_job_go_over_to_others():
    lengths = {"gconfig.max_new_tokens": 30, "gconfig.max_tokens": 80, "train_dataset.max_length": 50}
    plan = roost.plan(areal(lengths))
    assert "max_new_tokens" not in plan.settings  # what the longest prompt leaves
    assert plan["actor"].model.sequence == 80
    written = convert_plan(plan, Notation.VERL, Findings())
    assert written.values["data"] == {"max_prompt_length": 50, "max_response_length": 30}


@pytest.mark.parametrize(
    ("prompt", "target", "keys", "values"),
    [
        (1024, "verl", ("data",), {"max_prompt_length": 1024, "max_response_length": 512}),
        (None, "verl", ("data",), {"max_prompt_length": 3584, "max_response_length": 512}),
        (1024, "roll", ("sequence_length", "prompt_length", "response_length"), (4096, 1024, 512)),
        (None, "roll", ("sequence_length", "response_length"), (4096, 512)),
        (1024, "openrlhf", ("--data.max_len", "--rollout.max_new_tokens"), (1536, 512)),
        (None, "openrlhf", ("--data.max_len", "--rollout.max_new_tokens"), (4096, 512)),
        (1024, "slime", [f"--rollout-max-{name}-len" for name in ("prompt", "response", "context")], (1024, 512, 4096)),
        (None, "slime", [f"--rollout-max-{name}-len" for name in ("response", "context")], (512, 4096)),
    ],
)
def test_a_completion_shorter_than_what_the_prompt_leaves_goes_over(prompt, target, keys, values):
    lengths = {"gconfig.max_new_tokens": 512, "gconfig.max_tokens": 4096, "train_dataset.max_length": prompt}
    findings = Findings()
    written = convert_plan(roost.plan(areal(lengths)), Notation(target), findings).values
    assert (written[keys[0]] if len(keys) == 1 else tuple(written[key] for key in keys)) == values
    assert not any("response" in finding.what for finding in findings.warnings)


def test_a_level_that_areal_lacks_is_refused():
    changes = {"actor.adv_norm": norm("token", "batch")}
    assert findings_of(areal(changes))["RST-N075"].where.path == ("actor", "adv_norm", "mean_level")


def test_the_reference_of_areal_is_started_for_a_kl():
    # areal/trainer/rl_trainer.py: if config.actor.kl_ctl > 0 and config.ref is not None
    ref = {"ref.backend": "fsdp:d4", "ref.scheduling_strategy": beside("actor")}
    assert "reference" not in processes_of(roost.plan(areal(ref)))
    assert processes_of(roost.plan(areal(ref | {"actor.kl_ctl": 0.1})))["reference"] == "4 x 1 on 0-3"


def test_roles_beside_the_actor_of_one_allocation_for_all():
    roles = {"critic": {"path": "q"}, "ref": {"path": "q"}}
    job = {"allocation_mode": "sglang:d4+fsdp:d4", "actor": {"kl_ctl": 0.1}, **roles}
    beside_it = dict.fromkeys(("actor", "critic", "reference"), "4 x 1 on 4-7")
    assert processes_of(roost.plan(job)) == {"rollout": "4 x 1 on 0-3"} | beside_it
    assert "reference" not in processes_of(roost.plan(job | {"actor": {"kl_ctl": 0.0}}))


def test_engines_begin_at_a_node_where_they_would_be_cut():
    jobs = {"sglang:d2t4": "2 x 4 on 8-15", "sglang:d1t2": "1 x 2 on 6-7"}
    for backend, expected in jobs.items():
        changes = {"cluster.n_nodes": 2, "actor.backend": "fsdp:d6", "rollout.backend": backend}
        assert processes_of(roost.plan(areal(changes)))["rollout"] == expected
    by_node = {"cluster.n_nodes": 2, "scheduler.type": "slurm"}
    assert processes_of(roost.plan(areal(by_node)))["rollout"] == "4 x 1 on 8-11"


def test_a_script_with_a_config_of_areal(tmp_path, monkeypatch):
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(areal()))
    monkeypatch.chdir(tmp_path)
    for program in ("examples/math/gsm8k_rl.py", "-m areal.infra.launcher.ray examples/math/gsm8k_rl.py"):
        script = tmp_path / "run.sh"
        script.write_text(f"#!/bin/bash\npython3 {program} --config job.yaml actor.backend=fsdp:d2 cluster.n_nodes=1\n")
        plan = roost.plan(script)
        assert (plan.notation, processes_of(plan)["rollout"]) == ("areal", "4 x 1 on 2-5")


JUNK = [None, True, -1, 0, 3, 10**40, 2.5, float("nan"), "", "x", "8", "sglang:d3", "fsdp:t2"]
JUNK += [[], [1], {}, {"a": 1}, [{"a": {}}], "${nowhere}", "multi_node", "disaggregated"]


def test_whatever_a_key_holds_there_is_a_plan_or_findings():
    chance = random.Random(18)
    jobs = [(name, job["keys"]) for name, of_framework in JOBS.items() for job in of_framework]
    planned = 0
    for _ in range(200):
        framework, keys = chance.choice(jobs)
        changed = keys | {chance.choice(list(keys)): chance.choice(JUNK) for _ in range(2)}
        with contextlib.suppress(ConfigError):
            roost.plan(nested(changed), notation=framework)
            planned += 1
    assert 0 < planned < 200


@pytest.mark.parametrize(
    ("gpus", "batch", "is_wrong"),
    [
        (8, 512, False),
        (6, 512, True),
        (8, 500, True),
        (8, 256, False),
        (8, 1024, True),
        (8, 320, True),
        (8, None, False),
    ],
)
def test_batches_of_nemo_rl_divide(gpus, batch, is_wrong):
    """A step of 512 samples has whole batches, and a batch as many samples for each replica."""
    config = {
        "cluster": {"num_nodes": 1, "gpus_per_node": gpus},
        "grpo": {"num_prompts_per_step": 32, "num_generations_per_prompt": 16},
        "policy": {"model_name": "a", "dtensor_cfg": {"enabled": True}, "generation": {"backend": "vllm"}}
        | ({"train_global_batch_size": batch} if batch else {}),
    }
    findings = Findings()
    try_plan(config, findings)
    assert [error.where.key_path for error in findings.errors] == ["policy.train_global_batch_size"] * is_wrong
