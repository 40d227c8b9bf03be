"""Real Ray: one instance for all modules."""

import sys

import pytest

from tests.local_ray import shared_ray

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module", autouse=True)
def pickled_by_value(request):
    """Workers cannot import the tests, so the classes in them travel with their code."""
    module = sys.modules[request.module.__name__]
    ray.cloudpickle.register_pickle_by_value(module)
    yield
    ray.cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture(scope="module")
def cluster():
    from roost import Cluster

    with pytest.MonkeyPatch.context() as patch:
        shared_ray(patch)
        with Cluster(num_nodes=1) as cluster:
            yield cluster
