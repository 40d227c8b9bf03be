"""When collecting may end although some episodes still run: stragglers are cut off."""

from __future__ import annotations

import math
from collections.abc import Sequence

from roost.config.training import CollectSettings


def needed_of_group(settings: CollectSettings) -> int:
    """How many finished episodes every group must have before anything is cut off.

    >>> needed_of_group(CollectSettings(group_size=6, group_fraction=0.75))  # half of an even number rounds down
    4
    """
    return max(1, round(settings.group_size * settings.group_fraction))


def may_end(finished: Sequence[int], possible: Sequence[int], settings: CollectSettings) -> bool:
    """Whether enough has finished, given how many episodes of each group of a step have, and how many still can.

    Nobody waits for what has failed: a group that cannot have what is needed of it needs what it can have.

    >>> settings = CollectSettings(groups=2, group_size=4, fraction=0.75, group_fraction=0.5)
    >>> may_end([4, 2], [4, 4], settings), may_end([4, 1], [4, 4], settings), may_end([3, 2], [4, 4], settings)
    (True, False, False)
    >>> may_end([4, 1], [4, 1], settings)
    True
    """
    needed = needed_of_group(settings)
    wanted = math.ceil(sum(possible) * settings.fraction)
    counted = sum(map(min, finished, possible))
    return counted >= wanted and all(count >= min(needed, most) for count, most in zip(finished, possible, strict=True))
