"""A fixture for folders whose tests compute with tiny models."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Sums of threads may be added up in any order, and these models are too small for several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
