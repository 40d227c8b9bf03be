"""slime and miles: flags of `train.py` and `train_async.py`.

GPUs are slots in order: the learner takes the first, engines the same ones (`--colocate`) or those after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roost.config.findings import MAX_ACCELERATORS_PER_NODE, MAX_NODES, Findings, counted, remainder
from roost.config.frameworks.arguments import Arguments, Start, read_flags
from roost.config.frameworks.pools import (
    VISIBLE,
    Reader,
    add_visible_of_script,
    check_divides,
    engines_on,
    enough_visible,
    megatron_sizes,
    visible_devices,
)
from roost.config.frameworks.registry import Framework
from roost.config.job import (
    OFFLOADED_PARTS,
    DeviceList,
    Job,
    ModelUse,
    Notation,
    ParallelSizes,
    Role,
    Sharding,
    first_number,
    first_text,
    fraction_of_device,
    known_count,
    read_model_config,
)
from roost.config.notations.algorithm import algorithm_of, completion_of
from roost.config.shell.state import Value
from roost.config.source import Section, parse_yaml, read_yaml

VERSION = "slime of 2026-08-21 (624b824a8), miles of 2026-08-21 (31f1ca961)"
DEFAULTS: Mapping[str, Any] = {
    "--actor-num-nodes": 1,
    "--actor-num-gpus-per-node": 8,
    "--rollout-num-gpus-per-engine": 1,
    "--num-gpus-per-node": 8,
    "--advantage-estimator": "grpo",
    "--eval-num-gpus": 0,
}
SWITCHES = frozenset(
    f"--{name}"
    for name in (
        *("colocate", "offload", "offload-train", "offload-rollout", "no-offload-train", "no-offload-rollout"),
        *("release-train", "debug-train-only", "debug-rollout-only", "use-kl-loss", "normalize-advantages"),
        *("use-dynamic-batch-size", "sglang-enable-dp-attention"),
    )
)
PIPELINE = ("--sglang-pp-size", "--sglang-pipeline-parallel-size")  # of an engine
DATA = ("--sglang-dp-size", "--sglang-data-parallel-size")
EXPERT = ("--sglang-ep-size", "--sglang-expert-parallel-size")
DATA_ATTENTION = "--sglang-enable-dp-attention"
# Flags with which a step may not have rollout-batch-size * n-samples-per-prompt samples.
OWN_SAMPLES = (
    *("--use-dynamic-global-batch-size", "--disable-rollout-trim-samples", "--rollout-function-path"),
    *("--custom-generate-function-path", "--custom-convert-samples-to-train-data-path", "--num-steps-per-rollout"),
)
ONLY_BACKEND = "megatron"  # of slime since PR #1664 of March 2026; miles has others
PLACING = (
    *DEFAULTS,
    VISIBLE,
    *("--rollout-num-gpus", "--colocate", "--offload", "--offload-train", "--offload-rollout", "--release-train"),
    *("--no-offload-train", "--no-offload-rollout", "--rollout-external-engine-addrs", "--rollout-external"),
    *("--debug-train-only", "--debug-rollout-only", "--load-debug-rollout-data", "--sglang-config"),
    *("--prefill-num-servers", "--tensor-model-parallel-size", "--pipeline-model-parallel-size"),
    *("--context-parallel-size", "--expert-model-parallel-size", "--expert-tensor-parallel-size"),
    *("--hf-checkpoint", "--sglang-mem-fraction-static", "--max-tokens-per-gpu", "--train-backend", "--lora-rank"),
    *("--use-dynamic-batch-size", *PIPELINE, *DATA, *EXPERT, DATA_ATTENTION),
    *("--rollout-max-prompt-len", "--rollout-max-response-len", "--rollout-max-context-len"),
)


def read_arguments(words: Sequence[Value]) -> Arguments:
    return read_flags(words, SWITCHES)


def read_slime(root: Section, notation: Notation) -> Job:
    """Read the flags of a job of slime or miles."""
    return _Slime(root, notation).job()


def with_visible(start: Start, findings: Findings) -> Arguments:
    """The arguments with the GPUs that the command may see."""
    add_visible_of_script(start.arguments, start)
    return start.arguments


FRAMEWORK = Framework(read_slime, PLACING, read_arguments, base=with_visible)


@dataclass(frozen=True, slots=True)
class _Group:
    """Engines of one size on GPUs that follow each other; a placeholder has none."""

    gpus: int
    per_engine: int
    kind: str = "regular"  # regular, prefill, decode or placeholder
    model: str | None = None


@dataclass(slots=True)
class _Slime(Reader):
    def job(self) -> Job:
        nodes = self._count("--actor-num-nodes", 1, MAX_NODES) or 1
        per_node = self._count("--actor-num-gpus-per-node", 1, MAX_ACCELERATORS_PER_NODE) or 1
        learner = nodes * per_node
        train_only = self.root.flag("--debug-train-only") or not self._is_missing("--load-debug-rollout-data")
        rollout_only, shares = self.root.flag("--debug-rollout-only"), self.root.flag("--colocate")
        is_shared = shares and not rollout_only  # rollout-only turns --colocate and the offloads off
        is_external = self.root.get("--rollout-external-engine-addrs") not in (None, False)
        rollout = self.root.whole_number("--rollout-num-gpus", 0)
        if rollout is None and shares:
            rollout = learner
        is_given = not self._is_missing("--rollout-num-gpus") or self.root.values.get("--colocate") not in (None, False)
        if rollout is None and not train_only and not is_external and not is_given:
            self.root.error(
                "RST-N062",
                "--rollout-num-gpus",
                "is missing, and the engines do not share the learner's GPUs",
                f"{self.notation.value} adds it to {learner} and ends with a TypeError",
                "write --rollout-num-gpus 8, or --colocate",
            )
        if is_shared and self._is_async():
            self.root.error(
                "RST-N058",
                "--colocate",
                "gives the engines no GPUs of their own",
                f"train_async.py generates while it learns; {self.notation.value} ends with an assertion",
                f"start train.py, or write --rollout-num-gpus {rollout} instead",
            )
        total = learner
        has_engines = not train_only and not is_external
        width = self._gpus_per_node(per_node, is_shared or (nodes > 1 and has_engines))
        if not rollout_only:
            self._learner(learner)
            self._check_batch()
        if not train_only and not is_external:
            offset = 0 if is_shared or rollout_only else learner
            self._engines(rollout or 0, offset, width)
            total = max(learner if not rollout_only else 0, offset + (rollout or 0))
            total += self._eval_engines(total)
        if total <= width:
            enough_visible(visible_devices(self.root), total, self.root, "processes")
        return self.as_job(max(1, -(-total // width)), width, self._settings(is_shared))

    def _is_async(self) -> bool:
        return self.program.endswith("train_async")

    def _count(self, key: str, minimum: int, maximum: int | None = None) -> int | None:
        return self.root.whole_number(key, minimum, DEFAULTS.get(key), maximum)

    def _is_missing(self, key: str) -> bool:
        return self.root.values.get(key) is None

    def _gpus_per_node(self, per_node: int, is_whole: bool) -> int:
        """GPUs of a node: as written for engines, or their default, and at least as many as the learner has.

        `is_whole`: the learner seems to fill its nodes, as engines share them or it has several.
        """
        written = self._count("--num-gpus-per-node", 1, MAX_ACCELERATORS_PER_NODE) or 1
        if not self._is_missing("--num-gpus-per-node"):
            return max(written, per_node)
        if per_node < written and is_whole:
            self.root.findings.warn(
                "RST-N061",
                self.root.where("--actor-num-gpus-per-node"),
                f"is {per_node}, but engines take nodes to have {written} GPUs",
                f"--num-gpus-per-node is not written, and its default is {written}",
                f"write --num-gpus-per-node {per_node} if the nodes have {per_node}",
            )
        return max(written, per_node)

    def _settings(self, is_shared: bool) -> dict[str, object]:
        sleeps = is_shared or self.root.flag("--offload") or self.root.flag("--offload-rollout")
        if self.root.flag("--no-offload-rollout") or self.root.values.get("--offload-rollout") is False:
            sleeps = False
        sleeps = sleeps and not self.root.flag("--debug-rollout-only")
        settings: dict[str, object] = {"engines_sleep": sleeps}
        if self._is_async():
            settings["async_rollouts"] = True
        values = self.root.values
        in_loss = (values.get("--kl-loss-coef") or 0.0) if self.root.flag("--use-kl-loss") else None
        prompt, response, sequence = self._lengths()
        settings |= completion_of(prompt, response, sequence)
        in_reward, whitens = values.get("--kl-coef") or None, self.root.flag("--normalize-advantages")
        return settings | algorithm_of(self.notation, self._estimator(), in_loss, in_reward, prompt, whitens)

    def _lengths(self) -> tuple[float | None, float | None, float | None]:
        """Maximum tokens of a prompt, a completion and both; None if not written."""
        names = ("prompt", "response", "context")
        prompt, response, both = (first_number((self.root, f"--rollout-max-{name}-len")) for name in names)
        return prompt, response, both or (prompt + response if prompt and response else None)

    def _estimator(self) -> str:
        return self.root.text("--advantage-estimator") or str(DEFAULTS["--advantage-estimator"])

    def _check_batch(self) -> None:
        """Check that a step has whole batches, unless flags or the job's own code may change its samples."""
        prompts, batch = (known_count(self.root, f"--{name}-batch-size") for name in ("rollout", "global"))
        group, program = known_count(self.root, "--n-samples-per-prompt", 1), self.notation.value
        samples = prompts * group
        if not samples or not batch or any(not self._is_missing(flag) for flag in OWN_SAMPLES) or samples % batch == 0:
            return
        report = self.root.findings.warn if samples > batch else self.root.findings.error
        rest = "drops the rest; versions of 2025 assert it" if samples > batch else "ends with: Not enough samples"
        report(
            "RST-N088",
            self.root.where("--global-batch-size"),
            f"is {counted(batch, 'sample')}, and a step has {prompts} * {group}",
            f"{remainder(samples, batch)}; {program} {rest}",
            f"write a number that divides {samples}, or --use-dynamic-global-batch-size",
        )

    # --- learner

    def _model(self, context: int) -> ModelUse:
        path = first_text((self.root, "--hf-checkpoint"))
        offloads = self.root.flag("--offload-train") or self.root.flag("--offload") or self.root.flag("--colocate")
        if self.root.flag("--no-offload-train"):
            offloads = False
        offloads = offloads or self._estimator() == "ppo"  # the critic is on the same GPUs
        rank = first_number((self.root, "--lora-rank"))
        backend = self.root.text("--train-backend") or ONLY_BACKEND
        sequence = self._lengths()[2]
        return ModelUse(
            path,
            read_model_config(path),
            sharding=Sharding.FULL if backend == "fsdp" else Sharding.OPTIMIZER,
            strategy=backend,
            offloads=OFFLOADED_PARTS if offloads else (),
            tokens=self._tokens(context),
            lora_rank=int(rank) if rank else None,
            sequence=int(sequence) if sequence else None,
        )

    def _tokens(self, context: int) -> int | None:
        """Tokens of a micro-batch over a context group; the flag has an effect with dynamic batches only."""
        flag = "--max-tokens-per-gpu"
        tokens = first_number((self.root, flag))
        if tokens and not self.root.flag("--use-dynamic-batch-size"):
            what, why = "has no effect", f"{self.notation.value} reads it with --use-dynamic-batch-size only"
            fix = "add --use-dynamic-batch-size, or remove it"
            self.root.findings.warn("RST-N068", self.root.where(flag), what, why, fix)
            return None
        return int(tokens) * context if tokens else None

    def _learner(self, count: int) -> None:
        sizes = megatron_sizes(self.root, are_flags=True)
        where = self.root.where("--actor-num-gpus-per-node")
        check_divides(sizes, count, where, self.root)
        model = self._model(sizes.context)
        if self.notation is Notation.SLIME and model.strategy != ONLY_BACKEND:
            key, what = "--train-backend", f"is {model.strategy}, which slime no longer has"
            why, fix = (
                "since March 2026 it takes megatron only",
                "write megatron, or train with miles or an older slime",
            )
            self.root.findings.warn("RST-N087", self.root.where(key), what, why, fix)
        devices = DeviceList(range(count), 1)
        self.add("actor", "--actor-num-gpus-per-node", where, devices, Role.LEARNER, sizes, model)
        if self._estimator() == "ppo":
            place = self.root.where("--advantage-estimator")
            self.add("critic", "--advantage-estimator ppo", place, devices, Role.LEARNER, sizes, model)

    # --- engines

    def _engines(self, gpus: int, offset: int, width: int) -> None:
        per_engine = self._count("--rollout-num-gpus-per-engine", 1) or 1
        groups = self._groups(gpus, per_engine)
        alike: dict[tuple[int, str, str | None], list[int]] = {}
        start = offset
        for group in groups:
            devices = range(start, start + group.gpus)
            start += group.gpus
            if group.kind != "placeholder" and group.gpus:
                where = self.root.where("--rollout-num-gpus-per-engine")
                used = engines_on(devices, group.per_engine, where, self.root)
                self._report_cut(used, group.per_engine, width)
                alike.setdefault((group.per_engine, group.kind, group.model), []).extend(used)
        names: set[str] = set()
        flags = ("--rollout-num-gpus", "--rollout-num-gpus-per-engine", "--colocate")
        for (size, kind, model), devices_of in alike.items():
            if not devices_of:
                continue
            path = model or first_text((self.root, "--hf-checkpoint"))
            fraction = fraction_of_device(self.root, "--sglang-mem-fraction-static")
            use = ModelUse(path, read_model_config(path), memory_fraction=fraction, strategy="sglang")
            name = f"rollout.{kind}" if kind in ("prefill", "decode") else "rollout"
            name = f"{name}.{len(names) + 1}" if name in names else name
            names.add(name)
            self.add(
                name,
                "--rollout-num-gpus-per-engine",
                self.root.where(next((one for one in flags if not self._is_missing(one)), flags[0])),
                DeviceList(devices_of, size),
                Role.ENGINE,
                self._engine_sizes(size),
                use,
            )

    def _engine_sizes(self, gpus: int) -> ParallelSizes:
        """Sizes of an engine; with data-parallel attention, experts are split over all its copies."""
        pipeline = self._part(PIPELINE, gpus, "GPUs of an engine")
        tensor = gpus // pipeline
        data, expert = (self._part(flags, tensor, "GPUs of a stage of an engine") for flags in (DATA, EXPERT))
        if data > 1 and not self.root.flag(DATA_ATTENTION):
            why = f"{self.notation.value} asserts that data parallel engines have attention of their own"
            key = next(flag for flag in DATA if not self._is_missing(flag))
            self.root.error("RST-N068", key, f"is {data} without {DATA_ATTENTION}", why, f"add {DATA_ATTENTION}")
        return ParallelSizes(tensor // data, pipeline, expert=tensor if data > 1 else expert)

    def _part(self, flags: Sequence[str], gpus: int, of: str) -> int:
        """The number of parts that the first written of some flags makes of an engine."""
        key = next((flag for flag in flags if not self._is_missing(flag)), flags[0])
        parts = self.root.whole_number(key, 1, 1) or 1
        if gpus % parts:
            what, why = f"is {parts}, which does not divide the {gpus} {of}", remainder(gpus, parts)
            self.root.error("RST-N056", key, what, why, f"write a number that divides {gpus}")
            return 1
        return parts

    def _report_cut(self, devices: Sequence[int], size: int, width: int) -> None:
        """Warn of the first engine that a node's end cuts: a server takes GPUs of its own node, one after another."""
        starts = (gpu for gpu in devices[::size] if (gpu % width) + size > width)
        cut = next((gpu for gpu in starts if size % width or gpu % width), None)
        if cut is None:
            return
        program = self.notation.value
        if size > width and size % width:
            servers = counted(size // width, "server")
            why = f"{program} starts {servers} of {width} GPUs for it: {size} // {width} = {size // width}"
            fix = f"use a multiple of {width}, or a size that divides it"
        else:
            why = f"it begins at GPU {cut % width} of a node of {width}, and a server has GPUs of one node only"
            fix = f"use a size that divides {width}, and have engines begin where a node does"
        self.root.findings.warn(
            "RST-N056",
            self.root.where("--rollout-num-gpus-per-engine"),
            f"makes an engine {counted(size, 'GPU')} large that {program} cannot start",
            why,
            fix,
        )

    def _eval_engines(self, start: int) -> int:
        """miles: further engines for evaluation, after all others."""
        gpus = self._count("--eval-num-gpus", 0) or 0
        if gpus and self.notation is Notation.MILES:
            size = min(self._count("--rollout-num-gpus-per-engine", 1) or 1, gpus)
            where = self.root.where("--eval-num-gpus")
            devices = engines_on(range(start, start + gpus), size, where, self.root)
            path = first_text((self.root, "--hf-checkpoint"))
            model = ModelUse(path, read_model_config(path), strategy="sglang")
            requested, sizes = DeviceList(devices, size), self._engine_sizes(size)
            self.add("rollout.eval", "--eval-num-gpus", where, requested, Role.ENGINE, sizes, model)
        return gpus if self.notation is Notation.MILES else 0

    def _groups(self, gpus: int, per_engine: int) -> list[_Group]:
        """The groups of engines: one, or those of the file that `--sglang-config` names."""
        whole = self._parted(gpus, per_engine)
        path = first_text((self.root, "--sglang-config"))
        if path is None:
            return whole
        file = Path(path)
        if not file.is_absolute() and not file.is_file():
            file = Path(self.root.source.file or "").parent / path
        launch, findings = self.root.source.launch, Findings()
        written = launch.written.get(Path.cwd() / path) if launch is not None else None
        if written is not None:
            source = parse_yaml(written, path, findings)
        else:
            source = read_yaml(file, findings) if file.is_file() else None
        if source is None:
            self.root.findings.warn(
                "RST-N060",
                self.root.where("--sglang-config"),
                f"{path} is not here; all engines are planned as one group of equal engines",
                fix="plan from the folder that the job is started in",
            )
            return whole
        inner = Section.root(source, self.root.findings)
        groups = []
        for model in inner.mappings("sglang", "write - name: default"):
            size = model.whole_number("num_gpus_per_engine", 1, per_engine) or per_engine
            key = "server_groups" if "server_groups" in model else "engine_groups"
            for group in model.mappings(key, "write - worker_type: regular"):
                groups.append(
                    _Group(
                        group.whole_number("num_gpus", 0, 0) or 0,
                        group.whole_number("num_gpus_per_engine", 1, size) or size,
                        group.text("worker_type") or "regular",
                        model.text("model_path"),
                    )
                )
        total = sum(group.gpus for group in groups)
        if total != gpus:
            self.root.error(
                "RST-N063",
                "--sglang-config",
                f"has groups of {counted(total, 'GPU')}, but engines have {gpus}",
                fix=f"write --rollout-num-gpus {total}, or groups of {gpus} in all",
            )
        return groups or whole

    def _parted(self, gpus: int, per_engine: int) -> list[_Group]:
        """All engines, or those for prefill before those for decode."""
        key = "--prefill-num-servers"
        count, engines = self.root.whole_number(key, 0) or 0, gpus // per_engine
        if not count:
            return [_Group(gpus, per_engine)]
        if count >= engines:
            self.root.error(
                "RST-N063",
                key,
                f"is {count} of {counted(engines, 'engine')}; prefill and decode each need at least one",
                f"decode has the rest: {engines} - {count} = {engines - count}",
                "write a number below that of the engines",
            )
            return [_Group(gpus, per_engine)]
        prefill = count * per_engine
        return [_Group(prefill, per_engine, "prefill"), _Group(gpus - prefill, per_engine, "decode")]
