"""Declared hardware, such as robots: what a user writes about one item, checked, and filled in from a node's variables.

An accelerator is detected; a robot is declared, in `cluster.node_groups[].hardware.configs` or by variables of the node
it is connected to. Nothing here talks to a robot: whether it answers is for the live cluster to find out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from roost.cluster.hardware.problem import Problem, explain

__all__ = ["HardwareConfig", "NodeRank", "Problem", "fill_from_environment", "parse_config"]

NodeRank = Annotated[int, Field(strict=True, ge=0)]


class HardwareConfig(BaseModel):
    """One item of declared hardware. A kind of hardware is a class derived from this one.

    `kind` is the `type` that users write. `identifying_fields` are those whose variables say how many items a node has
    when none is declared.

    >>> class Arm(HardwareConfig):
    ...     kind = "Arm"
    ...     port: str | None = None
    >>> Arm(node_rank=3, port="/dev/ttyUSB0").model
    'Arm'
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: ClassVar[str] = ""
    identifying_fields: ClassVar[tuple[str, ...]] = ()

    node_rank: NodeRank = Field(description="the rank of the node that the item is connected to")

    @property
    def model(self) -> str:
        """Name shown to users: the kind, unless a kind has variants."""
        return self.kind


Config = TypeVar("Config", bound=HardwareConfig)


def parse_config(kind_class: type[Config], mapping: object) -> Config | list[Problem]:
    """Check what a user wrote about one item; return it, or everything that is wrong with it.

    >>> from roost.cluster.hardware.robots.kinds import FrankaConfig
    >>> parse_config(FrankaConfig, {"node_rank": 1, "robot_ip": "10.10.10.1"}).robot_ip
    '10.10.10.1'
    >>> for problem in parse_config(FrankaConfig, {"robot_ip": "ROBOT_IP", "gripper": "franka"}):
    ...     print(problem)
    node_rank: is missing; add node_rank, the rank of the node that the item is connected to
    robot_ip: 'ROBOT_IP' is a placeholder; write the robot's IP address, such as 10.10.10.1
    gripper: is not a field of Franka; did you mean gripper_type?
    """
    if not isinstance(mapping, Mapping):
        return [
            Problem(
                "RST-H042", (), f"{mapping!r} is not a mapping of fields", "write `node_rank: 0` and the other fields"
            )
        ]
    try:
        return kind_class.model_validate(dict(mapping))
    except ValidationError as error:
        return [explain(kind_class.kind, kind_class, found) for found in error.errors(include_url=False)]


def fill_from_environment(
    kind_class: type[Config], configs_of_node: Sequence[Config], node_rank: int, environ: Mapping[str, str]
) -> list[Config]:
    """Return the items of one node, with what was left out taken from the node's environment variables.

    A field is read from the variable of its name in capitals. Declared items get only their unset (None) fields filled.
    Where a node has no declared items they are made, as many as the variables of the identifying fields list, and
    then a variable also wins over a default. One item takes the whole value, so that a list keeps its commas;
    for several, a value has one part each. Node ranks are never read from variables.

    >>> from roost.cluster.hardware.robots.kinds import FrankaConfig
    >>> robots = fill_from_environment(FrankaConfig, [], 16, {"ROBOT_IP": "10.10.10.1,10.10.10.2"})
    >>> [(robot.node_rank, robot.robot_ip) for robot in robots]
    [(16, '10.10.10.1'), (16, '10.10.10.2')]
    """
    strangers = sorted({config.node_rank for config in configs_of_node} - {node_rank})
    if strangers:
        raise ValueError(f"configs of nodes {strangers} were given for node {node_rank}; give only that node's own")
    is_detected = not configs_of_node
    count = _count_items(kind_class, environ) if is_detected else len(configs_of_node)
    items: list[dict[str, Any]] = [config.model_dump() for config in configs_of_node] or [
        {"node_rank": node_rank} for _ in range(count)
    ]
    for name, field in kind_class.model_fields.items():
        unset = [i for i, item in enumerate(items) if is_detected or item[name] is None]
        text = environ.get(name.upper())
        if text is None or not unset or f"_{name}".endswith("_node_rank"):
            continue
        wanted = _plain(field.annotation)
        # A blank value usually means unset; only for a list does it mean an empty list.
        if not text.strip() and not _is_list(wanted):
            continue
        parts = [text] if count == 1 else _parts(kind_class.kind, name, text, count)
        for i in unset:
            items[i][name] = _converted(name, parts[i].strip(), wanted)
    return [_checked(kind_class, item) for item in items]


def _count_items(kind_class: type[HardwareConfig], environ: Mapping[str, str]) -> int:
    values = {name.upper(): environ.get(name.upper(), "") for name in kind_class.identifying_fields}
    counts = {name: len(text.split(",")) for name, text in values.items() if text.strip()}
    if len(set(counts.values())) > 1:
        written = " but ".join(f"{name} lists {count}" for name, count in counts.items())
        raise ValueError(f"{written}; give every {kind_class.kind} on this node one value in each, separated by commas")
    return next(iter(counts.values()), 0)


def _parts(kind: str, name: str, text: str, count: int) -> list[str]:
    parts = text.split(",")
    if len(parts) != count:
        raise ValueError(
            f"{name.upper()} has {len(parts)} values ({text!r}) for {count} items of {kind} on this node; "
            f"give {count} values separated by commas, in the order of the items"
        )
    return parts


def _plain(annotation: Any) -> Any:
    """Return the type inside `Annotated[...]` and `... | None`."""
    if get_origin(annotation) is Annotated:
        return _plain(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        inner = [choice for choice in get_args(annotation) if choice is not NoneType]
        return _plain(inner[0]) if len(inner) == 1 else str
    return annotation


def _is_list(wanted: Any) -> bool:
    return get_origin(wanted) in (tuple, list) or wanted in (tuple, list)


def _converted(name: str, text: str, wanted: Any) -> Any:
    """Turn a variable's text into the type of its field."""
    if _is_list(wanted):
        each = _plain((*get_args(wanted), str)[0])
        return [_converted(name, part.strip(), each) for part in text.split(",") if part.strip()]
    if wanted is bool:
        if text.lower() in ("1", "true", "yes", "on"):
            return True
        if text.lower() in ("0", "false", "no", "off"):
            return False
        raise ValueError(f"{name.upper()} is {text!r}, neither yes nor no; write 1 or 0")
    if wanted in (int, float):
        try:
            return wanted(text)
        except ValueError:
            raise ValueError(f"{name.upper()} is {text!r}, not a number; write a number") from None
    return text


def _checked(kind_class: type[Config], item: Mapping[str, Any]) -> Config:
    result = parse_config(kind_class, item)
    if isinstance(result, list):
        # Declared items were checked when they were written, so what is wrong came from a variable.
        found = ", and ".join(f"{str(problem.field[0]).upper()}: {problem.what}; {problem.fix}" for problem in result)
        raise ValueError(f"environment of node {item['node_rank']}: {found}")
    return result
