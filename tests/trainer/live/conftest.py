import pytest

pytest.importorskip("ray")
pytest.importorskip("torch")

from roost.rollout.arithmetic import write_arithmetic_model


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A transformer that knows nothing, small enough to learn a few sums in seconds."""
    return write_arithmetic_model(
        tmp_path_factory.mktemp("models") / "arithmetic", hidden_size=64, intermediate_size=128
    )


@pytest.fixture(autouse=True)
def own_machine(monkeypatch):
    """No cluster that somebody started before, and no accelerators but those that a job asks for."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("ROOST_FAKE_ACCELERATORS", "")
