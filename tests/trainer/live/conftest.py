import pytest

pytest.importorskip("ray")
pytest.importorskip("torch")

from roost.rollout.arithmetic import write_arithmetic_model
from tests.local_ray import shared_ray


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A transformer that knows nothing, small enough to learn a few sums in seconds."""
    return write_arithmetic_model(
        tmp_path_factory.mktemp("models") / "arithmetic", hidden_size=64, intermediate_size=128
    )


@pytest.fixture(scope="module", autouse=True)
def machine():
    """One Ray for all runs, as starting it takes as long as a short run."""
    with pytest.MonkeyPatch.context() as patch:
        shared_ray(patch)
        yield
