import pytest

from roost.rollout.colours import write_colour_model
from roost.vision.processor import FAMILIES
from tests.learner.conftest import models  # noqa: F401
from tests.one_thread import one_thread  # noqa: F401


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Folder of a tiny model of each family that reads images."""
    return {family: write_colour_model(tmp_path_factory.mktemp(family), family) for family in FAMILIES}
