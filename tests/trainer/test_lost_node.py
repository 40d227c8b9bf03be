"""A run whose nodes are lost: it goes on with those that are left, as long as its plan fits on them."""

import json
from typing import ClassVar

import pytest

pytest.importorskip("ray")
pytest.importorskip("torch")

from roost import ConfigError
from roost.rollout.arithmetic import Arithmetic, write_arithmetic_model
from roost.trainer import setup
from roost.trainer.records.run_folder import RunFolder
from tests.runtime.live.conftest import VARIABLES, RayNodes
from tests.trainer.live.jobs import config, learnt_groups, trained

# Ray looks for dead nodes every 3 s and gives up after 5 looks.
NOTICED_SOON = {"RAY_health_check_period_ms": "500", "RAY_health_check_initial_delay_ms": "500"}


class Losing(Arithmetic):
    """Kills nodes one after another: 24 episodes after the start, and after the run went on without the one before."""

    kills: ClassVar[list] = []  # functions that kill
    reported: ClassVar[list] = []
    losses: ClassVar[int] = 0
    episodes: ClassVar[int] = 0

    async def run_episode(self, task, transcript):
        Losing.episodes += 1
        # Learners may live for some steps after their node was killed.
        losses = sum(line.startswith("going on with the nodes") for line in Losing.reported)
        if losses == Losing.losses and Losing.episodes > 24:
            Losing.losses, Losing.episodes = losses + 1, 0
            Losing.kills[losses]()
        return await super().run_episode(task, transcript)


@pytest.fixture
def nodes():
    """Three nodes with one accelerator each."""
    with pytest.MonkeyPatch.context() as patch:
        for variable in VARIABLES:
            patch.delenv(variable, raising=False)
        for name, value in NOTICED_SOON.items():
            patch.setenv(name, value)
        nodes = RayNodes()
        for rank in range(3):
            nodes.add(1, rank=rank)
        patch.setenv("RAY_ADDRESS", nodes.address)
        patch.setattr(setup, "REPLACEMENT_LIMIT", 1.0)
        yield nodes
        nodes.stop()


@pytest.mark.long
def test_a_run_goes_on_while_there_is_a_place_for_its_learner_and_then_ends_clearly(nodes, tmp_path):
    model = write_arithmetic_model(tmp_path / "model", hidden_size=64, intermediate_size=128)
    Losing.kills = [lambda: nodes.kill(nodes.nodes[1]), lambda: nodes.kill(nodes.nodes[2])]
    task = {"_target_": "tests.trainer.test_lost_node.Losing"}
    values = config(model, {"actor": "1", "rollout": "0"}, task=task, max_steps=1000, checkpoint_every=1)
    values["cluster"] |= {"num_nodes": 3, "num_gpus_per_node": 1}
    reported = Losing.reported = []
    with pytest.raises(ConfigError) as ended:
        trained(values, tmp_path / "run", reported=reported)
    told = "\n".join(reported)
    moved = ["going on with the nodes that are left:", "node 1 lost", "actor 0: node 1 device 0 -> node 2 device 0"]
    assert "\n  ".join(moved) in told
    assert "RST-P045" in str(ended.value) and "nothing is left of actor (1 process)" in str(ended.value)
    assert "the run cannot go on; " in told and "--resume" in told
    run = RunFolder.open(tmp_path / "run")
    plan = json.loads(run.plan_file.read_text())
    assert [node.get("lost", False) for node in plan["nodes"]] == [False, True, False]
    assert plan["components"]["actor"]["processes"][0]["devices"] == [[2, 0]]
    steps = [record["step"] for record in run.steps()]
    assert len(steps) >= 2 and steps == list(range(1, len(steps) + 1))
    taken = [number for groups in learnt_groups(run).values() for number in groups]
    assert len(taken) == len(set(taken)) == 4 * len(steps), "each group is learnt from once"
