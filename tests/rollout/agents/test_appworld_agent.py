import asyncio
import subprocess
import sys
import threading
from typing import ClassVar

import pytest

from roost.engines.protocol import ContextFull
from roost.rollout.agents import bridge
from roost.rollout.agents.appworld_agent import (
    NO_CODE,
    AppworldAdapter,
    AppworldAgent,
    AssistantMessage,
    IPythonMessage,
    MaxSeqLenExceeded,
    PolicyMessage,
    RolloutCancelled,
    SystemMessage,
    UserMessage,
)
from roost.rollout.environments.environment import Observation
from tests.limits import HANG_S
from tests.rollout.agents.talk import Engine, ids, talk
from tests.rollout.agents.world import TASK, Noting
from tests.rollout.script import others_running, ran, settled


class Coder(AppworldAgent):
    """Runs what the policy says, as it is."""

    instances: ClassVar[list] = []

    def __init__(self, *, task, llm, hint="none"):
        self.instances.append(self)
        self.task, self.hint, self.outputs, self.error = task, hint, [], None
        self._llm, self._messages = llm, [SystemMessage(f"hint: {hint}", "today"), UserMessage(task.instruction)]

    def next_code_block(self, output, world):
        self.outputs.append((output, world.task_completed()))
        if output is not None:
            self._messages.append(IPythonMessage(output))
        try:
            message = self._llm.generate(self._messages)
        except (RolloutCancelled, MaxSeqLenExceeded) as error:
            self.error = error
            raise
        self._messages.append(message)
        return "" if message.content == "nothing" else message.content

    def history_as_messages(self, last_execution_output):
        return [*self._messages, IPythonMessage(last_execution_output)]


def run_episode(*says, agent=Coder, max_turns=10, environment=None, **keys):
    engine, environment = Engine(*says), environment or Noting()
    policy, transcript = talk(engine)
    agent.instances = []
    ran(AppworldAdapter(agent, keys, TASK).run_episode(policy, environment, Observation("begin"), max_turns))
    return agent.instances[0], environment.actions, engine, transcript


def test_the_contract():
    agent, actions, engine, transcript = run_episode("look", "nothing", "done", hint="short")
    assert (agent.task.instruction, agent.hint) == (TASK.name, "short")
    assert actions == ["look", "done"]
    assert agent.outputs == [(None, False), ("saw look", False), (NO_CODE, False)]
    assert len(transcript.sequences()) == 1
    history = agent.history_as_messages("end")
    kinds = [SystemMessage, UserMessage, PolicyMessage, IPythonMessage, PolicyMessage, IPythonMessage, PolicyMessage]
    assert [type(message) for message in history] == [*kinds, IPythonMessage]
    first = history[2]
    assert (first.content, first.prompt_tokens) == ("look", engine.asked[0])
    assert first.generated_tokens == (*ids("look"), engine.of.eos_token_id)
    assert first.generated_token_logprobs == (-0.5,) * 5
    assert (first.stopped_by_max_tokens_limit, first.rollout_cancelled) == (False, False)


class Chooser(Coder):
    """Asks twice for each block, and goes on with the second answer."""

    def next_code_block(self, output, world):
        self._llm.generate(self._messages)
        return super().next_code_block(output, world)


def test_answers_that_an_agent_drops_are_not_learnt_from():
    *_, engine, transcript = run_episode("first", "look", "second", "done", agent=Chooser)
    instances = [
        "".join(engine.of.decode([token for token, turn in zip(each.token_ids, each.turns, strict=True) if turn >= 0]))
        for each in transcript.sequences()
    ]
    assert "".join(instances).count("look") == 1 and "".join(instances).count("done") == 1
    assert not any(dropped in text for dropped in ("first", "second") for text in instances)


class Retold(Coder):
    def history_as_messages(self, last_execution_output):
        return [UserMessage("it went well")]


def test_a_history_without_the_policy_s_messages_keeps_all_turns():
    *_, transcript = run_episode("look", "done", agent=Retold)
    assert set(transcript.sequences()[0].turns) == {-1, 0, 1}


def test_a_turn_that_was_cut_says_so():
    agent, *_ = run_episode(ids("ab"), "done")
    assert agent.history_as_messages("")[2].stopped_by_max_tokens_limit


def all_threads_end():
    """Whether the agents' threads end by themselves."""
    threads = [thread for thread in threading.enumerate() if thread.name == "agent"]
    for thread in threads:
        thread.join(10)
    return not any(thread.is_alive() for thread in threads)


async def refused():
    raise ContextFull("the prompt is too long")


def test_a_conversation_that_becomes_too_long_ends_the_episode():
    agent, actions, *_ = run_episode("look", refused)
    assert isinstance(agent.error, MaxSeqLenExceeded)
    assert actions == ["look"]


def test_a_first_prompt_that_is_refused_is_a_failure():
    with pytest.raises(ContextFull):
        run_episode(refused)


def test_turns_are_counted():
    _, actions, *_ = run_episode("a", "b", "c", max_turns=2)
    assert actions == ["a", "b"]


def test_what_an_agent_raises_is_the_episode_s_failure():
    class Broken(Coder):
        def next_code_block(self, output, world):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run_episode(agent=Broken)


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(SystemExit(3), id="exit"),
        pytest.param(StopIteration(), id="stop iteration"),
        pytest.param(asyncio.CancelledError(), id="cancelled within"),  # as it leaves an asyncio.run of the agent's own
    ],
)
def test_an_agent_cannot_end_more_than_its_episode(error):
    class Ending(Coder):
        def next_code_block(self, output, world):
            raise error

    with pytest.raises(RuntimeError, match=f"the agent raised {type(error).__name__}"):
        run_episode(agent=Ending)


def test_the_world_may_be_tried_before_code_is_chosen():
    class Trying(Coder):
        def next_code_block(self, output, world):
            assert world.execute("try") == "saw try"
            return super().next_code_block(output, world)

    _, actions, *_ = run_episode("done", agent=Trying)
    assert actions == ["try", "done"]


@pytest.mark.parametrize("waits_for", ["policy", "environment"])
def test_cancelling_the_episode_unblocks_the_thread(waits_for, monkeypatch):
    monkeypatch.setattr(bridge, "GRACE_S", 1000)  # it must end because it is let go, not because it is left behind

    async def for_ever():
        await asyncio.Event().wait()

    async def cancelled():
        engine = Engine(for_ever if waits_for == "policy" else "look")
        policy, _ = talk(engine)
        Coder.instances = []
        environment = Noting(on_step=for_ever)
        adapter = AppworldAdapter(Coder, {}, TASK)
        playing = asyncio.create_task(adapter.run_episode(policy, environment, Observation("begin"), 5))
        while not (engine.asked if waits_for == "policy" else environment.actions):
            await asyncio.sleep(0.001)
        playing.cancel()
        await asyncio.wait([playing])
        assert playing.cancelled()
        assert not others_running()
        assert all_threads_end()
        return Coder.instances[0].error

    error = ran(cancelled())
    assert isinstance(error, RolloutCancelled) == (waits_for == "policy")


def test_a_thread_that_does_not_end_is_left_behind(monkeypatch):
    monkeypatch.setattr(bridge, "GRACE_S", 0.01)
    held = threading.Event()

    class Deaf(Coder):
        def next_code_block(self, output, world):
            held.wait()
            return super().next_code_block(output, world)

    async def cancelled():
        policy, _ = talk(Engine())
        playing = asyncio.create_task(AppworldAdapter(Deaf, {}, TASK).run_episode(policy, Noting(), Observation(""), 5))
        await settled()
        playing.cancel()
        await asyncio.wait([playing])
        held.set()
        return playing.cancelled()

    assert ran(cancelled())
    assert all_threads_end()
    assert isinstance(Deaf.instances[-1].error, RolloutCancelled)


def test_many_agents_that_block_play_side_by_side():
    """Each waits, in its thread, until all of them do; and the event loop goes on meanwhile."""
    count = 64
    together = threading.Barrier(count + 1)

    class Meeting(Coder):
        def next_code_block(self, output, world):
            together.wait(HANG_S)
            return super().next_code_block(output, world)

    async def all_play():
        adapters = [AppworldAdapter(Meeting, {}, TASK) for _ in range(count)]
        worlds = [Noting() for _ in range(count)]
        playing = [
            asyncio.create_task(adapter.run_episode(talk(Engine("done"))[0], world, Observation(""), 5))
            for adapter, world in zip(adapters, worlds, strict=True)
        ]
        while together.n_waiting < count:
            await asyncio.sleep(0.01)
        together.wait(HANG_S)
        await asyncio.gather(*playing)
        return [world.actions for world in worlds]

    assert ran(all_play()) == [["done"]] * count


HUNG = """
import asyncio, threading
from roost.rollout.agents.bridge import Bridge, in_thread

async def main():
    bridge, has_begun = Bridge(), threading.Event()
    hung = asyncio.create_task(in_thread(lambda: (has_begun.set(), threading.Event().wait()), bridge.close))
    while not has_begun.is_set():
        await asyncio.sleep(0.01)
    hung.cancel()

asyncio.run(main())
print("ended")
"""


def test_an_agent_that_hangs_keeps_no_process_from_ending():
    done = subprocess.run([sys.executable, "-c", HUNG], capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr


def test_an_episode_that_is_over_is_not_played_on():
    async def over():
        policy, transcript = talk(Engine())
        transcript.close()
        with pytest.raises(asyncio.CancelledError):
            await AppworldAdapter(Coder, {}, TASK).run_episode(policy, Noting(), Observation(""), 5)

    ran(over())


def test_messages_hold_as_many_log_probabilities_as_tokens():
    with pytest.raises(ValueError, match="2 tokens came with 1"):
        PolicyMessage("x", generated_tokens=(1, 2), generated_token_logprobs=(0.0,))
    assert AssistantMessage("x") != UserMessage("x")


def test_both_methods_must_be_there():
    class Half(AppworldAgent):
        def next_code_block(self, output, world):
            return ""

    with pytest.raises(TypeError, match="history_as_messages"):
        Half()
