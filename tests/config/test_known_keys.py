"""No key is ignored in silence: real keys are followed or listed with a reason, slips get a hint."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest

import roost
from roost.config.compose import load
from roost.config.findings import Findings, Severity
from roost.config.job import TRAINED, Notation
from roost.config.known_keys.report import TABLES
from roost.config.known_keys.tables import Effect
from roost.config.notations.dialects import DERIVED_FROM, defaults, derived
from roost.config.notations.loop import read_loop
from roost.config.notations.notation import read_job
from roost.config.notations.rlinf import read_rlinf
from roost.config.notations.roll import read_roll
from roost.config.source import Section
from roost.config.train import SETTINGS
from tests.cli.terminal import run, write
from tests.config.test_training_read import CONFIGS, TRAIN, merged

LISTS = Path(__file__).parent / "known_keys"
REAL = {notation: (LISTS / f"{notation.value}.txt").read_text().split() for notation in TRAINED}
OWN_OF_FILES = ("world_size",)  # real files have it at the top, where no program reads it


def job_of(notation, keys, trains=True, value="x"):
    config = CONFIGS[notation] | ({"train": TRAIN} if trains else {})
    for key in keys:
        config = merged(config, key.split("."), value)
    findings = Findings()
    return read_job(load(config, (), findings), findings, notation), findings


@functools.cache
def job_with(notation, key):
    return job_of(notation, [key])


def covered(job, key):
    """The entry of a key, or of the subtree that it is in."""
    path = tuple(key.split("."))
    return next((use for use in job.keys if path[: len(use.where.path)] == use.where.path), None)


@pytest.mark.parametrize("notation", TRAINED)
def test_every_real_key_is_followed_or_has_a_reason(notation):
    unexplained = []
    for key in REAL[notation]:
        job, _ = job_with(notation, key)
        use = covered(job, key)
        is_own = use is not None and use.known.effect is Effect.OWN and key.startswith(OWN_OF_FILES)
        if not is_own and (use is None or use.known.effect in (Effect.UNKNOWN, Effect.OWN)):
            unexplained.append(key)
        elif use.known.effect not in (Effect.FOLLOWED, Effect.PLACING) and not use.known.reason:
            unexplained.append(f"{key} without a reason")
    assert not unexplained


PLAIN = {"train_env_manager": None, "sft_train": None, "student": None}
NOT_DISTILLED = dict.fromkeys(("student_train", "student_infer", "is_pure_opd", "teacher"), None)

READERS = {Notation.RLINF: read_rlinf, Notation.ROLL: read_roll, Notation.LOOP: read_loop}
LEARNERS = ("actor", "critic", "inference", "reference", "actor_inference", "critic_inference")
PLACED = (*LEARNERS, "rollout", "reward", "env")
# Configs that together have every key read: some are read only beside others, or where a section (None) is absent.
READ_WITH = {
    Notation.RLINF: [
        {
            "cluster.component_placement": dict.fromkeys(PLACED, 0),
            **{f"{name}.model.is_lora": True for name in PLACED},
            "algorithm.entropy_bonus": 0.1,
            "algorithm.kl_beta": 0.1,
            "data.train_data_paths": ["train.jsonl"],
            "algorithm.adv_type": "gae",
        },
        {"data.train_data_paths": ["train.parquet"], "data.type": "vlm", "data.dataset_name": "base"},
        *({"reward.reward_type": kind} for kind in ("math", "vqa", "code_offline", "rstar2")),
        {"algorithm.adv_type": "reinpp", "algorithm.kl_beta": 0.1},
        {"algorithm.adv_type": "grpo_dynamic"},
        {"algorithm.loss_type": "decoupled_actor_critic"},
        {"algorithm.down_sampling.do_down_sampling": True, "runner.enable_dynamic_batch_size": True},
        {"actor.training_backend": "fsdp", "actor.optim.total_training_steps": 9, "actor.optim.lr_warmup_steps": -1},
        {"agentloop.toolcall_parser": "searchr1-qwen", "agentloop.max_turns": 3},
    ],
    Notation.ROLL: [
        *(
            {**NOT_DISTILLED, **case}
            for case in [
                {
                    **{f"{role}.device_mapping": [0] for role in ("reference", "reward", "critic")},
                    "actor_train.worker_cls": "actor_pg_worker.ActorPGWorker",
                    "adv_estimator": "reinforce",
                    "use_kl_loss": True,
                    "use_pg_clip_range": True,
                    "actor_infer.strategy_args.strategy_name": "vllm",
                    **PLAIN,
                    "actor_train.data_args.file_name": "train.jsonl",
                },
                *(
                    {
                        **{role: None for role in ("sft_train", "student") if role != learner},
                        f"{learner}.device_mapping": [0],
                        f"{learner}.data_args.file_name": "rows.json",
                        "train_env_manager": None,
                    }
                    for learner in ("sft_train", "student")
                ),
                {
                    "train": {},
                    "sft_train": None,
                    "student": None,
                    "train_env_manager.tags": ["*"],
                    "val_env_manager.tags": ["*"],
                    "custom_envs.*.env_type": "frozen_lake",
                    "custom_envs.*.env_manager_cls": "StepEnvManager",
                    "custom_envs.*.next_step_template": "",
                },
                *(
                    {**PLAIN, "rewards.*.worker_cls": f"roll.{name}", **more}
                    for name, more in (
                        ("CodeSandboxRewardWorker", {"rewards.*.use_local": False}),
                        ("CrossThinkQARuleRewardWorker", {"rewards.*.reward_type": "soft"}),
                        ("LLMJudgeRewardWorker", {"rewards.*.judge_model_type": "api"}),
                    )
                ),
                {
                    "adv_estimator": "reinforce",
                    "actor_train.worker_cls": None,
                    **PLAIN,
                    "add_token_level_kl": True,
                    "difficulty_mask": True,
                    "error_max_len_clip": True,
                },
                {"adv_estimator": "gigpo", "actor_infer.generating_args": None, "sft_train": None, "student": None},
            ]
        ),
        {**NOT_DISTILLED, **PLAIN, "use_opd": True, "reference.device_mapping": [0]},
        {
            **PLAIN,
            **dict.fromkeys(("student_train", "student_infer", "is_pure_opd"), None),
            **{f"teacher.{key}": None for key in ("device_mapping", "world_size", "strategy_args")},
            "teacher.*.device_mapping": [0],
            "use_opd": True,
        },
        {
            **PLAIN,
            **dict.fromkeys(("actor_train", "actor_infer", "is_pure_opd"), None),
            **{f"{role}.device_mapping": [0] for role in ("student_train", "student_infer", "teacher")},
            "student_train.worker_cls": "actor_pg_worker.ActorPGWorker",
            "student_train.data_args.file_name": "train.jsonl",
            "student_train.pg_variant": "cispo",
        },
        *(
            {
                **PLAIN,
                **dict.fromkeys(("actor_train", "actor_infer", "is_pure_opd"), None),
                **{f"{role}.device_mapping": [0] for role in ("student_train", "student_infer", "teacher")},
                "student_train.worker_cls": "actor_pg_worker.ActorPGWorker",
                "student_train.pg_variant": variant,
            }
            for variant in ("tis", "kimi15")
        ),
        *(
            {
                **NOT_DISTILLED,
                **PLAIN,
                "actor_train.worker_cls": "actor_pg_worker.ActorPGWorker",
                "actor_train.pg_variant": variant,
                "train_infer_correction.is_weight.enabled": True,
            }
            for variant in ("cispo", "tis", "kimi15")
        ),
        {**NOT_DISTILLED, **PLAIN, "actor_train.worker_cls": None},
    ],
    Notation.LOOP: [{"rl.eval.enable": True, "rl.optimization.lr_scheduler._target_": "get_const_lr"}],
}


class Recorded(dict):
    """A mapping that notes which of its keys are looked for."""

    def __init__(self, values, looked_for, path=()):
        below = {key: (*path, key) for key in values}
        super().__init__(
            {
                key: Recorded(value, looked_for, below[key]) if isinstance(value, dict) else value
                for key, value in values.items()
            }
        )
        self.path, self.looked_for = path, looked_for

    def get(self, key, default=None):
        self.looked_for.add(".".join((*self.path, str(key))))
        return super().get(key, default)

    def __getitem__(self, key):
        self.looked_for.add(".".join((*self.path, str(key))))
        return super().__getitem__(key)

    def __contains__(self, key):
        self.looked_for.add(".".join((*self.path, str(key))))
        return super().__contains__(key)


def keys_read(notation, paths, written):
    """The keys that reading the job looks for in a config that has the sections of all these paths."""
    config, looked_for, findings = CONFIGS[notation], set(), Findings()
    for path, value in written.items():
        config = config if value is None else merged(config, path.split("."), value)
    absent = tuple(f"{path}." for path, value in written.items() if value is None)
    for path in paths:
        if "." in path and not f"{path}.".startswith(absent):
            config = merged(config, [*path.split(".")[:-1], "_"], None)
    source = load(config, (), findings)
    root = Section.root(replace(source, values=Recorded(source.values, looked_for)), findings)
    job = READERS[notation](root)
    derived(root, job)
    defaults(root, notation, {})
    return looked_for


@pytest.mark.parametrize("notation", TRAINED)
def test_every_key_said_to_be_read_is_read(notation):
    entries = [entry for entry in TABLES[notation] if entry.known.effect in (Effect.FOLLOWED, Effect.PLACING)]
    patterns = {path for entry in entries for path in entry.patterns() if not path.endswith(".**")}
    patterns |= {path for paths in DERIVED_FROM[notation].values() for path in paths}
    roles = ("actor_train", "actor_infer") if notation is Notation.ROLL else ("",)
    written = {pattern: [pattern.replace("ROLE", role) for role in roles] for pattern in patterns}
    paths = [path for each in written.values() for path in each]
    read = set().union(*(keys_read(notation, paths, config) for config in READ_WITH[notation]))
    assert not sorted(pattern for pattern, each in written.items() if not read.intersection(each))


@pytest.mark.parametrize("notation", TRAINED)
def test_a_key_stands_once_in_a_table(notation):
    """And nowhere in it if a reader's own table has it, but for keys that count for placing as well."""
    followed = {".".join(path) for setting in SETTINGS.values() for path in setting.native(notation)}
    followed |= {path for paths in DERIVED_FROM[notation].values() for path in paths}
    listed = [(path, entry.known) for entry in TABLES[notation] for path in entry.patterns()]
    paths = [path for path, _ in listed]
    assert not sorted({path for path in paths if paths.count(path) > 1})
    assert not [path for path, known in listed if path in followed and known.effect is not Effect.PLACING]


@pytest.mark.parametrize("notation", TRAINED)
def test_what_is_not_followed_is_reported(notation):
    """Each key that changes training is named by a warning, each other by a note."""
    silent = []
    for key in REAL[notation]:
        job, findings = job_with(notation, key)
        use = covered(job, key)
        if use is None or not use.is_unused(trains=True) or not use.is_set or use.known.effect is Effect.OWN:
            continue
        named = str(use.where.path[-1])
        if not any(named in f"{found.where.key_path} {found.what}" for found in findings.found):
            silent.append(key)
    assert not silent


@pytest.mark.parametrize(
    ("notation", "key", "hint"),
    [
        (Notation.RLINF, "algorithm.ratio_clip_epz", "did you mean ratio_clip_eps?"),
        (Notation.RLINF, "data.train_data_pahts", "did you mean train_data_paths?"),
        (Notation.RLINF, "actor.optim.weight_deca", "did you mean weight_decay?"),
        (Notation.RLINF, "runner.logger.experimnt_name", "did you mean experiment_name?"),
        (Notation.RLINF, "reward.reward_scal", "did you mean reward_scale?"),
        (Notation.RLINF, "rollout.rollout_backnd", "did you mean rollout_backend?"),
        (Notation.RLINF, "algoritm", "did you mean algorithm?"),
        (Notation.ROLL, "whiten_advantage", "did you mean whiten_advantages?"),
        (Notation.ROLL, "adv_estimatr", "did you mean adv_estimator?"),
        (Notation.ROLL, "actor_train.training_args.learning_rte", "did you mean learning_rate?"),
        (Notation.ROLL, "actor_train.data_args.fle_name", "did you mean file_name?"),
        (Notation.ROLL, "actor_infer.generating_args.temprature", "did you mean temperature?"),
        (Notation.ROLL, "rewards.math_rule.tag_include", "did you mean tag_included?"),
        (Notation.LOOP, "rl.asynch_rollouts", "did you mean async_rollouts?"),
        (Notation.LOOP, "rl.learning_max_seqlen", "did you mean learning_max_seq_len?"),
        (Notation.LOOP, "llm.lora_dropot", "did you mean lora_dropout?"),
    ],
)
def test_a_slip_gets_a_hint(notation, key, hint):
    path = tuple(key.split("."))
    job, findings = job_of(notation, [key])
    assert [found.why for found in findings.warnings if found.where.path == path] == [hint]
    assert covered(job, key).known.effect is Effect.UNKNOWN


@pytest.mark.parametrize(
    ("notation", "key"),
    [(Notation.RLINF, "algorithm.zzz"), (Notation.ROLL, "train_infer_correction.is_weight.tis_lower")],
)
def test_an_invented_key_of_an_owned_section_is_unknown(notation, key):
    _, findings = job_of(notation, [key])
    (warning,) = [found for found in findings.warnings if found.where.key_path == key]
    assert (warning.what, warning.why) == ("is not a key Roost knows", f"{notation.program} does not know it either")


def test_sections_of_the_users_own_are_fine():
    job, findings = job_of(Notation.RLINF, ["my_notes.anything"])
    assert not findings.found
    assert covered(job, "my_notes.anything").known.effect is Effect.OWN


def test_keys_with_the_same_reason_share_a_warning():
    keys = ["data.is_markdown", "data.norm_column", "data.num_workers", "runner.log_interval"]
    _, findings = job_of(Notation.RLINF, keys)
    (warning,) = findings.warnings
    assert warning.what == "is_markdown, norm_column are not followed"
    assert "train.task" in warning.fix
    assert [note.where.key_path for note in findings.notes] == ["data", "runner"]
    assert "num_workers" in findings.notes[0].what


@pytest.mark.parametrize(
    ("notation", "key", "value", "harmless"),
    [
        (Notation.RLINF, "runner.early_stop.enabled", True, False),
        (Notation.RLINF, "runner.weight_sync_interval", 2, 1),
        (Notation.RLINF, "runner.val_split", 0.2, 0),
        (Notation.RLINF, "runner.resume_dir", "a/folder", None),
        (Notation.RLINF, "actor.sync_weight_no_wait", True, False),
        (Notation.RLINF, "actor.model.moe_aux_loss_coeff", 0.001, 0.0),
        (Notation.RLINF, "data.use_chat_template", False, True),
        (Notation.ROLL, "resume_from_checkpoint", "a/folder", False),
        (Notation.ROLL, "actor_train.model_update_frequency", 2, 1),
        (Notation.ROLL, "actor_train.apply_loss_scale", False, True),
        (Notation.ROLL, "is_use_additional_prompts", True, False),
        (Notation.ROLL, "user_defined_rollout_loop_cls", "my.Loop", None),
        (Notation.ROLL, "force_disable_old_logprobs_recompute", True, False),
        (Notation.ROLL, "actor_train.model_args.model_config_kwargs", {"attention_dropout": 0.1}, {}),
        (Notation.LOOP, "llm.chat_template", "a.jinja", None),
        (Notation.LOOP, "llm.vllm_class.presence_penalty", 1.2, None),
    ],
)
def test_a_key_that_changes_training_is_warned_about(notation, key, value, harmless):
    _, findings = job_of(notation, [key], value=value)
    assert [warning.where.key_path for warning in findings.warnings] == [key]
    _, findings = job_of(notation, [key], value=harmless)
    assert not findings.warnings


@pytest.mark.parametrize("value", [None, False, 0])
def test_a_key_that_switches_nothing_on_is_not_reported(value):
    keys = ["is_use_additional_prompts", "resume_from_checkpoint", "length_loss_weight"]
    job, findings = job_of(Notation.ROLL, keys, value=value)
    assert not findings.found
    assert covered(job, "is_use_additional_prompts").known.effect is Effect.NOTHING


@pytest.mark.parametrize("notation", TRAINED)
def test_a_config_that_only_places_gets_one_note(notation):
    keys = [key for key in REAL[notation] if key.count(".") < 2 and not key.startswith(tuple(CONFIGS[notation]))]
    _, findings = job_of(notation, keys[:80], trains=False)
    notes = [found for found in findings.found if found.severity is Severity.NOTE]
    assert len(notes) == 1
    assert "no section train" in notes[0].what


def test_a_plain_placing_config_gets_none():
    for notation in TRAINED:
        assert not job_of(notation, [], trains=False)[1].found


RLINF_JOB = """
cluster: {num_nodes: 1, num_gpus_per_node: 2, component_placement: {actor: 0, rollout: 1}}
actor: {model: {model_path: some/model}}
reward: {reward_threshold: 5}
data: {is_markdown: true}
runner: {log_interval: 3}
train: {task: {_target_: no_such_module.Task}}
"""


def test_plan_check_and_train_report_the_same(tmp_path):
    job = write(tmp_path, RLINF_JOB)
    override = "+data.enable_zh=true"

    def reported(text):
        return [line for line in text.splitlines() if line.startswith(("warning", "note"))]

    planned = reported(run("plan", job, override, width=400).stderr)
    assert len(planned) == 3
    assert reported(run("check", job, override, width=400).stdout) == planned
    assert reported(run("train", job, override, "--runs", tmp_path / "runs", width=400).stderr) == planned


def test_reasons_are_in_the_json_and_in_words(tmp_path):
    job = write(tmp_path, RLINF_JOB)
    plan = roost.plan(job)
    again = roost.Plan.from_json(plan.to_json())
    assert (again.keys, again.notes) == (plan.keys, plan.notes)
    assert {use.where.key_path: use.known.effect for use in plan.keys} == {
        "reward.reward_threshold": Effect.TRAINING,
        "data.is_markdown": Effect.TRAINING,
        "runner.log_interval": Effect.FILES,
    }
    assert "data.is_markdown, line 5" in run("explain", job, "data", width=200).stdout
    assert "reward.reward_threshold, line 4" in run("explain", job, "keys.reward", width=200).stdout
    assert len(run("explain", job, "keys", width=200).stdout.splitlines()) == 4


@pytest.mark.parametrize(
    "key",
    [
        "recompute_method",
        "recompute_num_layers",
        "sequence_parallel",
        "apply_rope_fusion",
        "moe_token_dispatcher_type",
    ],
)
def test_keys_of_speed_or_memory_are_not_said_to_be_the_models(key):
    job, _ = job_of(Notation.RLINF, [f"actor.model.{key}"])
    assert covered(job, f"actor.model.{key}").known.effect is Effect.SPEED


@pytest.mark.parametrize("word", ["adamw_8bit", "lion"])
def test_an_optimizer_of_roll_is_followed_or_named_by_what_there_is(word):
    _, findings = job_of(Notation.ROLL, ["actor_train.training_args.optim"], value=word)
    said = [str(found) for found in findings.found if "training_args.optim" in str(found.where)]
    assert not any("lr_scheduler_type" in each for each in said)
