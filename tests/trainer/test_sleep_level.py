"""Memory that engines keep when they sleep for a learner."""

import pytest

from roost.config.train import AdapterSettings, LearnerSettings, TrainSettings
from roost.trainer.setup import sleep_level_of

LEVELS = [
    pytest.param(None, 2, id="all-weights-come-anew"),
    pytest.param(AdapterSettings(), 1, id="only-an-adapter-comes"),
]


@pytest.mark.parametrize(("adapter", "level"), LEVELS)
def test_weights_are_kept_where_only_an_adapter_comes(adapter, level):
    assert sleep_level_of(TrainSettings(LearnerSettings("model", adapter=adapter), name="")) == level
