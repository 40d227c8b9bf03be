"""A Franka arm with its gripper and cameras."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from roost.cluster.hardware.robot import HardwareConfig, NodeRank
from roost.cluster.hardware.robots.fields import CameraType, FrankaGripper, IpAddress, Serials


class FrankaConfig(HardwareConfig):
    """One Franka arm. Its controller runs beside the environment unless `controller_node_rank` names another node.

    >>> FrankaConfig(node_rank=16, robot_ip="10.10.10.1").camera_type
    'realsense'
    """

    kind: ClassVar[str] = "Franka"
    identifying_fields: ClassVar[tuple[str, ...]] = ("robot_ip",)

    robot_ip: IpAddress | None = None
    camera_serials: Serials | None = None
    camera_type: CameraType = "realsense"
    gripper_type: FrankaGripper = "franka"
    gripper_connection: str | None = None
    controller_node_rank: NodeRank | None = None
    # Skips the checks on the live cluster: that the arm answers and its cameras are connected.
    disable_validate: bool = Field(default=False, strict=True)
