"""Images: what their files name exists, is copied into the build, and has the releases that tests have."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
IMAGES = ["Dockerfile", "Dockerfile.cuda"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions(name):
    """Pairs of instruction and the rest of its line; continued lines are joined."""
    lines = [line for line in (DOCKER / name).read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]


def allowed():
    """Files and folders that .dockerignore lets into the build; all others are left out."""
    first, *others = (ROOT / ".dockerignore").read_text().split()
    assert first == "**"
    return {name.removeprefix("!") for name in others if name.startswith("!")}


@pytest.mark.parametrize("name", IMAGES)
def test_packages_come_from_constraints_and_known_extras(name):
    installs = [rest for word, rest in instructions(name) if word == "RUN" and "pip install" in rest]
    own = [rest for rest in installs if "'.[" in rest]
    assert len(own) == 1 and all("--constraint constraints.txt" in rest for rest in installs)
    extras = re.search(r"'\.\[([\w,]+)\]'", own[0])[1].split(",")
    assert set(extras) <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("name", IMAGES)
def test_the_command_is_installed_and_not_run_as_root(name):
    found = instructions(name)
    assert "roost" in PROJECT["scripts"]
    assert found[-1] == ("CMD", '["roost", "--help"]')
    assert dict(found)["USER"] == "1000"
    assert dict(found)["ENV"].startswith("PATH=/opt/roost/bin:")
    copied = [shlex.split(rest) for word, rest in found if word == "COPY" and rest.startswith("--from")]
    made = set(re.findall(r"-m venv (/opt/\w+)", (DOCKER / name).read_text()))
    assert {words[1] for words in copied} == {words[2] for words in copied} == made


@pytest.mark.parametrize("name", IMAGES)
def test_kuberay_finds_what_it_needs(name):
    """The job server, wget for probes, and commands in the PATH of login shells."""
    steps = [rest for word, rest in instructions(name) if word == "RUN"]
    (own,) = [shlex.split(rest) for rest in steps if "'.[" in rest]
    assert own[0].startswith("python") and "ray[default]" in own
    last = shlex.split(steps[-1])
    assert any(word.startswith("wget=") for word in last)
    links = last[last.index("ln") :]
    assert links[1:5] == ["-s", "/opt/roost/bin/ray", "/opt/roost/bin/roost", "/usr/local/bin/"]


def test_the_build_has_all_that_the_package_needs():
    there = allowed()
    assert {"constraints.txt", "pyproject.toml", "roost", PROJECT["readme"]} <= there
    assert all((ROOT / name).exists() for name in there)


def test_vllm_is_the_release_of_the_tests():
    wanted = re.search(r"^release=([\d.]+)$", (ROOT / "scripts" / "vllm_cpu_env.sh").read_text(), re.MULTILINE)[1]
    assert ("ARG", f"VLLM={wanted}") in instructions("Dockerfile.cuda")


def test_the_recipe_uses_what_the_image_has():
    recipe = (DOCKER / "roost.def").read_text()
    assert {"/opt/roost/bin", "/opt/vllm/bin"} <= set(re.findall(r"/opt/\w+/bin", recipe))
    assert "docker save roost:cuda -o roost-cuda.tar" in recipe and "\nFrom: roost-cuda.tar\n" in recipe
