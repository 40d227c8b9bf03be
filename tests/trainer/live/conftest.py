import uuid

import pytest

pytest.importorskip("ray")
pytest.importorskip("torch")

import ray

from roost.rollout.arithmetic import write_arithmetic_model
from roost.runtime.ray_connection import connect
from tests.trainer.live.jobs import ACCELERATORS, MARK

# Of a machine on which jobs of all these tests can run; memory counts only where a job says what it needs of it.
MACHINE = {"ROOST_FAKE_ACCELERATORS": str(ACCELERATORS), "ROOST_FAKE_MEMORY_GB": "80"}


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A transformer that knows nothing, small enough to learn a few sums in seconds."""
    return write_arithmetic_model(
        tmp_path_factory.mktemp("models") / "arithmetic", hidden_size=64, intermediate_size=128
    )


@pytest.fixture(scope="module", autouse=True)
def machine():
    """One Ray for all runs of a module, as starting it takes as long as a short run; all it starts bears a mark."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        for name, value in {**MACHINE, MARK: uuid.uuid4().hex}.items():
            patch.setenv(name, value)
        connect("local")
        yield
        ray.shutdown()
