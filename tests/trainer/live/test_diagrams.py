"""The two diagrams of ml-loop as runs, on simulated accelerators with stated memory; asserted from the trace."""

import pytest

from tests.limits import HANG_S
from tests.trainer.live.jobs import ARITHMETIC, learnt_groups, spans_of, trained
from tests.trainer.live.scenarios import Talking, count_learning

STEPS = 3


def loop_config(model, gpus, needs=None, can_sleep=True, is_async=False, task=ARITHMETIC):
    """A job in ml-loop's notation; `needs` is what inference and learning require of each GPU, in GB."""
    rl = {
        "gpu_allocation": {"learning_gpus": gpus[0], "inference_gpus": gpus[1]},
        "async_rollouts": is_async,
        "params": {
            "total_iterations": STEPS,
            "scenarios_per_iteration": 4,
            "rollouts_per_scenario": 4,
            "minibatch_size": 16,
            "epochs_per_iteration": 1,
        },
        "optimization": {"optimizer": {"lr": 1e-3}},
    }
    if needs is not None:
        rl |= dict(zip(("inference_requires_memory_gb", "learning_requires_memory_gb"), needs, strict=True))
    llm = {
        "base_model_path": str(model),
        "vllm_class": {"max_new_tokens": 3},
        "vllm_server": {"enable_sleep_mode": can_sleep},
    }
    train = {
        "task": task,
        "engine": "torch",
        "engine_options": {"max_context": 64},
        "episode_timeout_s": HANG_S,
        "episode_attempts": 1,
    }
    return {"rl": rl, "llm": llm, "train": train}


SHARED, APART = ([0], [0]), ([0], [1])
TALKING = {**ARITHMETIC, "_target_": "tests.trainer.live.scenarios.Talking"}
LAYOUTS = {
    "disjoint-asynchronous": {"gpus": APART, "is_async": True, "task": TALKING},
    "restarted": {"gpus": SHARED, "needs": (75, 75), "can_sleep": False},
    "slept": {"gpus": SHARED, "needs": (75, 75)},
    "kept-as-both-fit": {"gpus": SHARED, "needs": (35, 35), "can_sleep": False},
}
# How often servers are started, stopped and put to sleep until the run is over, and the largest staleness of each step.
EXPECTED = {
    "disjoint-asynchronous": ({"start": 1, "stop": 0, "sleep": 0}, [0, 1, 1]),
    "restarted": ({"start": 1 + STEPS, "stop": STEPS, "sleep": 0}, [0, 0, 0]),
    "slept": ({"start": 1, "stop": 0, "sleep": STEPS}, [0, 0, 0]),
    "kept-as-both-fit": ({"start": 1, "stop": 0, "sleep": 0}, [0, 0, 0]),
}


LONG = ("restarted", "kept-as-both-fit", "disjoint-asynchronous")  # shorter tests try what differs from the other


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in LAYOUTS]
)
def layout(request):
    return request.param


@pytest.fixture(scope="module")
def run(layout, model, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        count_learning(patch, Talking)
        return trained(loop_config(model, **LAYOUTS[layout]), tmp_path_factory.mktemp("runs") / layout).run


def test_servers_are_there_when_the_diagram_says(run, layout):
    counts, staleness = EXPECTED[layout]
    assert {name: len(spans_of(run, name, "trainer")) for name in counts} == counts
    assert [record["staleness/max"] for record in run.steps()] == staleness
    learns, generates = spans_of(run, "learn", "actor"), spans_of(run, "generate", "rollout")
    together = any(start < end_of and start_of < end for start, end in learns for start_of, end_of in generates)
    assert len(learns) == STEPS and together is (layout == "disjoint-asynchronous")


def test_the_learner_makes_room_where_they_take_turns(run, layout):
    takes_turns = layout in ("restarted", "slept")
    assert (len(spans_of(run, "load", "actor")) >= STEPS) is takes_turns
    assert (len(spans_of(run, "offload", "actor")) >= STEPS) is takes_turns


def test_every_group_is_learnt_from_once(run):
    groups = learnt_groups(run)
    assert sorted(groups) == list(range(1, STEPS + 1))
    assert sorted(number for taken in groups.values() for number in taken) == list(range(4 * STEPS))


def test_a_run_leaves_everything_behind(run):
    policy = [run.policy / name for name in ("config.json", "model.safetensors", "tokenizer.json")]
    for file in (run.config_file, run.plan_file, run.trace_file, *policy):
        assert file.exists(), file
    assert len(run.steps()) == STEPS and [found["version"] for found in run.evaluations()] == [STEPS]
    assert all(0 < record["busy/actor"] <= 1 and 0 <= record["busy/rollout"] <= 1 for record in run.steps())
    # A step with staleness may find that all its groups were generated while the one before was learnt from.
    assert all(record["busy/rollout"] > 0 for record in run.steps() if record["staleness/max"] == 0)
    assert all(record["mismatch/logprob_mean"] < 1e-3 for record in run.steps() if record["staleness/max"] == 0)
