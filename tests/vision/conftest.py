import pytest
import torch

from roost.rollout.colours import write_colour_model
from roost.vision.processor import FAMILIES


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Folder of a tiny model of each family that reads images."""
    return {family: write_colour_model(tmp_path_factory.mktemp(family), family) for family in FAMILIES}
