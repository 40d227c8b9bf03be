import pytest

from roost.engines.tiny_model import write_tiny_model
from roost.learner.forward import Head
from roost.learner.learner import Learner
from tests.learner.random_samples import CPU, settings_of
from tests.one_thread import one_thread  # noqa: F401


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Gives the folder of a tiny model of a family."""
    folder, written = tmp_path_factory.mktemp("models"), {}

    def model(family="qwen2", **sizes):
        key = (family, *sorted(sizes.items()))
        if key not in written:
            written[key] = write_tiny_model(folder / str(len(written)), family, **sizes)
        return str(written[key])

    return model


@pytest.fixture
def learner(models):
    """Gives learners of a tiny model, with settings changed as said."""

    def new(family="qwen2", head=Head.POLICY, **changes):
        return Learner(settings_of(models(family), **changes), CPU, head)

    return new
