"""The rooms of the house: imports go one way, and the pure rooms stay pure."""

import ast
import functools
from pathlib import Path

import pytest

import roost
import roost.engines

ROOT = Path(__file__).parents[1] / "roost"
PURE = {"config", "cluster", "placement"}
MACHINE = {"config", "procs", "net"}
CORE = PURE | {"view", "procs", "net", "trace", "transport", "runtime", "engines", "learner", "rollout", "vision"}
MAY_IMPORT = {
    "conf": set(),
    "config": set(),
    "cluster": {"config"},
    "placement": {"config", "cluster"},
    "view": PURE,
    "procs": {"config"},
    "net": {"config", "procs"},
    "trace": {"config"},
    "vision": {"config"},
    "transport": MACHINE | {"placement", "trace"},
    "runtime": PURE | MACHINE | {"trace", "transport"},
    "doctor": PURE | {"procs", "runtime"},
    "schedulers": PURE | {"procs", "runtime"},
    "engines": PURE | MACHINE | {"trace", "transport", "runtime", "vision"},
    "torch_engine": {"config", "net", "engines", "vision"},
    "learner": PURE | MACHINE | {"trace", "transport", "runtime", "vision"},
    "sandbox": {"procs"},
    "rollout": PURE | MACHINE | {"trace", "transport", "runtime", "engines", "sandbox", "vision"},
    "app_world": {"config", "procs", "net", "rollout", "sandbox"},
    "trainer": CORE | {"doctor"},
    "cli": CORE | {"doctor", "schedulers", "trainer"},
}
NETWORK = {"requests", "httpx", "aiohttp", "socket"}
EFFECTS = {"ray", "torch", "transformers", "vllm", "sglang", "time", "asyncio"} | NETWORK
PURE_ROOMS = ("config", "cluster", "placement", "view")


@functools.cache
def imported(file):
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
    return found


ROOMS = sorted(folder for folder in ROOT.iterdir() if folder.is_dir() and folder.name != "__pycache__")
BY_ROOM = pytest.mark.parametrize("room", [pytest.param(room, id=room.name) for room in ROOMS])


@BY_ROOM
def test_imports_go_one_way(room):
    assert room.name in MAY_IMPORT, f"{room.name} is a room this test does not know"
    allowed = {room.name, *MAY_IMPORT[room.name]}
    found = [
        (file, name) for file in sorted(room.rglob("*.py")) for name in imported(file) if name.startswith("roost.")
    ]
    assert [(str(file), name) for file, name in found if name.split(".")[1] not in allowed] == []


@pytest.mark.parametrize("room", PURE_ROOMS)
def test_pure_rooms_have_no_effects(room):
    found = [(file, name) for file in sorted((ROOT / room).rglob("*.py")) for name in imported(file)]
    assert [(str(file), name) for file, name in found if name.split(".")[0] in EFFECTS] == []


@BY_ROOM
def test_a_module_binds_each_constant_once(room):
    twice = []
    for file in sorted(room.rglob("*.py")):
        bound = [name for node in ast.parse(file.read_text()).body for name in constants(node)]
        twice += [(str(file), name) for name in sorted(set(bound)) if bound.count(name) > 1]
    assert twice == []


def constants(node):
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]


@BY_ROOM
def test_a_file_is_read_in_one_sitting(room):
    sizes = {str(file): len(file.read_text().splitlines()) for file in room.rglob("*.py")}
    assert {file: size for file, size in sizes.items() if size > 600} == {}


@pytest.mark.parametrize("package", [roost, roost.engines], ids=lambda package: package.__name__)
def test_names_that_are_imported_on_demand_are_there(package):
    assert [name for name in package.__all__ if not hasattr(package, name)] == []
