"""The whole way: a policy that says the solution, the agents that people use, environments, servers and sandboxes."""

import pytest

from roost.rollout.agents.scenario import AgentScenario
from roost.rollout.episode import Split, Transcript
from tests.app_world.serving.session import solution
from tests.rollout.agents.talk import QWEN_TOKENIZER, Engine
from tests.rollout.agents.world import python
from tests.rollout.script import ran

SERVING = "roost.app_world.serving"
REACT = {"_target_": "roost.rollout.agents.react.ReactCoder"}
CODER = {"_target_": "tests.rollout.agents.programs.Coder", "style": "plain"}


@pytest.mark.parametrize(
    ("agent", "reported"),
    [
        pytest.param(REACT, python, id="react"),
        pytest.param(CODER, str, id="the AppWorld contract"),
    ],
)
def test_agents_play_from_configs(agent, reported):
    async def run():
        scenario = AgentScenario(
            QWEN_TOKENIZER,
            {"_target_": f"{SERVING}.tasks.AppWorldTasks", "difficulty": 1, "kinds": ["jot_note"], "count": 3},
            agent,
            {"_target_": f"{SERVING}.client.AppWorldEnvironments", "servers": 0, "worlds": 2},
        )
        task = scenario.task(Split.TRAIN, 1)
        says = ["print(apis.supervisor.show_today())", *solution(task.data["task_id"]).splitlines()]
        transcript = Transcript(Engine(*map(reported, says)).sample)
        try:
            return await scenario.run_episode(task, transcript), transcript.turns, len(says)
        finally:
            await scenario.close()

    score, turns, said_in_all = ran(run())
    assert score.reward == 1.0
    assert turns == said_in_all
    assert "'weekday'" in score.shown
