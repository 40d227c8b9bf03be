"""The number of concurrent episodes follows the load of a real engine."""

import pytest

import roost.rollout.concurrency
from tests.trainer.live.jobs import config, trained
from tests.trainer.pathologies import HERE


@pytest.mark.long
def test_episodes_beyond_what_an_engine_runs_are_held_back(model, tmp_path, monkeypatch):
    monkeypatch.setattr(roost.rollout.concurrency, "POLL_S", 0.02)
    values = config(
        model,
        {"actor": "0", "rollout": "1"},
        {"_target_": f"{HERE}.PaysForLength"},
        max_new_tokens=48,
        prompts_per_step=9,
        num_generations=16,
        adaptive_concurrency=True,
        engine_options={"max_context": 64, "args": ["--max-num-seqs", "16"]},
        max_steps=2,
        eval_tasks=1,
    )
    steps = trained(values, tmp_path / "run").run.steps()
    assert [step["samples/finished"] for step in steps] == [144.0, 144.0]
    assert steps[0]["concurrency/waiting"] > 16, "all were sent to it at first"
    assert 8 <= steps[-1]["concurrency/limit"] < 144
    assert 0 < steps[-1]["concurrency/kv_usage"] <= 1
