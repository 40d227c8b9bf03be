"""Declared hardware: what may be written about a robot, what is said of a mistake, and what variables fill in."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from roost.cluster.hardware import HardwareConfig, Problem, fill_from_environment, parse_config
from roost.cluster.hardware.robots.kinds import DOSW1Config, DualFrankaConfig, FrankaConfig, GimArmConfig, Turtle2Config


@pytest.mark.parametrize(
    ("kind", "defaults", "model"),
    [
        pytest.param(
            FrankaConfig,
            {
                "robot_ip": None,
                "camera_serials": None,
                "camera_type": "realsense",
                "gripper_type": "franka",
                "gripper_connection": None,
                "controller_node_rank": None,
                "disable_validate": False,
            },
            "Franka",
            id="Franka",
        ),
        pytest.param(
            DualFrankaConfig,
            {
                "left_robot_ip": None,
                "right_robot_ip": None,
                "left_camera_serials": None,
                "right_camera_serials": None,
                "base_camera_serials": None,
                "camera_type": "realsense",
                "base_camera_type": None,
                "left_camera_type": None,
                "right_camera_type": None,
                "left_gripper_type": "franka",
                "right_gripper_type": "franka",
                "left_gripper_connection": None,
                "right_gripper_connection": None,
                "left_controller_node_rank": None,
                "right_controller_node_rank": None,
            },
            "DualFranka",
            id="DualFranka",
        ),
        pytest.param(
            GimArmConfig,
            {
                "can_interface": "can0",
                "arm_variant": "gim_arm_xl",
                "camera_serials": None,
                "camera_type": "realsense",
                "enable_gripper": True,
                "gripper_type": "parallel",
                "controller_node_rank": None,
                "disable_validate": False,
            },
            "GimArm_gim_arm_xl",
            id="GimArm",
        ),
        pytest.param(
            DOSW1Config,
            {
                "robot_url": "localhost",
                "left_arm_port": 50051,
                "right_arm_port": 50053,
                "left_lead_port": 50050,
                "right_lead_port": 50052,
                "camera_serials": None,
            },
            "DOSW1",
            id="DOSW1",
        ),
        pytest.param(Turtle2Config, {}, "Turtle2", id="Turtle2"),
    ],
)
def test_only_the_node_is_required(kind: type[HardwareConfig], defaults: dict[str, Any], model: str) -> None:
    config = parse_config(kind, {"node_rank": 2})
    assert isinstance(config, kind)
    assert config.model_dump() == {"node_rank": 2, **defaults}
    assert config.model == model


@pytest.mark.parametrize(
    ("kind", "written"),
    [
        pytest.param(FrankaConfig, {"robot_ip": "10.10.10.1", "camera_serials": ["322142001230"]}, id="Franka"),
        pytest.param(FrankaConfig, {"robot_ip": "fe80::1"}, id="IPv6"),
        pytest.param(FrankaConfig, {"camera_type": "ZED", "gripper_type": "Robotiq"}, id="choices in any case"),
        pytest.param(FrankaConfig, {"gripper_connection": "/dev/ttyUSB0", "controller_node_rank": 1}, id="controller"),
        pytest.param(FrankaConfig, {"camera_serials": []}, id="no cameras"),
        pytest.param(FrankaConfig, {"robot_ip": None, "disable_validate": True}, id="explicit null"),
        pytest.param(
            DualFrankaConfig,
            {
                "base_camera_serials": ["BASE_CAMERA_SERIAL"],
                "base_camera_type": "realsense",
                "left_camera_type": "lumos",
                "left_gripper_type": "robotiq",
                "left_gripper_connection": "LEFT_GRIPPER_CONNECTION",
                "left_controller_node_rank": 0,
                "right_controller_node_rank": 1,
            },
            id="DualFranka as published",
        ),
        pytest.param(GimArmConfig, {"arm_variant": "gim_arm", "enable_gripper": False}, id="GimArm"),
        pytest.param(DOSW1Config, {"robot_url": "127.0.0.1", "left_arm_port": 50061}, id="DOSW1"),
    ],
)
def test_accepted(kind: type[HardwareConfig], written: dict[str, Any]) -> None:
    assert isinstance(parse_config(kind, {"node_rank": 0, **written}), kind)


WRITE_IP = "write the robot's IP address, such as 10.10.10.1"
ON_NODE = {"node_rank": 0}
FRANKA, DUAL, GIM, DOSW1, TURTLE = FrankaConfig, DualFrankaConfig, GimArmConfig, DOSW1Config, Turtle2Config

MISTAKES: list[tuple[str, type[HardwareConfig], Any, str]] = [
    ("missing", FRANKA, {}, "node_rank: is missing; add node_rank, the rank of the node that the item is connected to"),
    ("misspelt", FRANKA, {**ON_NODE, "robot_id": "1"}, "robot_id: is not a field of Franka; did you mean robot_ip?"),
    ("unknown", TURTLE, {**ON_NODE, "x": 1}, "x: is not a field of Turtle2; remove it; the fields are node_rank"),
    ("placeholder", FRANKA, {**ON_NODE, "robot_ip": "ROBOT_IP"}, f"robot_ip: 'ROBOT_IP' is a placeholder; {WRITE_IP}"),
    (
        "placeholder <>",
        DUAL,
        {**ON_NODE, "left_robot_ip": "<IP>"},
        f"left_robot_ip: '<IP>' is a placeholder; {WRITE_IP}",
    ),
    (
        "not an IP",
        FRANKA,
        {**ON_NODE, "robot_ip": "10.0.0.256"},
        f"robot_ip: '10.0.0.256' is not an IP address; {WRITE_IP}",
    ),
    ("host name", FRANKA, {**ON_NODE, "robot_ip": "arm.lan"}, f"robot_ip: 'arm.lan' is not an IP address; {WRITE_IP}"),
    ("rank in quotes", FRANKA, {"node_rank": "1"}, "node_rank: '1' is not a whole number; write 1 without quotes"),
    ("rank true", FRANKA, {"node_rank": True}, "node_rank: True is not a whole number; write a whole number"),
    ("rank 1.0", FRANKA, {"node_rank": 1.0}, "node_rank: 1.0 is not a whole number; write a whole number"),
    ("rank -1", FRANKA, {"node_rank": -1}, "node_rank: -1 is not allowed; it should be greater than or equal to 0"),
    (
        "number",
        FRANKA,
        {**ON_NODE, "camera_serials": ["a", 12]},
        'camera_serials[1]: 12 is not text; put it in quotes: "12"',
    ),
    (
        "list",
        FRANKA,
        {**ON_NODE, "camera_serials": "a"},
        "camera_serials: 'a' is not a list; write it as a list: [\"a\"]",
    ),
    (
        "choice",
        FRANKA,
        {**ON_NODE, "camera_type": "kinect"},
        "camera_type: 'kinect' is not one of the choices; write 'realsense', 'zed' or 'lumos'",
    ),
    ("flag", GIM, {**ON_NODE, "enable_gripper": "y"}, "enable_gripper: 'y' is not true or false; write true or false"),
    (
        "variant",
        GIM,
        {**ON_NODE, "arm_variant": "xl"},
        "arm_variant: 'xl' is not one of the choices; write 'gim_arm_xl' or 'gim_arm'",
    ),
    (
        "port",
        DOSW1,
        {**ON_NODE, "left_arm_port": 70000},
        "left_arm_port: 70000 is not allowed; it should be less than or equal to 65535",
    ),
    ("not a mapping", FRANKA, [1], "[1] is not a mapping of fields; write `node_rank: 0` and the other fields"),
]


@pytest.mark.parametrize(("name", "kind", "written", "reported"), MISTAKES, ids=[case[0] for case in MISTAKES])
def test_mistakes(name: str, kind: type[HardwareConfig], written: Any, reported: str) -> None:
    problems = parse_config(kind, written)
    assert isinstance(problems, list)
    assert list(map(str, problems)) == [reported]


def test_all_mistakes_are_found_at_once() -> None:
    problems = parse_config(FrankaConfig, {"robot_ip": "ROBOT_IP", "gripper": "franka", "camera_serials": ["a", 1]})
    assert isinstance(problems, list)
    assert all(isinstance(problem, Problem) for problem in problems)
    assert [problem.field for problem in problems] == [
        ("node_rank",),
        ("robot_ip",),
        ("camera_serials", 1),
        ("gripper",),
    ]


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        FrankaConfig(node_rank=0).robot_ip = "10.0.0.1"


IP1, IP2, IP9 = "10.0.0.1", "10.0.0.2", "10.0.0.9"
BOTH = f"{IP1},{IP2}"

FILLED: list[tuple[str, type[HardwareConfig], list[dict[str, Any]], dict[str, str], list[dict[str, Any]]]] = [
    ("unset is filled", FRANKA, [{}], {"ROBOT_IP": IP1}, [{"robot_ip": IP1}]),
    ("what is written stays", FRANKA, [{"robot_ip": IP9}], {"ROBOT_IP": IP1}, [{"robot_ip": IP9}]),
    ("a default is not unset", FRANKA, [{}], {"CAMERA_TYPE": "zed"}, [{}]),
    ("one item: a list keeps its commas", FRANKA, [{}], {"CAMERA_SERIALS": "a, b"}, [{"camera_serials": ("a", "b")}]),
    (
        "two items: a part each",
        FRANKA,
        [{}, {}],
        {"ROBOT_IP": f"{IP1} , {IP2}"},
        [{"robot_ip": IP1}, {"robot_ip": IP2}],
    ),
    (
        "two items: a list of one each",
        FRANKA,
        [{}, {}],
        {"CAMERA_SERIALS": "a,b"},
        [{"camera_serials": ("a",)}, {"camera_serials": ("b",)}],
    ),
    (
        "parts belong to positions",
        FRANKA,
        [{"robot_ip": IP9}, {}],
        {"ROBOT_IP": BOTH},
        [{"robot_ip": IP9}, {"robot_ip": IP2}],
    ),
    (
        "a variable nobody needs is not counted",
        FRANKA,
        [{"robot_ip": IP9}] * 2,
        {"ROBOT_IP": IP1},
        [{"robot_ip": IP9}] * 2,
    ),
    ("ranks are never filled", FRANKA, [{}], {"NODE_RANK": "3", "CONTROLLER_NODE_RANK": "3"}, [{}]),
    ("blank is unset", FRANKA, [{}], {"ROBOT_IP": ""}, [{}]),
    ("a blank list is empty", FRANKA, [{}], {"CAMERA_SERIALS": ""}, [{"camera_serials": ()}]),
    ("nothing declared, nothing made", FRANKA, [], {}, []),
    ("only identifying fields make items", FRANKA, [], {"CAMERA_TYPE": "zed"}, []),
    ("blank makes none", FRANKA, [], {"ROBOT_IP": " "}, []),
    (
        "made: variables win over defaults",
        FRANKA,
        [],
        {"ROBOT_IP": IP1, "CAMERA_TYPE": "zed", "CAMERA_SERIALS": "a,b"},
        [{"robot_ip": IP1, "camera_type": "zed", "camera_serials": ("a", "b")}],
    ),
    (
        "made: two",
        FRANKA,
        [],
        {"ROBOT_IP": BOTH, "DISABLE_VALIDATE": "1,off"},
        [{"robot_ip": IP1, "disable_validate": True}, {"robot_ip": IP2}],
    ),
    (
        "made: a pair",
        DUAL,
        [],
        {"LEFT_ROBOT_IP": IP1, "RIGHT_ROBOT_IP": IP2},
        [{"left_robot_ip": IP1, "right_robot_ip": IP2}],
    ),
    ("made: one arm is enough", DUAL, [], {"RIGHT_ROBOT_IP": IP2}, [{"right_robot_ip": IP2}]),
    (
        "made: GimArm",
        GIM,
        [],
        {"CAN_INTERFACE": "can1,can2", "ENABLE_GRIPPER": "Yes,NO"},
        [{"can_interface": "can1"}, {"can_interface": "can2", "enable_gripper": False}],
    ),
    (
        "made: DOSW1",
        DOSW1,
        [],
        {"ROBOT_URL": IP1, "LEFT_ARM_PORT": "50061"},
        [{"robot_url": IP1, "left_arm_port": 50061}],
    ),
    ("Turtle2 is never made", TURTLE, [], {"ROBOT_IP": IP1}, []),
]


@pytest.mark.parametrize(
    ("name", "kind", "declared", "variables", "expected"), FILLED, ids=[case[0] for case in FILLED]
)
def test_fill(
    name: str,
    kind: type[HardwareConfig],
    declared: list[dict[str, Any]],
    variables: dict[str, str],
    expected: list[dict[str, Any]],
) -> None:
    configs = [kind(node_rank=16, **fields) for fields in declared]
    assert fill_from_environment(kind, configs, 16, variables) == [kind(node_rank=16, **fields) for fields in expected]


NOT_FILLED: list[tuple[str, type[HardwareConfig], int, dict[str, str], str]] = [
    (
        "too few",
        FRANKA,
        3,
        {"ROBOT_IP": BOTH},
        f"ROBOT_IP has 2 values ('{BOTH}') for 3 items of Franka on this node; give 3 values separated by commas",
    ),
    (
        "too few for made items",
        FRANKA,
        0,
        {"ROBOT_IP": BOTH, "CAMERA_TYPE": "zed"},
        "CAMERA_TYPE has 1 values ('zed') for 2",
    ),
    (
        "arms disagree",
        DUAL,
        0,
        {"LEFT_ROBOT_IP": BOTH, "RIGHT_ROBOT_IP": IP9},
        "LEFT_ROBOT_IP lists 2 but RIGHT_ROBOT_IP lists 1; give every DualFranka on this node one value in each",
    ),
    ("comma at the end", FRANKA, 0, {"ROBOT_IP": f"{IP1},"}, f"ROBOT_IP: '' is not an IP address; {WRITE_IP}"),
    (
        "placeholder",
        FRANKA,
        1,
        {"ROBOT_IP": "ROBOT_IP"},
        "environment of node 7: ROBOT_IP: 'ROBOT_IP' is a placeholder",
    ),
    (
        "not a number",
        DOSW1,
        0,
        {"ROBOT_URL": "x", "LEFT_ARM_PORT": "http"},
        "LEFT_ARM_PORT is 'http', not a number; write",
    ),
    (
        "not a flag",
        GIM,
        0,
        {"CAN_INTERFACE": "can1", "ENABLE_GRIPPER": "?"},
        "is '?', neither yes nor no; write 1 or 0",
    ),
]


@pytest.mark.parametrize(
    ("name", "kind", "declared", "variables", "reported"), NOT_FILLED, ids=[case[0] for case in NOT_FILLED]
)
def test_fill_mistakes(
    name: str, kind: type[HardwareConfig], declared: int, variables: dict[str, str], reported: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(reported)):
        fill_from_environment(kind, [kind(node_rank=7)] * declared, 7, variables)


def test_fill_takes_the_items_of_one_node() -> None:
    with pytest.raises(ValueError, match=r"configs of nodes \[1\] were given for node 0"):
        fill_from_environment(FrankaConfig, [FrankaConfig(node_rank=1)], 0, {})


ADDRESSES = st.none() | st.ip_addresses(v=4).map(str)


@given(st.lists(ADDRESSES, min_size=1, max_size=5), st.integers(0, 2**20), st.data())
def test_filling_keeps_what_is_written_and_filling_again_changes_nothing(
    written: list[str | None], node_rank: int, data: st.DataObject
) -> None:
    size = len(written)
    variable = ",".join(data.draw(st.lists(st.ip_addresses(v=4).map(str), min_size=size, max_size=size)))
    configs = [FrankaConfig(node_rank=node_rank, robot_ip=address) for address in written]
    filled = fill_from_environment(FrankaConfig, configs, node_rank, {"ROBOT_IP": variable})
    pairs = zip(written, variable.split(","), strict=True)
    assert [config.robot_ip for config in filled] == [address or offered for address, offered in pairs]
    assert fill_from_environment(FrankaConfig, filled, node_rank, {"ROBOT_IP": variable}) == filled


@given(
    st.sampled_from([FRANKA, DUAL, GIM, DOSW1, TURTLE]),
    st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text(), max_size=4),
)
def test_anything_written_is_a_config_or_a_list_of_problems(
    kind: type[HardwareConfig], written: dict[str, Any]
) -> None:
    result = parse_config(kind, written)
    if isinstance(result, list):
        assert result and all(problem.what and problem.fix and str(problem) for problem in result)
    else:
        assert parse_config(kind, result.model_dump()) == result
