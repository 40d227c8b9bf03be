"""Collocated, disaggregated or hybrid: what the devices of the components say about how they take turns."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]

# Components that take part in the loop of generating and learning. Rewards and references are looked at on the side
# and may share anybody's devices without changing how the others take turns.
LOOP_COMPONENTS = ("actor", "rollout", "inference", "env", "student_train", "student_infer")


class PlacementMode(StrEnum):
    """How the components of a job share devices."""

    COLLOCATED = "collocated"
    DISAGGREGATED = "disaggregated"
    HYBRID = "hybrid"
    AUTO = "auto"


def mode_of(held: Mapping[str, Bools]) -> PlacementMode:
    """The mode, from the accelerators of the cluster that each component holds (one flag for each accelerator).

    Collocated where all hold the same ones, disaggregated where no two share any, hybrid otherwise.

    >>> first, second, both = (np.array(flags) for flags in ([True, False], [False, True], [True, True]))
    >>> mode_of({"actor": both, "rollout": both}).value, mode_of({"actor": first, "rollout": second}).value
    ('collocated', 'disaggregated')
    >>> mode_of({"actor": both, "rollout": first}).value
    'hybrid'
    """
    sets = [flags for name, flags in held.items() if name in LOOP_COMPONENTS and flags.any()]
    sets = sets or [flags for flags in held.values() if flags.any()]
    if all(np.array_equal(sets[0], other) for other in sets[1:]):
        return PlacementMode.COLLOCATED
    return PlacementMode.DISAGGREGATED if np.sum(sets, axis=0).max() == 1 else PlacementMode.HYBRID
