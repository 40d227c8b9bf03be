"""RLinf's agents with tools (`agentloop`, `tools`) as the task of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roost.config.data import AGENTS
from roost.config.findings import shown
from roost.config.source import Section

AGENT = "roost.rollout.agents.tools.ToolAgent"
ENVIRONMENT = "roost.rollout.environments.tools.ToolEnvironments"
TOOLS = "roost.rollout.environments.tools"
CODE_TOOL = "python_code_with_standard_io"  # RLinf's name of the tool of `codejudge`
SEARCH, TOOL_CALL = "search", "tool_call"
PARSERS = {"searchr1-qwen": SEARCH, "rstar2-qwen": TOOL_CALL, "qwen2.5": TOOL_CALL}
KEPT = {"left": "start", "right": "end", "middle": "both"}  # the part of a long tool response that is kept
MAX_TURNS, MAX_CALLS, MAX_CHARACTERS = 5, 3, 500  # RLinf's defaults
UNLIMITED = 10_000  # turns; the limit on response length ends episodes earlier
CHAT_KEYS = ("max_tool_response_length", "tool_response_truncate_side", "max_parallel_calls")

DERIVED_FROM = (
    "agentloop.toolcall_parser",
    "agentloop.max_turns",
    "agentloop.max_assistant_turns",
    "agentloop.max_user_turns",
    "agentloop.max_parallel_calls",
    "agentloop.max_tool_response_length",
    "agentloop.tool_response_truncate_side",
    "agentloop.continue_at_tool_failure",
    "tools.search.server_addr",
    "tools.search.topk",
    "tools.search.dummy_mode",
    "tools.search.max_concurrency",
    "tools.search.max_retries",
    "tools.search.retry_delay",
    "tools.codejudge.host_addr",
    "tools.codejudge.host_port",
    "tools.codejudge.concurrency_limit",
    "algorithm.sampling_params.stop",
    "rollout.custom_chat_template",
)


def tool_task(root: Section) -> dict[str, Any]:
    """The task of a config with tools; empty if it has no tools, or if train has a task."""
    loop, tools = root.below("agentloop"), root.below("tools")
    stop = root.below("algorithm", "sampling_params")
    names = [name for name in ("search", "codejudge") if tools.values.get(name) is not None]
    if _is_multi_agent(root):
        return {}
    if not names or root.below("train").values.get("task"):
        _warn_unused(root, names)
        return {}
    parser = _parser(loop, names)
    data = root.below("data")
    longest, prompt = root.below("runner").whole_number("seq_length", 1), data.whole_number("max_prompt_length", 1)
    room = longest - prompt if longest is not None and prompt is not None and longest > prompt else None
    cut = {} if prompt is None or data.flag("filter_prompt_by_length") else {"max_prompt_tokens": prompt}
    found = {
        "_target_": AGENTS,
        "agent": _agent(loop, parser, _strings(stop, "stop")) | cut,
        "environment": {"_target_": ENVIRONMENT, "tools": _tools(tools, names)},
        "max_turns": _turns(loop, parser),
        "keeps_reasoning": True,  # RLinf continues the tokens of earlier turns
        "max_response_length": room,
        "chat_template": root.below("rollout").text("custom_chat_template"),
        "template": dict(data.below("apply_chat_template_kwargs").values) or None,
    }
    return {"task": {key: value for key, value in found.items() if value is not None}}


def _warn_unused(root: Section, names: list[str]) -> None:
    """Warn of keys that only an agent with tools uses."""
    why = "train.task runs the episodes" if names else "only agents with tools follow it, and no tools are named"
    fix = "remove train.task, or the tools" if names else "remove it, or name the tools"
    for path in DERIVED_FROM:
        *above, key = path.split(".")
        section = root.below(*above)
        if section.values.get(key) not in (None, False, []):
            root.findings.warn("RST-T014", section.where(key), "is not followed", why, fix)


def _is_multi_agent(root: Section) -> bool:
    """Return True and report an error for WideSeek, whose planner agent gives tasks to worker agents."""
    loop = root.below("agentloop")
    if root.below("train").values.get("task"):
        return False
    is_wide = str(loop.values.get("toolcall_parser")).startswith("wideseek")
    if is_wide or "workflow" in loop:
        what = "plans with several agents, which Roost does not have"
        why = "RLinf's WideSeek has a planner and workers, a server for web pages, and a judge for tables"
        fix = "write train.task with an agent of your own (docs/agents.md)"
        loop.error("RST-T078", "toolcall_parser" if is_wide else "workflow", what, why, fix)
        return True
    return False


def _parser(loop: Section, names: list[str]) -> str:
    written = loop.text("toolcall_parser")
    if written is None:
        return SEARCH if names == ["search"] else TOOL_CALL
    if written not in PARSERS:
        what, why = f"is {shown(written)}, which Roost does not have", f"it has {', '.join(PARSERS)}"
        loop.error("RST-T078", "toolcall_parser", what, why, "write one of these, or train.task with your agent")
    return PARSERS.get(written, TOOL_CALL)


def _agent(loop: Section, parser: str, stop: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"_target_": AGENT, "parser": parser}
    if parser == SEARCH:
        unread = [key for key in CHAT_KEYS if loop.values.get(key) is not None]
        if unread:
            what = f"{', '.join(unread)} {'is' if len(unread) == 1 else 'are'} not used"
            why = "as in RLinf, the search agent shows each document up to 5000 characters"
            loop.findings.note("RST-T079", loop.where(), what, why, "remove them")
    else:
        found |= {
            "max_parallel_calls": loop.whole_number("max_parallel_calls", 1, MAX_CALLS),
            "max_answer_characters": loop.whole_number("max_tool_response_length", 1, MAX_CHARACTERS),
            "kept": KEPT.get(loop.text("tool_response_truncate_side") or "right", "both"),
        }
    if loop.flag("continue_at_tool_failure", default=True) is False:
        found["continues_at_failure"] = False
    return found | ({"stop": stop} if stop else {})


def _turns(loop: Section, parser: str) -> int:
    """Turns of the policy; RLinf also limits turns of tools (`max_user_turns`), and null is no limit."""
    if parser == SEARCH:
        return loop.whole_number("max_turns", 1, MAX_TURNS) or MAX_TURNS
    own, tools = (_limit(loop, key) for key in ("max_assistant_turns", "max_user_turns"))
    return min(own or UNLIMITED, UNLIMITED if tools is None else tools + 1)


def _limit(loop: Section, key: str) -> int | None:
    return None if key in loop and loop.values[key] is None else loop.whole_number(key, 1, MAX_TURNS)


def _strings(section: Section, key: str) -> list[str]:
    written = section.get(key)
    given = [written] if isinstance(written, str) else list(written or ())
    return [str(one) for one in given]


def _tools(tools: Section, names: list[str]) -> dict[str, Any]:
    makers = {"search": _search, "codejudge": _code}
    return dict(makers[name](section) for name in names if (section := tools.mapping(name)) is not None)


def _search(section: Section) -> tuple[str, Mapping[str, Any]]:
    address = section.text("server_addr")
    is_dummy = section.values.get("dummy_mode") is True
    if address is None and not is_dummy:
        what, why = "is missing", "searches go to a retrieval server of yours"
        section.error("RST-T080", "server_addr", what, why, "write server_addr: 127.0.0.1:8000")
    wait_s = section.number("retry_delay")
    found = {
        "_target_": f"{TOOLS}.Search",
        "url": None if is_dummy or address is None else _url(address),
        "topk": section.whole_number("topk", 1, 3),
        "at_a_time": section.whole_number("max_concurrency", 1),
        "tries": section.whole_number("max_retries", 1),
        "wait_s": wait_s,
    }
    return "search", {key: value for key, value in found.items() if value is not None or key == "url"}


def _code(section: Section) -> tuple[str, Mapping[str, Any]]:
    host, port = section.text("host_addr"), section.whole_number("host_port", 1, maximum=65535)
    found: dict[str, Any] = {"_target_": f"{TOOLS}.Python"}
    if host is not None and port is not None:
        found["url"] = _url(f"{host}:{port}")
    elif host is None and port is None:
        what, fix = "names no server: code runs in Roost's sandbox", "write host_addr and host_port for a code judge"
        section.findings.note("RST-T079", section.where(), what, "RLinf sends it to a code judge of yours", fix)
    else:
        key = "host_addr" if host is None else "host_port"
        section.error("RST-T080", key, "is missing", "the code judge needs both", f"write {key}, or neither of the two")
    places = section.whole_number("concurrency_limit", 1)
    return CODE_TOOL, found | ({} if places is None else {"at_a_time": places})


def _url(address: str) -> str:
    return address if "://" in address else f"http://{address}"
