"""The code of the placement documents, as printed there but for the import, on simulated accelerators."""

import pytest

from roost import Cluster, FlexiblePlacementStrategy, NodePlacementStrategy, PackedPlacementStrategy, Worker


class MyWorker(Worker):
    def __init__(self, msg: str = "Hello, World!"):
        super().__init__()
        self._msg = msg

    def hello(self):
        return self._rank

    def available_gpus(self):
        import torch

        available_gpus = torch.cuda.device_count()
        gpu_ids = [torch.cuda.get_device_properties(i) for i in range(available_gpus)]
        assert len(gpu_ids) == available_gpus
        return available_gpus


@pytest.fixture(scope="module")
def cluster(local_ray):
    with Cluster(num_nodes=1) as cluster:
        yield cluster


def test_flexible(cluster):
    placement = FlexiblePlacementStrategy([[0, 1], [2], [3]])
    my_worker = MyWorker.create_group().launch(cluster=cluster, name="flexible_placement", placement_strategy=placement)
    assert my_worker.available_gpus().wait() == [2, 1, 1]
    my_worker.close()


def test_packed(cluster):
    placement = PackedPlacementStrategy(start_hardware_rank=0, end_hardware_rank=3)
    my_worker = MyWorker.create_group().launch(cluster=cluster, name="packed_placement", placement_strategy=placement)
    assert my_worker.available_gpus().wait() == [1, 1, 1, 1]

    placement_chunked = PackedPlacementStrategy(start_hardware_rank=0, end_hardware_rank=3, num_hardware_per_process=2)
    my_worker_chunked = MyWorker.create_group().launch(
        cluster=cluster,
        name="chunked_placement",
        placement_strategy=placement_chunked,
    )
    assert my_worker_chunked.available_gpus().wait() == [2, 2]

    placement_strided = PackedPlacementStrategy(
        start_hardware_rank=0, end_hardware_rank=3, stride=2, num_hardware_per_process=2
    )
    my_worker_strided = MyWorker.create_group().launch(
        cluster=cluster,
        name="strided_placement",
        placement_strategy=placement_strided,
    )
    assert my_worker_strided.available_gpus().wait() == [2, 2]
    for group in (my_worker, my_worker_chunked, my_worker_strided):
        group.close()


def test_node(cluster):
    placement = NodePlacementStrategy([0] * 4)
    my_worker = MyWorker.create_group().launch(cluster=cluster, name="node_placement", placement_strategy=placement)
    assert my_worker.hello().wait() == [0, 1, 2, 3]
    my_worker.close()
