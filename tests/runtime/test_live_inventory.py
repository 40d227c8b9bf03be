"""A live cluster with a config: the machines that it describes, whether or not it places anything there."""

import pytest
from omegaconf import OmegaConf

pytest.importorskip("ray")

from roost.config.findings import Findings
from roost.runtime.nodes import read_cluster_config

SECTION = {"num_nodes": 3, "node_groups": [{"label": "arms", "node_ranks": "1-2"}]}
PLACED = {**SECTION, "component_placement": {"actor": "all"}}
OMEGA = OmegaConf.create({"count": 3, "cluster": {**SECTION, "num_nodes": "${count}"}})


def read(config):
    findings = Findings()
    job = read_cluster_config(config, findings)
    return job, findings


@pytest.mark.parametrize(
    ("config", "components"),
    [
        pytest.param(SECTION, [], id="section"),
        pytest.param({"cluster": SECTION}, [], id="config without placements"),
        pytest.param({"cluster": {**SECTION, "component_placement": {}}}, [], id="config with no placement"),
        pytest.param(PLACED, ["actor"], id="section with placements"),
        pytest.param({"cluster": PLACED, "runner": {}}, ["actor"], id="config with placements"),
        pytest.param(OMEGA, [], id="OmegaConf"),
        pytest.param(OMEGA.cluster, [], id="section of OmegaConf that refers to what is outside of it"),
    ],
)
def test_machines_of_a_config(config, components):
    job, findings = read(config)
    assert findings.found == ()
    assert job.num_nodes == 3
    assert [group.label for group in job.node_groups] == ["arms"]
    assert [component.name for component in job.components] == components


def test_machines_of_a_file(tmp_path):
    file = tmp_path / "machines.yaml"
    file.write_text("cluster: {num_nodes: 3, node_groups: [{label: arms, node_ranks: 1-2}]}\n")
    job, findings = read(file)
    assert findings.found == ()
    assert (job.num_nodes, job.components) == (3, ())


def test_no_config():
    assert read(None)[0] is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param({"num_node": 3}, "is not a key Roost knows", id="misspelt key"),
        pytest.param({**SECTION, "component_placement": {"actor": "x"}}, "'x'", id="placement that cannot be read"),
    ],
)
def test_mistakes_are_found_all_the_same(config, expected):
    _, findings = read(config)
    assert expected in findings.errors[0].what


def test_what_is_no_config():
    with pytest.raises(TypeError, match="cluster_cfg is 3"):
        read_cluster_config(3, Findings())
