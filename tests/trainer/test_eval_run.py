"""`roost eval`: metrics of groups, and a real engine that answers without a learner."""

import json
import math
from itertools import combinations

import pytest
import typer

pytest.importorskip("torch")

from datasets import Dataset
from transformers import AutoTokenizer

from roost.cli.eval import _job, eval_command
from roost.config.findings import ConfigError
from roost.rollout.arithmetic import write_arithmetic_model
from roost.rollout.episode import Episode, EpisodeReward, Group, Split, Task
from roost.trainer.eval_run import _loaded, by_tag, engine_masks
from roost.trainer.evaluation import Evaluation, at_k, pass_at
from roost.trainer.setup import load_scenario
from tests.cli.terminal import run

TEMPLATE = "{% for one in messages %}<{{ one['role'] }}>{{ one['content'] }}{% endfor %}<assistant>"


def group(*answers, tag="", right="7"):
    """Samples of a task that say these texts; the right one has a reward of 1."""
    episodes = tuple(Episode((), EpisodeReward(float(text.endswith(right)), text), 0.0) for text in answers)
    return Group(0, Task("3+4", tag=tag), 0, episodes)


@pytest.mark.parametrize("correct", range(6))
@pytest.mark.parametrize("k", [1, 2, 5])
def test_pass_at_k_is_the_share_of_draws_with_a_correct_sample(k, correct):
    draws = list(combinations([1] * correct + [0] * (5 - correct), k))
    assert pass_at(k, 5, correct) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_figures_of_groups():
    found = at_k([group("7", "so 7", "8", "9"), group("8", "8", "7", "9"), group()])
    assert found["tasks"] == 2 and found["samples"] == 8, "a group without a finished sample does not count"
    assert found["avg@4"] == pytest.approx(3 / 8) == found["pass@1"]
    assert found["pass@2"] == pytest.approx((5 / 6 + 1 / 2) / 2) and found["pass@4"] == 1
    assert found["majority@4"] == 0.5, "7 has two votes in the first group, 8 in the second"


def test_answers_are_compared_by_their_value_not_their_text():
    assert at_k([group("= 8", "it is 8", "#### 7", "7.0 = 7", "\\boxed{7} = 7")])["majority@5"] == 1


def test_tags_and_named_sets_have_their_own_figures():
    groups = (group("7", tag="easy"), group("8", tag="hard"))
    assert {tag: metrics["pass@1"] for tag, metrics in by_tag(groups).items()} == {"": 0.5, "easy": 1, "hard": 0}
    metrics = Evaluation(0, groups, ("a", "b")).metrics
    assert (metrics["a/pass@1"], metrics["b/pass@1"], metrics["reward/mean"]) == (1, 0, 0.5)
    assert math.isnan(at_k([])["reward/mean"])


def test_a_job_without_rewards_is_refused_before_an_engine_starts(tmp_path, capsys):
    job = {
        "cluster": {"num_nodes": 1, "num_gpus_per_node": 1, "component_placement": {"actor": 0}},
        "train": {"data": {"path": "rows.jsonl"}, "objective": "sft"},
    }
    (tmp_path / "warm.yaml").write_text(json.dumps(job))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(typer.Exit):
        eval_command(str(tmp_path), data=[str(tmp_path / "warm.yaml")], samples=1, out=tmp_path / "out")
    assert "is for roost sft and has no rewards" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "data", "options", "hint", "described"),
    [
        pytest.param("./nowhere", None, {}, "MODEL", "./nowhere does not exist", id="missing path"),
        pytest.param("runs/mth", None, {}, "MODEL", "runs/mth is not a local folder", id="missing run"),
        pytest.param("made", None, {}, "MODEL", "made is not the folder of a run with a policy", id="no run"),
        pytest.param("begun", None, {}, "MODEL", "begun is a run without a policy", id="run without a policy"),
        pytest.param("empty", "rows.jsonl", {}, "MODEL", "empty has no config.json", id="no model"),
        pytest.param("team/no", "rows.jsonl", {"answer": "sum"}, "MODEL", "is not a folder here", id="not on the hub"),
        pytest.param("made", "row.jsonl", {}, "--data", "there is no row.jsonl", id="missing data"),
        pytest.param("made", "rows.jsonl", {}, "--answer", "no column answer; .* prompt, sum", id="no answer"),
        pytest.param("made", "rows.jsonl", {"prompt": "question"}, "--prompt", "no column question", id="no prompt"),
        pytest.param("made", ["rows.jsonl", "b/rows.jsonl"], {}, "--data", "2 sets are named rows", id="same names"),
        pytest.param("made", "job.yaml", {"reward": "exact"}, "--reward", "is for data files", id="reward of a job"),
        pytest.param("made", "rows.jsonl", {"reward": "foo"}, "--reward", "foo is not a reward; use math", id="reward"),
        pytest.param(
            "made", ["job.yaml", "b.yml"], {"reward": "exact"}, "--reward", "b.yml are jobs with their own", id="jobs"
        ),
        pytest.param("made", "job.yaml", {"chat_template": False}, "--chat-template", "for data files", id="template"),
    ],
)
def test_mistakes_are_named_before_an_engine_starts(model, data, options, hint, described, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    for folder in ("made", "empty", "begun"):
        (tmp_path / folder).mkdir()
    (tmp_path / "begun" / "config.yaml").touch()
    (tmp_path / "made" / "config.json").write_text("{}")
    (tmp_path / "job.yaml").touch()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "sum": 2}\n')
    with pytest.raises(typer.BadParameter, match=described) as caught:
        eval_command(model, data=[data] if isinstance(data, str) else data, samples=1, **options)
    assert caught.value.param_hint == hint
    assert not (tmp_path / "eval").exists()


def test_an_engine_that_is_not_known_is_refused(tmp_path):
    done = run("eval", tmp_path, "--engine", "vlm", width=200)
    assert done.exit_code == 2 and "'vlm' is not one of" in done.stderr


def test_engines_get_accelerators_of_the_outer_mask(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nfor i in 0 1 2 3 4 5; do echo $i, GPU-$i, NVIDIA H100, 81559; done\n")
    tool.chmod(0o755)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    environ = {"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "4,5"}
    assert [mask["CUDA_VISIBLE_DEVICES"] for mask in engine_masks(2, environ)] == ["4", "5"]
    with pytest.raises(ValueError, match="--engines is 3, and 2 accelerators can be seen here; write --engines 2"):
        engine_masks(3, environ)
    assert engine_masks(2, {**environ, "ROOST_FAKE_ACCELERATORS": "2"}) is None


@pytest.mark.parametrize(
    ("template", "options", "sent"),
    [
        pytest.param(TEMPLATE, {}, ("<user>1+1=<assistant>", True), id="chat model"),
        pytest.param(TEMPLATE, {"chat_template": False}, ("1+1=", False), id="as it is"),
        pytest.param(None, {}, ("1+1=", False), id="base model"),
    ],
)
def test_text_of_data_files_is_sent_as_the_model_takes_it(template, options, sent, tmp_path):
    model, rows = write_arithmetic_model(tmp_path / "model", hidden_size=32, intermediate_size=32), tmp_path / "a.jsonl"
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(model)
    rows.write_text('{"prompt": "1+1=", "answer": 2}\n')
    described = []
    job = _job(str(rows), str(model), "exact", options, ())
    _, scenario, _ = _loaded(job, job.training, described.append)
    data = scenario.task(Split.EVALUATION, 0).data
    assert (data["prompt_text"], data["is_rendered"]) == sent
    assert ("in the model's chat template" in described[0]) is sent[1]


def test_a_column_may_be_missing_in_the_first_row(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1="}\n{"prompt": "1+2=", "answer": 3}\n')
    assert _job(str(rows), "tiny", "exact", {}, ()).training is not None


def test_answers_of_a_data_set_are_checked_once_it_is_loaded(tmp_path):
    model = write_arithmetic_model(tmp_path / "model", hidden_size=32, intermediate_size=32)
    Dataset.from_list([{"prompt": "1+1=", "sum": 2}]).save_to_disk(tmp_path / "saved")
    job = _job(str(tmp_path / "saved"), str(model), "exact", {}, ())
    with pytest.raises(ConfigError, match=r"RST-T090.* row 0 of .*saved has no answer"):
        load_scenario(job, job.training)
    job = _job(str(tmp_path / "saved"), str(model), "exact", {"answer": "sum"}, ())
    load_scenario(job, job.training)


def test_a_model_is_evaluated_by_an_engine_alone(tmp_path, capsys):
    model = write_arithmetic_model(tmp_path / "model", hidden_size=32, intermediate_size=32)
    job = {
        "cluster": {"num_nodes": 1, "num_gpus_per_node": 1, "component_placement": {"actor,rollout": 0}},
        "train": {"task": {"_target_": "roost.rollout.arithmetic.Arithmetic", "largest": 2}, "max_new_tokens": 3},
    }
    (tmp_path / "sums.yaml").write_text(json.dumps(job))
    rows = [{"question": f"{n}+1=", "sum": n + 1, "tag": "even" if n % 2 else "odd"} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    eval_command(
        str(model), [f"sums={tmp_path / 'sums.yaml'}", str(tmp_path / "rows.jsonl")],
        samples=4, reward="exact", prompt="question", answer="sum", temperature=None, max_new_tokens=3,
        limit=5, engines=1, out=tmp_path / "out", as_json=True,
    )  # fmt: skip
    tables = json.loads(capsys.readouterr().out)
    metrics = tables["sums"][""]
    assert tables["rows"][""]["tasks"] == 5 and tables["rows"][""]["samples"] == 20, "a data file, named by its stem"
    assert metrics["tasks"] == 5 and metrics["samples"] == 20 and 0 <= metrics["pass@4"] <= 1
    records = [json.loads(line) for line in (tmp_path / "out" / "completions.jsonl").read_text().splitlines()]
    asked = {one["task"] for one in records if one["set"] == "rows"}
    assert len(records) == 40 and len(asked) == 5 and asked <= {row["question"] for row in rows}
    records = [one for one in records if one["set"] == "sums"]
    assert len({one["task"] for one in records}) == 5
    assert len({one["completion"] for one in records}) > 5, "several samples are drawn, not the greedy one again"
    assert "pass@4" in (tmp_path / "out" / "report.html").read_text()
