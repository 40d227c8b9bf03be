"""Prompts from data files in ROLL's notation: `data_args`, templates, domains and the length of prompts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from string import Formatter
from typing import Any

from roost.config.data import AGENTS
from roost.config.findings import did_you_mean, shown
from roost.config.notations.roll import PROMPT_LENGTH
from roost.config.source import Section

MIN_PROMPT_TOKENS = 6  # ROLL drops prompts of 5 tokens or fewer
DOMAIN = "math_rule"  # of rows whose tag no reward lists
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


def sft_columns(root: Section) -> dict[str, Any]:
    """Columns of ROLL's supervised pipeline, which takes rows in the order of their files."""
    return {"prompt": root.text("prompt_key") or "instruction", "query": root.text("query_key"), "shuffle": False}


def distillation_columns(root: Section) -> dict[str, Any]:
    """Columns of ROLL's distillation, which shuffles rows and leaves out those of other splits than `train`."""
    prompt, question = root.text("prompt_key"), root.text("question_key") or "question"
    columns = {"prompt": question} if prompt is None else {"prompt": prompt, "query": question}
    return {**columns, "only": {"split": "train"}}


def _columns(arguments: Section) -> dict[str, str]:
    """Columns of the prompt, and of the answer, which rewards read from ground_truth."""
    column = arguments.text("messages") or arguments.text("prompt")
    return ({} if column is None else {"prompt": column}) | {"optional_answer": "ground_truth"}


def _domains(rewards: Section) -> dict[str, list[str]]:
    """The tags that each reward scores; a domain has the name of its reward."""
    found = {}
    for name in rewards.values:
        tags = rewards.below(str(name)).values.get("tag_included")
        found[str(name)] = [str(tag) for tag in tags] if isinstance(tags, list | tuple) else []
    return found


def _template(root: Section, arguments: Section, is_supervised: bool = False) -> dict[str, Any]:
    """The chat template (`global_template`, or `template` of the data), and templates by tag (`tag_to_template`)."""
    section, key = (root, "global_template") if root.values.get("global_template") else (arguments, "template")
    found = dict(_template_by_name(section, key, is_supervised) or NATIVE)
    by_tag = root.below("tag_to_template")
    names = {str(tag): _template_by_name(by_tag, str(tag), is_supervised) for tag in by_tag.values}
    if names:
        found["tag_templates"] = {tag: dict(each or NATIVE) for tag, each in names.items()}
    return found


def _template_by_name(section: Section, key: str, is_supervised: bool) -> Mapping[str, Any] | None:
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


TASKS = "roost.rollout.environments.text_games.GameTasks"
ENVIRONMENT = "roost.rollout.environments.text_games.TextGames"
AGENT = "roost.rollout.agents.templated.TemplatedAgent"

COMMON_GAME_KEYS = (
    "env_instruction",
    "format_penalty",
    "action_pattern",
    "special_token_list",
    "grid_lookup",
    "grid_vocab",
    "action_lookup",
)
# Roost's games by ROLL's env_type, and the keys of env_config that each takes.
GAMES: Mapping[str, tuple[str, ...]] = {
    "frozen_lake": ("size", "p", "is_slippery", "max_steps", "map_seed", *COMMON_GAME_KEYS),
    "sokoban": ("dim_room", "num_boxes", "max_steps", "search_depth", *COMMON_GAME_KEYS),
}
RENDER = "render_mode"
TRAJECTORY, IMAGES, PROXY = "trajectory", "VLTrajEnvManager", "ProxyEnvManager"
MANAGERS = {
    "TrajEnvManager": TRAJECTORY,
    IMAGES: TRAJECTORY,
    PROXY: TRAJECTORY,
    "StepEnvManager": "step",
    "StepConcatEnvManager": "step_concat",
}
STEP_FIELDS = ("history", "step_count", "history_length", "current_step", "current_observation", "max_response_length")
FIELDS = {
    TRAJECTORY: ("turn_idx", "observation", "suffix", "actions_left", "max_response_length"),
    "step": ("env_instruction", *STEP_FIELDS),
    "step_concat": ("env_instruction", *STEP_FIELDS),
}
DERIVED_FROM: Mapping[str, tuple[str, ...]] = {
    "task": (
        "custom_envs",
        "train_env_manager.tags",
        "train_env_manager.num_groups_partition",
        "val_env_manager.tags",
        "val_env_manager.num_groups_partition",
    ),
    "eval_tasks": ("val_batch_size", "val_env_manager.num_env_groups"),
    "eval_samples": ("val_env_manager.group_size",),
}
NUM_ENV_GROUPS = 128


def has_games(root: Section) -> bool:
    """Return True if the config names environments, and no task of the user's own."""
    return "custom_envs" in root and "train_env_manager" in root and not root.below("train").values.get("task")


def game_settings(root: Section) -> dict[str, Any]:
    """The task of an agentic config, and the size of its evaluations."""
    if not has_games(root):
        if "custom_envs" in root and "train_env_manager" in root:
            what, fix = "is not followed: train.task runs the episodes", "remove train.task, or custom_envs"
            root.findings.warn("RST-T014", root.where("custom_envs"), what, fix=fix)
        return {}
    train = _groups(root.below("train_env_manager"))
    held_out = root.below("val_env_manager")
    evaluation, sizes = train, {}
    if held_out.values:
        evaluation = _groups(held_out)
        samples = held_out.whole_number("group_size", 1, 1) or 1
        count = _evaluated(root, samples) or sum(evaluation.values())
        rounds = max(1, math.ceil(count / max(1, sum(evaluation.values()))))
        evaluation = {tag: groups * rounds for tag, groups in evaluation.items()}
        sizes = {"eval_tasks": count, "eval_samples": samples}
    tags = {tag: _environment(root, tag) for tag in dict.fromkeys((*train, *evaluation))}
    longest = root.whole_number("sequence_length", 1)
    task = {
        "_target_": AGENTS,
        "tasks": {"_target_": TASKS, "train": train, "evaluation": evaluation, "seed": root.values.get("seed", 42)},
        "environment": {"_target_": ENVIRONMENT, "games": {tag: game for tag, (game, _) in tags.items()}},
        "agent": {"_target_": AGENT, "tags": {tag: templates for tag, (_, templates) in tags.items()}},
        "max_turns": max((templates.get("max_steps", 1) for _, templates in tags.values()), default=1),
        "keeps_reasoning": True,  # ROLL continues the tokens of earlier turns, whatever the chat template would drop
        **({} if longest is None else {"max_sequence_length": longest}),
    }
    return {"task": task, **sizes}


def max_tokens_of_turns(task: Mapping[str, Any]) -> int | None:
    """The longest turn that any of a task's environments allows."""
    tags = task.get("agent", {}).get("tags", {}).values() if task.get("_target_") == AGENTS else ()
    return max((each["max_tokens_per_step"] for each in tags if each.get("max_tokens_per_step")), default=None)


def _evaluated(root: Section, samples: int) -> int | None:
    """Groups of an evaluation from `val_batch_size`, which counts episodes; None: all groups of the manager."""
    batch = root.values.get("val_batch_size")
    return batch // samples if isinstance(batch, int) and batch >= samples else None


def _groups(manager: Section) -> dict[str, int]:
    """Groups of each tag: `num_groups_partition`, or equal shares of `num_env_groups`."""
    tags, parts = manager.get("tags"), manager.get("num_groups_partition")
    total = manager.whole_number("num_env_groups", 1, NUM_ENV_GROUPS) or NUM_ENV_GROUPS
    if not isinstance(tags, list | tuple) or not tags or not all(isinstance(tag, str) for tag in tags):
        what = "names no environments" if not tags else f"is {shown(tags)}; it must be a list of names"
        manager.error("RST-T044", "tags", what, fix="write tags: [NAME], with names of custom_envs")
        return {}
    if parts is None:
        share, rest = divmod(total, len(tags))
        parts = [share + (index < rest) for index in range(len(tags))]
    is_list = isinstance(parts, list | tuple) and all(isinstance(part, int) and part >= 0 for part in parts)
    if not is_list or len(parts) != len(tags) or sum(parts) != total:
        manager.error(
            "RST-T044",
            "num_groups_partition",
            f"is {shown(parts)}, which does not share out {total} groups among {len(tags)} tags",
            f"num_env_groups is {total}, tags are {', '.join(tags)}",
            f"write {len(tags)} whole numbers whose sum is {total}",
        )
        return dict.fromkeys(tags, 1)
    return {tag: part for tag, part in zip(tags, parts, strict=True) if part}


def _environment(root: Section, tag: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The game of a tag and the templates of its agent."""
    section = root.below("custom_envs").mapping(tag)
    if section is None:
        known = [str(key) for key in root.below("custom_envs").values]
        fix = did_you_mean(tag, known) or f"add it to custom_envs, or name one of {', '.join(known)}"
        manager = (
            "train_env_manager"
            if tag in (root.below("train_env_manager").values.get("tags") or ())
            else "val_env_manager"
        )
        root.below(manager).error("RST-T044", "tags", f"{tag} is not in custom_envs", fix=fix)
        return {}, {}
    history = _history(section)
    return _game(section), _templates(section, history)


def _game(section: Section) -> dict[str, Any]:
    env_type = section.text("env_type")
    if env_type is None or env_type not in GAMES:
        section.error(
            "RST-T045",
            "env_type",
            "is missing" if env_type is None else f"{env_type} is not an environment that Roost has",
            f"it has {', '.join(GAMES)} as text games",
            "name one of these, or write train.task with an environment of your own (docs/environments.md)",
        )
        return {}
    config = section.below("env_config")
    config.refuse_unknown_keys((*GAMES[env_type], RENDER))
    keys = {key: config.get(key) for key in GAMES[env_type] if config.values.get(key) is not None}
    pattern = keys.get("action_pattern")
    if pattern is not None and not _has_group(pattern):
        what = f"is {shown(pattern)}, which is not a regular expression with a group"
        config.error("RST-T046", "action_pattern", what, fix="write one such as <answer>(.*?)</answer>")
    return {"env_type": env_type, **{key: _plain(value) for key, value in keys.items()}}


def _has_group(pattern: Any) -> bool:
    try:
        return re.compile(pattern).groups in (1, 2)
    except (re.error, TypeError):
        return False


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else list(value) if isinstance(value, list | tuple) else value


def _history(section: Section) -> str:
    """How ROLL's environment manager splits an episode into samples."""
    written = section.text("env_manager_cls")
    name = "TrajEnvManager" if written is None else written.rpartition(".")[2]
    if name not in MANAGERS:
        what, why = f"{name} is not supported", f"Roost has {', '.join(MANAGERS)}"
        section.error("RST-T047", "env_manager_cls", what, why, "name one of these, or write train.task")
        return TRAJECTORY
    if name == PROXY:
        what, why = "runs episodes as one conversation in Roost", "ROLL lets the program of agent_runner_cls play them"
        fix = "write env_manager_cls: TrajEnvManager, or train.task with your program (docs/agents.md)"
        section.findings.warn("RST-T047", section.where("env_manager_cls"), what, why, fix)
    mode = section.below("env_config").values.get(RENDER)
    if name == IMAGES or mode not in (None, "text"):
        where = section.where("env_manager_cls") if name == IMAGES else section.below("env_config").where(RENDER)
        what = "shows states as images, but Roost shows them as text"
        fix = "write env_manager_cls: TrajEnvManager and leave out render_mode"
        section.findings.warn("RST-T047", where, what, "its games have no pictures", fix)
    return MANAGERS[name]


def _templates(section: Section, history: str) -> dict[str, Any]:
    template = section.text("agent_template")
    key = "agent_template"
    if template is None and "next_step_template" in section:
        key = "next_step_template"
        before, after = section.text("pre_step_template") or "", section.text(key) or ""
        template = f"{before}{{observation}}{after}"
    if template is None:
        fix = (
            'write one, such as "{observation}"' if history == TRAJECTORY else 'write one with "{current_observation}"'
        )
        section.error("RST-T046", "agent_template", "is missing", fix=fix)
    else:
        _check_fields(section, key, template, history)
    steps = section.whole_number("max_steps", 1)
    if steps is None and section.values.get("max_steps") is None:
        section.error("RST-T044", "max_steps", "is missing", "it bounds the turns of an episode", "write max_steps: 10")
    keys = {
        "agent_template": template or "{observation}",
        "agent_system_template": section.text("agent_system_template"),
        "history": history,
        "history_length": section.whole_number("history_length", 1) if history != TRAJECTORY else None,
        "max_steps": steps or 1,
        "max_tokens_per_step": section.whole_number("max_tokens_per_step", 1),
    }
    return {key: value for key, value in keys.items() if value is not None}


def _check_fields(section: Section, key: str, template: str, history: str) -> None:
    """Every field of a template must be one that is filled."""
    try:
        found = [field for _, field, _, _ in Formatter().parse(template) if field is not None]
    except ValueError as error:
        fix = "write braces that are text as {{ and }}"
        section.error("RST-T046", key, f"is not a format string: {error}", fix=fix)
        return
    known = FIELDS[history]
    for field in dict.fromkeys(found):
        if re.split(r"[.\[]", field)[0] not in known:
            why = "an episode is one conversation" if history == TRAJECTORY else "each turn has a prompt of its own"
            fix = (
                did_you_mean(field, known)
                or f"fields are {', '.join(known)}; write braces that are text as {{{{ and }}}}"
            )
            section.error("RST-T046", key, f"has the field {{{field}}}, which nothing fills", why, fix)
