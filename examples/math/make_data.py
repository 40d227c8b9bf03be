"""Write the data of the example: word problems with their answers, and a few worked ones for the warm start.

python examples/math/make_data.py [FOLDER]

Every sum of two numbers up to 5 has eight rows in train, and two with other words in held_out.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

NAMES = ("Ann", "Ben", "Eva", "Leo", "Mia", "Tom")
THINGS = ("apples", "books", "cards", "coins", "pens", "shells")
VERBS = ("buys", "finds", "gets")
LARGEST = 5
TRAINED, HELD_OUT = 8, 2  # rows of each sum
WORKED = 72  # rows of sft

Row = dict[str, Any]


def problem(first: int, second: int, draw: random.Random) -> Row:
    text = f"{draw.choice(NAMES)} has {first} {draw.choice(THINGS)} and {draw.choice(VERBS)} {second}. How many?"
    return {"messages": [{"role": "user", "content": text}], "ground_truth": str(first + second), "tag": "sum"}


def data_sets(seed: int = 0) -> dict[str, list[Row]]:
    """Rows of each file; no problem of held_out is in another file."""
    draw = random.Random(seed)
    train: list[Row] = []
    held_out: list[Row] = []
    for first in range(LARGEST + 1):
        for second in range(LARGEST + 1):
            rows: dict[str, Row] = {}
            while len(rows) < TRAINED + HELD_OUT:
                row = problem(first, second, draw)
                rows[row["messages"][0]["content"]] = row
            train += list(rows.values())[:TRAINED]
            held_out += list(rows.values())[TRAINED:]
    draw.shuffle(train)
    return {"train": train, "held_out": held_out, "sft": [worked(row) for row in draw.sample(train, WORKED)]}


def worked(row: Row) -> Row:
    """The row with the assistant's answer, as the rules of RLinf and ROLL want it: after a blank line, in a box."""
    reply = {"role": "assistant", "content": f"Answer:\n\n\\boxed{{{row['ground_truth']}}}"}
    return {"messages": [*row["messages"], reply]}


if __name__ == "__main__":
    import pyarrow as pa
    import pyarrow.parquet as pq

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent / "data", metavar="FOLDER")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in data_sets().items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
        print(f"{name}: {len(rows)} rows")
