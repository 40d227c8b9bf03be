"""Whether a model is a local path or a hub name."""

import os
from contextlib import chdir

import pytest

from roost.config.job import ModelLocation, model_location, resolve_model

HUB, MISSING, FOLDER = ModelLocation.HUB, ModelLocation.MISSING, ModelLocation.FOLDER


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("Qwen/Qwen2.5-0.5B", HUB),
        ("gpt2", HUB),
        ("runs/arm-model", HUB),
        ("/data/models/Qwen", MISSING),
        ("./model", MISSING),
        ("../model", MISSING),
        ("~/model", MISSING),
        ("~nobody-of-this-name/model", MISSING),
        ("models/Qwen/0.5B", MISSING),
        ("models/", MISSING),
        ("my model", MISSING),
        ("a\0b", MISSING),
        ("x" * 5000, MISSING),
        ("", FOLDER),
    ],
)
@pytest.mark.parametrize("has_runs", [False, True], ids=["alone", "beside-runs"])
def test_only_the_path_itself_counts(name, place, has_runs, tmp_path, monkeypatch):
    """A folder `runs`, which the path is in but which is not the model, makes no difference."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    if has_runs:
        (tmp_path / "runs").mkdir()
    with chdir(tmp_path):
        assert model_location(name) is place


def test_a_folder_that_is_here(tmp_path):
    (tmp_path / "runs" / "model").mkdir(parents=True)
    with chdir(tmp_path):
        assert model_location("runs/model") is FOLDER
        assert resolve_model("runs/model") == os.path.join(os.getcwd(), "runs/model")  # noqa: PTH109, PTH118
        assert resolve_model("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"
