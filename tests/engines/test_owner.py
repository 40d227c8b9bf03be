"""Each start of a server: a seed of its own, and always the same name for its model."""

import asyncio
import functools
import shlex
import sys
from pathlib import Path

import psutil
import pytest

from roost.engines.command import EngineKind, ServerSpec
from roost.engines.protocol import EngineError
from roost.engines.server_process import LocalOwner, ServerProcess, spec_of_start, start_ready
from tests.engines.scripted_server import bounded
from tests.limits import HANG_S

STAND_IN = Path(__file__).parent / "programs" / "stand_in.py"
STARTS = range(1, 4)


def seeds(**fields):
    return [spec_of_start(ServerSpec(EngineKind.VLLM, "m", **fields), number).seed for number in STARTS]


def test_without_a_seed_no_two_starts_draw_alike():
    drawn = seeds() + seeds()
    assert len(set(drawn)) == len(drawn)
    assert all(0 <= seed < 2**31 for seed in drawn)


def test_a_given_seed_gives_every_server_and_start_its_own_and_the_same_ones_again():
    drawn = [seeds(seed=seed, name=name) for seed in (0, 1) for name in ("a-0", "a-1")]
    assert drawn == [seeds(seed=seed, name=name) for seed in (0, 1) for name in ("a-0", "a-1")]
    assert len({seed for row in drawn for seed in row}) == 4 * len(STARTS)
    assert all(0 <= seed < 2**31 for row in drawn for seed in row)
    assert seeds(seed=0, name="a-0") == [613979916, 1032963766, 1251407392], "a run is repeated in another process"


@pytest.mark.parametrize(
    ("served_name", "expected"), [(None, "m"), ("policy", "policy")], ids=["the first model", "as it was called"]
)
@pytest.mark.parametrize("checkpoint", [None, "/checkpoints/7"])
def test_the_name_of_the_model_stays_whatever_checkpoint_is_served(served_name, expected, checkpoint):
    started = spec_of_start(ServerSpec(EngineKind.TORCH, "m", served_name=served_name), 2, checkpoint)
    assert (started.model, started.served_name) == (checkpoint or "m", expected)


@pytest.fixture
def owner(tmp_path):
    """Owns stand-ins, which behave as the words say."""

    def made(words=""):
        python = tmp_path / "python"  # runs the stand-in, whatever module it is told to run
        python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(STAND_IN))} "$@"\n')
        python.chmod(0o755)
        env = {"STAND_IN": words, "STAND_IN_FOLDER": str(tmp_path)}
        spec = ServerSpec(EngineKind.TORCH, "m", python=str(python), env=env, seed=5)
        return LocalOwner(spec, tmp_path / "logs", start_limit_s=HANG_S)

    return made


def test_servers_of_an_owner_are_started_so(owner, tmp_path):
    async def run():
        one = owner()
        await one.start()
        await one.start("/checkpoints/7")
        await one.stop()
        return one.spec

    spec = bounded(run())
    logs = [tmp_path / "logs" / f"engine-{number}.log" for number in (1, 2)]
    for number, model, log in zip((1, 2), ("m", "/checkpoints/7"), logs, strict=True):
        described = f"{log.read_text().splitlines()[0]} "
        assert f" --model {model} " in described
        assert " --served-model-name m " in described
        assert f" --seed {spec_of_start(spec, number).seed} " in described


def test_a_server_is_not_started_before_the_last_one_has_ended(owner, monkeypatch):
    """The watch may be stopping a hung server when an update starts it again."""
    were_there = []

    async def run():
        one = owner("stubborn-helper")
        await one.start()
        first = one.pid

        async def noted(*args):
            were_there.append(psutil.pid_exists(first))
            return await start_ready(*args)

        monkeypatch.setattr("roost.engines.server_process.start_ready", noted)
        monkeypatch.setattr(ServerProcess, "stop", functools.partialmethod(ServerProcess.stop, 1.0))
        stopping = asyncio.create_task(one.stop())
        await asyncio.sleep(0)
        await one.start()
        is_running = await one.is_running()
        await asyncio.gather(stopping, one.stop())
        return is_running

    assert bounded(run())
    assert were_there == [False]


def test_a_stop_ends_a_start_that_is_under_way(owner, tmp_path):
    async def run():
        one = owner("never-ready")
        starting = asyncio.create_task(one.start())
        while not (tmp_path / "server.pid").exists() or not (tmp_path / "server.pid").read_text():
            await asyncio.sleep(0.01)
        await one.stop()
        was_there = psutil.pid_exists(int((tmp_path / "server.pid").read_text()))
        with pytest.raises(EngineError, match="engine was stopped while it was starting"):
            await starting
        return was_there, await one.is_running()

    assert bounded(run()) == (False, False)
