"""SkyRL jobs: layouts by its own code, and settings that contradict each other."""

import json
from pathlib import Path

import pytest

import roost
from roost.config.findings import Findings
from roost.config.job import Notation
from roost.placement.convert.convert_plan import convert_plan
from roost.placement.planner import try_plan
from tests.config.frameworks.test_jobs import check_layout, codes, plan_of, processes_of
from tests.grid import grid

GOLDEN = [json.loads(line) for line in (Path(__file__).parent / "golden" / "skyrl.jsonl").read_text().splitlines()]
JOB = "uv run --isolated --extra fsdp -m skyrl.train.entrypoints.main_base"
EIGHT = "trainer.placement.policy_num_gpus_per_node=8 generator.inference_engine.num_engines=8"


@grid("case", [pytest.param(case, id=f"golden-{index}") for index, case in enumerate(GOLDEN)])
def test_a_layout_by_its_own_code(case, tmp_path):
    check_layout(tmp_path, f"{JOB} {case['args']}", case["layout"], {"RST-N063", "RST-N066"})


def test_a_yaml_of_skyrl_is_recognised(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(
        "trainer: {placement: {policy_num_gpus_per_node: 4}, algorithm: {use_kl_loss: false}}\n"
        "generator: {inference_engine: {num_engines: 2, tensor_parallel_size: 2}}\n"
    )
    assert processes_of(roost.plan(file)) == {"actor": "4 x 1 on 0-3", "rollout": "2 x 2 on 0-3"}


def test_a_config_file_behind_a_script_is_not_passed_over(tmp_path):
    for option in ("--config my.yaml", "--config-name=my", "-cn my"):
        assert "RST-N060" in codes(tmp_path, f"{JOB} {option}")


def test_a_section_that_is_no_mapping(tmp_path):
    assert codes(tmp_path, f"{JOB} trainer.placement=3")["RST-C029"].where.path == ("trainer", "placement")


def test_a_main_dapo_of_verl_stays_one(tmp_path):
    plan = plan_of(tmp_path, "python3 -m recipe.dapo.main_dapo algorithm.adv_estimator=grpo trainer.nnodes=2")
    assert plan.notation == "verl"


def test_a_reference_is_started_by_default(tmp_path):
    command = f"{JOB} {EIGHT} trainer.placement.ref_num_gpus_per_node=8"
    assert "reference" in processes_of(plan_of(tmp_path, command))
    assert codes(tmp_path, command)["RST-N080"].fix.endswith("use_kl_loss=false to do without it")
    assert "RST-N080" not in codes(tmp_path, f"{command} trainer.algorithm.use_kl_loss=true")


def test_the_default_of_one_gpu_for_the_reference(tmp_path):
    found = codes(tmp_path, f"{JOB} \\\n  {EIGHT}")
    key = "trainer.placement.ref_num"
    assert found["RST-N066"].fix == f"write {key}_nodes=1 {key}_gpus_per_node=8"


def test_asynchronous_jobs_are_not_collocated(tmp_path):
    found = codes(tmp_path, f"{JOB} {EIGHT} trainer.fully_async.enabled=true trainer.algorithm.use_kl_loss=false")
    assert found["RST-N058"].fix == "write trainer.placement.colocate_all=false"


def test_a_simulated_learner_takes_no_gpus(tmp_path):
    keys = "trainer.fully_async.enabled=true trainer.fully_async.simulate_training=true"
    plan = plan_of(tmp_path, f"{JOB} {EIGHT} {keys} trainer.placement.colocate_all=false")
    assert processes_of(plan) == {"rollout": "8 x 1 on 0-7"}


@pytest.mark.parametrize(
    ("policy", "engines", "machines"),
    [
        ("policy_num_gpus_per_node=2", "num_engines=2", (1, 4)),
        ("policy_num_gpus_per_node=8", "num_engines=16", (3, 8)),
        ("policy_num_gpus_per_node=4 trainer.placement.policy_num_nodes=2", "num_engines=8", (2, 8)),
        ("policy_num_gpus_per_node=4", "num_engines=8", (2, 8)),
    ],
    ids=["one-machine", "engines-on-several", "shared-machines", "unequal"],
)
def test_the_machines_that_are_assumed(policy, engines, machines, tmp_path):
    keys = f"trainer.placement.{policy} generator.inference_engine.{engines} trainer.algorithm.use_kl_loss=false"
    plan = plan_of(tmp_path, f"{JOB} {keys} trainer.placement.colocate_all=false")
    assert (len(plan.inventory.nodes), plan.inventory.nodes[0].accelerators) == machines


@pytest.mark.parametrize(("backend", "is_wrong"), [("", True), ("ray", False)])
def test_an_engine_over_nodes_needs_ray(backend, is_wrong, tmp_path):
    key = f"generator.inference_engine.distributed_executor_backend={backend}" if backend else ""
    nodes = "trainer.placement.policy_num_nodes=2 trainer.placement.policy_num_gpus_per_node=8"
    size = "generator.inference_engine.tensor_parallel_size=16 trainer.algorithm.use_kl_loss=false"
    found = codes(tmp_path, f"python3 -m skyrl.train.entrypoints.main_base {nodes} {size} {key}")
    assert ("RST-N068" in found) == is_wrong


@pytest.mark.parametrize(("gpus", "tensor", "is_over"), [(6, 4, True), (6, 3, False), (4, 8, True), (8, 4, False)])
def test_an_engine_of_one_node_that_would_be_on_two(gpus, tensor, is_over, tmp_path):
    sizes = f"trainer.placement.policy_num_nodes=2 trainer.placement.policy_num_gpus_per_node={gpus}"
    sizes += f" trainer.algorithm.use_kl_loss=false generator.inference_engine.num_engines={2 * gpus // tensor}"
    engine = "generator.inference_engine.distributed_executor_backend=mp"
    tensors = f"generator.inference_engine.tensor_parallel_size={tensor}"
    assert ("RST-N068" in codes(tmp_path, f"{JOB} {sizes} {engine} {tensors}")) == is_over


EXPERTS = "trainer.placement.policy_num_gpus_per_node=8 trainer.algorithm.use_kl_loss=false trainer.strategy=megatron"
ENGINE = "generator.inference_engine"


@pytest.mark.parametrize(
    "keys",
    [
        f"{ENGINE}.tensor_parallel_size=2 {ENGINE}.data_parallel_size=4 {ENGINE}.expert_parallel_size=8",
        "generator.inference_engine_tensor_parallel_size=8 generator.inference_engine_expert_parallel_size=8",
    ],
    ids=["now", "before 2026"],
)
def test_experts_of_learners_and_engines_are_divided(keys, tmp_path):
    learner = "trainer.policy.megatron_config.expert_model_parallel_size=4"
    plan = plan_of(tmp_path, f"{JOB} {EXPERTS} {learner} {keys}")
    assert processes_of(plan) == {"actor": "8 x 1 on 0-7", "rollout": "1 x 8 on 0-7"}
    assert {part.name: part.parallel.expert for part in plan.components} == {"actor": 4, "rollout": 8}
    findings = Findings()
    written = convert_plan(plan, Notation.SKYRL, findings)
    assert findings.warnings == ()
    assert f"{ENGINE}.expert_parallel_size=8" in written.text
    assert learner in written.text


def test_an_expert_size_of_engines_that_skyrl_refuses(tmp_path):
    sizes = f"{ENGINE}.num_engines=2 {ENGINE}.tensor_parallel_size=4"
    found = codes(tmp_path, f"{JOB} {EXPERTS} {sizes} {ENGINE}.expert_parallel_size=8")["RST-N056"]
    assert found.fix == f"write {ENGINE}.expert_parallel_size=4"
    assert found.where.key_path == f"{ENGINE}.expert_parallel_size"


@pytest.mark.parametrize(("expert", "is_written"), [(4, True), (8, False)])
def test_experts_of_nemo_engines_for_skyrl(expert, is_written, tmp_path):
    """Two engines of 4 GPUs each; NeMo-RL can divide the experts over both."""
    file = tmp_path / "job.yaml"
    file.write_text(
        "cluster: {gpus_per_node: 8, num_nodes: 1}\n"
        "grpo: {num_prompts_per_step: 8}\n"
        "policy:\n"
        "  model_name: Qwen/Qwen3-30B-A3B\n"
        "  dtensor_cfg: {enabled: true}\n"
        "  generation:\n"
        "    backend: vllm\n"
        "    colocated: {enabled: true}\n"
        f"    vllm_cfg: {{tensor_parallel_size: 4, expert_parallel_size: {expert}}}\n"
    )
    findings = Findings()
    written = convert_plan(roost.plan(file), Notation.SKYRL, findings)
    assert (f"{ENGINE}.expert_parallel_size=4" in written.text) == is_written
    losses = [finding.what for finding in findings.warnings if "expert" in finding.what]
    assert [loss.rpartition(": ")[2] for loss in losses] == ([] if is_written else ["expert 8 -> 1"])


@pytest.mark.parametrize(("expert", "fits"), [(1, False), (8, True)])
def test_an_engine_whose_experts_are_divided_holds_less(expert, fits, tmp_path):
    """Of 57 GiB, 54 are experts'."""
    shape = {"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "vocab_size": 151936}
    shape |= {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144}
    shape |= {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    keys = f"{ENGINE}.data_parallel_size=8 {ENGINE}.expert_parallel_size={expert} trainer.policy.model.path={tmp_path}"
    program = JOB.replace("main_base", "main_generate")
    (tmp_path / "run.sh").write_text(f"{program} trainer.placement.colocate_all=false {keys}\n")
    findings = Findings()
    plan = try_plan(str(tmp_path / "run.sh"), findings, {"nodes": [{"accelerators": 8, "memory_gb": 40}]})
    assert [finding.code for finding in findings.errors] == ([] if fits else ["RST-M003"])
    assert (plan is not None) == fits


@pytest.mark.parametrize("key", [f"{ENGINE}.num_engines", "generator.num_inference_engines"], ids=["current", "old"])
def test_a_number_of_engines_is_written_as_the_whole_key(key, tmp_path):
    job = f"{JOB} trainer.placement.policy_num_gpus_per_node=8 trainer.algorithm.use_kl_loss=false {key}=2"
    found = codes(tmp_path, job)["RST-N066"]
    assert found.fix == f"write {key}=8, or trainer.placement.colocate_all=false"
