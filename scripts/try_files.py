"""Run real config files for two steps on this machine's CPU, and write a table of what happened.

python scripts/try_files.py FILE... [--out FOLDER] [--relative-to FOLDER]

Each file is changed by overrides alone: paths of models and data, numbers of devices, sizes, and the engine. The model
is tiny and random; the data are a few rows in the file's own format, with the columns that the file names. A server
stands in for judges, search servers and code judges.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from roost.config.compose import load
from roost.config.findings import Findings
from roost.config.interpolation import parse_devices
from roost.config.notations.notation import read_job, recognise
from roost.config.ranks import parse_placement, spell_ranks
from roost.config.source import Section

STEPS, ROWS, GROUP = 2, 24, 2
PROMPT, RESPONSE, EPISODE = 192, 16, 4096  # tokens; a token is a byte here
TURNS, TURN_TOKENS = 2, 8
LIMIT_S = 900
CALL = {"name": "python_code_with_standard_io", "arguments": {"code": "6 * 7", "input": ""}}
CALLS = tuple(
    word
    for number in range(4)  # several of each, so that some are generated
    for word in (f"<search>sun {number}</search>", f"<tool_call>{' ' * number}{json.dumps(CALL)}</tool_call>")
)
WORDS = ("\n\n", "\\boxed{1}", "\\boxed{2}", "<answer>", "</answer>", "Right", "Down", "yes", ", ", *CALLS)

NOT_FOLLOWED, USED = "not followed", ("read for placing", "followed")  # effects of keys

RLINF_SIZES: Mapping[str, Any] = {
    "cluster.num_nodes": 1,
    "runner.max_steps": STEPS,
    "runner.seq_length": PROMPT + RESPONSE,
    "data.max_prompt_length": PROMPT,
    "data.rollout_batch_size": 2,
    "data.data_size": ROWS,
    "algorithm.group_size": GROUP,
    "algorithm.n_minibatches": 1,
    "algorithm.sampling_params.max_new_tokens": RESPONSE,
    "algorithm.down_sampling.down_sampling_config.down_sample_to_n": GROUP,
    "algorithm.down_sampling.down_sampling_config.min_zero_reward_trace_num": GROUP // 2,
    "algorithm.down_sampling.down_sampling_config.min_non_zero_reward_trace_num": GROUP // 2,
    "actor.global_batch_size": 2 * GROUP,
    "actor.micro_batch_size": 1,
    "actor.model.seq_length": PROMPT + RESPONSE,
    "rollout.rollout_backend": "huggingface",
}
ROLL_SIZES: Mapping[str, Any] = {
    "num_nodes": 1,
    "max_steps": STEPS,
    "rollout_batch_size": 2,
    "val_batch_size": 2,
    "num_return_sequences_in_group": GROUP,
    "prompt_length": PROMPT,
    "response_length": RESPONSE,
    "max_actions_per_traj": TURNS,
    "max_tokens_per_step": TURN_TOKENS,
    "train_env_manager.num_env_groups": 1,
    "train_env_manager.group_size": GROUP,
    "train_env_manager.max_env_num_per_worker": GROUP,
    "val_env_manager.max_env_num_per_worker": 2,
}
MODEL_KEYS = ("model_path", "tokenizer_model", "model_name_or_path", "hf_model_path")
MODEL_ROOTS = ("pretrain", "reward_pretrain", "student_pretrain", "teacher_pretrain")
ENGINES = ("vllm", "sglang")
SUPERVISED = ("sft_train", "student")  # learners of ROLL's that take given answers
ONE = (
    "parallel_size",
    "ulysses_size",
    "num_gpus_per_worker",
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One file: whether it ran, why not, and the keys that had no effect."""

    file: str
    notation: str
    ran: bool
    reason: str = ""
    seconds: float = 0.0
    reward: str = ""
    ignored: tuple[tuple[str, str, str], ...] = ()  # key, effect, reason
    overrides: tuple[str, ...] = field(default=())


def leaves(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Values of a config that are not mappings, with their paths."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from leaves(value, (*path, str(key)))
    else:
        yield path, values


def compact(devices: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """Renumber devices to as few as possible, with the same components sharing them.

    >>> compact({"train": range(16), "infer": range(12), "judge": range(12, 16)})
    {'train': [0, 1], 'infer': [0], 'judge': [1]}
    """
    users: dict[int, tuple[str, ...]] = {}
    for device in sorted({each for used in devices.values() for each in used}):
        users[device] = tuple(name for name, used in devices.items() if device in used)
    kinds = list(dict.fromkeys(users.values()))
    return {name: [number for number, kind in enumerate(kinds) if name in kind] for name in devices}


class Tiny:
    """Tiny models and data files, written once to a folder; `port` is that of the stand-in server."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port

    def model(self, name: str = "model") -> str:
        """Folder of the model of this name, which has its own random weights."""
        from roost.engines.tiny_model import write_tiny_model

        folder, seed = self.folder / name, int(name != "model")
        sizes = {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 2 * EPISODE}
        if not (folder / "config.json").exists():
            write_tiny_model(folder, seed=seed, **sizes)
            _teach_words(folder)
        return str(folder)

    def rows(self, name: str, rows: list[dict[str, Any]], suffix: str) -> str:
        """Write a file in the format of its suffix; return its path."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"{name}{suffix}"
        if suffix == ".parquet":
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
        elif suffix == ".json":
            file.write_text(json.dumps(rows))
        else:
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(file)


def _teach_words(folder: Path) -> None:
    """Add tokens for whole answers and make them likely, so that rewards differ and there is something to learn."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(list(WORDS))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        rows = model.lm_head.weight
        first = tokenizer.convert_tokens_to_ids(WORDS[0])
        rows[:first] *= 0.02
        rows[first + len(WORDS) :] *= 0.02
        rows[first : first + len(WORDS)] *= 7.0 / rows[first : first + len(WORDS)].norm(dim=1).mean()
        calls = rows[first + len(WORDS) - len(CALLS) : first + len(WORDS)]
        calls[:] = 1.5 * calls[0]  # equally likely, so that each kind of call is generated
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def rlinf_overrides(values: Mapping[str, Any], tiny: Tiny) -> dict[str, Any]:
    """Paths and sizes of a file in RLinf's notation."""
    found = _existing(values, RLINF_SIZES)
    placed = {
        name: [rank for part in parse_placement(str(where)) for rank in part.resources or range(1)]
        for name, where in values["cluster"]["component_placement"].items()
        if str(where).strip() != "all"
    }
    compacted = compact(placed)
    count = 1 + max((rank for used in compacted.values() for rank in used), default=0)
    found |= {f"cluster.component_placement.{name}": spell_ranks(used) for name, used in compacted.items()}
    found["+cluster.num_gpus_per_node"] = count
    servers = {
        "search": {"server_addr": f"127.0.0.1:{tiny.port}"},
        "codejudge": {"host_addr": "127.0.0.1", "host_port": tiny.port},
    }
    for tool in values.get("tools") or {}:
        found |= {f"tools.{tool}.{key}": value for key, value in servers.get(tool, {}).items()}
        if tool in servers:  # prompts show the tools, and responses their answers
            found |= dict.fromkeys(("runner.seq_length", "actor.model.seq_length"), 2 * EPISODE)
            found["data.max_prompt_length"] = EPISODE
        if tool == "codejudge":  # the tiny model seldom ends a turn by itself
            found["+algorithm.sampling_params.stop"] = ["</tool_call>"]
    data = values.get("data", {})
    is_chat = bool(data.get("apply_chat_template"))
    answers = ("yes", "Right") if values.get("reward", {}).get("reward_type") == "searchr1" else WORDS[1:3]
    for key in ("train_data_paths", "val_data_paths", "eval_data_paths"):
        paths = data.get(key)
        if paths:
            first = paths if isinstance(paths, str) else paths[0]
            count = ROWS if key.startswith("train") else 4
            rows = [_rlinf_row(data, number, is_chat, answers[number % 2]) for number in range(count)]
            name = f"{key}-{is_chat}-{data.get('prompt_key')}-{data.get('answer_key')}-{answers[0].strip(chr(92))}"
            file = tiny.rows(name, rows, Path(first).suffix or ".jsonl")
            found[f"data.{key}"] = file if isinstance(paths, str) else [file]
    return found


def _rlinf_row(data: Mapping[str, Any], number: int, is_chat: bool, answer: str) -> dict[str, Any]:
    question = f"What is {number} + 1? Box it."
    prompt: Any = [{"role": "user", "content": question}] if is_chat else f"<|user|>{question}<|end|><|assistant|>"
    return {str(data.get("prompt_key")): prompt, str(data.get("answer_key")): [answer]}


def roll_overrides(values: Mapping[str, Any], tiny: Tiny) -> dict[str, Any]:
    """Paths and sizes of a file in ROLL's notation."""
    found = _existing(values, ROLL_SIZES)
    is_agentic = "train_env_manager" in values
    if "sequence_length" in values:
        found["sequence_length"] = EPISODE if is_agentic else PROMPT + RESPONSE
    roles = {path[:-1]: value for path, value in leaves(values) if path[-1] == "device_mapping" and value is not None}
    devices = {".".join(role): parse_devices(written) for role, written in roles.items()}
    compacted = compact(devices)
    found |= {f"{role}.device_mapping": used for role, used in compacted.items()}
    found["++num_gpus_per_node"] = 1 + max(device for used in compacted.values() for device in used)
    supervised = next((role for role in SUPERVISED if role in values), None)
    for path, value in leaves(values):
        if path[-1] == "world_size" and value not in (None, 1) and ".".join(path[:-1]) not in devices:
            found[".".join(path)] = 1
        if path[-1] == "gradient_accumulation_steps":
            found[".".join(path)] = 4 if supervised else 1
        if path[-1] == "strategy_name" and value in ENGINES:
            found[".".join(path)] = "hf_infer"
    if is_agentic:
        partition = values["val_env_manager"].get("num_groups_partition") if "val_env_manager" in values else None
        tags = len(partition) if partition else 1
        found |= {"val_env_manager.num_env_groups": tags, "val_batch_size": tags} if "val_env_manager" in values else {}
        found |= {"val_env_manager.num_groups_partition": [1] * tags} if partition else {}
        own = values["train_env_manager"].get("num_groups_partition")
        if own:
            found |= {"train_env_manager.num_groups_partition": [1] * len(own)}
            found |= {"train_env_manager.num_env_groups": len(own), "rollout_batch_size": GROUP * len(own)}
        else:
            found["rollout_batch_size"] = GROUP
    arguments = values.get("actor_train", {}).get("data_args", {})
    if arguments.get("file_name"):
        shares = [share for share in (arguments.get("domain_interleave_probs") or {}).values() if share]
        found["rollout_batch_size"] = max(2, math.ceil(round(1 / min(shares), 6))) if shares else 2
        found |= _roll_files(values, "actor_train", tiny)
    for role in (supervised, "validation"):
        if role and values.get(role, {}).get("data_args", {}).get("file_name"):
            found |= _supervised_file(values, role, tiny) if supervised else _roll_files(values, role, tiny)
    return found | ({"+max_steps": STEPS} if supervised and "max_steps" not in values else {})


def _supervised_file(values: Mapping[str, Any], role: str, tiny: Tiny) -> dict[str, Any]:
    """Questions and answers; those of the split test are not learnt."""
    question = values.get("question_key" if "student" in values else "prompt_key") or "instruction"
    answer = values.get("answer_key" if "student" in values else "response_key") or "output"
    others = {str(values[key]): "" for key in ("query_key", "system_key") if values.get(key)}
    rows = [
        {**others, question: f"What is {number} + 1? Box it.", answer: f"\\boxed{{{number + 1}}}"}
        | {"split": "test" if number % 4 == 3 else "train"}
        for number in range(ROWS)
    ]
    written = values[role]["data_args"]["file_name"]
    file = tiny.rows(f"{role}-{question}-{answer}", rows, ".json")
    return {f"{role}.data_args.file_name": file if isinstance(written, str) else [file]}


def _roll_files(values: Mapping[str, Any], role: str, tiny: Tiny) -> dict[str, Any]:
    """One file with rows of all tags, in place of all that the role names."""
    rewards = values.get("rewards", {})
    arguments = values[role]["data_args"]
    column = values["actor_train"]["data_args"].get("messages") or values["actor_train"]["data_args"].get("prompt")
    tags = [tag for reward in rewards.values() for tag in reward.get("tag_included") or ()]
    rows = [
        _roll_row(str(tag), number, str(column))
        for tag in tags
        for number in range(ROWS if role != "validation" else 1)
    ]
    written = arguments["file_name"]
    first = written if isinstance(written, str) else written[0]
    file = tiny.rows(f"{role}-{'-'.join(map(str, tags))[:80]}", rows, Path(first).suffix or ".jsonl")
    return {f"{role}.data_args.file_name": file if isinstance(written, str) else [file]}


def _roll_row(tag: str, number: int, column: str) -> dict[str, Any]:
    question = f"What is {number} + 1? Box it."
    messages = json.dumps([{"role": "user", "content": question}])
    row = {"id": str(number), "source": "made", "difficulty": "3", "prompt": question, "messages": messages}
    row |= {
        "ground_truth": str(1 + number % 2),
        "case_type": "",
        "test_case_function": "",
        "test_cases": "",
        "tag": tag,
    }
    if "code" in tag.lower():
        cases = json.dumps([{"assert_code": f"assert add({number}, 1) == {number + 1}"}])
        row |= {"case_type": "assert", "test_cases": cases, "ground_truth": ""}
    if tag == "ifeval":
        row["ground_truth"] = json.dumps({"func_name": "validate_no_commas"})
    if tag == "crossthinkqa":
        row["ground_truth"] = "R"
    return {**row, column: row.get(column, messages)}


def _existing(values: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    existing = {".".join(path) for path, _ in leaves(values)}
    return {key: value for key, value in wanted.items() if key in existing}


def overrides_of(file: Path, tiny: Tiny) -> tuple[str, list[str]]:
    """The notation of a file, and the overrides that make it run here."""
    findings = Findings()
    source = load(file, [], findings)
    notation = None if source is None else recognise(Section.root(source, findings))
    if source is None or notation is None:
        return "", []
    values = source.values
    found = (rlinf_overrides if notation.value == "rlinf" else roll_overrides)(values, tiny)
    for path, value in leaves(values):
        is_model = path[-1] in MODEL_KEYS or path in ((name,) for name in MODEL_ROOTS)
        if is_model and value is not None:
            found[".".join(path)] = tiny.model("teacher" if path[0].startswith("teacher") else "model")
        if path[-1].endswith(ONE) and value not in (None, 1):
            found[".".join(path)] = 1
    return notation.value, [f"{key}={_spelt(value)}" for key, value in found.items()]


def _spelt(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(_spelt(each) for each in value)}]"
    return f"'{value}'" if isinstance(value, str) and any(letter in value for letter in "/,-<") else str(value)


def ignored_keys(file: Path, overrides: list[str]) -> tuple[tuple[str, str, str], ...]:
    """Keys that training ignores: path, effect and reason of each."""
    findings = Findings()
    source = load(file, overrides, findings)
    job = None if source is None else read_job(source, findings, trains=True)
    uses = () if job is None else job.keys
    return tuple((use.where.key_path, use.known.effect.value, use.known.reason) for use in uses if use.is_set)


def try_file(file: Path, name: str, folder: Path, port: int) -> Outcome:
    """Check a file and train it for two steps, with the server at `port` in place of those that the file names."""
    tiny = Tiny(folder / "inputs", port)
    notation, overrides = overrides_of(file, tiny)
    facts: dict[str, Any] = {"overrides": tuple(overrides)}
    if not notation:
        return Outcome(name, notation, False, "not a job in a notation that Roost reads", **facts)
    facts["ignored"] = ignored_keys(file, overrides)
    run = folder / "runs" / "tried"
    subprocess.run(["rm", "-rf", str(run)], check=True)
    is_supervised = any(override.startswith(tuple(f"{role}." for role in SUPERVISED)) for override in overrides)
    command = [
        sys.executable,
        "-m",
        "roost",
        "sft" if is_supervised else "train",
        str(file),
        *overrides,
        "--runs",
        str(run.parent),
        "--name",
        "tried",
    ]
    began = time.monotonic()
    log = folder / "logs" / f"{name.replace('/', '_')}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, cwd=folder)
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(60)
            code = -1
    seconds = time.monotonic() - began
    lines = log.read_text().splitlines()
    steps = [line for line in lines if line.startswith("step ") and "/" in line.split()[1]]
    if code == 0 and len(steps) == STEPS:
        return Outcome(name, notation, True, "", seconds, steps[-1], **facts)
    errors = [line for line in lines if line.startswith("error ")] or lines[-3:]
    return Outcome(
        name, notation, False, f"exit {code} after {len(steps)} steps: {' / '.join(errors)}", seconds, **facts
    )


def table(outcomes: Sequence[Mapping[str, Any]]) -> str:
    """Outcomes as a Markdown table: a row for each file, with the keys that change training and are not followed."""
    lines = ["| file | two steps | keys that are not followed | other keys without effect |", "|---|---|---|---|"]
    reasons: dict[str, str] = {}
    for one in sorted(outcomes, key=lambda each: (not each["ran"], each["file"])):
        unfollowed = [(key, why) for key, effect, why in one["ignored"] if effect == NOT_FOLLOWED]
        others = sum(effect not in (NOT_FOLLOWED, *USED) for _, effect, _ in one["ignored"])
        reasons |= dict(unfollowed)
        result = "yes" if one["ran"] else f"no: {one['reason']}"
        lines.append(f"| `{one['file']}` | {result} | {', '.join(f'`{key}`' for key, _ in unfollowed)} | {others} |")
    lines += ["", "| key that is not followed | why |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{key}` | {why} |" for key, why in sorted(reasons.items()))])


class StandIn(BaseHTTPRequestHandler):
    """A judge that always gives 7 points, a search server with one document, and a code judge that prints 42."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = json.dumps(self._answer()).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _answer(self) -> dict[str, Any]:
        if self.path == "/retrieve":
            return {"result": [[{"contents": "The sun is a star.", "url": "sun"}]]}
        if self.path == "/run/long-batch":
            return {"results": [{"success": True, "run_success": True, "stdout": "42", "stderr": "", "cost": 0.1}]}
        reply = "<evaluation><score>7</score></evaluation>"
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": reply}}
        return {"id": "1", "object": "chat.completion", "choices": [choice]}

    def log_message(self, format: str, *args: Any) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/real-files"))
    parser.add_argument("--relative-to", type=Path, default=Path())
    arguments = parser.parse_args()
    folder = arguments.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ |= {"LLMASJUDGE_API_URL": f"http://127.0.0.1:{server.server_port}/v1", "LLMASJUDGE_API_KEY": "none"}
    results = folder / "results.json"
    for file in arguments.files:
        name = os.path.relpath(file.resolve(), arguments.relative_to.resolve())
        outcome = try_file(file.resolve(), name, folder, server.server_port)
        print(f"{'ran ' if outcome.ran else 'FAIL'} {outcome.seconds:4.0f} s  {name}  {outcome.reason}", flush=True)
        kept = json.loads(results.read_text()) if results.exists() else {}
        results.write_text(json.dumps(kept | {name: asdict(outcome)}, indent=1))
    if results.exists():
        (folder / "table.md").write_text(table(list(json.loads(results.read_text()).values())) + "\n")


if __name__ == "__main__":
    main()
