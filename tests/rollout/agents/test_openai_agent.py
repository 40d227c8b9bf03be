import asyncio
import threading

import pytest

from roost.rollout.agents import bridge
from roost.rollout.agents.openai_agent import OpenAIAgent
from roost.rollout.agents.recording import Recorder
from roost.rollout.check_target import NotLocated
from roost.rollout.environments.environment import Observation
from tests.rollout.agents.talk import Engine, talk
from tests.rollout.agents.world import TASK, Noting
from tests.rollout.script import others_running, ran, settled

PROGRAMS = "tests.rollout.agents.programs"
BOTH = pytest.mark.parametrize("run", ["run_episode", "play_async"])


def run_episode(*says, run, max_turns=10, **keys):
    async def playing():
        engine, environment, recorder = Engine(*says), Noting(), Recorder()
        policy, transcript = talk(engine)
        try:
            agent = OpenAIAgent(TASK, recorder, f"{PROGRAMS}.{run}", **keys)
            await agent.run_episode(policy, environment, Observation("begin"), max_turns)
        finally:
            await recorder.close()
        assert not others_running()
        return environment.actions, engine.shown, len(transcript.sequences())

    return ran(playing())


@BOTH
def test_a_program_for_the_client_runs_unchanged(run):
    actions, shown, sequences = run_episode("look", "done", run=run)
    assert (actions, sequences) == (["look", "done"], 1)
    assert "user\nsaw look<" in shown[1]


@BOTH
def test_turns_that_are_used_up_end_the_episode_and_do_not_fail_it(run):
    actions, _, _ = run_episode("a", "b", "c", run=run, max_turns=2)
    assert actions == ["a", "b"]


def test_arguments_of_the_config_are_given():
    _, shown, _ = run_episode("done", run="run_episode", arguments={"prefix": "please: "})
    assert "please: begin" in shown[0]


def test_what_a_program_raises_is_the_episode_s_failure():
    with pytest.raises(LookupError, match="mine"):
        run_episode(run="fail")


def test_a_program_that_is_not_there():
    with pytest.raises(NotLocated, match=r"tests\.rollout\.agents\.programs has no plya"):
        run_episode(run="plya")


@BOTH
def test_cancelling_the_episode_ends_the_program(run, monkeypatch):
    monkeypatch.setattr(bridge, "GRACE_S", 1000)  # it must end because it is let go, not because it is left behind

    async def for_ever():
        await asyncio.Event().wait()

    async def cancelled():
        engine, recorder = Engine(for_ever), Recorder()
        agent = OpenAIAgent(TASK, recorder, f"{PROGRAMS}.{run}")
        playing = asyncio.create_task(agent.run_episode(talk(engine)[0], Noting(), Observation("begin"), 5))
        while not engine.asked:
            await asyncio.sleep(0.001)
        playing.cancel()
        await asyncio.wait([playing])
        await recorder.close()
        await settled()
        return playing.cancelled(), others_running()

    assert ran(cancelled()) == (True, set())
    for thread in threading.enumerate():
        if thread.name == "agent":
            thread.join(10)
            assert not thread.is_alive()
