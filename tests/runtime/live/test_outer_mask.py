"""Accelerators behind a batch system's mask. The vendor's tool is a script here; all else is as on a GPU machine."""

import os
import subprocess
import sys

import pytest

from roost import Cluster, PackedPlacementStrategy, Worker
from tests.limits import HANG_S

TOOL = """#!/bin/sh
for i in 0 1 2 3 4 5 6 7; do echo "$i, GPU-$i$i$i$i, NVIDIA H100, 81559"; done
"""


class Scout(Worker):
    def sees(self):
        return os.environ["CUDA_VISIBLE_DEVICES"], self.accelerators


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param("4,5", id="by index"),
        pytest.param("GPU-4444,GPU-5555", id="by UUID", marks=pytest.mark.long),
    ],
)
def test_workers_get_devices_out_of_the_mask(ray_nodes_for_a_test, tmp_path, mask):
    (tmp_path / "nvidia-smi").write_text(TOOL)
    (tmp_path / "nvidia-smi").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    ray_nodes_for_a_test.add(2, PATH=path, CUDA_VISIBLE_DEVICES=mask, ROOST_FAKE_ACCELERATORS="0")
    with Cluster(num_nodes=1, address=ray_nodes_for_a_test.address) as cluster:
        (node,) = cluster.inventory.nodes
        assert (node.accelerators, node.accelerator_type, node.accelerator_model) == (2, "NV_GPU", "NVIDIA H100")
        group = Scout.create_group().launch(cluster, name="scout", placement_strategy=PackedPlacementStrategy(0, 1))
        assert group.sees().wait() == [("4", ("4",)), ("5", ("5",))]


PROGRAM = """
from roost import Cluster, PackedPlacementStrategy
from tests.runtime.live.test_outer_mask import Scout

with Cluster(num_nodes=1, address="local") as cluster:
    group = Scout.create_group().launch(cluster, name="scout", placement_strategy=PackedPlacementStrategy(0, 1))
    print(group.sees().wait())
"""


@pytest.mark.long
def test_simulated_devices_beside_a_mask_that_hides_the_real_ones():
    """Ray itself counts no more devices than a mask lists. Workers see no real ones either."""
    variables = {"CUDA_VISIBLE_DEVICES": "", "ROOST_FAKE_ACCELERATORS": "2"}
    environ = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env={**environ, **variables}, capture_output=True, text=True, timeout=HANG_S)
    assert done.stdout == "[('-1,-1', ('0',)), ('-1,-1', ('1',))]\n", done.stderr
