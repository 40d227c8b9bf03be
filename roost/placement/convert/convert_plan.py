"""Convert a plan, plan the result again, and compare."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import yaml

from roost.cluster.inventory import Inventory
from roost.config.findings import Finding, Findings, Where, counted
from roost.config.job import Notation, family
from roost.config.known_keys.tables import Effect, KeyUse
from roost.config.notations.algorithm import ESTIMATOR, KL_COEF, KL_IN
from roost.config.notations.notation import read_job
from roost.config.ranks import spell_ranks
from roost.config.source import Launch, Source
from roost.placement.component_plan import ComponentPlan
from roost.placement.convert.advice import (
    CHANGE_PRINTED,
    CHECK_MEMORY,
    SAME_ON_EQUAL,
    Advice,
    advise,
    advise_model,
    note_needs,
    rewards_at,
)
from roost.placement.convert.parts import ASSUMED, KEEP, TRAINED, is_dealt, is_kl_off
from roost.placement.convert.to_areal import to_areal
from roost.placement.convert.to_loop import to_loop
from roost.placement.convert.to_nemo import to_nemo
from roost.placement.convert.to_openrlhf import openrlhf_program, to_openrlhf
from roost.placement.convert.to_prime import to_prime
from roost.placement.convert.to_rlinf import to_rlinf
from roost.placement.convert.to_roll import to_roll
from roost.placement.convert.to_skyrl import skyrl_program, to_skyrl
from roost.placement.convert.to_slime import slime_program, to_slime
from roost.placement.convert.to_verl import to_verl, verl_program
from roost.placement.diff import FIELD_WORDS, NOTHING, REFERENCE_INSIDE, Change, diff_plans
from roost.placement.plan import Plan, has_devices, uses_model
from roost.placement.planner import try_plan

_WRITERS: Mapping[Notation, Callable[[Plan, Findings], dict[str, Any]]] = {
    Notation.RLINF: to_rlinf,
    Notation.ROLL: to_roll,
    Notation.LOOP: to_loop,
    Notation.VERL: to_verl,
    Notation.SLIME: to_slime,
    Notation.NEMO: to_nemo,
    Notation.OPENRLHF: to_openrlhf,
    Notation.SKYRL: to_skyrl,
    Notation.PRIME: to_prime,
    Notation.AREAL: to_areal,
}
WRITTEN = tuple(_WRITERS)
# Programs whose jobs are commands; the others have files.
_PROGRAMS: Mapping[Notation, Callable[[Plan, Mapping[str, Any]], str]] = {
    Notation.VERL: verl_program,
    Notation.SLIME: slime_program,
    Notation.OPENRLHF: openrlhf_program,
    Notation.SKYRL: skyrl_program,
}
_NAME_MACHINES = (Notation.RLINF, Notation.ROLL)  # the others run on whatever machines they find
_OWN = (*_NAME_MACHINES, Notation.LOOP)  # notations with variables and workers without devices
_ABOUT_PLACES = ("component", "process", "environment")
# Findings about the GPUs of each component, which follow from a program's rule of placement.
_ABOUT_SHARES = ("RST-N057", "RST-N058", "RST-N062", "RST-N063", "RST-N066", "RST-N068", "RST-N070", "RST-N074")
_CUTS_RANKS = "RLinf cuts ranks by these sizes, and with them processes would be elsewhere"
_SUBJECTS = {"residency": "memory between phases of ", "role": "role of "}
_GAINED = "which the job does not set"
# A refusal names other targets for jobs of up to so many processes: each target is a whole conversion, which takes
# seconds for 16,000 GPUs.
_MAX_TRIED = 2048
_PROCESSES = re.compile(r":[^,]*")  # of a placement of RLinf
# How programs place components on GPUs if no key does it.
_PLACES: Mapping[Notation, str] = {
    Notation.RLINF: "RLinf gives a process a run of ranks on one node, split by parallel sizes where they are written",
    Notation.ROLL: "ROLL gives workers slices of a list of GPUs, and deals those without out over the nodes",
    Notation.LOOP: "ml-loop has one machine, one GPU for each learner and servers of one size",
    Notation.VERL: "engines of verl fill the trainer's GPUs, or nodes of their own in the asynchronous trainers",
    Notation.SLIME: "engines of slime take all GPUs of the actor, or those after them",
    Notation.NEMO: "roles of NeMo-RL take whole nodes, or all GPUs of a single node that the engines leave",
    Notation.OPENRLHF: "engines of OpenRLHF that share the actor's GPUs take all of them, others those after the roles",
    Notation.SKYRL: "SkyRL's critic and engines share all of the policy's GPUs (colocate_all), or take those after it",
    Notation.PRIME: "prime-rl gives the first GPUs to engines and all others to the learner, by whole nodes on several",
    Notation.AREAL: "roles of AReaL that share GPUs have as many, and others take the next ones",
}
_HAS: Mapping[Notation, Sequence[str]] = {
    Notation.VERL: ("actor", "rollout", "reference", "critic", "a reward model behind engines", "teachers"),
    Notation.SLIME: ("actor", "rollout", "critic"),
    Notation.NEMO: ("actor", "rollout", "critic", "reward", "teachers"),
    Notation.OPENRLHF: ("actor", "rollout", "reference", "critic", "reward"),
    Notation.SKYRL: ("actor", "rollout", "reference", "critic"),
    Notation.PRIME: ("actor", "rollout"),
    Notation.AREAL: ("actor", "rollout", "reference", "critic", "teacher"),
    Notation.LOOP: ("actor", "rollout"),
}
# The component that a key of these programs is about; any other key is about the actor.
_KEYS_OF = {
    "reward": re.compile("reward"),
    "teacher": re.compile("teacher|distillation"),
    "critic": re.compile(r"critic|value\."),
    "reference": re.compile(r"\bref"),
    "rollout": re.compile("rollout|generation|inference|infer_|vllm|sglang|engine"),
}


@dataclass(frozen=True, slots=True)
class Converted:
    """A config in another notation."""

    notation: Notation
    values: dict[str, Any]
    program: str = ""  # the program that takes the values as arguments; empty if they are a file
    remarks: tuple[str, ...] = ()  # about values that the source does not set

    @property
    def text(self) -> str:
        """The config as a file, or as the command that starts the job; remarks are comments above it."""
        return "".join(f"# {remark}\n" for remark in self.remarks) + self._plain

    @property
    def _plain(self) -> str:
        if self.notation is Notation.PRIME:
            return "\n".join(_tables(self.values)).strip() + "\n"
        if not self.program:
            return yaml.safe_dump(self.values, sort_keys=False, allow_unicode=True, default_flow_style=None)
        start = f"python3 {self.program}" if self.program.endswith(".py") else f"python3 -m {self.program}"
        return " \\\n    ".join([start, *_arguments(self.values)]) + "\n"


def _tables(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[str]:
    """Lines of TOML: plain values before tables."""
    inner = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    if path and (len(inner) < len(values) or not values):
        yield f"\n[{'.'.join(path)}]"
    yield from (f"{key} = {json.dumps(value)}" for key, value in values.items() if key not in inner)
    for key, value in inner.items():
        yield from _tables(value, (*path, key))


def _arguments(values: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Overrides `a.b=c`, and flags for keys that begin with two dashes; a flag that is true stands alone."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _arguments(value, f"{path}{key}.")
        elif not key.startswith("--"):
            yield f"{path}{key}={shlex.quote(str(value))}"
        else:
            yield key if value is True else f"{key} {shlex.quote(str(value))}"


def convert_plan(
    plan: Plan, notation: Notation, findings: Findings, inventory: Inventory | None = None
) -> Converted | None:
    """A config in the notation that places every process alike, or in the order of GPUs that its program has.

    A placement that the notation cannot express is an error; every other difference that `diff_plans` finds is a
    warning. The inventory is the one that the job was planned on; without one, both configs describe their machines.
    """
    if notation not in _WRITERS:
        what = f"Roost reads jobs of {notation.program}, and does not write them"
        findings.error("RST-N064", Where(), what, fix=f"use one of {', '.join(_WRITERS)}")
        return None
    converted, found = _written(plan, notation, inventory)
    shown = found.found if converted is not None else _with_targets(found.errors, plan, notation, inventory)
    findings.collected.update(dict.fromkeys(shown))
    return converted


def _with_targets(
    errors: Sequence[Finding], plan: Plan, notation: Notation, inventory: Inventory | None
) -> Iterator[Finding]:
    """Errors of a refusal; unless the job is large, their fixes name the targets that take it."""
    if sum(part.world_size for part in plan.components) > _MAX_TRIED:
        yield from errors
        return
    others = [one for one in WRITTEN if one not in (notation, plan.notation)]
    taking = [one.value for one in others if _written(plan, one, inventory)[0] is not None]
    fix = f"convert to {', '.join(taking)}, or {KEEP}" if taking else f"{KEEP}: no other takes it"
    for error in errors:
        yield replace(error, fix=error.fix.replace(KEEP, fix))


def _written(plan: Plan, notation: Notation, inventory: Inventory | None) -> tuple[Converted | None, Findings]:
    """A converted config; for RLinf without parallel sizes if it cannot be expressed with them."""
    converted, found = _attempt(plan, notation, _WRITERS[notation], inventory)
    if notation is Notation.RLINF and any(finding.code in ("RST-N044", "RST-N045") for finding in found.errors):
        write = partial(to_rlinf, with_sizes=False)
        without, again = _attempt(plan, notation, write, inventory)
        if without is not None:
            return without, again
    return converted, found


def _attempt(
    plan: Plan, notation: Notation, write: Callable[[Plan, Findings], dict[str, Any]], inventory: Inventory | None
) -> tuple[Converted | None, Findings]:
    """A converted config, and findings about what it loses or cannot express."""
    findings = Findings()
    values = write(plan, findings)
    if findings.has_errors:
        return None, findings
    program = _PROGRAMS[notation](plan, values) if notation in _PROGRAMS else ""
    converted = Converted(notation, values, program)
    again = Findings()
    result = _planned_again(converted, inventory, again)
    ignored = {str(finding.where.path[-1]) for finding in again.warnings if finding.code == "RST-P022"}
    if ignored:
        placed = values["cluster"]["component_placement"]
        placed |= {name: _without_processes(placed[name]) for name in placed if name in ignored}
        again = Findings()
        result = _planned_again(converted, inventory, again)
    if result is None:
        _name_errors(plan, notation, again, findings)
        return None, findings
    _compare(plan, result, findings)
    note_needs(plan, notation, values, findings)
    remarks = [_remark(finding) for finding in findings.notes if finding.code == ASSUMED]
    remarks += [finding.what for finding in findings.warnings if finding.what.endswith(_GAINED)]
    remarks += _not_carried(plan, notation)
    return (None if findings.has_errors else replace(converted, remarks=tuple(dict.fromkeys(remarks)))), findings


# Ends of keys that are converted though they place no process.
_CARRIED = re.compile(
    r"(.*[.-])?(kl[_-](loss[_-]|penalty[_-])?coef|init_(kl_)?coef|reference_policy_kl_penalty|beta"
    r"|(adv|advantage)?[_-]?estimator|adv_type|normalize_advantages|whiten_advantages|use_kl_loss|add_token_level_kl"
    r"|staleness_threshold|max_staleness_steps|per_device_train_batch_size)"
)
# Settings whose keys are converted, or reported if plans differ; of section train, only some are.
_OF_MODELS = frozenset({"compute_dtype", "lora_rank", "activation_checkpointing", "micro_batch_tokens"})
_CONVERTED = _OF_MODELS | {
    *("model", "engine", "max_staleness", "max_new_tokens", "advantage_estimator", "kl_coef", "kl_penalty_coef"),
    *("whiten_advantages", "reward_baseline", "reward_std"),
}


def _not_carried(plan: Plan, notation: Notation) -> list[str]:
    """Lines with the keys about training that the job sets and that are not converted."""
    found = [use.where for use in plan.keys if _is_of_training(use)]
    decided = [(key, setting.name) for setting in plan.training for key in setting.keys]
    has_word = notation not in _OWN and any(each.value in TRAINED for each in plan.training if each.name == ESTIMATOR)
    of_train = _OF_MODELS | ({ESTIMATOR} if has_word and ESTIMATOR not in plan.settings else set())
    carried = {key.path for key, name in decided if name in (of_train if _in_train(key) else _CONVERTED)}
    found += [key for key, _ in decided if key.path not in carried]
    keys = [where.key_path for where in sorted(found, key=lambda where: where.order)]
    names = [key for key in dict.fromkeys(keys) if key.startswith("train.") or _CARRIED.fullmatch(key) is None]
    if not names:
        return []
    text = f"{counted(len(names), 'key')} about training not converted: {', '.join(names)}"
    return textwrap.wrap(text, 116, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _is_of_training(use: KeyUse) -> bool:
    """Return True for a key that no setting follows, or, of a job that only places, one whose setting is lost."""
    is_lost = use.known.effect is Effect.FOLLOWED and use.known.reason.removesuffix(" in train") not in _CONVERTED
    return use.known.effect is Effect.TRAINING or is_lost


def _in_train(where: Where) -> bool:
    return where.path[:1] == ("train",)


def _name_errors(plan: Plan, notation: Notation, again: Findings, findings: Findings) -> None:
    """Report the components that the program cannot place, by the job's names rather than the program's keys."""
    named = set[str]()
    others = [finding for finding in again.errors if finding.code not in _ABOUT_SHARES]
    for finding in others or again.errors:  # wrong numbers of GPUs follow from other errors
        part = _component_at(finding.where.key_path, plan)
        if notation in _OWN or part is None:
            what = f"{notation.value} cannot express this plan: {finding.where.key_path} {finding.what}"
            findings.error("RST-N044", Where(), what, finding.why, finding.fix)
        elif part.name not in named:
            named.add(part.name)
            if finding in others:
                what, why = f"{notation.value} refuses it: {finding.where.key_path} {finding.what}", finding.why
                fix = f"{finding.fix}, or {KEEP}" if finding.fix else KEEP
            else:
                what = f"{notation.value} cannot express this placement: {_held(part)}"
                why = f"{_PLACES[notation]}; {finding.why or f'{finding.where.key_path} {finding.what}'}"
                fix = KEEP
            findings.error("RST-N044", Where(path=(part.name,)), what, why, fix)


def _component_at(key: str, plan: Plan) -> ComponentPlan | None:
    """The component of the plan that a key of another program is about; None if the plan does not have it."""
    inner = key.removeprefix("actor_rollout_ref.")  # of verl, for all three
    word = next((name for name, pattern in _KEYS_OF.items() if pattern.search(inner)), "actor")
    return next((part for part in plan.components if family(part.name) == word), None)


def _held(part: ComponentPlan) -> str:
    """Processes and devices of a component, as text."""
    devices = spell_ranks(sorted(_devices(part)), limit=6)
    return f"{part.extent} with GPUs {devices}" if devices else part.extent


def _refuse(name: str, plan: Plan, result: Plan, findings: Findings) -> None:
    """Report a component that the program would place elsewhere, with its rule of placement."""
    program = result.notation.value
    before, after = (next((part for part in one.components if part.name == name), None) for one in (plan, result))
    why = _PLACES.get(result.notation, "")
    if after is None and before is not None:
        what = f"{program} has no place for it: {_held(before)}"
        has = _HAS.get(result.notation)
        why = f"components of {result.notation.program} with devices: {', '.join(has)}" if has else why
    elif before is None and after is not None:
        what = f"{program} starts it, and the job does not have it: {_held(after)}"
        if name == "critic":
            why = f"it is for advantage estimator {result.settings.get(ESTIMATOR)}"
    elif before is not None and after is not None:
        one, two = _held(before), _held(after)
        what = f"{program} cannot express this placement: {one}" + (f" -> {two}" if one != two else "")
    findings.error("RST-N045", Where(path=(name,)), what, why, KEEP)


def _refuse_apart(name: str, others: Sequence[str], plan: Plan, result: Plan, findings: Findings) -> None:
    """Report a component that would no longer share devices with `others`."""
    before, after = (spell_ranks(sorted(_devices(one[name])), limit=6) for one in (plan, result))
    what = f"{result.notation.value} cannot let it share GPUs with {' and '.join(others)}: GPUs {before} -> {after}"
    counts = [len(set[int]().union(*map(_devices, one.components))) for one in (plan, result)]
    more = f"; the job would take {counts[1]} GPUs in place of {counts[0]}" if counts[1] > counts[0] else ""
    findings.error("RST-N045", Where(path=(name,)), what, _PLACES[result.notation] + more, KEEP)


def _parted(name: str, plan: Plan, result: Plan) -> list[str]:
    """Components that share devices with this one in the plan, but not in the result."""
    here, there = ({part.name: _devices(part) for part in one.components} for one in (plan, result))
    both = [other for other in here if other in there and other != name]
    if name not in here or name not in there:
        return []
    return [other for other in both if here[name] & here[other] and not there[name] & there[other]]


def _devices(part: ComponentPlan) -> set[int]:
    return {*part.table.device_numbers.tolist()}


def _remark(finding: Finding) -> str:
    return f"{finding.where.key_path}: {finding.what} ({finding.why})"


def _without_processes(placement: str | dict[str, str]) -> str | dict[str, str]:
    """A placement of RLinf without its process ranks, which are not used if parallel sizes decide them."""
    if isinstance(placement, dict):
        return placement | {"placement": _PROCESSES.sub("", placement["placement"])}
    return _PROCESSES.sub("", placement)


def _planned_again(converted: Converted, inventory: Inventory | None, findings: Findings) -> Plan | None:
    notation = converted.notation
    if notation in _NAME_MACHINES:
        return try_plan(converted.values, findings, inventory, notation=notation)
    launch = Launch(notation.value, converted.program, (None, None, None)) if converted.program else None
    job = read_job(Source(converted.values, launch=launch), findings, notation)
    if job is None or findings.has_errors:
        return None
    if inventory is not None:  # these programs run on whatever machines they find
        job = replace(job, num_nodes=None, accelerators_per_node=None)
    return try_plan(job, findings, inventory)


def _compare(plan: Plan, result: Plan, findings: Findings) -> None:
    """Report every difference: an error if processes would be elsewhere, else a warning."""
    program = result.notation.value
    models: dict[str, list[tuple[str, str, str]]] = {}
    added, paths, refused, places = [], [], [], dict[Advice, list[str]]()
    order = _order(plan, result) if result.notation not in _OWN and _is_reordered(plan, result) else None
    for change in diff_plans(plan, result):
        if change.subject in _ABOUT_PLACES:
            loss = _loss_of_place(change, plan, result, order)
            if loss:
                places.setdefault(loss, []).append(str(change.component))
            else:
                refused.append(str(change.component))
        elif change.subject == "sizes":
            what = f"{program} cannot express these sizes with this placement: {_sizes(change)}"
            why = _CUTS_RANKS if result.notation is Notation.RLINF else ""
            findings.warn("RST-N046", Where(), what, why, CHECK_MEMORY)
        elif change.subject == "model":
            (name, _, old), (_, _, new) = (side.partition("=") for side in (change.before, change.after))
            if name == "path" and old == NOTHING:
                paths.append(new)
            else:
                models.setdefault(str(change.component), []).append((name, old, new))
        elif change.subject == "settings" and change.before == NOTHING:
            added.append(f"{change.component} {change.after}")
        else:
            why, fix = advise(change, result.notation, plan.notation)
            what = f"{program} cannot express this: {_SUBJECTS.get(change.subject, '')}{change}"
            findings.warn("RST-N046", Where(), what, why, fix)
    for (lost, fix), names in places.items():
        several = ", ".join(dict.fromkeys(names)) if len({*names}) > 1 else ""
        what = lost if all(name in lost for name in names) or not several else f"{lost}, for {several}"
        findings.warn("RST-N046", Where(path=() if several else (names[0],)), what, fix=fix)
    moved = dict.fromkeys(refused)
    apart = {name: others for name in moved if (others := _parted(name, plan, result))}
    held, given = _shapes(plan), _shapes(result)
    for component in moved:
        if component in apart:
            _refuse_apart(component, apart[component], plan, result, findings)
        elif not apart or held.get(component) != given.get(component):  # else it only moved to make room for those
            _refuse(component, plan, result, findings)
    if added:
        what = f"{program} takes {', '.join(added)}, {_GAINED}"
        findings.warn("RST-N046", Where(), what, fix=CHANGE_PRINTED)
    for path in dict.fromkeys(paths):
        what = f"{program} takes the model {path}, {_GAINED}"
        fix = "write its path; a script's variables are given before roost: MODEL_PATH=... roost convert"
        findings.warn("RST-N046", Where(path=("actor",)), what, fix=fix)
    for component, changes in models.items():
        _name_model(component, changes, result.notation, findings)


def _sizes(change: Change) -> str:
    """The sizes of a component that differ: `actor: expert 8 -> 1`."""
    one, two = (dict(size.split() for size in side.split(", ")) for side in (change.before, change.after))
    pairs = ((name, one.get(name, NOTHING), two.get(name, NOTHING)) for name in one | two)
    return f"{change.component}: {', '.join(f'{name} {old} -> {new}' for name, old, new in pairs if old != new)}"


def _name_model(
    component: str, changes: Sequence[tuple[str, str, str]], notation: Notation, findings: Findings
) -> None:
    """Report fields of a component's model: those lost or changed, and those that the job does not set."""
    lost = [change for change in changes if change[1] != NOTHING]
    gained = [f"{FIELD_WORDS.get(name, name)} {new}" for name, old, new in changes if old == NOTHING]
    where = Where(path=(component,))
    if lost:
        words = ", ".join(f"{FIELD_WORDS.get(name, name)} {old} -> {new}" for name, old, new in lost)
        what = f"{notation.value} cannot express this: {words}"
        findings.warn("RST-N046", where, what, fix=advise_model(lost, notation))
    if gained:
        what = f"{notation.value} takes {', '.join(gained)}, {_GAINED}"
        findings.warn("RST-N046", where, what, fix=CHANGE_PRINTED)


def _loss_of_place(change: Change, plan: Plan, result: Plan, order: str | None) -> Advice | None:
    """What is lost and a fix, if a change of placement is no error; else None.

    `order` describes the program's own order of GPUs; None if processes differ in more than their order.
    """
    part = next((part for part in plan.components if part.name == change.component), None)
    program = result.notation.value
    if part is None:
        is_reference = change.component == "reference" and plan.settings.get(KL_COEF) is not None
        is_beside = is_reference and result["reference"].table == result["actor"].table
        loss = f"{program} has a component reference for KL, which the job's learner computes"
        return (loss, CHECK_MEMORY) if is_beside else None
    if change.subject == "process" and is_dealt(part):
        loss = f"{program} does not place workers round-robin over the nodes: {part.name} fills them in order"
        return loss, "check that the first nodes have CPUs enough"
    if change.subject == "environment" and (not has_devices(part) or result.notation not in _OWN):
        return f"{program} does not set these variables: {change.before}", "export them where the job is started"
    if change.subject == "process" and order is not None:
        return f"{program} has an order of its own for GPUs: {order}", SAME_ON_EQUAL
    if change.subject != "component" or change.after:
        return None
    if not has_devices(part):
        fix = rewards_at(result.notation) if part.name.startswith("reward") else "let the program place it"
        return f"{program} does not place {part.name}, which has no devices: {change.before}", fix
    if part.name == "reference" and is_kl_off(plan) and KL_COEF not in result.settings:
        return f"{program} starts no reference for a KL of 0: {_held(part)}", "do nothing: a KL of 0 trains nothing"
    is_beside = part.name == "reference" and part.table == plan["actor"].table
    if is_beside and result.notation in REFERENCE_INSIDE:
        loss = f"{program} has no component {part.name}: its learner computes what it is for"
        is_same = all(plan.settings.get(key) == result.settings.get(key) for key in (KL_COEF, KL_IN))
        return loss, "do nothing: the KL is the same" if is_same else "do nothing for it: the KL differs as named"
    if result.notation not in _OWN and part.name.startswith("reward") and not uses_model(part):
        loss = f"{program} has no place for {part.name}, which has no model: {_held(part)}"
        return loss, rewards_at(result.notation)
    return None


def _order(plan: Plan, result: Plan) -> str:
    """The devices that components move to: `actor 4-7 -> 0-3`; or that processes change places within them."""
    kept = {part.name: part for part in plan.components}
    pairs = ((part.name, _devices(kept[part.name]), _devices(part)) for part in result.components if part.name in kept)
    spelled = ((name, *(spell_ranks(sorted(one), limit=6) for one in (old, new))) for name, old, new in pairs)
    moved = ", ".join(f"{name} {old} -> {new}" for name, old, new in spelled if old != new)
    return moved or "components keep theirs, and processes take them by number"


def _is_reordered(plan: Plan, result: Plan) -> bool:
    """Return True if all components that are kept have the same processes and share GPUs alike, in another order."""
    names = {part.name for part in result.components} & {part.name for part in plan.components}
    return _shapes(result).items() <= _shapes(plan).items() and _sharers(plan, names) == _sharers(result, names)


def _sharers(plan: Plan, names: set[str]) -> Counter[frozenset[str]]:
    """Number of devices that each set of components shares."""
    on_device: dict[int, set[str]] = {}
    for part in plan.components:
        for number in _devices(part) if part.name in names else ():
            on_device.setdefault(number, set()).add(part.name)
    return Counter(map(frozenset, on_device.values()))


def _shapes(plan: Plan) -> dict[str, list[tuple[int, int]]]:
    """Devices and nodes of the processes of each component."""
    found = {}
    for part in plan.components:
        table = part.table
        nodes = [len(np.unique(part)) for part in np.split(table.device_nodes, table.offsets[1:-1])]
        found[part.name] = sorted(zip(np.diff(table.offsets).tolist(), nodes, strict=True))
    return found
