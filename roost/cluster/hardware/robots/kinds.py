"""Robots that come with Roost."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from roost.cluster.hardware.robot import HardwareConfig, NodeRank

# Published examples have placeholders such as ROBOT_IP or LEFT_ROBOT_IP.
PLACEHOLDER = re.compile(r"<?[A-Z][A-Z0-9]*(_[A-Z0-9]+)*>?")


def check_ip(text: str) -> str:
    """Return the text if it is an IP address.

    >>> check_ip("192.168.0.7")
    '192.168.0.7'
    """
    try:
        ipaddress.ip_address(text)
    except ValueError:
        what = "{text} is a placeholder" if PLACEHOLDER.fullmatch(text) else "{text} is not an IP address"
        context = {"text": repr(text), "fix": "write the robot's IP address, such as 10.10.10.1"}
        raise PydanticCustomError("ip_address", what, context) from None
    return text


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


IpAddress = Annotated[str, AfterValidator(check_ip)]
Port = Annotated[int, Field(strict=True, ge=1, le=65535)]
Serials = tuple[str, ...]
CameraType = Annotated[Literal["realsense", "zed", "lumos"], BeforeValidator(_lower)]
FrankaGripper = Annotated[Literal["franka", "robotiq"], BeforeValidator(_lower)]


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


class DualFrankaConfig(HardwareConfig):
    """One pair of Franka arms. Cameras without a type have the common `camera_type`.

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


class GimArmConfig(HardwareConfig):
    """One GimArm; its variant is part of the model name.

    >>> GimArmConfig(node_rank=0).model
    'GimArm_gim_arm_xl'
    """

    kind: ClassVar[str] = "GimArm"
    identifying_fields: ClassVar[tuple[str, ...]] = ("can_interface",)

    can_interface: str = "can0"
    arm_variant: Literal["gim_arm_xl", "gim_arm"] = "gim_arm_xl"
    camera_serials: Serials | None = None
    camera_type: CameraType = "realsense"
    enable_gripper: bool = Field(default=True, strict=True)
    gripper_type: str = "parallel"
    controller_node_rank: NodeRank | None = None
    # Skips the check on the live cluster that the CAN interface exists.
    disable_validate: bool = Field(default=False, strict=True)

    @property
    def model(self) -> str:
        return f"{self.kind}_{self.arm_variant}"


class Turtle2Config(HardwareConfig):
    """One Turtle2. It has no identifying field, so it must be declared and is not created from variables.

    >>> Turtle2Config(node_rank=1).model
    'Turtle2'
    """

    kind: ClassVar[str] = "Turtle2"
