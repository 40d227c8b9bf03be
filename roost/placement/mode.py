"""Collocated, disaggregated or hybrid: what the devices of the components say about how they take turns."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from roost.cluster.resources import ACCELERATOR
from roost.placement.table import PlacementTable

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


def held_accelerators(table: PlacementTable) -> Bools:
    """For each accelerator of the cluster, whether one of the processes holds it; robots and nodes are none."""
    held = np.zeros(table.inventory.num_accelerators, np.bool_)
    if ACCELERATOR in table.kinds:
        is_accelerator = np.array([kind == ACCELERATOR for kind in table.kinds])[table.groups]
        counted = np.repeat(is_accelerator, np.diff(table.offsets))
        held[(table.inventory.first_accelerators[table.device_nodes] + table.device_ranks)[counted]] = True
    return held
