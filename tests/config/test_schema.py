"""The JSON Schema agrees with the planner on what people write."""

from pathlib import Path

import jsonschema
import pytest
import yaml

from roost.config.job import Notation
from roost.config.schema import config_schema
from tests.test_golden import rows

EXAMPLES = Path(__file__).parents[2] / "examples"


def errors(config, notation=None):
    schema = config_schema(notation)
    jsonschema.Draft202012Validator.check_schema(schema)
    return [error.json_path for error in jsonschema.Draft202012Validator(schema).iter_errors(config)]


@pytest.mark.parametrize("file", sorted(EXAMPLES.rglob("[!m]*.yaml")), ids=lambda file: file.stem)
def test_examples_are_valid(file):
    assert errors(yaml.safe_load(file.read_text())) == []


@pytest.mark.parametrize("case", rows("rlinf_clusters.jsonl"), ids=lambda case: case["file"])
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
