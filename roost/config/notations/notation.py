"""Recognise the notation of a config, and read it into a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from roost.config.findings import MAX_COMPONENTS, Findings, did_you_mean, shown
from roost.config.frameworks.keys import TRAINED as ALSO_TRAINED, framework_keys, report_framework_keys
from roost.config.frameworks.signs import is_areal, is_nemo, is_prime, is_trl
from roost.config.job import Job, Layout, Notation, ResolvedSetting
from roost.config.known_keys.tables import KeyUse, mark_unplaced, with_reported_reasons
from roost.config.notations.loop import read_loop
from roost.config.notations.rlinf import read_rlinf, with_reference
from roost.config.notations.roll import has_roles, read_roll
from roost.config.source import Section, Source

if TYPE_CHECKING:
    from roost.config.train import TrainSettings

_SIGNS = {
    Notation.RLINF: "cluster.component_placement (RLinf)",
    Notation.ROLL: "device_mapping or world_size in a role (ROLL)",
    Notation.LOOP: "rl.gpu_allocation (ml-loop)",
    Notation.VERL: "actor_rollout_ref (verl)",
    Notation.NEMO: "policy with cluster.gpus_per_node (NeMo-RL)",
    Notation.AREAL: "rollout.backend or actor.backend such as sglang:d4 (AReaL)",
    Notation.SKYRL: "trainer.placement (SkyRL)",
    Notation.PRIME: "orchestrator with trainer or deployment (prime-rl)",
    Notation.TRL: "use_vllm, or model_name_or_path with num_generations (TRL)",
}


def read_job(
    source: Source,
    findings: Findings,
    notation: Notation | None = None,
    layout: Layout | None = None,
    strict: bool = False,
    needs_components: bool = True,
    trains: bool = False,
) -> Job | None:
    """Read a config in the notation its keys show, or in the one given.

    Mistakes go to `findings`; the job holds what could be read. None means that the notation is not clear, or the job
    is too large. `needs_components`: False if only the machines matter. `trains`: read training settings even without
    a section `train`.
    """
    root = Section.root(source, findings)
    notation = notation or recognise(root)
    if notation is None:
        return None
    if notation is Notation.RLINF:
        job = read_rlinf(root, layout, needs_components)
    elif notation is Notation.ROLL:
        job = read_roll(root, strict, trains)
    elif notation is Notation.LOOP:
        job = read_loop(root)
    else:
        return _read_framework(root, notation, needs_components, trains)
    # Only now: jobs of other frameworks do not wait for them.
    from roost.config.known_keys.report import key_uses, report_keys, report_unread
    from roost.config.train_read import read_training

    if len(job.components) > MAX_COMPONENTS:
        what = f"places {len(job.components):,} components, more than the {MAX_COMPONENTS} that Roost plans for"
        root.findings.error("RST-N006", root.where(), what, fix="place fewer components")
        return None
    for component in job.components:
        if not component.name.isprintable():
            findings.error(
                "RST-N007", component.where, f"{shown(component.name)} is not a name", fix="use letters, digits and _"
            )
    if needs_components and not job.components and not findings.has_errors:
        root.findings.error("RST-N005", root.where(), "places no component", fix=f"add one, with {_SIGNS[notation]}")
    training, resolved = read_training(root, job, trains)
    if notation is Notation.RLINF and training is not None:
        job = with_reference(job, training, root)
    staleness = {"max_staleness": training.max_staleness} if training is not None and training.max_staleness else {}
    uses = key_uses(root, notation)
    if not needs_components:
        uses = ()  # only the machines matter
    elif "train" in root or training is not None:
        if notation is Notation.RLINF and training is not None:
            uses = mark_unplaced(uses, {component.name for component in job.components})
        uses = report_keys(uses, root, notation)
    else:
        report_unread(uses, root)
    return replace(
        job,
        training=training,
        trains=trains,
        resolved=resolved,
        keys=uses,
        settings={**job.settings, **staleness},
        warnings=findings.warnings,
        notes=findings.notes,
    )


def _read_framework(root: Section, notation: Notation, needs_components: bool, trains: bool) -> Job | None:
    """A job of another framework, with training settings if Roost can train it."""
    # Only now: other configs do not wait for them.
    from roost.config.frameworks.registry import framework_of, read_framework

    if trains and notation not in ALSO_TRAINED:
        what = f"is a job of {notation.program}, which Roost plans but cannot train"
        fix = (
            f"train it with {notation.program}, or write a section train over its placement, which "
            f"roost convert {root.source.file} --to rlinf prints: data, batch sizes and learning rate are not converted"
        )
        root.findings.error("RST-T098", root.where(), what, fix=fix)
        return None
    job = read_framework(root, notation)
    training: TrainSettings | None = None
    resolved: tuple[ResolvedSetting, ...] = ()
    if notation in ALSO_TRAINED and (trains or "train" in root):
        from roost.config.train_read import read_training

        if notation is Notation.TRL:
            from roost.config.frameworks.trl_train import with_rollout

            job = with_rollout(job)
        training, resolved = read_training(root, job, trains)
    uses: tuple[KeyUse, ...] = ()
    if needs_components:
        uses = framework_keys(root, notation, framework_of(notation).placing, training is not None)
        report_framework_keys(uses, root, notation, is_trained=training is not None)
        uses = with_reported_reasons(uses, root.findings)
    return replace(
        job,
        training=training,
        trains=trains,
        resolved=resolved,
        keys=uses,
        warnings=root.findings.warnings,
        notes=root.findings.notes,
    )


def recognise(root: Section) -> Notation | None:
    """The notation, by keys that only it has; report an error if none or several match."""
    if root.source.launch is not None:
        return Notation(root.source.launch.framework)
    values = root.values
    shown_by = {
        Notation.RLINF: "cluster" in values and not is_nemo(values) and not is_areal(values),
        Notation.LOOP: isinstance(values.get("rl"), Mapping) and "gpu_allocation" in values["rl"],
        Notation.ROLL: has_roles(values),
        Notation.VERL: "actor_rollout_ref" in values,
        Notation.NEMO: is_nemo(values),
        Notation.AREAL: is_areal(values),
        Notation.SKYRL: isinstance(values.get("trainer"), Mapping) and "placement" in values["trainer"],
        Notation.PRIME: is_prime(values, root.source.file),
        Notation.TRL: is_trl(values),
    }
    found = [notation for notation, is_shown in shown_by.items() if is_shown]
    if len(found) == 1:
        return found[0]
    cluster = values.get("cluster")
    if isinstance(cluster, Mapping) and "component_placement" in cluster:
        _warn_second_notation(root, found)
        return Notation.RLINF
    if not values:
        root.findings.error("RST-N003", root.where(), "is empty", fix=f"write one of: {'; '.join(_SIGNS.values())}")
    elif not found and (missing := next((one for one in root.findings.warnings if one.code == "RST-C018"), None)):
        root.findings.error(
            "RST-N001",
            root.where(),
            "places nothing without the files that its defaults name",
            f"{missing.what.rpartition(': ')[2]}: not there; {missing.why}",
            f"{missing.fix.removesuffix(' if they say anything about placement')}, or choose others: group=option",
        )
    elif not found:
        root.findings.error(
            "RST-N001",
            root.where(),
            "is in none of the notations Roost knows",
            _likely_slip(values) or f"none of these keys is there: {'; '.join(_SIGNS.values())}",
            "write one of them, or name the notation with --notation",
        )
    else:
        root.findings.error(
            "RST-N002",
            root.where(),
            f"could be {' or '.join(_SIGNS[notation] for notation in found)}",
            fix=f"name the notation with --notation {' or '.join(found)}",
        )
    return None


def _warn_second_notation(root: Section, found: list[Notation]) -> None:
    """Warn of ROLL roles or an ml-loop GPU allocation in a config that is read as RLinf's."""
    has_roles = any(isinstance(value, Mapping) and "device_mapping" in value for value in root.values.values())
    if has_roles or Notation.LOOP in found:
        what = f"is read as {_SIGNS[Notation.RLINF]}, though it has keys of another notation as well"
        root.findings.warn("RST-N004", root.where(), what, fix="remove them, or name the notation with --notation")


def _likely_slip(values: Mapping[Any, Any]) -> str:
    """A hint if a key is nearly one of those that show the notation."""
    inner = values["rl"] if isinstance(values.get("rl"), Mapping) else {}
    hints = [did_you_mean(key, ("cluster", "rewards", "actor_train")) for key in values]
    hints += [did_you_mean(key, ("gpu_allocation",)) for key in inner]
    return next((hint for hint in hints if hint), "")
