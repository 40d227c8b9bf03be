"""What a server is started with each time: a seed of its own, and always the same name for its model."""

import shlex
import sys
from pathlib import Path

import pytest

from roost.engines.owner import LocalOwner, spec_of_start
from roost.engines.spec import EngineKind, ServerSpec
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


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_servers_of_an_owner_are_started_so(tmp_path):
    python = tmp_path / "python"  # runs the stand-in, whatever module it is told to run
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(STAND_IN))} "$@"\n')
    python.chmod(0o755)
    env = {"STAND_IN": "", "STAND_IN_FOLDER": str(tmp_path)}
    spec = ServerSpec(EngineKind.TORCH, "m", python=str(python), env=env, seed=5)
    owner = LocalOwner(spec, tmp_path / "logs", start_limit_s=HANG_S)
    await owner.start()
    await owner.start("/checkpoints/7")
    await owner.stop()
    logs = [tmp_path / "logs" / f"engine-{number}.log" for number in (1, 2)]
    for number, model, log in zip((1, 2), ("m", "/checkpoints/7"), logs, strict=True):
        told = f"{log.read_text().splitlines()[0]} "
        assert f" --model {model} " in told
        assert " --served-model-name m " in told
        assert f" --seed {spec_of_start(spec, number).seed} " in told
