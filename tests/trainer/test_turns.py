from types import SimpleNamespace

import pytest

from roost.engines.protocol import InFlight
from roost.placement.residency import Decision
from roost.trainer.turns import Turns
from tests.rollout.script import ran

ALL = ("weight", "grad", "optimizer")
RELEASE = SimpleNamespace(version=3)


class Noted:
    """Anything that is called: by which name, with what, in which order."""

    def __init__(self, calls, *immediate):
        self._calls, self._immediate = calls, immediate

    def __getattr__(self, name):
        def call(*arguments):
            self._calls.append((name, *arguments))

        async def call_awaited(*arguments):
            call(*arguments)

        return call if name in self._immediate else call_awaited


def calls_of(turn, *more, decision, in_flight=InFlight.DRAIN, offloads=ALL, displaced=None):
    calls = []
    turns = Turns(decision, in_flight, offloads, displaced)
    ran(getattr(turns, turn)(Noted(calls, "learning_begins"), [Noted(calls)], *more))
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
            [("offload", ["grad", "optimizer"]), ("wake", RELEASE), ("offload", ["weight"])],
            id="engines wake",
        ),
        pytest.param(
            {"decision": Decision.RESTART},
            [("offload", ["grad", "optimizer"]), ("start_servers", RELEASE), ("offload", ["weight"])],
            id="engines start",
        ),
        pytest.param(
            {"decision": Decision.RESTART, "displaced": ("rollout-1",), "in_flight": InFlight.DROP},
            [
                ("offload", ["grad", "optimizer"]),
                ("start_servers", RELEASE),
                ("update", RELEASE, InFlight.DROP),
                ("offload", ["weight"]),
            ],
            id="some start, the others are updated",
        ),
        pytest.param(
            {"decision": Decision.SLEEP, "offloads": ("optimizer",)},
            [("offload", ["optimizer"]), ("wake", RELEASE)],
            id="weights stay",
        ),
        pytest.param(
            {"decision": Decision.SLEEP, "offloads": ("weight",)},
            [("wake", RELEASE), ("offload", ["weight"])],
            id="only weights go, when they have been sent",
        ),
        pytest.param({"decision": Decision.RESTART, "offloads": ()}, [("start_servers", RELEASE)], id="nothing moves"),
    ],
)
def test_weights_leave_the_learner_s_device_after_the_engines_have_them_and_all_else_before(case, expected):
    assert calls_of("to_engines", RELEASE, **case) == expected


def test_whether_one_waits_for_the_other():
    taken = {decision: Turns(decision, InFlight.DRAIN, ()).are_taken for decision in Decision}
    assert taken == {Decision.KEEP: False, Decision.SLEEP: True, Decision.RESTART: True}
