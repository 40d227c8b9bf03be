import asyncio
from dataclasses import replace

import pytest

from roost.config.compose import load
from roost.config.findings import Findings, Where
from roost.config.notations.notation import read_job
from roost.engines.protocol import ContextFull
from roost.rollout.agents import scenario as module
from roost.rollout.agents.scenario import AgentScenario
from roost.rollout.data.scenario import PromptScenario
from roost.rollout.episode import Split, Task, Transcript
from roost.rollout.episode_runner import checked_reward
from roost.rollout.rewards.config import make_reward
from roost.rollout.rewards.reward import Answer
from roost.trainer.targets import make_scenario
from tests.rollout.agents.talk import QWEN_TOKENIZER, Engine
from tests.rollout.agents.world import TASK, Noting, Worlds, python
from tests.rollout.script import others_running, ran, settled

HERE = "tests.rollout.agents"
REACT = {"_target_": "roost.rollout.agents.react.ReactCoder", "system_prompt": "", "worked_example": ""}
GUESSER = {"_target_": f"{HERE}.programs.Guesser", "hint": "guess"}
CODER = {"_target_": f"{HERE}.programs.Coder", "style": "plain"}
PROGRAM = {"_target_": "roost.rollout.agents.openai_agent.OpenAIAgent", "run": f"{HERE}.programs.run_episode"}


def made(agent=REACT, worlds=None, **keys):
    tasks = {"_target_": f"{HERE}.world.Tasks", "count": 4}
    environment = {"_target_": f"{HERE}.world.Worlds"}
    scenario = AgentScenario(QWEN_TOKENIZER, tasks, agent, environment, **keys)
    if worlds is not None:
        scenario.use_environments(worlds)
    return scenario


def run_episode(*says, agent=REACT, worlds=None, task=TASK, **keys):
    """The score and the transcript."""

    async def playing():
        transcript = Transcript(Engine(*says).sample)
        scenario = made(agent, worlds, **keys)
        try:
            score = await scenario.run_episode(task, transcript)
        finally:
            await scenario.close()
        await settled()
        assert not others_running()
        return checked_reward(score, transcript.turns), transcript

    return ran(playing())


async def full():
    raise ContextFull("the context length is 64 tokens")


@pytest.mark.parametrize("agent", [REACT, GUESSER, CODER, PROGRAM], ids=["react", "own", "AppWorld", "program"])
def test_an_episode_ends_with_the_engines_context_and_is_worth_what_it_is(agent):
    say = python("look") if agent is REACT else "look"
    score, transcript = run_episode(say, full, agent=agent)
    assert score.shown.startswith("> look\nsaw look")
    assert len(transcript.sequences()[0].completion_versions) > 0


def test_rewards_judge_what_the_policy_said_last():
    long = "x" * 1000
    score, _ = run_episode(python("look"), f"{long}\n{python('done')}", worlds=Worlds())
    assert score.answer.startswith(long), "whole, whatever is shown of it"


def test_a_task_that_fills_the_context_by_itself_is_a_failure():
    with pytest.raises(ContextFull):
        run_episode(full, agent=GUESSER)


def test_tasks_come_from_the_source():
    scenario = made()
    assert scenario.size(Split.TRAIN) == 4
    assert scenario.task(Split.EVALUATION, 2) == Task("evaluation 2")


@pytest.mark.parametrize(
    ("agent", "says"),
    [
        pytest.param(REACT, [python("look"), python("done")], id="react"),
        pytest.param(CODER, ["look", "done"], id="the AppWorld contract"),
        pytest.param(PROGRAM, ["look", "done"], id="a program for OpenAI's client"),
    ],
)
def test_an_episode_with_each_kind_of_agent(agent, says):
    worlds = Worlds()
    score, transcript = run_episode(*says, agent=agent, worlds=worlds)
    assert (score.reward, score.turn_rewards) == (2.0, ())
    assert score.shown == "> look\nsaw look\n> done\nsaw done"
    assert len(transcript.sequences()) == 1
    assert worlds.opened[0].calls == [("reset", "count to three", 5), "score", "close"]
    assert worlds.is_closed


def test_environments_are_closed_though_the_recorder_cannot_be(monkeypatch):
    async def fail(recorder):
        raise OSError("its port is gone")

    monkeypatch.setattr(module.Recorder, "close", fail)
    worlds = Worlds()
    with pytest.raises(OSError, match="its port is gone"):
        run_episode(python("done"), worlds=worlds)
    assert worlds.is_closed


def test_environments_are_made_here_where_nobody_brings_others():
    score, _ = run_episode(python("done"))
    assert score.reward == 1.0


def test_environments_are_chosen_before_the_first_episode():
    async def late():
        scenario = made()
        await scenario.run_episode(TASK, Transcript(Engine(python("done")).sample))
        with pytest.raises(RuntimeError, match="before the first"):
            scenario.use_environments(Worlds())

    ran(late())


def test_rewards_of_steps_belong_to_the_turns_before_them():
    """The agent makes two steps of each turn."""
    worlds = Worlds(lambda: Noting(rewards=[1.0, 0.5, 0.0, 4.0]))
    score, transcript = run_episode("a", "done", agent=GUESSER, worlds=worlds)
    assert score.turn_rewards == (1.5, 4.0)
    assert transcript.turns == 2


def test_a_long_episode_is_shown_in_short():
    says = [python("x" * 1000)] * 30
    score, _ = run_episode(*says, max_turns=30)
    assert "[10 steps are not shown]" in score.shown
    assert len(score.shown) < 20 * 900


def test_turns_are_bounded():
    score, _ = run_episode(*[python("a")] * 5, max_turns=3)
    assert score.reward == 3.0
    with pytest.raises(ValueError, match="max_turns is 0"):
        made(max_turns=0)


@pytest.mark.parametrize(
    ("agent", "described"),
    [
        pytest.param({"_target_": f"{HERE}.programs.Silent"}, "the policy had no turn", id="says nothing"),
        pytest.param({**PROGRAM, "run": f"{HERE}.programs.fail"}, "mine", id="raises"),
        pytest.param({**PROGRAM, "run": f"{HERE}.programs.wrapped"}, "returned a coroutine", id="is not awaited"),
        pytest.param(
            {"_target_": f"{HERE}.programs.Blocking"}, "Blocking.run_episode is not asynchronous", id="blocks"
        ),
        pytest.param({"_target_": f"{HERE}.programs.Nobody"}, "has no Nobody", id="is not there"),
    ],
)
def test_an_episode_that_fails_closes_its_environment(agent, described):
    worlds = Worlds()
    with pytest.raises(Exception, match=described):
        run_episode(agent=agent, worlds=worlds)
    assert worlds.opened[0].calls[-1] == "close"


class Slow(Noting):
    """Takes its time to close."""

    def __init__(self, gate):
        super().__init__()
        self._gate = gate

    async def close(self):
        await self._gate.wait()
        await super().close()


@pytest.mark.parametrize("cancels", [1, 2], ids=["once", "also while it closes"])
def test_a_cancelled_episode_closes_its_environment(cancels):
    async def cancelled():
        gate = asyncio.Event()
        worlds = Worlds(lambda: Slow(gate))
        playing = asyncio.create_task(
            made({"_target_": f"{HERE}.programs.Stuck"}, worlds).run_episode(TASK, Transcript(Engine().sample))
        )
        await settled()
        for _ in range(cancels):
            playing.cancel()
            await settled()
        assert not playing.done()
        gate.set()
        await asyncio.wait([playing])
        return playing.cancelled(), worlds.opened[0].calls[-1], others_running()

    assert ran(cancelled()) == (True, "close", set())


def test_an_environment_that_does_not_close_is_not_waited_for(monkeypatch, caplog):
    monkeypatch.setattr(module, "CLOSE_LIMIT_S", 0.01)
    score, _ = run_episode(python("done"), worlds=Worlds(lambda: Slow(asyncio.Event())))
    assert score.reward == 1.0
    assert "did not close within 0.01 s" in caplog.text


def test_an_environment_that_fails_to_close_does_not_fail_the_episode(caplog):
    class Failing(Noting):
        async def close(self):
            raise OSError("gone already")

    score, _ = run_episode(python("done"), worlds=Worlds(Failing))
    assert score.reward == 1.0
    assert "gone already" in caplog.text


def test_episodes_side_by_side_share_a_recorder():
    async def playing():
        scenario = made(PROGRAM, Worlds())
        plays = [scenario.run_episode(TASK, Transcript(Engine("look", "done").sample)) for _ in range(20)]
        try:
            return [score.reward for score in await asyncio.gather(*plays)]
        finally:
            await scenario.close()

    assert ran(playing()) == [2.0] * 20


QUESTIONS = "roost.rollout.environments.environment.Questions"
EXACT = {"exact": {"_target_": "roost.rollout.rewards.math_answer.ExactAnswer"}}


@pytest.mark.parametrize("run", ["run_episode", "play_async", "answer_alone"])
def test_a_program_answers_the_questions_of_a_data_file(run, tmp_path):
    """The config's own task: data, rewards and a program for OpenAI's client, without a class for the environment."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "2+2?", "answer": "four"}\n')
    config = {
        "cluster": {"num_nodes": 1, "num_gpus_per_node": 1, "component_placement": {"actor,rollout": 0}},
        "train": {
            "model": "tiny",
            "data": {"path": str(path), "prompt": "question"},
            "rewards": EXACT,
            "task": {
                "_target_": "roost.rollout.agents.scenario.AgentScenario",
                "environment": {"_target_": QUESTIONS},
                "agent": {**PROGRAM, "run": f"{HERE}.programs.{run}"},
            },
        },
    }
    findings = Findings()
    settings = read_job(load(config, (), findings), findings).training
    scenario = make_scenario(settings.task, QWEN_TOKENIZER, Where(), findings)
    assert findings.found == ()

    async def playing():
        engine, task = Engine("four"), scenario.task(Split.TRAIN, 0)
        try:
            score = await scenario.run_episode(task, Transcript(engine.sample))
        finally:
            await scenario.close()
        scored = await make_reward("exact", EXACT["exact"]).score(Answer(task, score.answer))
        return engine.shown, score, scored

    shown, score, scored = ran(playing())
    assert "user\n2+2?<" in shown[0] and (score.reward, score.answer, scored) == (0.0, "four", 1.0)
    bare = {**config, "train": {key: value for key, value in config["train"].items() if key != "rewards"}}
    read_job(load(bare, (), findings), findings)
    assert [each.code for each in findings.found] == ["RST-T061"]


def test_an_answer_in_the_info_of_an_environment_is_not_the_policys():
    """Environments may report the right one there."""

    class Telling(Noting):
        async def step(self, action):
            return replace(await super().step(action), info={"answer": "the right one"})

    score, _ = run_episode(python("done"), worlds=Worlds(Telling))
    assert score.answer == python("done")


@pytest.mark.parametrize(("most", "size"), [(60, 0), (2000, 1)], ids=["too long with its tools", "fits"])
def test_schemas_of_tools_count_for_the_length_of_a_prompt(most, size, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "who?"}\n')
    data = {"path": str(tmp_path / "rows.jsonl"), "chat_template": True, "max_prompt_tokens": most}
    tasks = PromptScenario(QWEN_TOKENIZER, **data)
    assert tasks.size(Split.TRAIN) == 1, "the question alone is short"
    search = {"_target_": "roost.rollout.environments.tools.Search", "url": None}
    tools = {"_target_": "roost.rollout.environments.tools.ToolEnvironments", "tools": {"search": search}}
    tasks = PromptScenario(QWEN_TOKENIZER, **data)
    agent = {"_target_": "roost.rollout.agents.tools.ToolAgent"}
    scenario, findings = AgentScenario(QWEN_TOKENIZER, tasks, agent, tools), Findings()
    scenario.open_data(Where(), findings)
    assert [each.code for each in findings.found] == ([] if size else ["RST-T066"])
    if size:
        assert '"name": "search"' in scenario.task(Split.TRAIN, 0).data["prompt_text"]
