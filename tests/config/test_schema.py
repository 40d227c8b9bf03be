"""The JSON Schema agrees with the planner on what people write."""

from functools import cache
from pathlib import Path

import jsonschema
import pytest
import yaml

from roost.config.job import TRAINED, Notation
from roost.config.schema import config_schema
from roost.config.train import SETTINGS
from tests.config.test_training_read import config_of, read
from tests.grid import grid
from tests.test_golden import rows

EXAMPLES = Path(__file__).parents[2] / "examples"


@cache
def validator(notation):
    schema = config_schema(notation)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def errors(config, notation=None):
    return [error.json_path for error in validator(notation).iter_errors(config)]


@pytest.mark.parametrize("file", sorted(EXAMPLES.rglob("[!m]*.yaml")), ids=lambda file: file.stem)
def test_examples_are_valid(file):
    assert errors(yaml.safe_load(file.read_text())) == []


@grid("case", rows("rlinf_clusters.jsonl"), ids=lambda case: case["file"])
def test_real_clusters_are_valid(case):
    assert errors({"cluster": case["cluster"]}, Notation.RLINF) == []


def cluster(**keys):
    return {"cluster": {"num_nodes": 1, "component_placement": {"actor": "all"}, **keys}}


@pytest.mark.parametrize(
    ("config", "path"),
    [
        pytest.param(cluster(num_node=1), "$.cluster", id="unknown-key"),
        pytest.param(cluster(num_nodes=0), "$.cluster.num_nodes", id="no-nodes"),
        pytest.param(cluster(component_placement={"actor": "x"}), "$.cluster.component_placement.actor", id="ranks"),
        pytest.param(cluster(node_groups=[{"label": "a"}]), "$.cluster.node_groups[0]", id="group-without-nodes"),
        pytest.param(
            cluster(node_groups=[{"label": "node", "node_ranks": 0}]), "$.cluster.node_groups[0].label", id="reserved"
        ),
        pytest.param({"actor_train": {"world_size": 0}}, "$.actor_train.world_size", id="no-workers"),
        pytest.param({"rl": {"gpu_allocation": {"learning_gpus": [0]}}}, "$.rl.gpu_allocation", id="no-inference-gpus"),
    ],
)
def test_mistakes_are_marked(config, path):
    assert errors(config) == [path]


@pytest.mark.parametrize("notation", TRAINED)
def test_every_setting_is_described(notation):
    described = config_schema(notation)["properties"]["train"]["properties"]
    assert list(described) == list(SETTINGS)
    for name, setting in SETTINGS.items():
        assert described[name]["description"] == setting.description


WRITTEN = (
    None,
    True,
    -2,
    -1,
    -0.5,
    0,
    1,
    0.5,
    1.5,
    1e13,
    9_000_000,
    "word",
    "2e-05",
    [],
    [1],
    ["q_proj"],
    {},
    {"_target_": "a.B"},
    {"_target_": 1},
)


def rejected(config, name):
    """Whether the reader rejects what is written for a setting, whatever else it says of it."""
    _, findings = read(config)
    found = [error.what for error in findings.errors if error.where.path[:2] == ("train", name)]
    return any("is missing" not in what for what in found)


@grid("name", SETTINGS)
def test_the_schema_rejects_what_the_reader_rejects(name):
    for value in (*WRITTEN, *map(str, SETTINGS[name].choices)):
        if name == "task" and value == {}:
            continue  # the reader says that it is missing
        config = config_of(**{name: value})
        assert (errors(config, Notation.RLINF) == []) == (not rejected(config, name)), value


@pytest.mark.parametrize("notation", TRAINED)
def test_an_unknown_setting_is_rejected(notation):
    config = config_of(notation, learning_rat=1)
    assert errors(config) == ["$.train"]
    assert rejected(config, "learning_rat")


@grid("name", SETTINGS)
def test_an_interpolation_is_allowed(name):
    assert errors(config_of(**{name: "${some.key}"})) == []


def test_an_interpreter_may_be_null():
    software = [{"node_ranks": 0, "python_interpreter_path": None}]
    groups = [{"label": "a", "node_ranks": 0, "env_configs": software}]
    cluster = {"num_nodes": 1, "component_placement": {"actor": "all"}, "node_groups": groups}
    assert errors({"cluster": cluster}) == []
