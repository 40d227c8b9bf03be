"""TRL: `trl grpo`, or a script behind `accelerate launch` or `torchrun`, with the server that `trl vllm-serve` starts.

The launcher says how many learner processes there are, one per GPU. Engines are cut from them in order (colocate), or
are the replicas of a server on GPUs of its own, which are those that its command may see.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from roost.config.findings import MAX_ACCELERATORS, MAX_NODES, Findings, Position, Where, counted
from roost.config.frameworks.arguments import (
    Arguments,
    Start,
    calls_in,
    find_file,
    read_config,
    read_flags,
    read_overrides,
    value_at,
)
from roost.config.frameworks.pools import (
    VISIBLE,
    Reader,
    add_visible,
    check_divides,
    enough_visible,
    visible_devices,
)
from roost.config.frameworks.registry import Framework
from roost.config.frameworks.signs import names_trl
from roost.config.frameworks.trl_train import RLOO, RLOO_BETA, check_groups, is_rloo
from roost.config.job import (
    DEFAULT_ADAPTER_RANK,
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
    read_model_config,
)
from roost.config.notations.algorithm import RESPONSE, algorithm_of
from roost.config.notations.words import NO_FLAGS
from roost.config.shell.state import Command, Reading, Value
from roost.config.source import Section, read_text

VERSION = "TRL of 2026-07-24 (f2cd57710)"
DEFAULTS: Mapping[str, Any] = {
    "use_vllm": False,
    "vllm_mode": "colocate",  # server before 2025-12
    "vllm_tensor_parallel_size": 1,
    "vllm_gpu_memory_utilization": 0.3,
    "vllm_enable_sleep_mode": False,
    "beta": 0.0,  # of GRPO
    "tensor_parallel_size": 1,  # of the server
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "gpu_memory_utilization": 0.9,
}
# Configs of accelerate that TRL ships, by name: each is for one machine of eight GPUs.
_ONE_MACHINE = {"num_machines": 1, "num_processes": 8}
SHIPPED: Mapping[str, Mapping[str, Any]] = {
    **{name: {"distributed_type": "FSDP", **_ONE_MACHINE} for name in ("fsdp1", "fsdp2")},
    **{
        f"{prefix}zero{stage}": {
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {"zero_stage": stage},
            **_ONE_MACHINE,
        }
        for prefix in ("", "deepspeed_")
        for stage in (1, 2, 3)
    },
    "multi_gpu": {"distributed_type": "MULTI_GPU", **_ONE_MACHINE},
    "single_gpu": {"distributed_type": "NO", **_ONE_MACHINE},
}
SIGNS = ("--use_vllm", "--vllm_mode", "--vllm_server_base_url", "--vllm_server_host", "--vllm_tensor_parallel_size")
NAMED = re.compile(r"(?:.*[./])?\w*(?:grpo|gspo|rloo|trl)\w*(?:\.py)?", re.IGNORECASE)
TRAINERS = ("grpo", "rloo")
CONFIGS = ("GRPOConfig", "RLOOConfig", "AsyncGRPOConfig")
# Ways in which a script reads its flags, or has another module do it.
PARSES = re.compile(r"[Pp]arse|argv|getopt|docopt|\b(?:click|typer|tyro|fire|hydra|absl|draccus|OmegaConf|chz)\b")
MAIN_KEYS = ("model_name_or_path", "output_dir", "num_generations")  # one of which each YAML of TRL has
LAUNCHERS = ("accelerate", "torchrun", "deepspeed", "torch.distributed.run", "torch.distributed.launch")
SWITCHES = frozenset(("--multi_gpu", "--use_deepspeed", "--use_fsdp", "--cpu", "--standalone"))
# Of accelerate, torchrun and deepspeed, which read what stands before the script; `trl` passes its own on.
OF_LAUNCHERS = (
    *("num_processes", "num_machines", "gpu_ids", "nproc_per_node", "nnodes", "num_gpus", "num_nodes"),
    *("config_file", "accelerate_config", "multi_gpu", "distributed_type", "machine_rank"),
)
PLACING = (
    *(f"{dashes}{name}" for name in DEFAULTS for dashes in ("", "--")),
    *(
        f"{dashes}{name}"
        for dashes in ("", "--")
        for name in (
            *OF_LAUNCHERS,
            *("config", "model_name_or_path", "use_peft", "lora_r", "max_prompt_length", "max_completion_length"),
            *("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_device", "deepspeed"),
        )
    ),
    *(VISIBLE, "async", RLOO, NO_FLAGS, "vllm_serve.*", "fsdp_config.*", "deepspeed_config.*"),
)
GPU_IDS = ("--gpu_ids", "gpu_ids")
SETTING = re.compile(r"\+{0,2}train\.[\w.]+=")
SERVERS = (("trl", "vllm-serve"), ("vllm", "serve"))
SERVER_PROGRAMS = ("trl.scripts.vllm_serve", "vllm_serve.py")
SHORT = re.compile(r"-(tp|pp|dp)(?==|$)")  # flags of `vllm serve`
LONG = {kind[0] + "p": f"--{kind}_parallel_size" for kind in ("tensor", "pipeline", "data")}


# --- commands


def read_arguments(words: Sequence[Value]) -> Arguments:
    """Flags with underscores, whichever way they are written, and Roost's own settings `train.name=value`."""
    settings = [word for word in words if SETTING.match(word.prefix)]
    read = read_flags([word for word in words if word not in settings], SWITCHES)
    found = read_overrides(settings)
    found.unknown += read.unknown
    if words and (words[0].known or "").endswith((".yaml", ".yml")):  # HfArgumentParser takes a file without a flag too
        found.set(("--config",), words[0].known, words[0].position)
    for key, value in read.values.items():
        name = "--" + key[2:].replace("-", "_")
        found.set((name,), value, read.positions[(key,)])
    return found


def is_trl(start: Start) -> bool:
    """Return True for `trl grpo`, and for scripts with flags, a name or a config class of TRL's trainers."""
    rest, program, arguments = start.command.words[start.at + 1 :], start.program, start.arguments
    if program.rpartition("/")[2] == "trl":
        return bool(rest) and rest[0].known in TRAINERS
    if any(sign in arguments.values for sign in SIGNS):
        return True
    has_overrides = any(re.match(r"[+~]*(?!train\.)[\w.]+=", word.prefix) for word in rest)
    is_named = NAMED.fullmatch(program) is not None and (bool(arguments.values) or _launcher_at(start) is not None)
    return (is_named and not has_overrides) or bool(_keywords(start)) or names_trl(start)


def with_files(start: Start, findings: Findings) -> Arguments:
    """The arguments over the launcher's, and over the files that both name."""
    command, arguments = start.command, start.arguments
    at = _launcher_at(start)
    whole = Arguments(options=arguments.options, unknown=arguments.unknown)
    keywords = _keywords(start)
    for key, (value, position) in keywords.items():
        whole.set((key,), value, position)
    if _starts_rloo(start):
        whole.set((RLOO,), True, command.position)
    if keywords and not _reads_flags(start):
        whole.set((NO_FLAGS,), True, command.position)
        arguments = _without_flags(start, findings)
    if start.program.rpartition("/")[2] != "trl":
        arguments = _without_launcher_flags(arguments, start, findings)
    launcher = read_arguments(command.words[at + 1 : start.at]) if at is not None else Arguments()
    name = start.before[at] if at is not None else start.program.rpartition("/")[2]
    if name not in ("accelerate", "deepspeed", "trl"):
        whole.set(("nproc_per_node",), 1, command.position)  # python, or the default of torchrun
    for given in (launcher, arguments):
        for key, is_own in (("--config", given is arguments), ("--config_file", True), ("--accelerate_config", True)):
            if key in given.values and is_own:
                _add_file(whole, given.values[key], key, given.positions[(key,)], command, findings)
    _add_accelerate(whole, command, findings)
    for given in (launcher, arguments):
        for key, value in given.values.items():
            if key != "train":
                whole.set((key,), value, given.positions[(key,)])
        for path in given.positions:
            if path[0] == "train":
                whole.set(path, value_at(given.values, path), given.positions[path])
    add_visible(whole, command)
    return whole


def with_server(arguments: Arguments, reading: Reading) -> Arguments:
    """The arguments with those of the server that the same script starts."""
    for other in reading.commands.values():
        names = [(word.known or "").rpartition("/")[2] for word in other.words]
        pairs = list(pairwise(names))
        at = next((at for at, pair in enumerate(pairs) if pair in SERVERS or pair[1] in SERVER_PROGRAMS), None)
        if at is None:
            continue
        arguments.set(("vllm_serve",), {}, other.position)
        read = read_arguments([_long(word) for word in other.words[at + 2 :]])
        for key, value in read.values.items():
            arguments.set(("vllm_serve", key), value, read.positions[(key,)])
        add_visible(arguments, other, "vllm_serve")
        if any(name in ("srun", "ssh", "pdsh") for name in names[:at]):
            arguments.set(("vllm_serve", "elsewhere"), True, other.position)
        break
    return arguments


def _long(word: Value) -> Value:
    """The word, or the long flag that a short one of vLLM stands for."""
    short = SHORT.match(word.prefix)
    return Value((LONG[short[1]], *word.after(short.end()).parts), word.position) if short is not None else word


def _launcher_at(start: Start) -> int | None:
    places = [at for at, name in enumerate(start.before) if name in LAUNCHERS]
    return places[-1] if places else None


def _add_accelerate(whole: Arguments, command: Command, findings: Findings) -> None:
    """Add the config of accelerate that a YAML of TRL names, under the YAML's own keys."""
    key = "accelerate_config"
    if whole.values.get(key) is not None:
        below = Arguments()
        _add_file(below, whole.values[key], key, whole.positions[(key,)], command, findings)
        for name, value in below.values.items():
            if name not in whole.values:
                whole.set((name,), value, below.positions[(name,)])


def _add_file(whole: Arguments, name: Any, key: str, position: Position, command: Command, findings: Findings) -> None:
    """Add a YAML file of TRL or accelerate; one of accelerate that TRL ships is known without its file."""
    file = find_file(name, command) if isinstance(name, str) else None
    source = read_config(file, command, findings) if file is not None else None
    shipped = SHIPPED.get(Path(str(name)).stem) if key != "--config" else None
    if source is not None:
        for path, value in source.values.items():
            whole.set((str(path),), value, source.positions.get((path,), position))
    elif shipped is not None:
        for path, value in shipped.items():
            whole.set((path,), value, position)
        if "/" in str(name) or "." in str(name):  # a path; a name alone is one of TRL's
            findings.note(
                "RST-N060",
                Where(*position),
                f"{name} is not here; the config that TRL ships by this name is used",
                f"it is for {_ONE_MACHINE['num_processes']} processes on one machine",
                "plan from the folder that the job is started in",
            )
    else:
        findings.warn(
            "RST-N060",
            Where(*position),
            f"{name if isinstance(name, str) else 'the file'} is not here; defaults are used instead of it",
            f"defaults of {VERSION}",
            "plan from the folder that the job is started in",
        )


def _script_of(start: Start) -> tuple[Path | None, str]:
    """The Python script that is started, and its text where it is here."""
    file = find_file(start.program, start.command) if start.program.endswith(".py") else None
    return file, (read_text(file, Findings(), "a script") if file is not None else None) or ""


def _reads_flags(start: Start) -> bool:
    return PARSES.search(_script_of(start)[1]) is not None


def _without_flags(start: Start, findings: Findings) -> Arguments:
    """The arguments without the flags of a script that reads none; Roost's own settings stay."""
    arguments = start.arguments
    names = [str(key) for key in arguments.values if key != "train"]
    if names:
        what = f"{'has' if len(names) == 1 else 'and others have'} no effect: {start.program} reads no flags"
        why = "it has no parser of arguments, and writes the values of its config itself"
        fix = f"change the values in {start.program}, or have TrlParser read them"
        findings.warn("RST-N068", Where(*arguments.positions[(names[0],)], (names[0],)), what, why, fix)
    return _kept(arguments, {"train"})


def _without_launcher_flags(arguments: Arguments, start: Start, findings: Findings) -> Arguments:
    """The arguments of a script without flags of a launcher, which have an effect before the script only."""
    of_launcher = {name for name in (f"--{flag}" for flag in OF_LAUNCHERS) if name in arguments.values}
    for name in sorted(of_launcher):
        what = f"is an argument of {start.program}, and does not change how many processes are started"
        why, fix = "a launcher reads what stands before the script", f"write it before {start.program}, or remove it"
        findings.warn("RST-N068", Where(*arguments.positions[(name,)], (name,)), what, why, fix)
    return _kept(arguments, set(arguments.values) - of_launcher)


def _kept(arguments: Arguments, keys: set[Any]) -> Arguments:
    """The arguments with these keys only."""
    values = {key: value for key, value in arguments.values.items() if key in keys}
    positions = {path: place for path, place in arguments.positions.items() if path[0] in keys}
    return replace(arguments, values=values, positions=positions)


def _keywords(start: Start) -> dict[str, tuple[Any, Position]]:
    """Keyword arguments of the trainer's config in a script that is here; nothing of it is run."""
    file, text = _script_of(start)
    found: dict[str, tuple[Any, Position]] = {}
    for name, here, keywords in calls_in(text, str(file), CONFIGS):
        found |= keywords
        if name == "AsyncGRPOConfig":
            found |= {"use_vllm": (True, here), "vllm_mode": ("server", here), "async": (True, here)}
    return found


def _starts_rloo(start: Start) -> bool:
    """Return True for `trl rloo`, and for a script with the config class of RLOO alone, or of that name."""
    program = start.program.rpartition("/")[2]
    if program == "trl":
        return [word.known for word in start.command.words[start.at + 1 :][:1]] == ["rloo"]
    text = _script_of(start)[1]
    named = [name for name in CONFIGS if name in text]
    return named == ["RLOOConfig"] if named else "rloo" in program.lower()


# --- job


def read_trl(root: Section, notation: Notation) -> Job:
    """Read the arguments of a TRL job; a YAML may name a config of accelerate."""
    source = root.source
    if source.launch is None and "accelerate_config" in root:
        whole = Arguments(dict(root.values), dict(source.positions))
        _add_accelerate(whole, Command((), (source.file, None, None), {}, None, is_certain=True), root.findings)
        root = Section.root(replace(source, values=whole.values, positions=whole.positions), root.findings)
    return _TRL(root, notation).job()


FRAMEWORK = Framework(read_trl, PLACING, read_arguments, is_trl, with_files, with_server)


@dataclass(slots=True)
class _TRL(Reader):
    def job(self) -> Job:
        machines = self._machines()
        processes = self._processes()
        if processes % machines:
            self.root.findings.error(
                "RST-N056",
                self._where("num_machines"),
                f"is {machines}, which does not divide the {processes} processes",
                f"num_processes counts those of all machines: {processes} % {machines} = {processes % machines}",
                "write a multiple of the machines as num_processes",
            )
        visible = self._visible(self.root, processes) if machines == 1 else None
        learner = visible if visible is not None else list(range(processes))
        server = self._server_devices(learner, machines) if self._mode() == "server" else []
        width = max(1, processes // machines) if machines > 1 else max([*learner, *server]) + 1
        if machines == 1 and self._serves_elsewhere():
            width = max(len(learner), len(server), *(device + 1 for device in learner))
        self._learner(learner)
        self._engines(learner, server)
        self._report_idle_settings()
        last = max([*learner, *server])
        settings: dict[str, object] = {
            "engines_sleep": self._mode() == "colocate" and self._flag("vllm_enable_sleep_mode")
        }
        if self._is_async():
            settings["async_rollouts"] = True
        else:
            check_groups(self.root, processes)
        names = ("max_prompt_length", "max_completion_length")
        prompt, response = (first_number((self.root, self._key(name))) for name in names)
        settings |= {RESPONSE: int(response)} if response and not prompt else {}
        beta = self._beta() or None
        in_loss, in_reward = (None, beta) if is_rloo(self.root) else (beta, None)
        estimator = "rloo" if is_rloo(self.root) else "grpo"
        settings |= algorithm_of(self.notation, estimator, in_loss, in_reward, prompt)
        return self.as_job(max(machines, last // width + 1), width, settings)

    # --- keys

    def _key(self, name: str) -> str:
        """A setting as it is written: a flag, or a key of a file."""
        is_script = self.root.source.launch is not None
        return f"--{name}" if f"--{name}" in self.root.values or (is_script and name not in self.root.values) else name

    def _where(self, name: str) -> Where:
        return self.root.where(self._key(name))

    def _flag(self, name: str) -> bool:
        return self.root.flag(self._key(name), bool(DEFAULTS.get(name, False)))

    def _is_given(self, name: str) -> bool:
        return self.root.values.get(self._key(name)) is not None

    def _number(self, name: str, default: int, maximum: int | None = None) -> int:
        return self.root.whole_number(self._key(name), 1, default, maximum) or 1

    def _beta(self) -> float:
        written = self.root.number(self._key("beta"))
        return (RLOO_BETA if is_rloo(self.root) else 0.0) if written is None else written

    def _is_async(self) -> bool:
        return "async_grpo" in self.program or self.root.values.get("async") is True

    def _mode(self) -> str:
        """Where engines are: colocate, server, or none."""
        if self._is_async():
            return "server"
        if not self._flag("use_vllm"):
            return "none"
        mode = self.root.text(self._key("vllm_mode")) or str(DEFAULTS["vllm_mode"])
        if mode not in ("colocate", "server"):
            self.root.error(
                "RST-N068", self._key("vllm_mode"), f"is {mode}; it is colocate or server", fix="write one of the two"
            )
        return mode

    # --- processes

    def _machines(self) -> int:
        name = next((name for name in ("num_machines", "nnodes", "num_nodes") if self._is_given(name)), "num_machines")
        return self._number(name, 1, MAX_NODES)

    def _processes(self) -> int:
        forced = self._flag("multi_gpu")
        if self._distribution() in ("NO", "FALSE") and not forced:  # YAML reads a plain NO as false
            if "--num_processes" in self.root.values and self._number("num_processes", 1, MAX_ACCELERATORS) > 1:
                why = (
                    f"distributed_type is {self._distribution()} in the config of accelerate, which starts one process"
                )
                self._has_no_effect("num_processes", why, "use another config, or add --multi_gpu")
            return 1
        for name in ("nproc_per_node", "num_gpus"):
            if self._is_given(name):
                if self.root.values.get(self._key(name)) in ("gpu", "auto"):
                    return self._seen(name) * self._machines()
                return self._number(name, 1, MAX_ACCELERATORS) * self._machines()
        if self._is_given("num_processes"):
            count = self._number("num_processes", 1, MAX_ACCELERATORS)
            if forced and count == 1:
                what, why = "cannot be used with one process", "accelerate ends with an error"
                self.root.findings.error("RST-N068", self._where("multi_gpu"), what, why, "remove it")
            return count
        return self._seen("num_processes")

    def _seen(self, name: str) -> int:
        """The GPUs that the launcher counts when it starts; an error where nothing says which it may see."""
        ids = visible_devices(self.root, *GPU_IDS)
        if ids is not None:
            return len(ids)
        written = self.root.values.get(self._key(name)) or "not written"
        self.root.findings.error(
            "RST-N081",
            self._where(name),
            f"is {written}, so that the job has as many processes as the machine has GPUs",
            "the launcher counts the GPUs that it sees when it starts",
            f"write {self.root.spell(self._key(name), 8)}, or give it before: {VISIBLE}=0,1,2,3",
        )
        return self._number("vllm_tensor_parallel_size", 1)  # a number that causes no further finding

    def _distribution(self) -> str:
        return str(self.root.values.get("distributed_type", "")).upper()

    def _has_no_effect(self, name: str, why: str, fix: str) -> None:
        self.root.findings.warn("RST-N068", self._where(name), "has no effect", why, fix)

    def _visible(self, section: Section, needed: int, what: str = "processes") -> list[int] | None:
        return enough_visible(visible_devices(section, *GPU_IDS), needed, section, what)

    # --- server

    def _server(self) -> Section:
        return self.root.below("vllm_serve")

    def _serves_elsewhere(self) -> bool:
        return self._server().values.get("elsewhere") is True

    def _server_sizes(self) -> tuple[ParallelSizes, int]:
        """Sizes of an engine of the server, and engines."""
        tensor, pipeline, data = (
            self._server().whole_number(f"--{kind}_parallel_size", 1, DEFAULTS[f"{kind}_parallel_size"]) or 1
            for kind in ("tensor", "pipeline", "data")
        )
        return ParallelSizes(tensor, pipeline), data

    def _server_devices(self, learner: Sequence[int], machines: int) -> list[int]:
        if "vllm_serve" not in self.root:
            self.root.findings.note(
                "RST-N083",
                self._where("vllm_mode"),
                "the engines are those of a server that this job does not start",
                "they are not planned",
                "start trl vllm-serve in the same script to plan both",
            )
            return []
        sizes, engines = self._server_sizes()
        size = sizes.tensor * sizes.pipeline * engines
        ids = self._visible(self._server(), size, "processes of the server")
        if machines > 1 or self._serves_elsewhere():
            start = max(max(learner) + 1, len(learner))
            return list(range(start, start + size))
        devices = ids if ids is not None else list(range(size))
        shared = sorted(set(devices) & set(learner))
        if shared:
            self.root.findings.error(
                "RST-N082",
                self.root.where("vllm_serve"),
                f"the server and the learner both take {counted(len(shared), 'GPU')}: {','.join(map(str, shared))}",
                f"each takes the first GPUs it sees; {VISIBLE} does not keep them apart",
                f"write {VISIBLE}=... before both commands",
            )
        return devices

    # --- components

    def _sharding(self) -> Sharding:
        kind = "MULTI_GPU" if self._flag("multi_gpu") else self._distribution()
        if kind == "FSDP":
            return Sharding.FULL
        if kind == "DEEPSPEED":
            stage = self.root.below("deepspeed_config").values.get("zero_stage")
            return Sharding.FULL if stage == 3 else Sharding.OPTIMIZER
        file = first_text((self.root, self._key("deepspeed"))) or ""  # a config of DeepSpeed, by its usual name
        if "zero3" in file:
            return Sharding.FULL
        return Sharding.OPTIMIZER if "zero" in file else Sharding.NONE

    def _learner(self, devices: Sequence[int]) -> None:
        path = first_text((self.root, self._key("model_name_or_path")))
        lengths = [
            first_number((self.root, self._key(name))) for name in ("max_prompt_length", "max_completion_length")
        ]
        rank = first_number((self.root, self._key("lora_r"))) or DEFAULT_ADAPTER_RANK
        has_adapter = self._flag("use_peft")
        deepspeed = self.root.below("deepspeed_config").values.get("offload_optimizer_device")
        model = ModelUse(
            path,
            read_model_config(path),
            sharding=self._sharding(),
            strategy=str(self.root.values.get("distributed_type") or "accelerate").lower(),
            sequence=int(sum(length or 0 for length in lengths)) if all(lengths) else None,
            offloads=("optimizer",) if deepspeed == "cpu" else (),
            lora_rank=int(rank) if has_adapter else None,
        )
        name = "num_processes"
        requested, where = DeviceList(devices, 1), self._where(name)
        self.add("actor", self._key(name), where, requested, Role.LEARNER, None, model)
        if self._beta() and not has_adapter:
            frozen = ModelUse(path, model.config, sharding=model.sharding, strategy=model.strategy)
            self.add("reference", self._key("beta"), self._where("beta"), requested, Role.SCORER, None, frozen)

    def _engines(self, learner: Sequence[int], server: Sequence[int]) -> None:
        mode = self._mode()
        section, key, where = (
            self.root,
            self._key("vllm_gpu_memory_utilization"),
            self._where("vllm_tensor_parallel_size"),
        )
        default = "vllm_gpu_memory_utilization"
        devices: Sequence[int] = learner
        if mode == "colocate":
            size = self._number("vllm_tensor_parallel_size", DEFAULTS["vllm_tensor_parallel_size"])
            sizes = ParallelSizes(tensor=size)
            check_divides(sizes, len(learner), where, self.root, f"vllm_tensor_parallel_size {size}")
            if len(learner) % size:
                return
        elif server:
            sizes, devices = self._server_sizes()[0], server
            section, key, where = self._server(), "--gpu_memory_utilization", self.root.where("vllm_serve")
            default = "gpu_memory_utilization"
        else:
            return
        fraction = fraction_of_device(section, key) or float(DEFAULTS[default])
        path = first_text((self._server(), "--model"), (self.root, self._key("model_name_or_path")))
        model = ModelUse(path, read_model_config(path), memory_fraction=fraction, strategy="vllm")
        written = "vllm_serve" if mode == "server" else self._key("vllm_mode")
        requested = DeviceList(devices, sizes.tensor * sizes.pipeline)
        self.add("rollout", written, where, requested, Role.ENGINE, sizes, model)

    def _report_idle_settings(self) -> None:
        """Warn about settings of engines that have no effect."""
        mode = self._mode()
        old = "it is of TRL before 2025-04, whose engine had a GPU of its own"
        reasons = {"vllm_device": (old, "remove it; for GPUs of their own, write vllm_mode: server")}
        is_unread = "--config" in self.root.values and not any(key in self.root.values for key in MAIN_KEYS)
        if mode == "none" and not is_unread:  # use_vllm may be in a file that is not here
            why = "use_vllm is false by default; the learner generates by itself"
            reasons |= dict.fromkeys(("vllm_mode", "vllm_tensor_parallel_size"), (why, "add use_vllm"))
        elif mode == "server":
            why = "it is for engines in the learner's processes; a server has its own"
            reasons["vllm_tensor_parallel_size"] = (why, "give --tensor_parallel_size to trl vllm-serve")
        for name, (why, fix) in reasons.items():
            if self._is_given(name):
                self._has_no_effect(name, why, fix)
        if mode != "server" and "vllm_serve" in self.root:
            self.root.findings.warn(
                "RST-N068",
                self.root.where("vllm_serve"),
                "the server that the script starts is not used",
                "vllm_mode is colocate by default (server before 2025-12)"
                if mode == "colocate"
                else "use_vllm is not set",
                "add --use_vllm --vllm_mode server",
            )
