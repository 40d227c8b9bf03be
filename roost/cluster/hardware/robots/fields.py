"""Types of fields that several robots have."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

# Examples are published with names such as ROBOT_IP or LEFT_ROBOT_IP where each user's own value belongs.
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
