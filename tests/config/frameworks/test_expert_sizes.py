"""Megatron's size of single experts: read, checked, counted in memory, and converted."""

import json

import pytest

import roost
from roost.config.compose import load
from roost.config.findings import Findings
from roost.config.job import Notation, Role
from roost.config.notations.notation import read_job
from roost.placement.convert.convert_plan import convert_plan
from roost.placement.diff import diff_plans
from roost.placement.memory.model import held_parameters
from roost.placement.memory.shape import shape_from_config
from tests.docs.memory_page import MODELS

ACTOR, REF = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.ref.megatron"
SIZES = f"{ACTOR}.tensor_model_parallel_size=4 {ACTOR}.expert_model_parallel_size=4"
OF_EXPERTS = f"{ACTOR}.expert_tensor_parallel_size"
MIXTURE = MODELS["Qwen3-30B-A3B"]


def script(folder, words):
    (folder / "config.json").write_text(json.dumps(MIXTURE))
    file = folder / "run.sh"
    given = (
        f"model_engine=megatron algorithm.adv_estimator=grpo trainer.n_gpus_per_node=8 trainer.nnodes=2 "
        f"actor_rollout_ref.model.path={folder} actor_rollout_ref.rollout.name=vllm data.train_files=train.jsonl"
    )
    file.write_text(f"python3 -m verl.trainer.main_ppo {given} {words}\n")
    return file


def errors_of(folder, words, trains=False):
    findings = Findings()
    read_job(load(script(folder, words), (), findings), findings, trains=trains)
    return findings.errors


@pytest.mark.parametrize(
    ("words", "actor", "reference"),
    [
        pytest.param("", None, None, id="not written"),
        pytest.param(f"{OF_EXPERTS}=null", None, None, id="null"),
        pytest.param(f"{OF_EXPERTS}=1", 1, 1, id="one, of the reference as well"),
        pytest.param(f"{OF_EXPERTS}=4", None, None, id="the tensor size"),
        pytest.param(f"{OF_EXPERTS}=1 {REF}.expert_tensor_parallel_size=2", 1, 2, id="another of the reference"),
    ],
)
def test_the_size_is_read(words, actor, reference, tmp_path):
    plan = roost.plan(script(tmp_path, f"{SIZES} actor_rollout_ref.actor.use_kl_loss=True {words}"))
    assert [plan[name].parallel.expert_tensor for name in ("actor", "reference")] == [actor, reference]
    places = {use.where.key_path: use.places for use in plan.keys}
    assert all(places[path] for path in places if path.endswith("expert_tensor_parallel_size"))


def test_the_experts_of_megatron_are_counted_by_it(tmp_path):
    sizes = roost.plan(script(tmp_path, f"{SIZES} {OF_EXPERTS}=1"))["actor"].parallel
    shape = shape_from_config(MIXTURE)
    assert held_parameters(shape, sizes) == shape.dense_parameters / 4 + shape.expert_parameters / 4


RLINF = """
cluster: {{num_nodes: 1, num_gpus_per_node: 8, component_placement: {{actor: 0-7}}}}
actor: {{training_backend: megatron, model: {{tensor_model_parallel_size: 4, expert_tensor_parallel_size: {size}}}}}
"""
ROLL = """
num_gpus_per_node: 8
pretrain: model
actor_train:
  device_mapping: list(range(0,8))
  strategy_args:
    strategy_name: {strategy}
    strategy_config: {{tensor_model_parallel_size: 4, expert_tensor_parallel_size: {size}}}
"""


@pytest.mark.parametrize(
    ("text", "size", "found"),
    [
        pytest.param(RLINF, 1, 1, id="rlinf"),
        pytest.param(RLINF, 4, None, id="rlinf, the tensor size"),
        pytest.param(RLINF, "null", None, id="rlinf, null"),
        pytest.param(ROLL.replace("{strategy}", "megatron_train"), 2, 2, id="roll"),
        pytest.param(ROLL.replace("{strategy}", "megatron_train"), 4, None, id="roll, the tensor size"),
        pytest.param(ROLL.replace("{strategy}", "fsdp2_train"), 2, None, id="roll without Megatron"),
    ],
)
def test_it_is_read_from_the_keys_of_rlinf_and_roll(text, size, found, tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(text.format(size=size))
    learner = roost.plan(file).components[0]
    assert (learner.role, learner.parallel.tensor, learner.parallel.expert_tensor) == (Role.LEARNER, 4, found)
    written = convert_plan(roost.plan(file), Notation.RLINF, Findings())
    assert written is not None and (f"expert_tensor_parallel_size: {found}" in written.text) == (found is not None)


@pytest.mark.parametrize(("size", "parts"), [(1, None), (2, None), (3, 12), (8, 32)])
def test_it_divides_the_gpus(size, parts, tmp_path):
    errors = errors_of(tmp_path, f"{SIZES} {OF_EXPERTS}={size}")
    assert [(error.code, error.where.key_path) for error in errors] == [("RST-N056", OF_EXPERTS)] * bool(parts)
    for error in errors:
        assert error.what == f"splits experts over {parts} GPUs, which do not divide the 16 of the learner"
        assert error.why.startswith(f"expert tensor {size} * expert 4 * pipeline 1: 16 ")


@pytest.mark.parametrize(("size", "is_refused"), [(1, False), (2, True), (4, False)])
def test_roosts_learner_does_not_split_single_experts(size, is_refused, tmp_path):
    errors = errors_of(tmp_path, f"{SIZES} {OF_EXPERTS}={size}", trains=True)
    found = [error for error in errors if error.code == "RST-T123"]
    assert [error.where.key_path for error in found] == [OF_EXPERTS] * is_refused


@pytest.mark.parametrize("target", ["verl", "slime", "nemo", "skyrl", "roll", "rlinf", "openrlhf"])
def test_it_is_written_or_named(target, tmp_path):
    plan = roost.plan(script(tmp_path, f"{SIZES} {OF_EXPERTS}=1"))
    findings = Findings()
    written = convert_plan(plan, Notation(target), findings)
    assert written is not None, [str(error) for error in findings.errors]
    is_written = "expert_tensor_parallel_size" in str(written.values).replace("-", "_")
    named = [each.what for each in findings.warnings if "expert_tensor 1 -> nothing" in each.what]
    of_megatron = target not in ("openrlhf", "rlinf")  # RLinf cannot express this placement with these sizes
    assert (is_written, bool(named)) == (of_megatron, not of_megatron)


def test_it_is_a_difference_between_plans_only_where_there_may_be_experts(tmp_path):
    def plan(words, **config):
        file = script(tmp_path, words)
        (tmp_path / "config.json").write_text(json.dumps({**MIXTURE, **config}))
        return roost.plan(file)

    tensor = f"{ACTOR}.tensor_model_parallel_size=4"
    for config, is_change in (({}, True), ({"model_type": "qwen3", "num_experts": 0}, False)):
        changes = diff_plans(plan(tensor, **config), plan(f"{tensor} {OF_EXPERTS}=1", **config))
        assert [change.component for change in changes if change.subject == "sizes"] == ["actor"] * is_change
