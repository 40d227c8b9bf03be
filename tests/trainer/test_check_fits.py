"""A checkpoint that the learners of a changed job cannot restore is found before launch."""

import dataclasses

import pytest

from roost.config.compose import load
from roost.config.findings import ConfigError, Findings
from roost.config.notations.notation import read_job
from roost.engines.tiny_model import write_tiny_model
from roost.learner.forward import Head
from roost.learner.learner import Learner
from roost.trainer.records.checkpoints import CRITIC, TrainerState
from roost.trainer.records.resuming import check_fits, checkpoints_of
from roost.trainer.records.run_folder import RunFolder
from tests.learner.random_samples import CPU

STEP = 20


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    sizes = {"small": {}, "wide": {"intermediate_size": 96}}
    return {name: str(write_tiny_model(folder / name, "qwen2", **changes)) for name, changes in sizes.items()}


@pytest.fixture
def resume(models, tmp_path):
    """Save a checkpoint of a job with some training settings, and check whether it fits one with others."""

    def job_of(model, critic=None, **train):
        placement = {"actor": 0, "rollout": 1} | ({"critic": 0} if train.get("advantage_estimator") == "gae" else {})
        config = {
            "cluster": {"num_nodes": 1, "num_gpus_per_node": 2, "component_placement": placement},
            "critic": {"model": {"model_path": models[critic or model]}},
            "train": {"model": models[model], "task": {"_target_": "my_tasks.Sums"}, **train},
        }
        findings = Findings()
        job = read_job(load(config, (), findings), findings)
        findings.raise_errors()
        return job

    def check(before, after):
        job, run = job_of(**before), RunFolder(tmp_path / "runs" / "first")
        checkpoint = checkpoints_of(run, job.training).at(STEP)
        others = [CRITIC] if "critic" in {part.name for part in job.components} else []
        for name in ("learner", *others):
            settings = job.training.learner
            settings = dataclasses.replace(settings, compile=False, activation_checkpointing=False)
            learner = Learner(settings, CPU, Head.VALUE if name in others else Head.POLICY)
            learner.save(checkpoint.folder / name)
            learner.wait_saved()
        changed = job_of(**after)
        check_fits(run, changed, changed.training, TrainerState(STEP))

    return check


SMALL, LORA = {"model": "small"}, {"model": "small", "lora_rank": 4}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(SMALL, {**SMALL, "learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 2}, id="rates"),
        pytest.param(SMALL, {**SMALL, "optimizer_cpu_offload": True}, id="state-on-the-host"),
        pytest.param({**SMALL, "optimizer": "muon"}, {**SMALL, "optimizer": "muon", "muon_momentum": 0.9}, id="muon"),
        pytest.param(LORA, {**LORA, "lora_alpha": 3}, id="alpha"),
        pytest.param({**SMALL, "weight_dtype": "bfloat16", "compute_dtype": "bfloat16"}, SMALL, id="type-of-weights"),
        pytest.param({**SMALL, "advantage_estimator": "gae"}, {**SMALL, "advantage_estimator": "gae"}, id="critic"),
    ],
)
def test_settings_that_may_change(resume, before, after):
    resume(before, after)


@pytest.mark.parametrize(
    ("before", "after", "code", "key", "words"),
    [
        pytest.param(
            SMALL,
            {**SMALL, "optimizer": "muon"},
            "RST-L003",
            "train.optimizer",
            ["is muon, but the checkpoint of step 20 has the state of adamw", "write train.optimizer: adamw"],
            id="optimizer",
        ),
        pytest.param(
            {**SMALL, "optimizer": "muon"},
            SMALL,
            "RST-L003",
            "train.optimizer",
            ["is adamw, but the checkpoint of step 20 has the state of muon", "write train.optimizer: muon"],
            id="optimizer-not-written",
        ),
        pytest.param(
            SMALL,
            {"model": "wide"},
            "RST-L004",
            "train.model",
            ["is of another model", "down_proj.weight is 64 x 128 there and 64 x 96 here, and"],
            id="model",
        ),
        pytest.param(
            LORA,
            {**LORA, "lora_rank": 8},
            "RST-L004",
            "train.lora_rank",
            ["is 8, but the checkpoint of step 20 has an adapter of rank 4", "write train.lora_rank: 4"],
            id="rank",
        ),
        pytest.param(
            LORA, SMALL, "RST-L004", "train.lora_rank", ["is not written, but", "an adapter of rank 4"], id="no-adapter"
        ),
        pytest.param(
            SMALL,
            LORA,
            "RST-L004",
            "train.lora_rank",
            ["is 4, but", "no adapter", "remove train.lora_rank"],
            id="adapter",
        ),
        pytest.param(
            {**LORA, "lora_target_modules": ["q_proj", "v_proj"]},
            {**LORA, "lora_target_modules": ["q_proj"]},
            "RST-L004",
            "train.lora_target_modules",
            [
                "gives q_proj an adapter",
                "has one of q_proj, v_proj",
                "write train.lora_target_modules: [q_proj, v_proj]",
            ],
            id="layers-of-the-adapter",
        ),
    ],
)
def test_settings_that_must_stay(resume, before, after, code, key, words):
    with pytest.raises(ConfigError) as caught:
        resume(before, after)
    [finding] = caught.value.findings
    assert (finding.code, finding.where.key_path) == (code, key)
    for word in (*words, "or train under another --name"):
        assert word in str(finding)


def test_a_critic_of_another_model_is_found(resume):
    gae = {**SMALL, "advantage_estimator": "gae"}
    with pytest.raises(ConfigError) as caught:
        resume(gae, {**gae, "critic": "wide"})
    [finding] = caught.value.findings
    assert (finding.code, finding.where.key_path) == ("RST-L004", "cluster.component_placement.critic")


def test_a_run_from_its_beginning_has_nothing_to_fit(resume, tmp_path):
    check_fits(RunFolder(tmp_path / "no run"), None, None, TrainerState())
