from types import SimpleNamespace

import pytest

from roost.engines.protocol import InFlight
from roost.engines.residency import EngineSwitch
from roost.placement.memory.residency import Decision
from roost.trainer.loop import DeviceSwitch
from tests.rollout.script import ran

ALL = ("weight", "grad", "optimizer")
RELEASE = SimpleNamespace(version=3)


class NotedFleet:
    """A fleet that notes what is asked of it, and lets the learner leave when it would."""

    def __init__(self, calls):
        self._calls = calls

    def learning_begins(self):
        self._calls.append(("learning_begins",))

    async def sleep(self, *arguments):
        self._calls.append(("sleep", *arguments))

    async def stop_servers(self, *arguments):
        self._calls.append(("stop_servers", *arguments))

    async def update(self, *arguments):
        self._calls.append(("update", *arguments))

    async def wake(self, update, in_flight, offload):
        self._calls.append(("wake", update, in_flight))
        await offload()

    async def start_servers(self, update, offload):
        self._calls.append(("write", update))
        await offload()
        self._calls.append(("start_servers",))


class NotedLearner:
    """A learner that notes what it moves."""

    name = "actor"

    def __init__(self, calls):
        self._calls = calls

    async def load(self, parts):
        self._calls.append(("load", parts))

    async def offload(self, parts, in_background):
        self._calls.append(("offload", parts, *(["in background"] if in_background else [])))


def calls_of(turn, *more, decision, in_flight=InFlight.DRAIN, offloads=ALL, displaced=None, overlaps=False):
    calls = []
    engines = EngineSwitch(decision, in_flight=in_flight, displaced=displaced)
    switch = DeviceSwitch(engines, {"actor": offloads}, overlaps)
    ran(getattr(switch, turn)(NotedFleet(calls), [NotedLearner(calls)], *more))
    return calls


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        pytest.param({"decision": Decision.KEEP}, [("learning_begins",)], id="both have the devices"),
        pytest.param(
            {"decision": Decision.SLEEP},
            [("sleep", 2, InFlight.DRAIN, None), ("learning_begins",), ("load", ALL)],
            id="engines sleep",
        ),
        pytest.param(
            {"decision": Decision.SLEEP, "in_flight": InFlight.HOLD, "displaced": ("rollout-1",)},
            [("sleep", 2, InFlight.DROP, ("rollout-1",)), ("learning_begins",), ("load", ALL)],
            id="some sleep, and what they had goes on elsewhere",
        ),
        pytest.param(
            {"decision": Decision.RESTART},
            [("stop_servers", None), ("learning_begins",), ("load", ALL)],
            id="engines stop",
        ),
        pytest.param(
            {"decision": Decision.SLEEP, "offloads": ()},
            [("sleep", 2, InFlight.DRAIN, None), ("learning_begins",)],
            id="the learner stays where it is",
        ),
    ],
)
def test_devices_go_to_the_learner_once_the_engines_have_left_them(case, expected):
    assert calls_of("to_learner", **case) == expected


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        pytest.param(
            {"decision": Decision.KEEP, "in_flight": InFlight.HOLD},
            [("update", RELEASE, InFlight.HOLD)],
            id="both have the devices",
        ),
        pytest.param(
            {"decision": Decision.SLEEP},
            [("offload", ["grad", "optimizer"]), ("wake", RELEASE, InFlight.DRAIN), ("offload", ["weight"])],
            id="engines wake",
        ),
        pytest.param(
            {"decision": Decision.SLEEP, "overlaps": True},
            [
                ("offload", ["grad", "optimizer"], "in background"),
                ("wake", RELEASE, InFlight.DRAIN),
                ("offload", ["weight"]),
            ],
            id="engines wake while moments are copied",
        ),
        pytest.param(
            {"decision": Decision.SLEEP, "overlaps": True, "offloads": ("optimizer",)},
            [("offload", ["optimizer"], "in background"), ("wake", RELEASE, InFlight.DRAIN), ("offload", [])],
            id="copied moments are freed where weights stay",
        ),
        pytest.param(
            {"decision": Decision.RESTART},
            [("offload", ["grad", "optimizer"]), ("write", RELEASE), ("offload", ["weight"]), ("start_servers",)],
            id="engines start",
        ),
        pytest.param(
            {"decision": Decision.RESTART, "displaced": ("rollout-1",), "in_flight": InFlight.DROP},
            [
                ("offload", ["grad", "optimizer"]),
                ("update", RELEASE, InFlight.DROP),
                ("write", RELEASE),
                ("offload", ["weight"]),
                ("start_servers",),
            ],
            id="some start, when the others are updated",
        ),
        pytest.param(
            {"decision": Decision.SLEEP, "offloads": ("optimizer",)},
            [("offload", ["optimizer"]), ("wake", RELEASE, InFlight.DRAIN)],
            id="weights stay",
        ),
        pytest.param(
            {"decision": Decision.SLEEP, "offloads": ("weight",)},
            [("wake", RELEASE, InFlight.DRAIN), ("offload", ["weight"])],
            id="only weights go, when they have been sent",
        ),
        pytest.param(
            {"decision": Decision.RESTART, "offloads": ()},
            [("write", RELEASE), ("start_servers",)],
            id="nothing moves",
        ),
    ],
)
def test_weights_leave_the_learner_s_device_after_the_engines_have_them_and_all_else_before(case, expected):
    assert calls_of("to_engines", RELEASE, **case) == expected


def test_whether_one_waits_for_the_other():
    taken = {decision: DeviceSwitch(EngineSwitch(decision), {}).is_shared for decision in Decision}
    assert taken == {Decision.KEEP: False, Decision.SLEEP: True, Decision.RESTART: True}
