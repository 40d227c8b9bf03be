"""A DOS-W1: two arms and the two lead arms that teach them, each behind a port of one host."""

from __future__ import annotations

from typing import ClassVar

from roost.cluster.hardware.robot import HardwareConfig
from roost.cluster.hardware.robots.fields import Port, Serials


class DOSW1Config(HardwareConfig):
    """One DOS-W1.

    >>> DOSW1Config(node_rank=1, robot_url="10.0.0.5").right_arm_port
    50053
    """

    kind: ClassVar[str] = "DOSW1"
    identifying_fields: ClassVar[tuple[str, ...]] = ("robot_url",)

    robot_url: str = "localhost"
    left_arm_port: Port = 50051
    right_arm_port: Port = 50053
    left_lead_port: Port = 50050
    right_lead_port: Port = 50052
    camera_serials: Serials | None = None
