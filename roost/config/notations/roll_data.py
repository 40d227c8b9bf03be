"""Prompts from data files in ROLL's notation: `data_args`, templates, domains and the length of prompts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from roost.config.findings import did_you_mean, shown
from roost.config.section import Section

PROMPT_LENGTH = 1024
MIN_PROMPT_TOKENS = 6  # ROLL drops prompts of 5 tokens or fewer
DOMAIN = "math_rule"  # of rows that no reward lists
VISION = re.compile(r"[-_]vl\b", re.IGNORECASE)  # in names of templates
NATIVE: Mapping[str, Any] = {"chat_template": True}
TEMPLATES: Mapping[str, Mapping[str, Any]] = {
    "native": NATIVE,
    "qwen2_5": NATIVE,
    "qwen3": {**NATIVE, "template_arguments": {"enable_thinking": True}},
    "chatml": {"chat_template": "chatml"},
    "empty": {"chat_template": "empty"},
    "longcot_V3": {**NATIVE, "prompt_suffix": "<think>\n"},
}


def data_settings(root: Section, learner: str) -> dict[str, Any]:
    """`data`, and `eval_tasks` where there is a validation set; empty for a config without data files."""
    arguments, validation = root.below(learner, "data_args"), root.below("validation", "data_args")
    if not arguments.values.get("file_name"):
        return {}
    tag = arguments.text("tag") or "tag"
    files = {"path": arguments.get("file_name"), **_columns(arguments)}
    domains = _domains(root.below("rewards"))
    found: dict[str, Any] = {
        **files,
        **(_template(root, arguments) if "prompt" not in arguments else {"chat_template": False}),
        "max_prompt_tokens": root.whole_number("prompt_length", 1, PROMPT_LENGTH),
        "min_prompt_tokens": MIN_PROMPT_TOKENS,
        "optional_tag_column": tag,
        "domain_column": "domain",
        "domains": domains,
        "default_domain": DOMAIN if domains else "",
        "mix": dict(arguments.below("domain_interleave_probs").values) or None,
        "eval": validation.get("file_name") or None,
    }
    data = {key: value for key, value in found.items() if value is not None}
    return {"data": data} | ({"eval_tasks": 0} if "eval" in data else {})


def supervised_data(root: Section, learner: str, columns: Mapping[str, Any]) -> dict[str, Any]:
    """`data` of the supervised pipelines: the columns of the prompt, and the order of rows.

    The last incomplete batch is left out.
    """
    arguments, validation = root.below(learner, "data_args"), root.below("validation", "data_args")
    if not arguments.values.get("file_name"):
        return {}
    found = {
        "path": arguments.get("file_name"),
        **columns,
        "system_column": root.text("system_key"),
        **_template(root, arguments, is_supervised=True),
        "drop_last": True,
        "eval": validation.get("file_name") or None,
    }
    data = {key: value for key, value in found.items() if value is not None}
    return {"data": data} | ({"eval_tasks": 0} if "eval" in data else {})


def of_instructions(root: Section) -> dict[str, Any]:
    """Columns of ROLL's supervised pipeline, which takes rows in the order of their files."""
    return {"prompt": root.text("prompt_key") or "instruction", "query": root.text("query_key"), "shuffle": False}


def of_questions(root: Section) -> dict[str, Any]:
    """Columns of ROLL's distillation, which shuffles rows and leaves out those of other splits than `train`."""
    prompt, question = root.text("prompt_key"), root.text("question_key") or "question"
    columns = {"prompt": question} if prompt is None else {"prompt": prompt, "query": question}
    return {**columns, "only": {"split": "train"}}


def _columns(arguments: Section) -> dict[str, str]:
    """The prompt's column; rewards read the answer from ground_truth."""
    column = arguments.text("messages") or arguments.text("prompt")
    return ({} if column is None else {"prompt": column}) | {"optional_answer": "ground_truth"}


def _domains(rewards: Section) -> dict[str, list[str]]:
    """The tags of each domain: the reward of that name scores them."""
    found = {}
    for name in rewards.values:
        tags = rewards.below(str(name)).values.get("tag_included")
        found[str(name)] = [str(tag) for tag in tags] if isinstance(tags, list | tuple) else []
    return found


def _template(root: Section, arguments: Section, is_supervised: bool = False) -> dict[str, Any]:
    """`global_template`, or that of the data; `tag_to_template` by the tag of a row."""
    section, key = (root, "global_template") if root.values.get("global_template") else (arguments, "template")
    found = dict(_named(section, key, is_supervised) or NATIVE)
    by_tag = root.below("tag_to_template")
    names = {str(tag): _named(by_tag, str(tag), is_supervised) for tag in by_tag.values}
    if names:
        found["tag_templates"] = {tag: dict(each or NATIVE) for tag, each in names.items()}
    return found


def _named(section: Section, key: str, is_supervised: bool) -> Mapping[str, Any] | None:
    name = section.text(key) if key in section else None
    if name is None:
        return None
    if VISION.search(name) and is_supervised:
        what, why = f"{shown(name)} is for prompts with images", "Roost reads images in reinforcement learning alone"
        section.error("RST-T082", key, what, why, "use a text model and a text data set")
    elif VISION.search(name):
        return NATIVE  # of a model that reads images
    elif name not in TEMPLATES:
        why = f"Roost has {', '.join(TEMPLATES)}"
        fix = did_you_mean(name, TEMPLATES) or "write its text as chat_template in train.data, in Jinja"
        section.error("RST-T013", key, f"{shown(name)} is not supported", why, fix)
    return TEMPLATES.get(name)
