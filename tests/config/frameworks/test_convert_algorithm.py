"""Estimators, whitening, KL and lengths of converted jobs: written, or a named loss."""

import pytest

import roost
from roost.config.findings import Findings
from roost.config.job import Notation
from roost.placement.convert.convert_plan import convert_plan
from roost.placement.diff import diff_plans
from tests.config.frameworks.test_jobs import plan_of

VERL = "python3 -m verl.trainer.main_ppo trainer.n_gpus_per_node=4 actor_rollout_ref.rollout.name=vllm"
SLIME = "python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 4 --colocate"
SKYRL = (
    "uv run -m skyrl.train.entrypoints.main_base trainer.placement.policy_num_gpus_per_node=4 "
    "trainer.placement.ref_num_gpus_per_node=4 generator.inference_engine.num_engines=4"
)
PLACED = {"num_nodes": 1, "num_gpus_per_node": 4, "component_placement": {"actor,rollout": "0-3"}}


def rlinf(**algorithm):
    return roost.plan({"cluster": PLACED, "algorithm": {"adv_type": "grpo"} | algorithm})


def converted(plan, target):
    findings = Findings()
    written = convert_plan(plan, Notation(target), findings)
    assert written is not None, [finding.what for finding in findings.errors]
    return written, [finding.what for finding in findings.warnings]


JOBS = {
    "rlinf": lambda _: rlinf(normalize_advantages=True),
    "slime": lambda folder: plan_of(folder, f"{SLIME} --normalize-advantages"),
    "skyrl": lambda folder: plan_of(folder, f"{SKYRL} trainer.algorithm.advantage_batch_normalize=true"),
}
SWITCHES = {
    "rlinf": "normalize_advantages: true",
    "roll": "whiten_advantages: true",
    "slime": "--normalize-advantages",
    "skyrl": "advantage_batch_normalize=True",
    "areal": "adv_norm: {mean_level: batch, std_level: batch}",
    "verl": None,
    "nemo": None,
    "openrlhf": None,
}


@pytest.mark.parametrize("source", JOBS)
@pytest.mark.parametrize("target", SWITCHES)
def test_whitening_is_written_or_named(source, target, tmp_path):
    written, lost = converted(JOBS[source](tmp_path), target)
    named = f"{target} cannot express this: whiten_advantages: true -> nothing"
    assert (named in lost) == (SWITCHES[target] is None)
    assert SWITCHES[target] is None or SWITCHES[target] in written.text


@pytest.mark.parametrize(
    ("command", "target", "words", "absent"),
    [
        (f"{VERL} algorithm.adv_estimator=gae", "slime", "--normalize-advantages", None),
        (f"{VERL} algorithm.adv_estimator=gae", "nemo", "normalize_advantages: true", None),
        (f"{VERL} algorithm.adv_estimator=gae", "skyrl", "advantage_estimator=gae", "batch_normalize"),
        (f"{SLIME} --advantage-estimator ppo", "nemo", "normalize_advantages: false", None),
        (f"{SLIME} --advantage-estimator ppo", "rlinf", "normalize_advantages: false", None),
        (f"{VERL} algorithm.adv_estimator=reinforce_plus_plus", "slime", "--normalize-advantages", None),
        (f"{VERL} algorithm.adv_estimator=reinforce_plus_plus", "rlinf", "adv_type: reinpp", "normalize_advantages"),
        (f"{VERL} algorithm.adv_estimator=reinforce_plus_plus_baseline", "roll", "norm_mean_type: group", None),
        (f"{SLIME} --advantage-estimator reinforce_plus_plus", "areal", "kl_ctl: 0.0", "adv_norm"),
        (f"{SLIME} --advantage-estimator reinforce_plus_plus", "rlinf", "adv_type: raw", "normalize_advantages"),
    ],
)
def test_estimators_are_whitened_as_in_the_source(command, target, words, absent, tmp_path):
    written, lost = converted(plan_of(tmp_path, command), target)
    assert words in written.text
    assert absent is None or absent not in written.text
    assert not any("whiten" in what or "estimator" in what for what in lost)


def test_whitening_alone_is_a_difference():
    on, off = (rlinf(normalize_advantages=value) for value in (True, False))
    assert [str(change) for change in diff_plans(on, off)] == ["whiten_advantages: true -> nothing"]


OFF = {
    "reward": f"{VERL} algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.0",
    "loss": f"{VERL} algorithm.adv_estimator=grpo actor_rollout_ref.actor.use_kl_loss=True "
    "actor_rollout_ref.actor.kl_loss_coef=0",
    "skyrl": f"{SKYRL} trainer.algorithm.use_kl_loss=true trainer.algorithm.kl_loss_coef=0.0",
}


@pytest.mark.parametrize("source", OFF)
@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("verl", "0.0"),
        ("skyrl", "kl_loss_coef=0.0"),
        ("slime", None),
        ("openrlhf", "--algo.kl.init_coef 0"),
        ("nemo", "reference_policy_kl_penalty: 0.0"),
        ("areal", "kl_ctl: 0.0"),
    ],
)
def test_a_kl_of_0_stays_0(source, target, words, tmp_path):
    written, lost = converted(plan_of(tmp_path, OFF[source]), target)
    assert words is None or words in written.text
    assert "0.001" not in written.text and "0.01" not in written.text
    assert not any("kl_" in what for what in lost)
    idles = target in ("verl", "skyrl") or (target == "slime" and source != "reward")
    assert any("starts no reference for a KL of 0" in what for what in lost) != idles


def test_a_kl_of_0_differs_from_another(tmp_path):
    off, on = (plan_of(tmp_path, f"{OFF['loss']}{digits}") for digits in ("", ".01"))
    assert [str(change) for change in diff_plans(off, on)] == ["kl_coef: 0 -> 0.01"]


def test_engines_of_verl_beside_the_trainer_are_synced_after_every_update(tmp_path):
    command = "python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4"
    written, _ = converted(plan_of(tmp_path, command), "verl")
    assert "async_training.staleness_threshold=0" in written.text
    assert "async_training.trigger_parameter_sync_step=1" in written.text


AREAL = {
    "cluster": {"n_nodes": 1, "n_gpus_per_node": 8},
    "actor": {"backend": "fsdp:d4"},
    "rollout": {"backend": "vllm:d4"},
    "gconfig": {"max_new_tokens": 4096},
}


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("openrlhf", "--rollout.max_new_tokens 4096"),
        ("openrlhf", "--data.max_len 4608"),
        ("roll", "response_length: 4096"),
        ("rlinf", "sampling_params: {max_new_tokens: 4096}"),
        ("nemo", "max_new_tokens: 4096"),
        ("prime", "[orchestrator.train.sampling]\nmax_completion_tokens = 4096"),
        ("slime", "--rollout-max-response-len 4096"),
    ],
)
def test_the_longest_completion_goes_over(target, words):
    written, lost = converted(roost.plan(AREAL, notation="areal"), target)
    assert words in written.text
    assert not any("max_new_tokens: " in what for what in lost)


GSPO = f"{VERL} algorithm.adv_estimator=grpo actor_rollout_ref.actor.policy_loss.loss_mode=gspo"


@pytest.mark.parametrize(
    ("command", "target", "words", "loss"),
    [
        (GSPO, "slime", "--advantage-estimator gspo", None),
        (GSPO, "verl", "policy_loss.loss_mode=gspo", None),
        (GSPO, "roll", "adv_estimator: grpo", "roll cannot express this: advantage_estimator: gspo -> grpo"),
        (f"{SLIME} --advantage-estimator gspo", "verl", "policy_loss.loss_mode=gspo", None),
        (f"{VERL} algorithm.adv_estimator=reinforce_plus_plus_baseline", "rlinf", "use_reinpp_baseline: true", None),
    ],
)
def test_estimators_of_two_keys(command, target, words, loss, tmp_path):
    written, lost = converted(plan_of(tmp_path, command), target)
    assert words in written.text
    assert [what for what in lost if "estimator" in what] == ([loss] if loss else [])


def test_a_reward_model_stays_one_in_rlinf(tmp_path):
    roles = "--actor.num_gpus_per_node 4 --ref.num_gpus_per_node 4 --reward.num_gpus_per_node 4"
    paths = "--actor.model_name_or_path Qwen/Qwen3-8B --reward.model_name_or_path Qwen/Qwen3-8B"
    rest = "--vllm.num_engines 4 --train.colocate_all --algo.advantage.estimator rloo"
    command = f"python3 -m openrlhf.cli.train_ppo_ray {roles} {paths} {rest}"
    written, lost = converted(plan_of(tmp_path, command), "rlinf")
    assert written.values["reward"]["model"] == {"model_path": "Qwen/Qwen3-8B"}
    assert not any("role of" in what for what in lost)


def test_messages_have_words_for_fields_and_say_each_once():
    command = {"cluster": PLACED, "actor": {"model": {"precision": "fp32"}}, "runner": {"seq_length": 2048}}
    written, lost = converted(roost.plan(command), "slime")
    assert any("bytes per weight 4 -> 2" in what for what in lost)
    assert len(set(written.remarks)) == len(written.remarks)


@pytest.mark.parametrize(
    ("target", "needed"),
    [
        (
            "verl",
            [
                "data.train_files",
                "actor_rollout_ref.model.path",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
            ],
        ),
        ("slime", ["--prompt-data", "--rm-type", "--hf-checkpoint", "--ref-load"]),
        ("openrlhf", ["--data.prompt_dataset", "--actor.model_name_or_path"]),
        ("skyrl", ["data.train_data", "environment.env_class"]),
        ("areal", ["train_dataset.path", "experiment_name", "actor.path"]),
        ("nemo", ["defaults", "data", "policy.model_name"]),
    ],
)
def test_what_the_other_program_needs_to_start_is_noted(target, needed, tmp_path):
    command = f"{VERL} algorithm.adv_estimator=grpo actor_rollout_ref.actor.use_kl_loss=True"
    findings = Findings()
    written = convert_plan(plan_of(tmp_path, command), Notation(target), findings)
    assert {*needed} <= {note.where.key_path for note in findings.notes}
    assert all(f"# {key}: not " in written.text for key in needed)


@pytest.mark.parametrize("target", ["verl", "nemo"])
def test_what_the_source_says_is_not_noted_as_needed(target, tmp_path):
    """Dynamic batches need no micro-batch size, and a model that is named is converted."""
    tokens = "actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=9000"
    findings = Findings()
    plan = plan_of(tmp_path, f"{VERL} algorithm.adv_estimator=grpo actor_rollout_ref.model.path=/m/x {tokens}")
    convert_plan(plan, Notation(target), findings)
    noted = {note.where.key_path for note in findings.notes if note.what == "not converted"}
    assert noted == {"data.train_files" if target == "verl" else "data"}


def test_a_kl_that_moves_is_not_called_the_same(tmp_path):
    """OpenRLHF has KL in the rewards, NeMo-RL in the loss; the processes of the reference are no loss beside it."""
    flags = (
        "--actor.num_gpus_per_node 8 --vllm.num_engines 2 --vllm.tensor_parallel_size 4 --reward.remote_url http://x"
    )
    command = f"python3 -m openrlhf.cli.train_ppo_ray {flags} --train.colocate_all --algo.advantage.estimator rloo"
    findings = Findings()
    convert_plan(plan_of(tmp_path, command), Notation.NEMO, findings)
    fixes = {finding.what: finding.fix for finding in findings.warnings}
    assert "nemo cannot express this: kl_in: reward -> loss" in fixes
    assert "do nothing: the KL is the same" not in fixes.values()


def test_keys_about_training_that_are_not_converted_are_named(tmp_path):
    kl = "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.01"
    keys = "actor_rollout_ref.actor.optim.lr=1e-6 data.train_batch_size=64 data.max_prompt_length=512"
    plan = plan_of(tmp_path, f"python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo {kl} {keys}")
    for notation in (Notation.SKYRL, Notation.NEMO, Notation.RLINF):
        written = convert_plan(plan, notation, Findings())
        listed = "actor_rollout_ref.actor.optim.lr, data.train_batch_size\n"
        assert f"# 2 keys about training not converted: {listed}" in written.text
