"""A Turtle2, which has nothing to configure."""

from __future__ import annotations

from typing import ClassVar

from roost.cluster.hardware.robot import HardwareConfig


class Turtle2Config(HardwareConfig):
    """One Turtle2. It has no identifying field, so it is always declared, never made from variables.

    >>> Turtle2Config(node_rank=1).model
    'Turtle2'
    """

    kind: ClassVar[str] = "Turtle2"
