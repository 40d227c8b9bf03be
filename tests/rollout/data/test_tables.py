import csv
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from roost.rollout.data import tables
from roost.rollout.data.tables import DataError, ManyRows, first_rows, open_rows

ROWS = [
    {"prompt": f"What is {n}+{n}? ½", "answer": str(2 * n), "tag": "even" if n % 2 == 0 else "odd"} for n in range(25)
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(tables.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    return tmp_path / "cache"


def write_lines(path):
    path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")


def write_json(path):
    path.write_text(json.dumps(ROWS, indent=2, ensure_ascii=False))


def write_csv(path):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(ROWS[0]))
        writer.writeheader()
        writer.writerows(ROWS)


def write_parquet(path):
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=10)


def write_arrow(path):
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=10)


def write_stream(path):
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=10)


WRITERS = {
    "rows.jsonl": write_lines,
    "rows.json": write_json,
    "rows.csv": write_csv,
    "rows.parquet": write_parquet,
    "rows.arrow": write_arrow,
    "rows.ipc": write_stream,
}


def all_rows(path, **more):
    rows = ManyRows(open_rows(str(path), more.get("name"), more.get("split", "train")))
    return [rows.row(index) for index in range(len(rows))]


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_has_the_same_rows(name, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "BLOCK", 64)  # rows and characters lie across blocks
    monkeypatch.setattr(tables, "BATCH_ROWS", 4)
    WRITERS[name](tmp_path / name)
    assert all_rows(tmp_path / name) == ROWS
    (rows,) = open_rows(str(tmp_path / name), None, "train")
    assert rows.read(7, 23) == ROWS[7:23]
    assert rows.columns == ("prompt", "answer", "tag")


@pytest.mark.parametrize("text", ["[]", "", "  [ ]  "])
def test_a_json_file_may_be_empty(text, tmp_path):
    (tmp_path / "none.json").write_text(text)
    assert all_rows(tmp_path / "none.json") == []


@pytest.mark.parametrize("text", ['{"prompt": "a"}', '{"prompt": "a"}\n{"prompt": "b"}\n'])
def test_a_json_file_may_hold_objects(text, tmp_path):
    (tmp_path / "one.json").write_text(text)
    assert [row["prompt"] for row in all_rows(tmp_path / "one.json")] == ["a", "b"][: text.count("prompt")]


@pytest.mark.parametrize("text", ['[{"prompt": "a"}, {"prompt": }]', '[{"prompt": "a"}, ', '[{"prompt": "a"}, 5 5]'])
def test_broken_json_is_told_with_its_row(text, tmp_path):
    (tmp_path / "broken.json").write_text(text)
    with pytest.raises(DataError, match=r"row 1 of .*broken.json, line 1, is"):
        all_rows(tmp_path / "broken.json")


def test_a_folder_and_a_pattern_are_read_in_order(tmp_path):
    (tmp_path / "b").mkdir()
    write_lines(tmp_path / "b" / "two.jsonl")
    write_parquet(tmp_path / "a.parquet")
    (tmp_path / "README.md").write_text("no data")
    assert all_rows(tmp_path) == [*ROWS, *ROWS]
    assert all_rows(tmp_path / "**" / "*.jsonl") == ROWS


def test_a_parquet_file_is_converted_once(tmp_path, cache):
    write_parquet(tmp_path / "rows.parquet")
    all_rows(tmp_path / "rows.parquet")
    (made,) = cache.iterdir()
    before = made.stat().st_mtime_ns
    all_rows(tmp_path / "rows.parquet")
    assert [file.stat().st_mtime_ns for file in cache.iterdir()] == [before]
    pq.write_table(pa.Table.from_pylist(ROWS[:3]), tmp_path / "rows.parquet")
    assert all_rows(tmp_path / "rows.parquet") == ROWS[:3]


def test_columns_are_known_without_a_conversion(tmp_path, cache):
    for name, write in WRITERS.items():
        write(tmp_path / name)
        found = first_rows(str(tmp_path / name), 2)
        assert found.columns == ("prompt", "answer", "tag")
        assert [str(row["answer"]) for row in found.rows] == [str(row["answer"]) for row in ROWS[:2]]
    assert not cache.exists()


def test_the_first_rows_are_of_the_first_file_that_has_any(tmp_path):
    (tmp_path / "a.jsonl").touch()
    assert first_rows(str(tmp_path), 2).rows == []
    write_lines(tmp_path / "b.jsonl")
    assert first_rows(str(tmp_path), 2).rows == ROWS[:2]


def test_the_first_rows_of_a_json_file_are_read_without_the_rest(tmp_path):
    (tmp_path / "a.json").write_text('[{"prompt": 1}, {"prompt": 2}, broken]')
    assert [row["prompt"] for row in first_rows(str(tmp_path / "a.json"), 2).rows] == [1, 2]


@pytest.mark.parametrize(
    ("name", "text", "described"),
    [
        ("a.jsonl", '{"prompt": 1}\n\n{"prompt" 2}\n', "row 1 of .*a.jsonl, line 3, is not JSON; .*column 11"),
        ("a.jsonl", '{"prompt": 1}\n[2]\n', "row 1 of .*a.jsonl, line 2, is a list"),
        ("a.json", '[\n{"prompt": 1},\n{"prompt":\n 2 3}]', "row 1 of .*a.json, line 4, is not JSON"),
        ("a.json", '[{"prompt": 1},\n2]', "row 1 of .*a.json, line 2, is a int"),
    ],
)
def test_a_broken_row_is_told_with_its_line(name, text, described, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=described):
        all_rows(tmp_path / name)
    with pytest.raises(DataError, match=described):
        first_rows(str(tmp_path / name), 9)


def test_the_names_of_a_folder_begin_with_the_most_similar(tmp_path):
    for name in ("a.txt", *(f"b{n}.txt" for n in range(9)), "train.jsonl"):
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=r"has train.jsonl, a.txt, .*, and 3 more"):
        open_rows(str(tmp_path / "trian.jsonl"), None, "train")


def test_a_missing_file_is_told_with_what_is_there(tmp_path):
    write_lines(tmp_path / "train.jsonl")
    with pytest.raises(DataError, match=r"there is no .*trian.jsonl; .* has train.jsonl"):
        open_rows(str(tmp_path / "trian.jsonl"), None, "train")


def test_a_damaged_parquet_file_is_told(tmp_path):
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 no parquet")
    with pytest.raises(DataError, match=r"rows.parquet cannot be read"):
        open_rows(str(tmp_path / "rows.parquet"), None, "train")


def test_a_long_cell_of_a_csv_file_is_read(tmp_path):
    (tmp_path / "a.csv").write_text(f"prompt,answer\n{'x' * 140_000},007\n")
    assert first_rows(str(tmp_path / "a.csv"), 2).rows == all_rows(tmp_path / "a.csv")
    assert all_rows(tmp_path / "a.csv") == [{"prompt": "x" * 140_000, "answer": "007"}]


@pytest.mark.parametrize("text", ["prompt,answer\ncafé,1\n", "café,answer\na,1\n"])
def test_a_csv_file_that_is_not_utf8_is_told(text, tmp_path):
    (tmp_path / "a.csv").write_bytes(text.encode("latin-1"))
    for read in (all_rows, lambda path: first_rows(str(path), 2)):
        with pytest.raises(DataError, match=r"a.csv cannot be read; .*(UTF8|utf-8)") as described:
            read(tmp_path / "a.csv")
        assert described.value.code == "RST-T068"


def test_a_saved_data_set_is_read_by_split(tmp_path):
    from datasets import Dataset, DatasetDict

    saved = DatasetDict({"train": Dataset.from_list(ROWS[:20]), "test": Dataset.from_list(ROWS[20:])})
    saved.save_to_disk(tmp_path / "saved")
    assert all_rows(tmp_path / "saved", split="test") == ROWS[20:]
    with pytest.raises(DataError, match=r"no split dev; it has train, test; write split: train"):
        all_rows(tmp_path / "saved", split="dev")


def test_a_hub_that_cannot_be_reached_is_asked_once(monkeypatch):
    import datasets
    from huggingface_hub import constants

    for module in (datasets.config, constants):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DataError, match=r"cannot be loaded from the hub; .* the hub cannot be reached: .*refused"):
        open_rows("nobody/nothing", None, "train")
    assert not datasets.config.HF_HUB_OFFLINE and not constants.HF_HUB_OFFLINE, "other names may be reached"
    assert os.environ["HF_HUB_OFFLINE"] == "0"


def test_a_hub_name_without_access_says_what_to_do(monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match=r"cannot be loaded from the hub; .*; write the path of local files instead"):
        open_rows("nobody/nothing", None, "train")
