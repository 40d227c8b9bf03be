"""RLinf's agents with tools as tasks."""

import pytest

from roost.config.compose import load
from roost.config.data import AGENTS, SCENARIO
from roost.config.findings import Findings
from roost.config.known_keys.tables import Effect
from roost.config.notations.notation import read_job
from roost.config.notations.rlinf_agents import CODE_TOOL
from roost.rollout.agents.tools import PARSERS, Kept
from roost.rollout.check_target import SCENARIO as PART, check_target

JOB = {
    "cluster": {"num_nodes": 1, "component_placement": {"actor,rollout,reward": "0"}},
    "runner": {"task_type": "reasoning", "max_steps": 2, "seq_length": 7096},
    "algorithm": {"group_size": 4, "sampling_params": {"max_new_tokens": 3000, "stop": ["</search>", "</answer>"]}},
    "data": {
        "max_prompt_length": 4096,
        "filter_prompt_by_length": True,
        "rollout_batch_size": 8,
        "prompt_key": "prompt",
        "answer_key": "solutions",
        "apply_chat_template": False,
        "train_data_paths": ["train.jsonl"],
    },
    "agentloop": {"group_name": "Loop", "toolcall_parser": "searchr1-qwen", "max_turns": 2},
    "tools": {"search": {"server_addr": "10.0.0.1:8000", "topk": 5}},
    "reward": {"reward_type": "searchr1"},
    "rollout": {"model": {"model_path": "model"}},
    "actor": {"model": {"model_path": "model"}},
}
CODE = {
    **JOB,
    "data": {**JOB["data"], "type": "rstar2", "apply_chat_template": True, "apply_chat_template_kwargs": {"deep": 1}},
    "agentloop": {
        "toolcall_parser": "rstar2-qwen",
        "max_user_turns": None,
        "max_assistant_turns": 7,
        "max_parallel_calls": 1,
        "tool_response_truncate_side": "middle",
        "max_tool_response_length": 256,
    },
    "tools": {"mcp_file_system": None, "codejudge": {"host_addr": "h", "host_port": 81, "concurrency_limit": 9}},
    "rollout": {**JOB["rollout"], "custom_chat_template": "{{ messages[0].content }}"},
}


def read(config):
    findings = Findings()
    return read_job(load(config, (), findings), findings, trains=True), findings


def changed(section, job=JOB, **keys):
    return {**job, section: {**job[section], **keys}}


def task_of(config):
    job, findings = read(config)
    assert not findings.has_errors, findings.errors
    return job.training.task


def test_a_search_agent():
    task = task_of(JOB)
    assert task["_target_"] == AGENTS
    assert task["agent"]["parser"] == "search"
    assert task["agent"]["stop"] == ["</search>", "</answer>"]
    assert task["environment"]["tools"]["search"] == {
        "_target_": "roost.rollout.environments.tools.Search",
        "url": "http://10.0.0.1:8000",
        "topk": 5,
    }
    assert (task["max_turns"], task["max_response_length"], task["keeps_reasoning"]) == (2, 3000, True)
    assert task["tasks"]["_target_"] == SCENARIO
    assert (task["tasks"]["path"], task["tasks"]["max_prompt_tokens"]) == (["train.jsonl"], 4096)


def test_a_code_agent():
    task = task_of(CODE)
    assert task["agent"] == {
        "_target_": "roost.rollout.agents.tools.ToolAgent",
        "parser": "tool_call",
        "max_parallel_calls": 1,
        "max_answer_characters": 256,
        "kept": "both",
        "stop": ["</search>", "</answer>"],
    }
    assert task["environment"]["tools"] == {
        CODE_TOOL: {"_target_": "roost.rollout.environments.tools.Python", "url": "http://h:81", "at_a_time": 9}
    }
    assert task["max_turns"] == 7
    assert (task["chat_template"], task["template"]) == ("{{ messages[0].content }}", {"deep": 1})
    assert task["tasks"]["chat_template"] == task["chat_template"], "prompts are measured as they are shown"


@pytest.mark.parametrize("config", [JOB, CODE])
def test_the_task_can_be_made(config):
    task = {key: value for key, value in task_of(config).items() if key != "tasks"}
    findings = Findings()
    check_target({**task, "tasks": {"_target_": SCENARIO, "path": []}}, read(config)[0].source.where(), PART, findings)
    assert {found.code for found in findings.errors} <= {"RST-T060"}, "the data alone are missing here"


@pytest.mark.parametrize(
    ("keys", "turns"),
    [
        ({}, 5),
        ({"max_assistant_turns": None, "max_user_turns": 2}, 3),
        ({"max_assistant_turns": 2, "max_user_turns": 9}, 2),
        ({"max_assistant_turns": None, "max_user_turns": None}, 10_000),
    ],
)
def test_turns_of_the_policy(keys, turns):
    loop = {"toolcall_parser": "rstar2-qwen", **keys}
    assert task_of({**CODE, "agentloop": loop})["max_turns"] == turns


@pytest.mark.parametrize(("side", "kept"), [("left", "start"), ("right", "end"), ("middle", "both"), (None, "end")])
def test_the_side_of_a_long_answer(side, kept):
    agent = task_of(changed("agentloop", CODE, tool_response_truncate_side=side))["agent"]
    assert Kept(agent["kept"]) == kept
    assert agent["parser"] in PARSERS


def test_prompts_that_are_not_filtered_are_cut():
    agent = task_of(changed("data", filter_prompt_by_length=False))["agent"]
    assert agent["max_prompt_tokens"] == 4096


def test_a_failure_may_end_an_episode():
    assert "continues_at_failure" not in task_of(changed("agentloop", continue_at_tool_failure=True))["agent"]
    agent = task_of(changed("agentloop", continue_at_tool_failure=False))["agent"]
    assert agent["continues_at_failure"] is False


def test_keys_of_the_servers():
    tool = task_of(changed("tools", search={"dummy_mode": True}))["environment"]["tools"]["search"]
    assert tool["url"] is None
    keys = {"server_addr": "https://me/find", "max_concurrency": 4, "max_retries": 2, "retry_delay": 1}
    tool = task_of(changed("tools", search=keys))["environment"]["tools"]["search"]
    assert (tool["url"], tool["at_a_time"], tool["tries"], tool["wait_s"]) == ("https://me/find", 4, 2, 1)


def test_code_without_a_server_runs_in_the_sandbox():
    job, findings = read(changed("tools", CODE, codejudge={"concurrency_limit": 9}))
    assert "url" not in job.training.task["environment"]["tools"][CODE_TOOL]
    assert [note.what for note in findings.notes if note.code == "RST-T079"] == [
        "names no server: code runs in Roost's sandbox"
    ]


@pytest.mark.parametrize(
    ("config", "code", "key"),
    [
        (changed("tools", search={"topk": 3}), "RST-T080", "tools.search.server_addr"),
        (changed("tools", CODE, codejudge={"host_addr": "h"}), "RST-T080", "tools.codejudge.host_port"),
        (changed("agentloop", toolcall_parser="mine"), "RST-T078", "agentloop.toolcall_parser"),
        (changed("agentloop", toolcall_parser="wideseek_r1-qwen"), "RST-T078", "agentloop.toolcall_parser"),
    ],
)
def test_what_is_missing_is_said_before_a_run(config, code, key):
    _, findings = read(config)
    assert [(found.code, found.where.key_path) for found in findings.errors] == [(code, key)]


@pytest.mark.parametrize("config", [JOB, CODE])
def test_no_key_of_the_agents_is_left_unfollowed(config):
    job, findings = read(config)
    left = [use for use in job.keys if use.known.effect is Effect.TRAINING and use.is_set]
    assert not [use.where.key_path for use in left if use.section in ("agentloop", "tools", "rollout")]
    assert not findings.warnings


def test_what_a_search_agent_does_not_read_is_noted():
    _, findings = read(changed("agentloop", max_tool_response_length=500, tool_response_truncate_side="right"))
    (note,) = (note for note in findings.notes if note.code == "RST-T079")
    assert note.what == "max_tool_response_length, tool_response_truncate_side are not used"


def test_keys_of_an_agent_that_is_not_there_are_not_followed():
    without = {key: value for key, value in JOB.items() if key != "tools"}
    job, findings = read(without)
    assert job.training.task["_target_"] == SCENARIO
    assert [warning.where.key_path for warning in findings.warnings] == [
        "agentloop.toolcall_parser",
        "agentloop.max_turns",
        "algorithm.sampling_params.stop",
    ]
    own = {"task": {"_target_": "my.Scenario"}}
    job, findings = read({**JOB, "train": own})
    assert job.training.task == own["task"]
    assert "tools.search.server_addr" in [warning.where.key_path for warning in findings.warnings]


@pytest.mark.parametrize(
    ("scales", "aggregation", "warned"),
    [
        (None, "token-mean", 0),
        (["group_level", "agent_level", "turn_level"], "seq-mean-token-mean", 0),
        (["group_level"], "token-mean", 1),
    ],
)
def test_scales_of_turns(scales, aggregation, warned):
    keys = {"adv_type": "grpo_dynamic", "loss_agg_func": "token-mean", "loss_scales": scales}
    job, findings = read(changed("algorithm", **keys))
    assert job.training.learner.loss.loss_aggregation == aggregation
    assert [found.where.key_path for found in findings.warnings] == ["algorithm.loss_scales"] * warned
    left = [use.where.key_path for use in job.keys if use.known.effect is Effect.TRAINING and use.is_set]
    assert left == ["algorithm.loss_scales"] * warned, "the list of keys says so, too"
