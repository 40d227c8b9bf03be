import uuid

import pytest

pytest.importorskip("ray")
pytest.importorskip("torch")

from roost.rollout.arithmetic import write_arithmetic_model
from tests.local_ray import shared_ray
from tests.trainer.live.jobs import ACCELERATORS, MARK

# Of a machine on which jobs of all these tests can run; memory counts only where a job says what it needs of it.
MACHINE = {"ROOST_FAKE_ACCELERATORS": str(ACCELERATORS), "ROOST_FAKE_MEMORY_GB": "80"}


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A transformer that knows nothing, small enough to learn a few sums in seconds."""
    return write_arithmetic_model(
        tmp_path_factory.mktemp("models") / "arithmetic", hidden_size=64, intermediate_size=128
    )


@pytest.fixture(scope="session")
def mark():
    """Value of the variable that all processes of these tests have."""
    return uuid.uuid4().hex


@pytest.fixture(scope="module", autouse=True)
def machine(mark):
    """One Ray for all runs, as starting it takes as long as a short run."""
    variables = {**MACHINE, MARK: mark}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        shared_ray(**variables)
        yield
