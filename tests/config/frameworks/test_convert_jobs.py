"""Shipped jobs in other notations: the same processes, or a named loss."""

import pytest

import roost
from roost.config.findings import Findings
from roost.config.job import Notation, Role
from roost.placement.convert.convert_plan import convert_plan
from tests.config.frameworks.test_files import CASES as FILES
from tests.config.frameworks.test_files import file_of
from tests.config.frameworks.test_jobs import CASES as SCRIPTS
from tests.config.frameworks.test_jobs import plan_of, processes_of, script_of
from tests.grid import grid

CASES = [*SCRIPTS, *FILES]
TARGETS = ("rlinf", "roll", "loop", "verl", "slime", "nemo", "openrlhf", "skyrl", "prime", "areal")
REFUSED = {"RST-N044", "RST-N045", "RST-N047", "RST-N048", "RST-N049", "RST-N050", "RST-N053"}


NOT_WHOLE = {
    # engines only
    *("examples/serve/run_serve_qwen1.5b.sh", "examples/advanced/glm-5.2/infer/pd.toml"),
    "examples/train/sft/run_sft_lora.sh",  # another program, without lengths of prompts
    # roles are written one by one, so that neither the older order nor what awex does by itself is said
    *("examples/terminal_bench, the older allocation_mode", "examples/math/gsm8k_grpo_awex_colocate.yaml"),
}


def facts_of(plan):
    """What a conversion must keep or name."""
    return [
        (part.name, part.parallel, part.role, part.model.sharding, part.model.memory_fraction)
        + ((part.model.offloads,) if part.role is Role.LEARNER else ())
        for part in plan.components
    ]


def plan_of_job(folder, framework, job):
    return roost.plan(script_of(folder, framework, job) if "keys" not in job else file_of(folder, framework, job))


@grid("target", TARGETS)
@grid(("framework", "job"), CASES)
def test_a_shipped_job_in_another_notation(framework, job, target, tmp_path):
    plan = plan_of_job(tmp_path, framework, job)
    findings = Findings()
    written = convert_plan(plan, Notation(target), findings)
    if written is None:
        assert {finding.code for finding in findings.errors} <= REFUSED
        assert all(finding.what and finding.fix for finding in findings.errors)
        return
    file = tmp_path / ("again.sh" if written.program else "again.toml" if target == "prime" else "again.yaml")
    file.write_text(written.text)
    again = roost.plan(file, plan.inventory if target == "loop" else None)
    assert again.notation == target
    lost = {finding.code for finding in findings.found}
    if not lost:
        assert facts_of(again) == facts_of(plan)
        assert processes_of(again) == processes_of(plan)
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
        assert [finding.what for finding in findings.found] == [], job["source"]


SEPARATE = "--actor.num_gpus_per_node 8 --vllm.num_engines 2 --vllm.tensor_parallel_size 4 --reward.remote_url http://x"
OPENRLHF = f"python3 -m openrlhf.cli.train_ppo_ray {SEPARATE} --algo.kl.init_coef 0 --algo.advantage.estimator rloo"
TRL = "accelerate launch --num_processes 8 train_grpo.py --use_vllm --vllm_tensor_parallel_size 2"


@pytest.mark.parametrize("target", ["verl", "rlinf", "slime"])
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
    convert_plan(plan_of(tmp_path, f"{OPENRLHF} --train.colocate_all"), Notation.RLINF, findings)
    whats = [finding.what for finding in findings.found]
    assert "rlinf takes tokens 2048 for actor, which the job does not say" in whats
    assert not any("nothing ->" in what for what in whats)


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("areal", "max_head_offpolicyness: 3"),
        ("prime", "max_off_policy_steps = 3"),
        ("nemo", "max_trajectory_age_steps: 3"),
        ("skyrl", "trainer.fully_async.max_staleness_steps=3"),
        ("roll", "async_generation_ratio: 3"),
        ("verl", None),
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
