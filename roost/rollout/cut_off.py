"""When collecting may end although some episodes still run: stragglers are cut off."""

from __future__ import annotations

import math
from collections.abc import Sequence

from roost.spec.training import CollectSettings


def needed_of_group(settings: CollectSettings) -> int:
    """How many finished episodes every group must have before anything is cut off.

    >>> needed_of_group(CollectSettings(group_size=6, group_fraction=0.75))  # half of an even number rounds down
    4
    """
    return max(1, round(settings.group_size * settings.group_fraction))


def may_end(finished: Sequence[int], settings: CollectSettings) -> bool:
    """Whether enough has finished, given how many episodes of each group of a step have.

    >>> settings = CollectSettings(groups=2, group_size=4, fraction=0.75, group_fraction=0.5)
    >>> may_end([4, 2], settings), may_end([4, 1], settings), may_end([3, 2], settings)
    (True, False, False)
    """
    wanted = math.ceil(len(finished) * settings.group_size * settings.fraction)
    counted = sum(min(count, settings.group_size) for count in finished)
    return counted >= wanted and all(count >= needed_of_group(settings) for count in finished)
