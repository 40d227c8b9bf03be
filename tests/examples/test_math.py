"""The word problems: the committed files are what the generator writes, and data keys alone make the jobs train."""

import importlib
import json
import runpy
from pathlib import Path

import pytest

pytest.importorskip("torch")

import pyarrow.parquet as pq
from transformers import AutoTokenizer

from roost.config.compose import load
from roost.config.findings import Findings
from roost.config.notations.notation import read_job
from roost.engines.protocol import Finish
from roost.rollout.episode import Split, Transcript
from roost.rollout.rewards.reward import Answer
from roost.trainer.sft import Conversations
from roost.trainer.targets import load_scenario
from tests.rollout.script import completion, ran

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/math"
NOTATIONS = ("rlinf", "roll", "loop")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("model"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))  # where the script finds the other
        patch.setattr("sys.argv", ["make_model.py", folder])
        runpy.run_path(str(EXAMPLE / "make_model.py"), run_name="__main__")
    return folder


def job(name):
    findings = Findings()
    read = read_job(load(EXAMPLE / f"{name}.yaml", (), findings), findings, trains=True)
    assert not findings.has_errors and not findings.warnings, findings.found
    return read


def test_the_committed_files_are_what_the_generator_writes():
    made = runpy.run_path(str(EXAMPLE / "make_data.py"))["data_sets"]()
    for name, rows in made.items():
        assert [json.loads(line) for line in (EXAMPLE / f"data/{name}.jsonl").read_text().splitlines()] == rows
        assert pq.read_table(EXAMPLE / f"data/{name}.parquet").to_pylist() == rows
    asked = {name: {row["messages"][0]["content"] for row in rows} for name, rows in made.items()}
    assert not asked["held_out"] & asked["train"] and asked["sft"] <= asked["train"]


@pytest.mark.parametrize("name", NOTATIONS)
def test_answers_are_scored_by_the_rule_of_the_notation(name, model, monkeypatch):
    monkeypatch.chdir(ROOT)
    settings = job(name).training
    tokenizer = AutoTokenizer.from_pretrained(model)
    scenario = load_scenario(settings.task, model)
    assert (scenario.size(Split.TRAIN), scenario.size(Split.EVALUATION)) == (288, 72)
    ((_, keys),) = settings.rewards.items()
    own = {key: value for key, value in keys.items() if key in ("scale", "min_val", "max_val")}
    module, _, kind = keys["_target_"].rpartition(".")
    reward = getattr(importlib.import_module(module), kind)(**own)
    task = scenario.task(Split.TRAIN, 0)
    right = int(task.data["ground_truth"])

    async def scored(number):
        async def sample(token_ids, turn, max_tokens):
            assert tokenizer.unk_token_id not in token_ids
            return completion(tokenizer(f"Answer:\n\n\\boxed{{{number}}}<end>").input_ids, finish=Finish.STOP)

        reported = await scenario.run_episode(task, Transcript(sample))
        return await reward.score(Answer(task, reported.shown))

    async def both():
        try:
            return [await scored(number) for number in (right, (right + 1) % 11)]
        finally:
            await reward.close()

    assert ran(both()) == [1, 0]


def test_the_warm_start_learns_the_form_of_answers(model, monkeypatch):
    monkeypatch.chdir(ROOT)
    tokenizer = AutoTokenizer.from_pretrained(model)
    data = Conversations(load_scenario(job("sft").training.task, model), tokenizer)
    samples, left_out = data.samples(Split.TRAIN, range(data.size(Split.TRAIN)))
    assert len(samples) == 72 and not left_out
    assert all(len(sample) == 16 and sample.num_generated == 4 for sample in samples), (
        "a box, a number, its end, the end"
    )


def test_a_vocabulary_that_a_tensor_size_divides(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    monkeypatch.syspath_prepend(str(EXAMPLE))
    runpy.run_path(str(EXAMPLE / "make_model.py"))["write_model"](str(folder), 36)
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 36
    assert len(AutoTokenizer.from_pretrained(folder)) == 35
