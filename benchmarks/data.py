"""A Parquet file of many rows as training data: time to the first batch and peak memory; see docs/benchmarks.md."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import Annotated

import pyarrow as pa
import pyarrow.parquet as pq
import typer

from roost.rollout.data.scenario import PromptScenario
from roost.rollout.data.tables import CACHE_VARIABLE
from roost.rollout.episode import Split

GROUP = 100_000  # rows written at a time
BATCH = 128  # prompts of a step


def write_rows(path: Path, count: int) -> None:
    schema = pa.schema({"prompt": pa.string(), "answer": pa.int64()})
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, count, GROUP):
            numbers = range(start, min(start + GROUP, count))
            texts = [f"Problem {n}: what is {n % 997} + {n % 991}? Show your work." for n in numbers]
            writer.write_table(pa.table({"prompt": texts, "answer": [n % 997 + n % 991 for n in numbers]}, schema))


def first_batch(path: Path) -> tuple[float, float, float]:
    """Seconds to the tasks of the first step, and the peak memory in MB before and after."""
    before, began = _peak(), time.perf_counter()
    scenario = PromptScenario(None, path=str(path), answer="answer", batch_size=BATCH)
    order = scenario.order(Split.TRAIN, 0)
    for number in range(BATCH):
        scenario.task(Split.TRAIN, order.index(number))
    return time.perf_counter() - began, before, _peak()


def _peak() -> float:
    """Peak memory of this process, in MB; `ru_maxrss` would count that of its parent."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def main(rows: Annotated[int, typer.Option(help="Rows of the file.")] = 10_000_000) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.parquet"
        write_rows(path, rows)
        os.environ[CACHE_VARIABLE] = str(Path(folder) / "cache")
        print(f"{rows:,} rows, {path.stat().st_size / 1e6:.0f} MB of Parquet, first batch of {BATCH}")
        for label in ("first run, which converts the file", "later run"):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                seconds, before, peak = pool.apply(first_batch, (path,))
            print(f"{label}: {seconds:.1f} s, peak memory {peak:.0f} MB ({before:.0f} MB after imports)")


if __name__ == "__main__":
    typer.run(main)
