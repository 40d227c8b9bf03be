"""Environment of each process of a component before it starts."""

from dataclasses import replace

import pytest

import roost
from roost.cluster.inventory import Inventory

pytest.importorskip("ray")

from roost.runtime.launch import LiveNodes, planned_processes, process_setups
from roost.runtime.membership import NodeReport
from roost.runtime.worker import LaunchOptions
from roost.transport.context import DaemonContact, SimulatedDevices

MACHINES = {"nodes": [{"accelerators": 8, "accelerator_type": "SIMULATED"}]}
REPORT = NodeReport(
    node_id="f00d",
    address="10.0.0.1",
    hostname="alpha",
    accelerator_type="SIMULATED",
    physical_ids=tuple("abcdefgh"),
    memory_gb=24.0,
)


def described(options, placement="2-3", isolate=True, report=REPORT):
    """The setups of a component on a node of which the job holds accelerators 2 to 4."""
    job = {"cluster": {"num_nodes": 1, "component_placement": {"actor": placement}}}
    component = roost.plan(job, MACHINES, isolate_accelerator=isolate)["actor"]
    live = LiveNodes([report], [DaemonContact(0, "alpha", 1, "")], ["logs"], Inventory.from_dict(MACHINES))
    held = {(0, device): device for device in (2, 3, 4)}
    where = planned_processes("actor", component, options, [0])
    return process_setups(where, component, options, [0], live, held, ("127.0.0.1", 2950))


@pytest.mark.parametrize(
    ("planned", "asked", "expected"),
    [
        pytest.param(True, None, ["c", "d"], id="as planned: its own"),
        pytest.param(False, None, ["c,d,e", "c,d,e"], id="as planned: all that the job holds"),
        pytest.param(True, False, ["c,d,e", "c,d,e"], id="asked for all"),
        pytest.param(False, True, ["c", "d"], id="asked for its own"),
    ],
)
def test_what_a_launch_says_of_visible_accelerators_holds_before_the_plan(planned, asked, expected):
    setups = described(LaunchOptions(isolate_accelerator=asked), isolate=planned)
    assert [setup.env["ROOST_VISIBLE_DEVICES"] for setup in setups] == expected
    assert {setup.placement.isolate_accelerator for setup in setups} == {planned if asked is None else asked}


@pytest.mark.parametrize(
    ("kind", "asked", "expected"),
    [
        pytest.param("SIMULATED", True, SimulatedDevices(1, 24.0), id="its own"),
        pytest.param("SIMULATED", False, SimulatedDevices(3, 24.0), id="all that the job holds"),
        pytest.param("NV_GPU", True, None, id="real ones are shown by their driver"),
    ],
)
def test_simulated_devices_are_shown_as_far_as_they_are_visible(kind, asked, expected):
    setups = described(LaunchOptions(isolate_accelerator=asked), report=replace(REPORT, accelerator_type=kind))
    assert [setup.simulated for setup in setups] == [expected] * 2
