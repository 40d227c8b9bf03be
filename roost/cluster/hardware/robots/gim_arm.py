"""A GimArm on a CAN bus."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from roost.cluster.hardware.robot import HardwareConfig, NodeRank
from roost.cluster.hardware.robots.fields import CameraType, Serials


class GimArmConfig(HardwareConfig):
    """One GimArm; its variant is part of the model that people are shown.

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
