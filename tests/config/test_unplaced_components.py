"""Keys of RLinf's reference and critic, where these are not placed."""

import json

import pytest

from roost.config.compose import load
from roost.config.findings import Findings
from roost.config.job import ParallelSizes
from roost.config.known_keys.tables import Effect
from roost.config.notations.notation import read_job


def read(**rest):
    config = {
        "cluster": {"num_nodes": 1, "num_gpus_per_node": 4, "component_placement": {"actor": "0-3", "rollout": "0-3"}},
        "actor": {"model": {"model_path": "org/model", "tensor_model_parallel_size": 4}},
        "train": {"task": {"_target_": "my_tasks.Sums"}},
        **rest,
    }
    findings = Findings()
    job = read_job(load(config, (), findings), findings)
    assert not findings.errors
    return job


def reference_of(**own):
    job = read(algorithm={"kl_beta": 0.1}, **({"reference": own} if own else {}))
    assert not [use for use in job.keys if use.is_unused(trains=True)]
    (reference,) = (part for part in job.components if part.name == "reference")
    return reference


def test_a_reference_that_is_not_placed_follows_its_section():
    assert reference_of().parallel == ParallelSizes(tensor=4)
    assert reference_of(model={"precision": "fp32"}).parallel == ParallelSizes(tensor=4)
    sized = reference_of(model={"tensor_model_parallel_size": 2, "model_path": "org/other"})
    assert sized.parallel == ParallelSizes(tensor=2)
    assert (sized.written_name, sized.model.path) == ("reference", "org/other")
    assert reference_of(fsdp_config={"fsdp_size": 2}).parallel == ParallelSizes(shard=2)


@pytest.mark.parametrize(("experts", "size"), [({}, 1), ({"num_experts": 8}, 2), ({"num_local_experts": 8}, 2)])
def test_a_dense_reference_beside_a_mixture_has_no_expert_size(tmp_path, experts, size):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "any", **experts}))
    job = read(
        algorithm={"kl_beta": 0.1},
        actor={"model": {"model_path": "org/mixture", "expert_model_parallel_size": 2}},
        reference={"model": {"model_path": str(tmp_path)}},
    )
    found = {part.name: part.parallel for part in job.components}
    assert (found["actor"].expert, found["reference"].expert) == (2, size)


@pytest.mark.parametrize(
    ("own", "sizes"),
    [
        ({"fsdp_config": {"fsdp_size": 2}}, {"reference": (1, 2), "inference": (4, 2)}),
        ({"fsdp_config": {"fsdp_size": -1}}, {"reference": (1, None), "inference": (4, None)}),
        (
            {"model": {"tensor_model_parallel_size": 2}, "fsdp_config": {"fsdp_size": 2}},
            {"reference": (2, 2), "inference": (2, 2)},
        ),
        ({}, {"reference": (1, None), "inference": (4, 1)}),
    ],
)
def test_placed_scorers_have_the_fsdp_size_of_their_section(own, sizes):
    placement = {"actor": "0-3", "rollout": "0-3", "reference": "0-3", "inference": "0-3"}
    model = {"model_path": "org/model", "tensor_model_parallel_size": 4}
    job = read(
        algorithm={"kl_beta": 0.1, "recompute_logprobs": True},
        cluster={"num_nodes": 1, "num_gpus_per_node": 4, "component_placement": placement},
        actor={"model": model, "fsdp_config": {"fsdp_size": 1}},
        **dict.fromkeys(sizes, own),
    )
    assert not [use for use in job.keys if use.is_unused(trains=True)]
    found = {part.name: part.parallel for part in job.components}
    assert {name: (found[name].tensor, found[name].shard) for name in sizes} == sizes


@pytest.mark.parametrize("name", ["critic", "reference"])
def test_keys_of_a_component_that_there_is_not_have_no_effect(name):
    job = read(**{name: {"model": {"model_path": "org/other"}}})
    (use,) = (use for use in job.keys if use.is_unused(trains=True))
    assert (use.where.path, use.known.effect) == ((name, "model", "model_path"), Effect.NOTHING)
    assert use.known.reason == f"{name} is not placed"
