"""Real Ray: one instance for all modules that leave it as they found it, and clusters on it."""

import contextlib
import os
import sys

import pytest

from tests.local_ray import end_ray, shared_ray

ray = pytest.importorskip("ray")

VARIABLES = ("RAY_ADDRESS", "ROOST_NODE_RANK", "RLINF_NODE_RANK", "ROOST_VISIBLE_DEVICES", "ROOST_FAKE_MEMORY_GB")


@pytest.fixture(scope="module", autouse=True)
def pickled_by_value(request):
    """Workers cannot import the tests, so the classes in them travel with their code."""
    module = request.module
    ray.cloudpickle.register_pickle_by_value(sys.modules[module.__name__])
    yield
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[module.__name__])


@pytest.fixture(scope="module")
def module_patch():
    with pytest.MonkeyPatch.context() as patch:
        for variable in VARIABLES:
            patch.delenv(variable, raising=False)
        yield patch


@pytest.fixture(scope="module")
def local_ray(module_patch):
    """A local Ray with 8 simulated accelerators."""
    shared_ray(module_patch)


@pytest.fixture(scope="module")
def shared_cluster(local_ray):
    """One cluster for tests that leave it as they found it."""
    from roost import Cluster

    with Cluster(num_nodes=1) as cluster:
        yield cluster


@pytest.fixture
def cluster(local_ray):
    """A cluster of its own, for tests that break something."""
    from roost import Cluster

    with Cluster(num_nodes=1) as cluster:
        yield cluster


class RayNodes:
    """Ray's own test cluster: several nodes on this machine, each with an environment of its own."""

    def __init__(self):
        from ray.cluster_utils import Cluster

        end_ray()
        self.nodes = []
        self._cluster = Cluster()

    def add(self, accelerators=0, rank=None, cpus=2, **environ):
        variables = {"ROOST_FAKE_ACCELERATORS": str(accelerators), **environ}
        if rank is not None:
            variables["ROOST_NODE_RANK"] = str(rank)
        # The test cluster starts a node as a child of this process, which inherits its environment.
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            node = self._started(num_cpus=cpus, num_gpus=accelerators, include_dashboard=False)
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
        self.nodes.append(node)
        return node

    def _started(self, **options):
        from roost.runtime.ray_connection import STARTS, RayExited, patient_start, without_services

        for _ in range(STARTS - 1):
            with contextlib.suppress(RayExited), without_services(), patient_start():
                return self._cluster.add_node(**options)
        with without_services(), patient_start():
            return self._cluster.add_node(**options)

    @property
    def address(self):
        return self._cluster.address

    def kill(self, node):
        self._cluster.remove_node(node, allow_graceful=False)

    def stop(self):
        ray.shutdown()
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def ray_nodes(module_patch):
    """An empty test cluster, to which a module adds the nodes it needs."""
    nodes = RayNodes()
    yield nodes
    nodes.stop()


@pytest.fixture
def doomed_nodes(module_patch):
    """Two nodes of a test cluster of its own, the second of which is to be killed."""
    nodes = RayNodes()
    nodes.add(0, rank=0)
    lost = nodes.add(0, rank=1)
    yield nodes, lost
    nodes.stop()


@pytest.fixture
def ray_nodes_for_a_test(module_patch):
    """A test cluster for one test."""
    nodes = RayNodes()
    yield nodes
    nodes.stop()
