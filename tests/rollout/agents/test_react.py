from pathlib import Path

import pytest
import yaml

import roost
from roost.engines.protocol import ContextFull, EngineRefused
from roost.rollout.agents.react import ReactCoder
from roost.rollout.environments.environment import Observation
from roost.rollout.episode import Task
from tests.rollout.agents.talk import Engine, talk
from tests.rollout.agents.world import TASK, Noting, python
from tests.rollout.script import ran

DEFAULT = Path(roost.__file__).parent / "conf" / "appworld" / "agent" / "default.yaml"


async def refused():
    raise ContextFull("the prompt is too long")


def run_episode(*says, first="print a word", max_turns=10, task=TASK, **keys):
    """Calls of the environment, and prompts of the policy."""
    engine, environment = Engine(*says), Noting()
    policy, transcript = talk(engine)
    ran(ReactCoder(task, **keys).run_episode(policy, environment, Observation(first), max_turns))
    assert len(transcript.sequences()) == 1
    return environment.actions, engine.shown


def test_it_writes_code_sees_the_output_and_stops_when_the_environment_is_over():
    actions, shown = run_episode(python("one"), python("done"))
    assert actions == ["one", "done"]
    assert "Your task: print a word" in shown[0]
    assert "Output:\nsaw one\n\nRemember the task: print a word<|im_end|>" in shown[1]


@pytest.mark.parametrize(
    ("says", "turns"),
    [
        pytest.param([python("a")] * 3, 3, id="turns are used up"),
        pytest.param([python("a"), refused], 10, id="the context is used up"),
    ],
)
def test_it_ends_when_it_cannot_go_on(says, turns):
    actions, _ = run_episode(*says, max_turns=turns)
    assert actions == ["a"] * sum(isinstance(one, str) for one in says)


def test_a_first_prompt_that_is_refused_is_a_failure():
    with pytest.raises(ContextFull):
        run_episode(refused)


def test_a_refusal_for_another_reason_is_a_failure():
    async def wrong():
        raise EngineRefused("token id 900 is not in the vocabulary of 512")

    with pytest.raises(EngineRefused, match="900"):
        run_episode(python("a"), wrong)


def test_a_turn_without_code_is_told_so_and_changes_nothing():
    actions, shown = run_episode("I wonder.", python("done"))
    assert actions == ["done"]
    assert "user\nNo code was found." in shown[1]
    assert "Output" not in shown[1].rpartition("<|im_start|>user")[2]


def test_keys_change_what_is_shown():
    keys = {
        "system_prompt": "Be {brief}.",
        "worked_example": "",
        "reminder": "Do {task}, {now}!",
        "shown_characters": 5,
    }
    _, shown = run_episode(python("one\ntwo"), python("done"), **keys)
    assert shown[0].startswith("<|im_start|>system\nBe {brief}.<|im_end|>\n<|im_start|>user\nYour task: print a word<")
    assert "Output:\nsaw o\n[6 of 11 characters are not shown]\n\nDo print a word, {now}!<" in shown[1]


def test_a_task_that_the_environment_does_not_tell_is_told_by_its_name():
    _, shown = run_episode(python("done"), first="", task=Task("count to three"))
    assert "Your task: count to three" in shown[0]


def test_nothing_is_asked_when_it_is_over_from_the_beginning():
    policy, _ = talk(Engine())
    ran(ReactCoder(TASK).run_episode(policy, Noting(), Observation("", is_over=True), 5))


def test_the_default_config_has_every_key_and_tells_of_the_apps():
    keys = yaml.safe_load(DEFAULT.read_text())
    assert keys.pop("_target_") == "roost.rollout.agents.react.ReactCoder"
    assert set(keys) == {"system_prompt", "worked_example", "reminder", "shown_characters", "max_tokens"}
    assert all(name in keys["system_prompt"] for name in ("apis.api_docs", "apis.supervisor.complete_task("))
    ReactCoder(TASK, **keys)


def test_an_output_of_which_nothing_is_shown_is_a_mistake():
    with pytest.raises(ValueError, match="shown_characters is 0"):
        ReactCoder(TASK, shown_characters=0)
