"""Shipped jobs in other notations: the same processes, or a named loss."""

import pytest

import roost
from roost.config.findings import Findings
from roost.config.job import Notation, Role
from roost.placement.convert.convert_plan import _component_at, convert_plan
from roost.placement.convert.parts import KEEP
from roost.placement.diff import diff_plans
from tests.config.frameworks.test_files import CASES as FILES, file_of
from tests.config.frameworks.test_jobs import CASES as SCRIPTS, plan_of, processes_of, script_of
from tests.grid import grid

CASES = [*SCRIPTS, *FILES]
TARGETS = ("rlinf", "roll", "loop", "verl", "slime", "nemo", "openrlhf", "skyrl", "prime", "areal")
REFUSED = {"RST-N044", "RST-N045", "RST-N047", "RST-N048", "RST-N049", "RST-N050", "RST-N053"}


NOT_WHOLE = {
    # engines only
    *("examples/serve/run_serve_qwen1.5b.sh", "examples/advanced/glm-5.2/infer/pd.toml"),
    "examples/terminal_bench, the older allocation_mode",  # roles are written one by one, in another order
}


def facts_of(plan):
    """Facts that a conversion must keep or name; a reference may be inside the learner."""
    return {
        part.name: (part.parallel, part.role, part.model.sharding, part.model.memory_fraction)
        + ((part.model.offloads,) if part.role is Role.LEARNER else ())
        for part in plan.components
        if part.name != "reference"
    }


def processes_beside_reference(plan):
    return {name: words for name, words in processes_of(plan).items() if name != "reference"}


def plan_of_job(folder, framework, job):
    return roost.plan(script_of(folder, framework, job) if "keys" not in job else file_of(folder, framework, job))


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in (1, 2))])
def test_a_shipped_job_in_another_notation(part, tmp_path):
    """Each job in a third of the targets, and by turns in each of them."""

    @grid(("number", "framework", "job"), [(number, *case.values) for number, case in enumerate(CASES)])
    def convert(number, framework, job, tmp_path):
        plan = plan_of_job(tmp_path, framework, job)
        targets = [target for index, target in enumerate(TARGETS) if (number + index) % 3 == part]
        grid("target", targets)(check_conversion)(plan=plan, tmp_path=tmp_path)

    convert(tmp_path=tmp_path)


def check_conversion(plan, target, tmp_path):
    findings = Findings()
    written = convert_plan(plan, Notation(target), findings)
    if written is None:
        assert {finding.code for finding in findings.errors} <= REFUSED
        assert all(finding.what and finding.fix for finding in findings.errors)
        return
    file = tmp_path / ("again.sh" if written.program else "again.toml" if target == "prime" else "again.yaml")
    file.write_text(written.text)
    again = roost.plan(file)
    assert again.notation == target
    lost = {finding.code for finding in findings.warnings}
    whats = [f"{finding.where.key_path} {finding.what}" for finding in findings.warnings]
    changes = diff_plans(plan, again)
    assert bool(changes) == bool(lost), changes
    for change in changes:
        words = "takes the model" if change.before == "path=nothing" else change.component or change.subject
        assert any(words in what for what in whats), change
    assert {finding.code for finding in findings.notes} <= {"RST-N084"}
    for note in findings.notes:
        assert f"# {note.where.key_path}: {note.what}" in written.text
    if not lost:
        assert facts_of(again) == facts_of(plan)
        assert processes_beside_reference(again) == processes_beside_reference(plan)
    else:
        assert lost == {"RST-N046"}
        kept, before = processes_of(again), processes_of(plan)
        if any("order of its own" in finding.what for finding in findings.found):
            kept, before = ({name: words.split(" on ")[0] for name, words in one.items()} for one in (kept, before))
        assert {name: kept.get(name) for name in before if name != "reference"} == {
            name: words for name, words in before.items() if name != "reference"
        }


@pytest.mark.parametrize("framework", ["verl", "slime", "nemo", "openrlhf", "skyrl", "prime", "areal"])
def test_a_job_goes_back_to_its_own_framework_whole(framework, tmp_path):
    """All shipped facts, which are about placement, survive."""
    for _, job in (case.values for case in CASES if case.values[0] == framework):
        if job["source"] in NOT_WHOLE:
            continue
        plan = plan_of_job(tmp_path, framework, job)
        findings = Findings()
        assert convert_plan(plan, Notation(framework), findings) is not None, job["source"]
        assert [finding.what for finding in findings.warnings] == [], job["source"]


SEPARATE = "--actor.num_gpus_per_node 8 --vllm.num_engines 2 --vllm.tensor_parallel_size 4 --reward.remote_url http://x"
OPENRLHF = f"python3 -m openrlhf.cli.train_ppo_ray {SEPARATE} --algo.kl.init_coef 0 --algo.advantage.estimator rloo"
TRL = "accelerate launch --num_processes 8 train_grpo.py --use_vllm --vllm_tensor_parallel_size 2"


@pytest.mark.parametrize("target", ["verl", "rlinf"])
@pytest.mark.parametrize(
    ("command", "word"),
    [(f"{OPENRLHF} --train.colocate_all --ds.zero_stage 2", "deepspeed"), (TRL, "accelerate")],
    ids=["openrlhf", "trl"],
)
def test_a_backend_that_the_other_program_lacks_becomes_fsdp(command, word, target, tmp_path):
    findings = Findings()
    written = convert_plan(plan_of(tmp_path, command), Notation(target), findings)
    assert written is not None
    assert "fsdp" in written.text
    assert "megatron" not in written.text
    losses = [finding.what for finding in findings.found if finding.code == "RST-N046"]
    assert any(f"strategy {word} -> fsdp" in what for what in losses)


def test_a_value_that_the_job_does_not_say_is_named_as_one(tmp_path):
    findings = Findings()
    lengths = "data.max_prompt_length=1024 data.max_response_length=1024"
    convert_plan(plan_of(tmp_path, f"{VERL} {lengths}"), Notation.RLINF, findings)
    whats = [finding.what for finding in findings.found]
    assert "rlinf takes tokens per micro-batch 2048, which the job does not set" in whats
    assert not any("nothing ->" in what for what in whats)


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("areal", "max_head_offpolicyness: 3"),
        ("prime", "max_off_policy_steps = 3"),
        ("nemo", "max_trajectory_age_steps: 3"),
        ("skyrl", "trainer.fully_async.max_staleness_steps=3"),
        ("roll", "async_generation_ratio: 3"),
        ("verl", "async_training.staleness_threshold=3"),
        ("openrlhf", "--train.async_queue_size 3"),
        ("slime", None),
    ],
)
def test_the_staleness_bound_is_written_or_named(target, text, tmp_path):
    keys = {
        "cluster.n_nodes": 1,
        "cluster.n_gpus_per_node": 8,
        "rollout.backend": "sglang:d4",
        "rollout.max_head_offpolicyness": 3,
        "actor.backend": "fsdp:d4",
        "actor.path": "Qwen/Qwen3-8B",
    }
    plan = roost.plan(file_of(tmp_path, "areal", {"keys": keys}))
    findings = Findings()
    written = convert_plan(plan, Notation(target), findings)
    named = [finding.what for finding in findings.found if "iterations that rollouts are ahead: 3" in finding.what]
    if text is None:
        assert len(named) == 1
    else:
        assert text in written.text and not named


VERL = "python3 -m verl.trainer.main_ppo trainer.n_gpus_per_node=4 actor_rollout_ref.rollout.name=vllm"


def converted(folder, command, target):
    findings = Findings()
    written = convert_plan(plan_of(folder, command), Notation(target), findings)
    assert written is not None, [finding.what for finding in findings.errors]
    noted = {finding.where.key_path: finding.what for finding in findings.notes}
    return written, noted, [finding.what for finding in findings.warnings]


@pytest.mark.parametrize(
    ("command", "target", "key", "value"),
    [
        (f"{TRL} --vllm_mode colocate", "openrlhf", "--reward.remote_url", "REWARD.py"),
        (f"{TRL} --vllm_mode colocate", "areal", "actor.weight_update_mode", "disk"),
        ("python3 train_async.py --actor-num-nodes 2 --rollout-num-gpus 8", "prime", "slurm.job_name", "rl"),
        (f"{OPENRLHF} --train.colocate_all --data.max_len 3072", "verl", "data.max_prompt_length", "512"),
        (f"{OPENRLHF} --train.colocate_all --data.max_len 3072", "skyrl", "trainer.max_prompt_length", "512"),
    ],
)
def test_a_value_that_only_lets_the_job_start_is_a_note(command, target, key, value, tmp_path):
    written, noted, _ = converted(tmp_path, command, target)
    assert noted[key] == f"not in the source; set to {value}"
    assert f"# {key}: not in the source; set to {value} (" in written.text
    assert value in written.text.rpartition("# ")[2]


@pytest.mark.parametrize(
    ("estimator", "target", "flag"),
    [
        ("rloo", "openrlhf", "--algo.advantage.estimator rloo"),
        ("grpo", "openrlhf", "--algo.advantage.estimator group_norm"),
        ("reinforce_plus_plus", "slime", "--advantage-estimator reinforce_plus_plus"),
        ("rloo", "skyrl", "trainer.algorithm.advantage_estimator=rloo"),
        ("remax", "verl", "algorithm.adv_estimator=remax"),
        ("grpo", "roll", "adv_estimator: grpo"),
        ("grpo", "rlinf", "adv_type: grpo"),
        ("reinforce_plus_plus", "rlinf", "adv_type: reinpp"),
        ("rloo", "areal", "mean_leave1out: true"),
        ("grpo", "areal", "reward_norm: {mean_level: group, std_level: group"),
        ("reinforce_plus_plus", "areal", "adv_norm: {mean_level: batch, std_level: batch}"),
        ("reinforce_plus_plus_baseline", "areal", "reward_norm: {mean_level: group, std_level: null"),
    ],
)
def test_the_estimator_of_the_source_is_written(estimator, target, flag, tmp_path):
    written, noted, lost = converted(tmp_path, f"{VERL} algorithm.adv_estimator={estimator}", target)
    assert flag in written.text
    assert not any("estimator" in name for name in (*noted, *lost))


@pytest.mark.parametrize(("target", "word"), [("slime", "grpo"), ("nemo", "grpo"), ("roll", "nothing")])
def test_an_estimator_that_the_other_program_lacks_is_named(target, word, tmp_path):
    _, _, lost = converted(tmp_path, f"{VERL} algorithm.adv_estimator=rloo", target)
    assert f"{target} cannot express this: advantage_estimator: rloo -> {word}" in lost


def test_a_kl_that_the_other_program_lacks_is_named(tmp_path):
    separate = "python3 train_async.py --actor-num-nodes 1 --rollout-num-gpus 8 --use-kl-loss --kl-loss-coef 0.05"
    _, _, lost = converted(tmp_path, separate, "prime")
    assert "prime cannot express this: kl_coef: 0.05 -> nothing" in lost
    assert "prime cannot express this: kl_in: loss -> nothing" in lost


KL_IN_LOSS = f"{VERL} algorithm.adv_estimator=grpo actor_rollout_ref.actor.use_kl_loss=True"
KL_IN_REWARD = f"{VERL} algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.02"


@pytest.mark.parametrize(
    ("command", "target", "words", "loss"),
    [
        (f"{KL_IN_LOSS} actor_rollout_ref.actor.kl_loss_coef=0.05", "openrlhf", "--algo.kl.init_coef 0.05", None),
        (KL_IN_LOSS, "openrlhf", "--algo.kl.use_loss", None),
        (KL_IN_REWARD, "openrlhf", "--algo.kl.init_coef 0.02", None),
        (KL_IN_REWARD, "verl", "algorithm.use_kl_in_reward=True", None),
        (KL_IN_REWARD, "slime", "--kl-coef 0.02", None),
        (KL_IN_REWARD, "skyrl", "trainer.algorithm.use_kl_in_reward=True", None),
        (KL_IN_REWARD, "areal", "kl_ctl: 0.02", None),
        (KL_IN_LOSS, "roll", "use_kl_loss: true\nkl_loss_coef: 0.001", None),
        (KL_IN_REWARD, "roll", "add_token_level_kl: true\ninit_kl_coef: 0.02", None),
        (KL_IN_LOSS, "rlinf", "kl_beta: 0.001", None),
        (KL_IN_REWARD, "rlinf", "kl_beta: 0.02", "rlinf cannot express this: kl_in: reward -> loss"),
        (KL_IN_REWARD, "nemo", "reference_policy_kl_penalty: 0.02", "nemo cannot express this: kl_in: reward -> loss"),
    ],
)
def test_the_kl_of_the_source_is_written(command, target, words, loss, tmp_path):
    written, noted, lost = converted(tmp_path, command, target)
    assert words in written.text
    assert not any("kl" in name for name in noted)
    assert [what for what in lost if "kl" in what] == ([loss] if loss else [])


@pytest.mark.parametrize(
    ("command", "target", "what", "why", "fix"),
    [
        (
            KL_IN_LOSS,
            "areal",
            "areal cannot express this: kl_in: loss -> reward",
            "AReaL has KL in the rewards only",
            "tune the coefficient for KL in the rewards, or convert to openrlhf, slime, skyrl, nemo, rlinf, roll",
        ),
        (
            f"{VERL} algorithm.adv_estimator=rloo",
            "slime",
            "slime cannot express this: advantage_estimator: rloo -> grpo",
            "slime has ppo, grpo, gspo, reinforce_plus_plus, reinforce_plus_plus_baseline",
            "choose one of them in --advantage-estimator, or convert to openrlhf, skyrl, areal",
        ),
        (
            "python3 train_async.py --actor-num-nodes 1 --rollout-num-gpus 8 --rollout-max-prompt-len 256",
            "prime",
            "prime cannot express this: max_prompt_length: 256 -> nothing",
            "",
            "drop longer prompts from the data",
        ),
    ],
)
def test_a_loss_says_what_the_target_does_and_what_to_do(command, target, what, why, fix, tmp_path):
    findings = Findings()
    convert_plan(plan_of(tmp_path, command), Notation(target), findings)
    assert [(each.why, each.fix) for each in findings.warnings if each.what == what] == [(why, fix)]


FULLY_ASYNC = (
    "python3 -m verl.experimental.fully_async_policy.fully_async_main trainer.n_gpus_per_node=4 rollout.nnodes=1 "
    "rollout.n_gpus_per_node=4 actor_rollout_ref.rollout.name=vllm algorithm.adv_estimator=grpo "
    "async_training.trigger_parameter_sync_step=1 async_training.staleness_threshold=0.5"
)


@pytest.mark.parametrize(
    ("target", "words", "is_rounded"),
    [
        ("verl", "async_training.staleness_threshold=0.5", False),
        ("roll", "async_generation_ratio: 0.5", False),
        ("skyrl", "max_staleness_steps=1", True),
        ("areal", "max_head_offpolicyness: 1", True),
        ("prime", "max_off_policy_steps = 1", True),
        ("nemo", "max_trajectory_age_steps: 1", True),
    ],
)
def test_a_staleness_of_verl_is_written_or_its_rounding_is_named(target, words, is_rounded, tmp_path):
    written, _, lost = converted(tmp_path, FULLY_ASYNC, target)
    assert words in written.text
    loss = f"{target} cannot express this: iterations that rollouts are ahead: 0.5 -> 1"
    assert (loss in lost) == is_rounded


MEGATRON_KEYS = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"


@pytest.mark.parametrize(
    ("command", "choice"),
    [
        (f"{VERL} model_engine=megatron {MEGATRON_KEYS}", "model_engine=megatron"),
        (
            f"{FULLY_ASYNC} --config-name=fully_async_ppo_megatron_trainer {MEGATRON_KEYS}",
            "--config-name fully_async_ppo_megatron_trainer.yaml",
        ),
        ("python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate", "model_engine=megatron"),
        (VERL, None),
    ],
    ids=["verl", "fully-async", "slime", "fsdp"],
)
def test_a_job_of_megatron_names_verls_config_of_it(command, choice, tmp_path):
    written, _, _ = converted(tmp_path, command, "verl")
    assert (choice in written.text) if choice else ("model_engine" not in written.text)
    assert plan_of(tmp_path, written.text)["actor"].model.strategy == ("megatron" if choice else "fsdp")


def test_tokens_of_a_micro_batch_come_with_dynamic_batches_of_slime(tmp_path):
    tokens = "actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=9000"
    written, _, _ = converted(tmp_path, f"{VERL} algorithm.adv_estimator=grpo {tokens}", "slime")
    assert plan_of(tmp_path, written.text)["actor"].model.tokens == 9000


@pytest.mark.parametrize("command", [f"{VERL} algorithm.adv_estimator=grpo", OPENRLHF], ids=["fsdp", "deepspeed"])
def test_slime_has_learners_of_megatron_only(command, tmp_path):
    written, noted, lost = converted(tmp_path, command, "slime")
    assert "--train-backend" not in written.text
    assert plan_of(tmp_path, written.text)["actor"].model.strategy == "megatron"
    assert noted["--num-layers"] == "not converted"
    assert any("-> megatron" in what for what in lost)


@pytest.mark.parametrize(("target", "key"), [("rlinf", "reward"), ("roll", "rewards")])
def test_a_reward_that_is_not_converted_is_noted(target, key, tmp_path):
    _, noted, _ = converted(tmp_path, "python3 train.py --colocate --actor-num-nodes 1", target)
    assert noted[key] == "not converted"


PRIME = """
[deployment]
num_train_gpus = 4
num_infer_gpus = 4
[inference.vllm]
tensor_parallel_size = 2
enable_expert_parallel = true
"""


@pytest.mark.parametrize("target", ["prime", "nemo", "skyrl", "verl"])
def test_the_expert_groups_of_engines_are_kept_or_named(target, tmp_path):
    (tmp_path / "rl.toml").write_text(PRIME)
    plan = roost.plan(tmp_path / "rl.toml")
    assert plan["rollout"].parallel.expert == 4
    findings = Findings()
    written = convert_plan(plan, Notation(target), findings)
    named = [finding.what for finding in findings.warnings if "rollout: expert 4 -> 1" in finding.what]
    keys = {"prime": "enable_expert_parallel = true", "nemo": "expert_parallel_size: 4"}
    assert (keys[target] in written.text and not named) if target in keys else len(named) == 1


FLAT = "python3 -m openrlhf.cli.train_ppo_ray --actor_num_gpus_per_node 8 --vllm_num_engines 2 --init_kl_coef 0"
FLAT += " --advantage_estimator rloo --remote_rm_url http://x --async_train"


@pytest.mark.parametrize(
    "command",
    [f"{OPENRLHF} --train.async_enable --train.async_queue_size 4", f"{FLAT} --async_queue_size 4"],
    ids=["dotted", "flat"],
)
def test_openrlhfs_queue_is_how_far_rollouts_are_ahead(command, tmp_path):
    assert plan_of(tmp_path, command).settings["async_generation_ratio"] == 4
    written, _, _ = converted(tmp_path, command, "verl")
    assert "async_training.staleness_threshold=4" in written.text


@pytest.mark.parametrize(("engine", "key"), [("sglang", "model_path"), ("vllm", "model")])
def test_a_job_of_areal_names_its_model_and_its_critic(engine, key, tmp_path):
    command = f"{VERL} actor_rollout_ref.rollout.name={engine} algorithm.adv_estimator=gae"
    command += " actor_rollout_ref.model.path=Qwen/Qwen3-8B actor_rollout_ref.rollout.gpu_memory_utilization=0.6"
    written, _, _ = converted(tmp_path, command, "areal")
    assert written.values[engine][key] == written.values["tokenizer_path"] == "Qwen/Qwen3-8B"
    assert written.values["critic"]["is_critic"] is True and "is_critic" not in written.values["actor"]


@pytest.mark.parametrize("estimator", ["reinforce", "reinforce_baseline"])
def test_whitening_without_a_deviation_goes_to_areal_and_back(estimator, tmp_path):
    command = f"{OPENRLHF.replace('rloo', estimator)} --algo.advantage.no_std_norm"
    written, _, lost = converted(tmp_path, command, "areal")
    assert written.values["actor"]["adv_norm"] == {"mean_level": "batch", "std_level": None}
    assert not any("advantage" in what for what in lost)
    again = convert_plan(roost.plan(written.values, notation="areal"), Notation.OPENRLHF, Findings())
    assert again.values["--algo.advantage.estimator"] == estimator
    assert again.values["--algo.advantage.no_std_norm"] is True


def test_whitening_that_openrlhf_does_not_do_is_named():
    norms = {"reward_norm": {"mean_level": "group", "std_level": "group"}, "adv_norm": {"std_level": None}}
    job = {"cluster": {"n_nodes": 1}, "actor": {"backend": "fsdp:d4", **norms}, "rollout": {"backend": "vllm:d4"}}
    findings = Findings()
    written = convert_plan(roost.plan(job, notation="areal"), Notation.OPENRLHF, findings)
    assert written.values["--algo.advantage.estimator"] == "group_norm"
    assert "--algo.advantage.no_std_norm" not in written.values
    lost = "openrlhf cannot express this: whiten_advantages: batch/none -> nothing"
    assert lost in [finding.what for finding in findings.warnings]


SLIME = "python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate"


@pytest.mark.parametrize("command", [f"{SLIME} --rollout-max-response-len 4096", f"{TRL} --max_completion_length 4096"])
def test_a_length_of_completions_alone_goes_over(command, tmp_path):
    written, noted, lost = converted(tmp_path, command, "skyrl")
    assert "max_generate_length=4096" in written.text
    assert noted["trainer.max_prompt_length"] == "not in the source; set to 512"
    assert not any("response" in what for what in lost)
    assert "--rollout-max-response-len 4096" in converted(tmp_path, command, "slime")[0].text
    assert "max_new_tokens: 4096" in converted(tmp_path, command, "nemo")[0].text


def test_slime_takes_one_length_where_the_job_says_one(tmp_path):
    written, _, lost = converted(tmp_path, f"{OPENRLHF} --train.colocate_all --data.max_len 3072", "slime")
    assert "--rollout-max-context-len 3072" in written.text
    assert not any("sequence" in what for what in lost)


@pytest.mark.parametrize("target", ["verl", "skyrl", "slime"])
def test_both_lengths_go_over(target, tmp_path):
    lengths = "data.max_prompt_length=2048 data.max_response_length=8192"
    written, noted, lost = converted(tmp_path, f"{VERL} algorithm.adv_estimator=grpo {lengths}", target)
    words = {"slime": ("--rollout-max-prompt-len 2048", "--rollout-max-response-len 8192")}
    assert all(each in written.text for each in words.get(target, ("max_prompt_length=2048", "=8192")))
    assert not any("sequence" in what for what in lost)
    assert not any("length" in key for key in noted)


INSIDE = {
    "cluster.num_nodes": 1,
    "cluster.gpus_per_node": 4,
    "grpo.async_grpo.enabled": False,
    "policy.generation.vllm_cfg.tensor_parallel_size": 1,
    "policy.max_total_sequence_length": 4096,
    "data.max_input_seq_length": 1024,
    "loss_fn.reference_policy_kl_penalty": 0.01,
}


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("skyrl", "trainer.algorithm.kl_loss_coef=0.01"),
        ("openrlhf", "--algo.kl.init_coef 0.01"),
        ("areal", "kl_ctl: 0.01"),
        ("roll", "kl_loss_coef: 0.01"),
    ],
)
def test_a_reference_inside_the_learner_becomes_a_component_and_is_named(target, words, tmp_path):
    findings = Findings()
    written = convert_plan(roost.plan(file_of(tmp_path, "nemo", {"keys": INSIDE})), Notation(target), findings)
    assert words in written.text
    lost = [finding.what for finding in findings.warnings]
    assert f"{target} has a component reference for KL, which the job's learner computes" in lost
    assert not any("kl_coef" in what for what in lost)


def test_a_reference_of_verl_is_inside_the_learner_too(tmp_path):
    """Both compute the reference's log-probs in the learner's processes."""
    plan = roost.plan(file_of(tmp_path, "nemo", {"keys": INSIDE}))
    findings = Findings()
    written = convert_plan(plan, Notation.VERL, findings)
    assert "actor_rollout_ref.actor.kl_loss_coef=0.01" in written.text
    assert not any("reference" in finding.what for finding in findings.warnings)
    (tmp_path / "verl.sh").write_text(written.text)
    again = roost.plan(tmp_path / "verl.sh")
    assert "reference" in {part.name for part in again.components}
    assert not any(change.component == "reference" for change in diff_plans(plan, again))


def test_the_longest_prompt_of_nemo_goes_back_and_is_never_called_missing(tmp_path):
    plan = roost.plan(file_of(tmp_path, "nemo", {"keys": INSIDE}))
    assert "max_input_seq_length: 1024" in convert_plan(plan, Notation.NEMO, Findings()).text
    longest = INSIDE | {"data.max_input_seq_length": 4096}  # as long as all of a sequence
    findings = Findings()
    convert_plan(roost.plan(file_of(tmp_path, "nemo", {"keys": longest})), Notation.SKYRL, findings)
    assert "skyrl cannot express this: max_prompt_length: 4096 -> 512" in [
        finding.what for finding in findings.warnings
    ]
    assert not any("length" in note.where.key_path for note in findings.notes)


def test_the_other_programs_own_model_is_named(tmp_path):
    command = f'{VERL} algorithm.adv_estimator=grpo actor_rollout_ref.model.path="$UNSET_HOME/model"'
    written, _, lost = converted(tmp_path, command, "skyrl")
    what = "skyrl takes the model Qwen/Qwen2.5-1.5B-Instruct, which the job does not set"
    assert what in lost
    assert f"# {what}" in written.text


def test_the_estimator_that_roost_trains_with_is_written(tmp_path):
    config = {
        "cluster": {"num_nodes": 1, "num_gpus_per_node": 4, "component_placement": {"actor,rollout": "0-3"}},
        "train": {"max_steps": 1, "model": "models/a", "task": {"_target_": "package.module.Task"}},
    }
    plan = roost.plan(config)
    assert {str(each.value) for each in plan.training if each.name == "advantage_estimator"} == {"leave_one_out"}
    findings = Findings()
    assert "algorithm.adv_estimator=rloo" in convert_plan(plan, Notation.VERL, findings).text
    assert not any("adv_estimator" in note.where.key_path for note in findings.notes)


def test_process_ranks_that_rlinf_does_not_use_are_left_out(tmp_path):
    sizes = "actor_rollout_ref.rollout.tensor_model_parallel_size=2 algorithm.adv_estimator=grpo"
    written, _, _ = converted(tmp_path, f"{VERL} {sizes}", "rlinf")
    assert written.values["cluster"]["component_placement"]["rollout"] == "0-3"
    assert written.values["rollout"]["tensor_parallel_size"] == 2


def refusals(plan, target):
    findings = Findings()
    assert convert_plan(plan, Notation(target), findings) is None
    return {finding.where.key_path: f"{finding.what}; {finding.why}" for finding in findings.errors}


@pytest.mark.parametrize("target", ["openrlhf", "skyrl", "areal"])
def test_a_refusal_names_the_component_and_the_rule(target):
    """The keys that the target would have for it are not the user's."""
    placed = {"actor": "0-7", "rollout": "0-3"}
    plan = roost.plan({"cluster": {"num_nodes": 1, "num_gpus_per_node": 8, "component_placement": placed}})
    (where, what) = next(iter(refusals(plan, target).items()))
    assert where == "rollout"
    assert what.startswith(f"{target} cannot express this placement: 4 processes on node 0 with GPUs 0-3; ")
    assert "share" in what
    assert not any(key in what for key in ("num_engines", "scheduling_strategy", "policy_num"))


def test_a_component_that_the_target_lacks_is_named_once():
    separate = {"actor": "0-3", "critic": "0-3", "rollout": "4-7"}
    plan = roost.plan({"cluster": {"num_nodes": 1, "num_gpus_per_node": 8, "component_placement": separate}})
    assert refusals(plan, "prime") == {
        "critic": "prime has no place for it: 4 processes on node 0 with GPUs 0-3; "
        "components of prime-rl with devices: actor, rollout"
    }


def test_components_that_share_gpus_are_not_parted():
    shared = {"actor": "0-3", "critic": "0-3", "rollout": "4-7"}
    plan = roost.plan({"cluster": {"num_nodes": 1, "num_gpus_per_node": 8, "component_placement": shared}})
    (where, what), *others = refusals(plan, "skyrl").items()
    assert (where, others) == ("critic", [])
    assert what.startswith("skyrl cannot let it share GPUs with actor: GPUs 0-3 -> 4-7; ")
    assert what.endswith("the job would take 12 GPUs in place of 8")


def test_a_teacher_on_the_learners_gpus_stays_there_in_areal():
    placed = {"actor,rollout,teacher": "0-7"}
    plan = roost.plan({"cluster": {"num_nodes": 1, "num_gpus_per_node": 8, "component_placement": placed}})
    written = convert_plan(plan, Notation.AREAL, Findings())
    again = roost.plan(written.values, notation="areal")
    assert processes_of(again)["teacher"] == processes_of(again)["actor"] == "8 x 1 on 0-7"


@pytest.mark.parametrize("name", ["critic", "reference"])
def test_a_component_on_devices_that_the_target_lacks_is_refused(name):
    placed = {f"actor,{name}": "0-3", "rollout": "4-7"}
    plan = roost.plan({"cluster": {"num_nodes": 1, "num_gpus_per_node": 8, "component_placement": placed}})
    assert list(refusals(plan, "prime")) == [name]
    assert convert_plan(plan, Notation.SLIME, Findings()) is not None  # which computes a reference in its learner


def test_a_staleness_that_loop_lacks_is_named_by_the_key_of_the_job():
    job = {"actor": {"backend": "fsdp:d4"}, "rollout": {"backend": "vllm:d4", "max_head_offpolicyness": 4}}
    plan = roost.plan(job, notation="areal")
    assert "rollout.max_head_offpolicyness" in refusals(plan, "loop")


@pytest.mark.parametrize(
    ("keys", "lag"),
    [
        ({}, 3.4),
        ({"staleness_threshold": 0}, 3),
        ({"trigger_parameter_sync_step": 1}, 0.1),
        ({"trigger_parameter_sync_step": 2, "staleness_threshold": 0.5}, 2),
    ],
)
def test_the_lag_of_verl_follows_from_both_keys(keys, lag, tmp_path):
    written = " ".join(f"async_training.{key}={value}" for key, value in keys.items())
    plan = plan_of(tmp_path, f"{FULLY_ASYNC.partition(' async_training')[0]} {written}")
    assert plan.settings["async_generation_ratio"] == lag


def test_a_job_without_a_trainer_is_refused_with_targets_that_take_it(tmp_path):
    file = tmp_path / "inference.toml"
    file.write_text('[vllm]\nmodel = "Qwen/Qwen3-4B"\ntensor_parallel_size = 2\n')
    findings = Findings()
    assert convert_plan(roost.plan(file), Notation.SLIME, findings) is None
    (error,) = findings.errors
    assert error.what == "the job has no trainer, which slime needs"
    assert error.why == "components on devices: rollout"
    assert error.fix == "convert to rlinf, roll, or keep the notation it is written in"


@pytest.mark.parametrize(("nodes", "names_targets"), [(128, True), (129, False)])
def test_targets_are_not_tried_for_a_large_job(nodes, names_targets):
    job = {"num_nodes": nodes, "num_gpus_per_node": 8}
    placed = {"actor,rollout": "all"}
    findings = Findings()
    assert (
        convert_plan(roost.plan({"cluster": {**job, "component_placement": placed}}), Notation.LOOP, findings) is None
    )
    assert all(("convert to" in error.fix) is names_targets for error in findings.errors if KEEP in error.fix)
    assert any(KEEP in error.fix for error in findings.errors)


@pytest.mark.parametrize(
    ("key", "component"),
    [
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size", "actor"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", "rollout"),
        ("actor_rollout_ref.ref.megatron.tensor_model_parallel_size", "reference"),
        ("trainer.n_gpus_per_node", "actor"),
    ],
)
def test_keys_of_verl_are_those_of_their_component(key, component):
    placed = {"actor,reference,rollout": "0-3"}
    plan = roost.plan({"cluster": {"num_nodes": 1, "num_gpus_per_node": 4, "component_placement": placed}})
    assert _component_at(key, plan).name == component


@pytest.mark.parametrize("target", ["verl", "slime", "nemo", "openrlhf", "skyrl"])
def test_sizes_that_the_target_refuses_are_not_called_a_matter_of_placement(target):
    config = {
        "cluster": {"num_nodes": 1, "num_gpus_per_node": 8, "component_placement": {"actor,rollout": "0-5"}},
        "runner": {"task_type": "embodied"},
        "actor": {"training_backend": "megatron", "model": {"tensor_model_parallel_size": 4}},
    }
    findings = Findings()
    assert convert_plan(roost.plan(config), Notation(target), findings) is None
    (error,) = findings.errors
    assert error.where.key_path == "actor"
    assert error.what.startswith(f"{target} refuses it: ")
    assert error.what.endswith("gives the learner 6 GPUs, which the model's 4 parts do not divide")
    assert error.why.endswith("6 % 4 = 2") and "engines" not in error.why
    assert error.fix.startswith("use a multiple of 4 GPUs, or smaller sizes, or convert to loop")
