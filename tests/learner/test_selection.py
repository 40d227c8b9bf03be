"""Which samples are learnt from."""

import numpy as np
import pytest

from roost.config.train import AdvantageSettings
from roost.learner.advantages import select

ADVANTAGES = np.array([0.3, -0.3, 0.0, 0.01, -0.02])


@pytest.mark.parametrize(
    ("settings", "kept", "too_small", "not_positive"),
    [
        pytest.param({}, [0, 1, 2, 3, 4], 0, 0, id="all, even without advantage"),
        pytest.param({"min_abs_advantage": 0.02}, [0, 1, 4], 2, 0, id="as far as the least is far enough"),
        pytest.param({"positive_advantages_only": True}, [0, 3], 0, 3, id="zero is not positive"),
        pytest.param(
            {"min_abs_advantage": 0.1, "positive_advantages_only": True}, [0], 3, 1, id="each is counted for one reason"
        ),
        pytest.param({"min_abs_advantage": 1.0}, [], 5, 0, id="none is left"),
    ],
)
def test_selection(settings, kept, too_small, not_positive):
    chosen = select(ADVANTAGES, AdvantageSettings(**settings))
    assert chosen.kept.tolist() == kept
    assert (chosen.too_small, chosen.not_positive) == (too_small, not_positive)
    assert chosen.dropped == 5 - len(kept)


def test_nothing_to_select():
    chosen = select(np.array([]), AdvantageSettings(min_abs_advantage=0.1))
    assert (chosen.kept.tolist(), chosen.dropped) == ([], 0)
