"""Nodes with engines only are lost while a run needs them: it goes on, and every group counts once."""

import asyncio
from typing import ClassVar

import pytest

from roost.placement.plan import Plan
from roost.rollout.arithmetic import Arithmetic
from tests.limits import HANG_S
from tests.runtime.live.conftest import VARIABLES, RayNodes
from tests.trainer.live.jobs import config, learnt_groups, trained

pytestmark = pytest.mark.long

GROUPS, GENERATIONS, STEPS = 2, 2, 4
GONE_ON = "the run goes on; "


@pytest.fixture(scope="module", autouse=True)
def machine():
    """Not the Ray of the other tests: one of several nodes."""


class Doomed(Arithmetic):
    """After the first step nodes are killed, one after the other; an episode waits until the run goes on."""

    kills: ClassVar[list] = []  # functions that kill a node
    notes: ClassVar[list] = []

    def __init__(self, tokenizer, largest=2):
        super().__init__(tokenizer, largest)
        self._begun, self._killing = 0, asyncio.Lock()

    async def run_episode(self, task, transcript):
        self._begun += 1
        if self._begun > GROUPS * GENERATIONS and Doomed.kills:
            async with self._killing:
                await self._kill_next()
        return await super().run_episode(task, transcript)

    async def _kill_next(self):
        kill, seen = Doomed.kills.pop(0) if Doomed.kills else None, self._gone_on()
        if kill is None:
            return
        await asyncio.to_thread(kill)
        async with asyncio.timeout(HANG_S):
            while self._gone_on() == seen:
                await asyncio.sleep(0.05)

    def _gone_on(self):
        return len([note for note in Doomed.notes if note.startswith(GONE_ON)])


def test_a_run_goes_on_without_the_nodes_of_its_engines(model, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        for variable in VARIABLES:
            patch.delenv(variable, raising=False)
        nodes = RayNodes()
        try:
            nodes.add(2, rank=0)
            first, second = (nodes.add(1, rank=rank) for rank in (1, 2))
            Doomed.kills[:] = [lambda: nodes.kill(first), lambda: nodes.kill(second)]
            values = config(
                model,
                {"actor": "0", "rollout": "1-2"},
                task={"_target_": "tests.trainer.live.test_lost_nodes.Doomed"},
                max_steps=STEPS,
                prompts_per_step=GROUPS,
                num_generations=GENERATIONS,
            )
            values["cluster"] |= {"num_nodes": 3}
            del values["cluster"]["num_gpus_per_node"]
            reported = []
            folder = tmp_path / "run"
            run = trained(values, folder, reported=reported, notes=Doomed.notes, address=nodes.address).run
        finally:
            nodes.stop()
    gone_on = [note.removeprefix(GONE_ON) for note in Doomed.notes if note.startswith(GONE_ON)]
    assert gone_on == [
        "node 1 lost; rollout 1: node 1 device 0 -> node 2 device 0",
        "node 2 lost; rollout: 2 -> 1 process; rollout 1: removed from node 2 device 0",
    ]
    assert not [text for text in reported if "continuing from step" in text]
    taken = [number for groups in learnt_groups(run).values() for number in groups]
    assert sorted(taken) == list(range(GROUPS * STEPS))
    assert run.finished_at() == STEPS
    plan = Plan.from_json(run.plan_file.read_text())
    assert [node.lost for node in plan.inventory.nodes] == [False, True, True] and plan["rollout"].world_size == 1
