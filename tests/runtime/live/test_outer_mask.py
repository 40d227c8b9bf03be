"""Accelerators behind a batch system's mask. The vendor's tool is a script here; all else is as on a GPU machine."""

import os

import pytest

from roost import Cluster, PackedPlacementStrategy, Worker

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
