"""One measurement of one runtime and bare Ray, in a separate process.

`runtime_process.py roost|rlinf launch|accelerators|nodes-64|call|channel|send ROUNDS FILE` writes a JSON object a line
to FILE as soon as it has one, so that what was measured before a step hung is not lost.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WORKERS = 16
NODES = 8  # of a simulated cluster
ON_NODES = {f"nodes-{count}": count for count in (16, 64, 256)}
CALL_WARM_UP = 20
GONE_LIMIT = 180.0  # seconds for killed processes to exit
KB, MB = 1 << 10, 1 << 20
LOADS = (("numpy", KB, 500), ("numpy", MB, 100), ("numpy", 64 * MB, 8), ("torch", MB, 100), ("torch", 64 * MB, 8))
MODULES = {"roost": "runtime_roost", "rlinf": "runtime_peer_rlinf"}

Row = dict[str, Any]


def measure_launches(side: Any, bare: Any, rounds: int, workers: int, first: int) -> Iterator[Row]:
    """Seconds from the launch to the first answers of all workers; the order of the sides alternates."""
    for each in (side, bare):
        timed_launch(each, first)  # Ray's own first steps
    for turn in range(rounds):
        order = (side, bare) if turn % 2 == 0 else (bare, side)
        seconds = {each is side: timed_launch(each, workers) for each in order}
        yield {"seconds": seconds[True], "bare": seconds[False]}


def timed_launch(side: Any, count: int) -> float:
    side.begin()
    start = time.perf_counter()
    group = side.launch(count)
    processes = side.answer(group)
    seconds = time.perf_counter() - start
    if len(set(processes)) != count:
        raise RuntimeError(f"{count} workers were launched, and {len(set(processes))} answered")
    side.end(group)
    wait_until_gone(processes)
    return seconds


def wait_until_gone(processes: list[int]) -> None:
    end = time.monotonic() + GONE_LIMIT
    while any(Path(f"/proc/{pid}").exists() for pid in processes):
        if time.monotonic() > end:
            raise TimeoutError(f"killed processes are still there after {GONE_LIMIT:.0f} s")
        time.sleep(0.1)
    time.sleep(1)  # for Ray to clean up after them


def measure_calls(side: Any, bare: Any, rounds: int) -> Iterator[Row]:
    """Seconds of an empty call on all workers; the order of the sides alternates."""
    side.begin()
    groups = {True: side.launch(WORKERS), False: bare.launch(WORKERS)}
    callers = {True: side, False: bare}
    for turn in range(-CALL_WARM_UP, rounds):
        seconds = {}
        for is_side in (True, False) if turn % 2 == 0 else (False, True):
            start = time.perf_counter()
            callers[is_side].answer(groups[is_side])
            seconds[is_side] = time.perf_counter() - start
        if turn >= 0:
            yield {"seconds": seconds[True], "bare": seconds[False]}
    for is_side, group in groups.items():
        callers[is_side].end(group)


def measure_streams(pair: Any, queue: Any, rounds: int) -> Iterator[Row]:
    """Seconds per item for each load; a round runs all loads once, so that other load affects all of them."""
    from runtime_bare import Load

    for values in LOADS:
        load = Load(*values)
        pair.seconds(load), queue.seconds(load)
    for turn in range(rounds):
        for values in LOADS:
            load = Load(*values)
            order = (pair, queue) if turn % 2 == 0 else (queue, pair)
            seconds = {each is pair: each.seconds(load) / load.count for each in order}
            copy = pair.copy_seconds(load.nbytes)
            row = {"seconds": seconds[True], "bare": seconds[False], "copy": copy}
            yield {"kind": load.kind, "nbytes": load.nbytes, **row}


def rows(module: Any, bare: Any, what: str, rounds: int) -> Iterator[Row]:
    if what in ON_NODES:
        yield from measure_launches(module.Side(nodes=NODES), bare.Bare(), rounds, ON_NODES[what], NODES)
        return
    side = module.Side(on_accelerators=what == "accelerators")
    if what in ("launch", "accelerators"):
        yield from measure_launches(side, bare.Bare(), rounds, WORKERS, 2)
    elif what == "call":
        yield from measure_calls(side, bare.Bare(), rounds)
    else:
        yield from measure_streams(module.Pair(side, what), bare.BarePair(), rounds)


def main() -> None:
    name, what, rounds, file = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    if what == "accelerators":
        os.environ["ROOST_FAKE_ACCELERATORS"] = str(WORKERS)
    import runtime_bare

    started = runtime_bare.start_ray(WORKERS if what == "accelerators" else 0, NODES if what in ON_NODES else 1)
    module = importlib.import_module(MODULES[name])
    with Path(file).open("w") as out:
        for row in rows(module, runtime_bare, what, rounds):
            print(json.dumps(row), file=out, flush=True)
    import ray

    ray.shutdown()
    started.shutdown()


if __name__ == "__main__":
    main()
