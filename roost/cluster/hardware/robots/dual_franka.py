"""Two Franka arms that act as one robot, with wrist cameras and a camera that sees both."""

from __future__ import annotations

from typing import ClassVar

from roost.cluster.hardware.robot import HardwareConfig, NodeRank
from roost.cluster.hardware.robots.fields import CameraType, FrankaGripper, IpAddress, Serials


class DualFrankaConfig(HardwareConfig):
    """One pair of Franka arms. A camera without a type of its own has the common `camera_type`.

    >>> DualFrankaConfig(node_rank=0, left_robot_ip="10.0.0.1", right_robot_ip="10.0.0.2").left_gripper_type
    'franka'
    """

    kind: ClassVar[str] = "DualFranka"
    identifying_fields: ClassVar[tuple[str, ...]] = ("left_robot_ip", "right_robot_ip")

    left_robot_ip: IpAddress | None = None
    right_robot_ip: IpAddress | None = None
    left_camera_serials: Serials | None = None
    right_camera_serials: Serials | None = None
    base_camera_serials: Serials | None = None
    camera_type: CameraType = "realsense"
    base_camera_type: CameraType | None = None
    left_camera_type: CameraType | None = None
    right_camera_type: CameraType | None = None
    left_gripper_type: FrankaGripper = "franka"
    right_gripper_type: FrankaGripper = "franka"
    left_gripper_connection: str | None = None
    right_gripper_connection: str | None = None
    left_controller_node_rank: NodeRank | None = None
    right_controller_node_rank: NodeRank | None = None
