"""The rooms of the house: imports go one way, and the pure rooms stay pure."""

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "roost"
PURE = {"config", "cluster", "placement"}
MACHINE = {"config", "procs", "net"}
CORE = PURE | {"view", "procs", "net", "trace", "transport", "runtime", "engines", "learner", "rollout"}
MAY_IMPORT = {
    "conf": set(),
    "config": set(),
    "cluster": {"config"},
    "placement": {"config", "cluster"},
    "view": PURE,
    "procs": {"config"},
    "net": {"config", "procs"},
    "trace": {"config"},
    "transport": MACHINE | {"placement", "trace"},
    "runtime": PURE | MACHINE | {"trace", "transport"},
    "doctor": PURE | {"procs", "runtime"},
    "schedulers": PURE | {"procs", "runtime"},
    "engines": PURE | MACHINE | {"trace", "transport", "runtime"},
    "torch_engine": {"config", "net", "engines"},
    "learner": PURE | MACHINE | {"trace", "transport", "runtime"},
    "sandbox": {"procs"},
    "rollout": PURE | MACHINE | {"trace", "transport", "runtime", "engines", "sandbox"},
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


FILES = [pytest.param(file, id=str(file.relative_to(ROOT))) for file in sorted(ROOT.rglob("*.py"))]


@pytest.mark.parametrize("file", FILES)
def test_imports_go_one_way(file):
    room = file.relative_to(ROOT).parts[0]
    if room not in MAY_IMPORT:
        assert file.name in ("__init__.py", "__main__.py"), f"{room} is a room this test does not know"
        return
    for module in imported(file):
        if module.startswith("roost."):
            other = module.split(".")[1]
            assert other == room or other in MAY_IMPORT[room], f"{room} may not import {module}"


@pytest.mark.parametrize("file", [case for case in FILES if case.values[0].relative_to(ROOT).parts[0] in PURE_ROOMS])
def test_pure_rooms_have_no_effects(file):
    assert not {module.split(".")[0] for module in imported(file)} & EFFECTS


@pytest.mark.parametrize("file", FILES)
def test_a_file_is_read_in_one_sitting(file):
    assert len(file.read_text().splitlines()) <= 600
