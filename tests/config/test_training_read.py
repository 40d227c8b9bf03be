"""The section `train`: every setting is read, by its own name or by the notation's, and nothing is passed over."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import roost
from roost.config.compose import load
from roost.config.findings import Findings, Severity
from roost.config.job import TRAINED, Notation
from roost.config.notations.notation import read_job
from roost.config.train import SETTINGS, OptimizerSettings, RolloutSettings, TrainSettings, value_of
from roost.config.train_choices import OTHER_NAMES
from roost.config.train_read import setting_location
from tests.config.settings_page import NEEDED, PAGE, settings_page
from tests.grid import grid

EXAMPLES = Path(__file__).parents[2] / "examples" / "arithmetic"
TRAIN = {"task": {"_target_": "my_tasks.Sums"}, "model": "some/model"}
CONFIGS = {
    Notation.RLINF: {
        "cluster": {"num_nodes": 1, "num_gpus_per_node": 2, "component_placement": {"actor": 0, "rollout": 1}}
    },
    Notation.ROLL: {
        "num_gpus_per_node": 2,
        "actor_train": {"device_mapping": [0]},
        "actor_infer": {"device_mapping": [1]},
    },
    Notation.LOOP: {"rl": {"gpu_allocation": {"learning_gpus": [0], "inference_gpus": [1]}}},
}
SAMPLES = RolloutSettings().prompts_per_step * RolloutSettings().num_generations


def merged(config, path, value):
    """The config with one value more; what lies on the way is copied, not changed."""
    first, *rest = path
    return {**config, first: merged(config.get(first, {}), rest, value) if rest else value}


def read(config):
    findings = Findings()
    job = read_job(load(config, (), findings), findings)
    # Notes name keys that need not be followed; tests/config/test_known_keys.py is about them.
    findings.collected = {found: None for found in findings.collected if found.severity is not Severity.NOTE}
    return job.training, findings


def config_of(notation=Notation.RLINF, **train):
    return {**CONFIGS[notation], "train": TRAIN | train}


def settings_of(notation=Notation.RLINF, **train):
    settings, findings = read(config_of(notation, **train))
    assert not findings.found, findings.found
    return settings


def whats(findings):
    return [finding.what for finding in findings.found]


def sample(key):
    """A value of a setting's kind that is not its default."""
    if key.name == "minibatch_size":
        return SAMPLES // 4
    if key.choices:
        return key.type(key.choices[-1])
    if key.type is tuple:
        return ("q_proj", "v_proj")
    if key.name == "teacher":
        return {"model": "large", "coef": 0.5}
    if key.name == "data":
        return {"path": "some/file.jsonl", "shuffle": False}
    if key.name == "rollout_rejection":
        return {"token": [0.5, 2.0]}
    return {int: 5, float: 0.625, bool: True, str: "some/thing", Mapping: {"_target_": "a.B", "c": 1}}[key.type]


def written(value):
    return str(value) if isinstance(value, str) else list(value) if isinstance(value, tuple) else value


def beside(key):
    """Settings that need another: an adapter its rank, a minibatch its batch."""
    if key.name == "minibatch_size":
        return {
            "prompts_per_step": RolloutSettings().prompts_per_step,
            "num_generations": RolloutSettings().num_generations,
        }
    if key.name == "data":
        return {"task": {}, "rewards": {"exact": {"_target_": "a.B"}}}
    return {"lora_rank": 3} if key.name in ("lora_alpha", "lora_target_modules") else {}


@grid("key", SETTINGS.values(), ids=lambda key: key.name)
def test_a_setting_is_read_by_its_name(key):
    value = value_of(settings_of(**beside(key), **{key.name: written(sample(key))}), key.name)
    assert value == sample(key)
    assert type(value) is type(sample(key))


@grid(
    ("key", "nothing"),
    [
        pytest.param(key, None, id=f"{key.name}-null")
        for key in SETTINGS.values()
        if key.name not in NEEDED and key.null is None
    ]
    + [pytest.param(key, -1, id=f"{key.name}-minus-one") for key in SETTINGS.values() if key.type is int],
)
def test_a_setting_that_is_not_given_has_its_default(key, nothing):
    assert value_of(settings_of(**{key.name: nothing}), key.name) == value_of(settings_of(), key.name)


@pytest.mark.parametrize("written", [0, None])
@pytest.mark.parametrize(
    ("notation", "path"),
    [
        pytest.param(Notation.RLINF, ("train", "value_clip"), id="train"),
        pytest.param(Notation.RLINF, ("algorithm", "value_clip"), id="rlinf"),
        pytest.param(Notation.ROLL, ("value_clip",), id="roll"),
    ],
)
def test_the_clip_of_values_can_be_switched_off(notation, path, written):
    assert settings_of(Notation.RLINF).learner.loss.value_clip == 0.2
    settings, findings = read(merged(config_of(notation), path, written))
    assert settings.learner.loss.value_clip == 0
    assert not findings.found


def test_what_is_left_out_where_the_plan_decides():
    settings = settings_of()
    assert settings.learner.activation_checkpointing is None
    assert settings.critic_learning_rate is None
    assert settings_of(activation_checkpointing=False).learner.activation_checkpointing is False
    assert settings_of(activation_checkpointing="auto").learner.activation_checkpointing == "auto"
    _, findings = read(config_of(Notation.RLINF, activation_checkpointing="some"))
    assert whats(findings) == ["is 'some'; it must be true, false or auto"]


def test_a_run_keeps_checkpoints_unless_it_says_otherwise():
    assert settings_of().checkpoint.checkpoint_every == 20
    assert settings_of(checkpoint_every=0).checkpoint.checkpoint_every == 0


def test_what_is_not_written_is_as_the_settings_say():
    settings = settings_of()
    plain = TrainSettings(settings.learner, task=TRAIN["task"], name="")
    assert settings == plain
    assert settings.learner.optimizer.total_steps == plain.max_steps


GIGPO = {
    "advantage_level": "sample",
    "step_gamma": 0.95,
    "reward_baseline": "group",
    "reward_std": "group",
    "state_scope": "group",
    "whiten_advantages": "none",
}


@grid(
    ("notation", "train", "defaults"),
    [
        pytest.param(Notation.RLINF, {"advantage_estimator": "gigpo"}, GIGPO, id="gigpo"),
        pytest.param(Notation.ROLL, {"advantage_estimator": "gigpo"}, GIGPO, id="gigpo-roll"),
        pytest.param(
            Notation.RLINF,
            {"advantage_estimator": "gigpo", "step_gamma": 0.5, "reward_std": "none"},
            {**GIGPO, "step_gamma": 0.5, "reward_std": "none"},
            id="gigpo-written",
        ),
        pytest.param(
            Notation.RLINF,
            {"step_gamma": 0.5, "advantage_estimator": "reward"},
            {"advantage_level": "sample", "reward_baseline": "none"},
            id="steps",
        ),
        pytest.param(
            Notation.RLINF,
            {"step_gamma": 0.5, "advantage_level": "episode"},
            {"advantage_level": "episode"},
            id="steps-of-episodes",
        ),
        pytest.param(
            Notation.ROLL,
            {"advantage_estimator": "reinforce++_baseline"},
            {"whiten_advantages": "tokens"},
            id="whitened-roll",
        ),
        pytest.param(
            Notation.ROLL,
            {"advantage_estimator": "reinforce++_baseline", "whiten_advantages": "none"},
            {"whiten_advantages": "none"},
            id="whitened-roll-written",
        ),
        pytest.param(Notation.ROLL, {"advantage_estimator": "grpo"}, {"whiten_advantages": "none"}, id="grpo-roll"),
    ],
)
def test_defaults_depend_on_the_estimator(notation, train, defaults):
    advantage = settings_of(notation, **train).advantage
    assert {name: getattr(advantage, name) for name in defaults} == defaults


def config_with(path, notation, **train):
    """A config that may have the key: a role of ROLL's must be placed."""
    config = config_of(notation, **train)
    if path[0] in ("student_train", "student"):  # the learner, where it is taught
        return {path[0] if name == "actor_train" else name: value for name, value in config.items()} | {
            "is_pure_opd": False
        }
    role = path[0] if notation is Notation.ROLL and path[0] in ("critic", "sft_train") else None
    return config if role is None else merged(config, (role, "device_mapping"), [0])


NATIVE = [
    pytest.param(key, notation, path, id=f"{notation}-{'.'.join(path)}")
    for key in SETTINGS.values()
    for notation in TRAINED
    for path in key.native(notation)
]


@grid(("key", "notation", "path"), NATIVE)
def test_a_notations_own_key_is_read(key, notation, path):
    config = merged(config_with(path, notation, **beside(key)), path, written(sample(key)))
    settings, findings = read(config)
    assert not findings.found
    assert value_of(settings, key.name) == sample(key)


@grid(("key", "notation", "path"), NATIVE)
def test_train_and_the_notations_own_key_must_agree(key, notation, path):
    train = beside(key) | {key.name: written(sample(key))}
    config = merged(config_with(path, notation, **train), path, written(sample(key)))
    assert not read(config)[1].found
    other = {int: 4, float: 0.5, bool: False, str: "other", tuple: ["o_proj"]}[key.type]
    _, findings = read(merged(config, path, other))
    assert any(f"but {'.'.join(path)} is" in what for what in whats(findings))


KNOWN_ELSEWHERE = [
    ({"loss_type": "gspo"}, "importance_sampling_level: sequence, clip_range: 0.0003, clip_range_high: 0.0004"),
    ({"loss_type": "DAPO"}, "clip_range_high: 0.28"),
    ({"advantage_estimator": "dr-grpo"}, "advantage_estimator: group_mean, loss_aggregation: seq-mean-token-sum-norm"),
    *(
        ({"advantage_estimator": word}, "write advantage_estimator: reward, whiten_advantages: tokens")
        for word in ("reinforce_plus_plus", "reinpp")
    ),
    ({"rollout_is": "seq"}, "write rollout_is: trajectory for the product over a sample (verl's and ROLL's sequence)"),
    ({"importance_sampling_level": "seq"}, "write importance_sampling_level: sequence"),
    ({"kl_estimator": "low_var_kl"}, "write kl_estimator: k3"),
    ({"rollout_is": "segment"}, "write rollout_is: turn_mean"),
]


@pytest.mark.parametrize(("train", "fix"), KNOWN_ELSEWHERE, ids=lambda value: str(value))
def test_names_of_other_frameworks_are_answered_with_the_spelling_here(train, fix):
    _, findings = read(config_of(**train))
    (finding,) = findings.found
    assert finding.code == "RST-T006" and fix in finding.fix and "did you mean" not in str(finding)


@grid(("train", "fix"), [({"clip_range": 1.5}, "write clip_range: 0.2"), ({"eval_top_p": 2}, "write eval_top_p: 1")])
def test_the_fix_of_a_number_that_is_too_large_is_the_default(train, fix):
    _, findings = read(config_of(**train))
    assert [finding.fix for finding in findings.found] == [fix]


@pytest.mark.parametrize("kind", OTHER_NAMES)
def test_spellings_of_other_names_can_be_read(kind):
    for name, spelling in OTHER_NAMES[kind].items():
        assert name not in tuple(kind)
        if ": " not in spelling:
            assert kind(spelling), name
            continue
        settings = yaml.safe_load("{" + spelling + "}")
        _, findings = read(config_of(**settings))
        assert not [each for each in findings.found if each.code in ("RST-T006", "RST-T001")], name


@pytest.mark.parametrize(
    ("train", "what", "why"),
    [
        pytest.param({"learning_rat": 1}, "is not a key Roost knows", "did you mean learning_rate?", id="key"),
        pytest.param({"advantage_estimator": "grop"}, "is 'grop'", "did you mean grpo?", id="choice"),
        pytest.param({"engine": "vlm"}, "is 'vlm'", "did you mean vllm?", id="engine"),
        pytest.param({"max_steps": 0}, "is 0; it must be a whole number of at least 1", "", id="least"),
        pytest.param({"max_steps": 1.5}, "is 1.5; it must be a whole number of at least 1", "", id="part-of-a-step"),
        pytest.param({"min_p": 2}, "is 2; it must be at most 1", "", id="most"),
        pytest.param({"learning_rate": -1}, "is -1; it must be a number that is not negative", "", id="negative"),
        pytest.param({"learning_rate": "-1e-5"}, "is '-1e-5'; it must be a number that is not negative", "", id="word"),
        pytest.param({"learning_rate": "1e999"}, "is '1e999'; it must be at most 1e+12", "", id="huge-word"),
        pytest.param({"learning_rate": 1e20}, "is 1e+20; it must be at most 1e+12", "", id="huge"),
        pytest.param({"learning_rate": math.inf}, "is inf; it must be at most 1e+12", "", id="infinite"),
        pytest.param({"learning_rate": math.nan}, "is nan; it must be a number that is not negative", "", id="nan"),
        pytest.param({"learning_rate": "small"}, "is 'small'; it must be a number that is not negative", "", id="text"),
        pytest.param({"positive_advantages_only": "yes"}, "is 'yes'; it must be true or false", "", id="flag"),
        pytest.param({"task": "Sums"}, "is 'Sums'; it must be a mapping", "", id="mapping"),
        pytest.param({"task": {"largest": 4}}, "has no _target_", "", id="target"),
        pytest.param({"task": None}, "is missing", "", id="task"),
        pytest.param({"model": None}, "is missing", "", id="model"),
    ],
)
def test_a_wrong_value_is_a_finding(train, what, why):
    _, findings = read(config_of(**train))
    assert (what, why) in [(finding.what, finding.why) for finding in findings.found]


@pytest.mark.parametrize("rate", ["2e-05", "2E-5", "0.00002", "2.0e-05"])
def test_a_learning_rate_as_yaml_readers_give_it(rate, tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(
        "cluster: {num_nodes: 1, num_gpus_per_node: 2, component_placement: {actor: 0, rollout: 1}}\n"
        f"actor: {{optim: {{lr: {rate}}}}}\n"
        "train: {task: {_target_: a.B}, model: a/b}\n"
    )
    for overrides in ([], ["+train.max_steps=5"]):
        findings = Findings()
        assert read_job(load(file, overrides, findings), findings).training.learner.optimizer.learning_rate == 2e-5
        assert not findings.found


def test_a_learning_rate_that_a_reader_took_for_a_word():
    assert settings_of(learning_rate="2e-05").learner.optimizer.learning_rate == 2e-5


def test_what_cannot_be_resolved_inside_a_task_is_a_finding():
    task = {"_target_": "a.B", "data": {"file": "${nowhere.at.all}"}}
    _, findings = read(config_of(task=task))
    assert [finding.where.path for finding in findings.found] == [("train", "task", "data", "file")]


def test_the_model_is_the_actors_then_the_engines():
    critic = {"device_mapping": [0], "model_args": {"model_name_or_path": "a/critic"}}
    roll = {"critic": critic, **CONFIGS[Notation.ROLL], "pretrain": "a/policy", "adv_estimator": "gae"}
    settings, _ = read({**roll, "train": {"task": TRAIN["task"]}})
    assert settings.learner.model == "a/policy"
    rlinf = merged(CONFIGS[Notation.RLINF], ("rollout", "model", "model_path"), "an/engine")
    settings, findings = read({**rlinf, "train": {"task": TRAIN["task"]}})
    assert settings.learner.model == "an/engine"
    assert not findings.found


@pytest.mark.parametrize(
    ("train", "count", "what"),
    [
        pytest.param({"prompts_per_step": 4, "num_generations": 8, "minibatch_size": 8}, 4, None, id="divides"),
        pytest.param({"prompts_per_step": 4, "num_generations": 8, "minibatch_size": 32}, 1, None, id="all"),
        pytest.param(
            {"prompts_per_step": 40, "num_generations": 6, "minibatch_size": 32},
            8,
            "do not divide the 240",
            id="uneven",
        ),
        pytest.param(
            {"prompts_per_step": 4, "num_generations": 8, "minibatch_size": 33},
            1,
            "a step has 32 samples",
            id="too-large",
        ),
    ],
)
def test_minibatches(train, count, what):
    settings, findings = read(config_of(**train, ppo_epochs=3, max_steps=7))
    assert settings.minibatches == count
    assert settings.learner.optimizer.total_steps == 7 * 3 * count
    assert len(findings.found) == (what is not None)
    assert what is None or what in findings.found[0].what


@pytest.mark.parametrize(
    ("config", "name", "path"),
    [
        pytest.param(config_of(top_p=0.5), "top_p", ("train", "top_p"), id="train"),
        pytest.param(config_of(), "top_p", ("train", "top_p"), id="nowhere"),
        pytest.param(
            merged(config_of(), ("algorithm", "group_size"), 4),
            "num_generations",
            ("algorithm", "group_size"),
            id="native",
        ),
        pytest.param(
            merged(config_of(), ("algorithm", "ratio_clip_eps"), 0.2),
            "clip_range",
            ("algorithm", "ratio_clip_eps"),
            id="made-of",
        ),
        pytest.param(
            merged(config_of(Notation.ROLL), ("response_length",), 9),
            "max_new_tokens",
            ("response_length",),
            id="made-roll",
        ),
        pytest.param(config_of(Notation.ROLL), "actor", ("actor_train", "device_mapping"), id="component"),
        pytest.param(
            merged(config_of(), ("cluster", "component_placement", "task"), 0), "task", ("train", "task"), id="setting"
        ),
    ],
)
def test_the_place_of_a_setting(config, name, path):
    findings = Findings()
    assert setting_location(name, read_job(load(config, (), findings), findings)).path == path


def test_a_config_without_the_section_only_places():
    assert read(CONFIGS[Notation.RLINF])[0] is None


def test_the_examples_say_the_same_in_three_notations():
    jobs, plans = [], []
    for name in ("rlinf", "roll", "loop"):
        findings = Findings()
        jobs.append(read_job(load(EXAMPLES / f"{name}.yaml", (), findings), findings))
        assert not findings.found
        plans.append(roost.plan(replace(jobs[-1], training=None)))
    assert jobs[0].training == jobs[1].training == jobs[2].training
    assert jobs[0].training.learner.optimizer.learning_rate != OptimizerSettings().learning_rate
    for name in ("actor", "rollout"):
        processes = [list(plan[name].processes()) for plan in plans]
        assert processes[0] == processes[1] == processes[2]
        assert len(processes[0]) == 1


def test_page_is_what_the_code_says():
    assert PAGE.read_text(encoding="utf-8") == settings_page(), "run: python -m tests.config.settings_page"


def test_supervised_training_says_that_a_teacher_of_another_objective_is_used():
    teacher = {"model": "large", "coef": 0.5}
    config = config_of(objective="sft", teacher=teacher, rollout_logprobs="all", request_seeds=True)
    findings = Findings()
    read_job(load(config, (), findings), findings)
    found = {note.code: note for note in findings.notes}
    assert found["RST-T081"].what == "coef is not used"
    assert found["RST-T081"].why.endswith("is used for distillation on the given completions, with weight 0.5")
    assert "train.rollout_logprobs, train.request_seeds are not used" in found["RST-T043"].what


@grid(
    ("key", "fix"),
    [
        (
            "tensor_parallel_size",
            "write actor.model.tensor_model_parallel_size for the learner, rollout.tensor_parallel_size for engines",
        ),
        ("context_parallel_size", "write actor.model.context_parallel_size for the learner"),
        ("ep", "write actor.model.expert_model_parallel_size for the learner"),
        ("fsdp_size", "write actor.fsdp_config.fsdp_size for the learner"),
    ],
)
def test_parallel_sizes_in_train_are_told_where_they_belong(key, fix):
    _, findings = read(config_of(**{key: 2}))
    (finding,) = findings.found
    assert (finding.code, finding.where.path, finding.fix) == ("RST-C023", ("train", key), fix)
