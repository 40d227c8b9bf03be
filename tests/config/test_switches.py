"""Keys of a notation that do nothing without another key."""

import pytest

import roost
from roost.config.compose import load
from roost.config.findings import Findings
from roost.config.job import TRAINED, Origin
from roost.config.notations.notation import read_job
from tests.config.test_training_dialects import with_all
from tests.config.test_training_read import config_of

RLINF, ROLL, _ = TRAINED
FIX, CAP = "algorithm.importance_sampling_fix", "algorithm.importance_sampling_clip"
WITH_REFERENCE = {"adv_estimator": "reinforce", "reference.device_mapping": [0]}


def job_of(notation, written):
    findings = Findings()
    job = read_job(load(with_all(config_of(notation), written), (), findings), findings)
    return job, [note for note in findings.notes if note.code == "RST-T094"]


@pytest.mark.parametrize(
    ("notation", "written", "fix"),
    [
        (ROLL, {"pg_clip": 0.2, "pg_clip_high": 0.28}, "write use_pg_clip_range: true"),
        (ROLL, {"init_kl_coef": 0.01}, "write add_token_level_kl: true"),
        (ROLL, {"target_kl": 0.1}, "write add_token_level_kl: true"),
        (ROLL, {"kl_loss_coef": 0.01}, "write use_kl_loss: true"),
        (ROLL, {"use_kl_loss": True}, "write kl_loss_coef: 0.001"),
        (
            RLINF,
            {"actor.training_backend": "fsdp", "algorithm.early_stop_imp_ratio": 5.0},
            "write max_mean_ratio in train",
        ),
        (RLINF, {CAP: 5}, f"write {FIX}: true"),
        (RLINF, {"algorithm.behave_weight_threshold": 2}, "write algorithm.loss_type: decoupled_actor_critic"),
    ],
)
def test_a_key_without_its_switch_is_noted_and_decides_nothing(notation, written, fix):
    job, (note,) = job_of(notation, written)
    path = list(written)[-1]
    assert (note.where.key_path, note.fix) == (path, f"{fix}, or remove it")
    assert path not in {key.key_path for setting in job.resolved for key in setting.keys}
    (use,) = [use for use in job.keys if use.where.key_path == path]
    assert use.known.reason == note.why


@pytest.mark.parametrize(
    ("notation", "written"),
    [
        (ROLL, {"pg_clip_high": 0.28, "use_pg_clip_range": True}),
        (ROLL, {"pg_clip_high": 0.28, "use_pg_clip_range": False}),
        (ROLL, {"kl_loss_coef": 0.01, "use_kl_loss": True}),
        (ROLL, {"init_kl_coef": 0.0}),
        (RLINF, {CAP: 5, FIX: True}),
        (RLINF, {"actor.training_backend": "megatron", "algorithm.early_stop_imp_ratio": 5.0}),
    ],
)
def test_a_switch_that_is_written_is_meant(notation, written):
    assert job_of(notation, written)[1] == []


def test_a_switch_that_is_off_leaves_its_keys_without_effect():
    job, _ = job_of(ROLL, {"pg_clip": 0.3, "pg_clip_high": 0.28, "use_pg_clip_range": False})
    (setting,) = [setting for setting in job.resolved if setting.name == "clip_range_high"]
    assert (setting.value, setting.origin) == (0.3, Origin.CONFIG)
    assert [key.key_path for key in setting.keys] == ["pg_clip"]


@pytest.mark.parametrize(
    ("written", "fix"),
    [
        ({"kl_loss_coef": 0.01}, "write use_kl_loss: true"),
        ({"use_kl_loss": True}, "write kl_loss_coef: 0.001"),
        ({"init_kl_coef": 0.01}, "write add_token_level_kl: true"),
        ({}, "write train.kl_coef: 0.001"),
    ],
)
def test_a_reference_without_a_kl_names_the_switch_that_is_missing(written, fix):
    plan = roost.plan(with_all(config_of(ROLL), WITH_REFERENCE | written))
    (found,) = [warning for warning in plan.warnings if warning.code == "RST-P025"]
    assert found.fix == f"{fix}, or remove reference"
