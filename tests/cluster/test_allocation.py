"""Ranks and sizes of nodes from the variables of every environment that starts them."""

import re

import pytest
from hypothesis import given, strategies as st

from roost.cluster.allocation import AllocationError, Fact, expand_hosts, node_rank, read_allocation

SLURM = {"SLURM_JOB_ID": "71", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_JOB_NUM_NODES": "4", "SLURM_NODEID": "2"}
HETEROGENEOUS = {
    "SLURM_JOB_ID": "71",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST": "gpu[1-2]",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "gpu[1-2]",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "cpu7",
    "SLURMD_NODENAME": "cpu7",
    "SLURM_NODEID": "0",
}
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.9",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_TASK_ID": "sky-1",
}
DSTACK = {
    "DSTACK_NODE_RANK": "1",
    "DSTACK_NODES_NUM": "2",
    "DSTACK_NODES_IPS": "10.0.0.4\n10.0.0.9",
    "DSTACK_MASTER_NODE_IP": "10.0.0.4",
    "DSTACK_GPUS_PER_NODE": "4",
}
TORCHRUN = {"NODE_RANK": "1", "NNODES": "2", "MASTER_ADDR": "node-a", "MASTER_PORT": "6379"}
VOLCANO = {"VC_TASK_INDEX": "1", "VC_WORKER_NUM": "2", "VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job"}
KUBERNETES = {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "train-1"}
LEPTON = {
    "LEPTON_JOB_WORKER_INDEX": "1",
    "LEPTON_JOB_TOTAL_WORKERS": "2",
    "LEPTON_JOB_SERVICE_PREFIX": "j",
    "LEPTON_SUBDOMAIN": "j-svc",
    "LEPTON_RESOURCE_ACCELERATOR_NUM": "8",
}
PAI = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "m", "MASTER_PORT": "2", "NPROC_PER_NODE": "8"}


@pytest.mark.parametrize(
    ("environ", "nodes", "expected"),
    [
        pytest.param({}, None, (0, 1, None, ()), id="nothing: this machine"),
        pytest.param(SLURM, None, (2, 4, "n1", ("n1", "n2", "n3", "n4")), id="Slurm"),
        pytest.param(
            SLURM | {"SLURM_STEP_NODELIST": "n[3-4]", "SLURMD_NODENAME": "n4", "SLURM_NODEID": "1"},
            None,
            (1, 2, "n3", ("n3", "n4")),
            id="a step on a part of a Slurm job",
        ),
        pytest.param(HETEROGENEOUS, None, (2, 3, "gpu1", ("gpu1", "gpu2", "cpu7")), id="heterogeneous Slurm job"),
        pytest.param(
            {
                "SLURM_JOB_ID": "71",
                "SLURM_HET_SIZE": "2",
                "SLURM_JOB_NODELIST_PACK_GROUP_0": "g1",
                "SLURM_JOB_NODELIST_PACK_GROUP_1": "c[1-3]",
                "SLURM_STEP_NODELIST": "c[1-2],g1",
                "SLURMD_NODENAME": "c2",
            },
            None,
            (2, 3, "g1", ("g1", "c1", "c2")),
            id="heterogeneous step, older names",
        ),
        pytest.param(SKYPILOT, None, (1, 2, "10.0.0.4", ("10.0.0.4", "10.0.0.9")), id="SkyPilot"),
        pytest.param(DSTACK, None, (1, 2, "10.0.0.4", ("10.0.0.4", "10.0.0.9")), id="dstack"),
        pytest.param(TORCHRUN, None, (1, 2, "node-a", ()), id="torchrun"),
        pytest.param(
            {"PET_NODE_RANK": "1", "PET_NNODES": "2:2", "PET_MASTER_ADDR": "a"}, None, (1, 2, "a", ()), id="PET_"
        ),
        pytest.param(
            VOLCANO, None, (1, 2, "job-worker-0.job", ("job-worker-0.job", "job-worker-1.job")), id="Volcano, ModelArts"
        ),
        pytest.param(KUBERNETES, 4, (1, 4, "train-0.svc.cluster.local", ()), id="Kubernetes"),
        pytest.param(KUBERNETES | {"MASTER_ADDR": "h"}, 4, (1, 4, "h", ()), id="Kubernetes with a head"),
        pytest.param(LEPTON, None, (1, 2, "j-0.j-svc", ()), id="Lepton"),
        pytest.param(PAI, None, (1, 2, "m", ()), id="PAI"),
        pytest.param({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "m"}, 2, (1, 2, "m", ()), id="RANK of 2 nodes"),
        pytest.param({"RLINF_NODE_RANK": "1"}, 2, (1, 2, None, ()), id="RLinf"),
        pytest.param(
            {"ROOST_NODE_RANK": "1", "ROOST_NUM_NODES": "2", "ROOST_HEAD_ADDRESS": "h"},
            None,
            (1, 2, "h", ()),
            id="Roost",
        ),
        pytest.param(SKYPILOT | {"ROOST_NODE_RANK": "01"}, 2, (1, 2, "10.0.0.4", ("10.0.0.4", "10.0.0.9")), id="agree"),
        pytest.param(
            {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_NODEID": "0", "ROOST_NODE_RANK": "3"},
            4,
            (3, 4, "n1", ()),
            id="a Slurm job for each node",
        ),
    ],
)
def test_environments(environ, nodes, expected):
    found = read_allocation(environ, nodes, domain="svc.cluster.local")
    assert (found.rank, found.nodes, found.head, found.hosts) == expected


@pytest.mark.parametrize(
    ("environ", "nodes", "message"),
    [
        pytest.param(
            SKYPILOT | {"NODE_RANK": "0"},
            None,
            "SKYPILOT_NODE_RANK=1 and NODE_RANK=0 disagree about the node rank",
            id="ranks",
        ),
        pytest.param(
            {"ROOST_NODE_RANK": "1", "RLINF_NODE_RANK": "2"},
            4,
            "ROOST_NODE_RANK=1 and RLINF_NODE_RANK=2 disagree",
            id="Roost's and RLinf's",
        ),
        pytest.param(
            SLURM | {"NNODES": "8"}, None, "SLURM_JOB_NODELIST=4 and NNODES=8 disagree about the number", id="numbers"
        ),
        pytest.param(SLURM, 2, "--nodes=2 and SLURM_JOB_NODELIST=4 disagree", id="--nodes"),
        pytest.param(KUBERNETES, None, "JOB_COMPLETION_INDEX=1 is set, but no variable has the number", id="no number"),
        pytest.param({}, 4, "--nodes=4, but no variable has this node's rank: export ROOST_NODE_RANK", id="no rank"),
        pytest.param(
            {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}, None, "srun --ntasks-per-node=1", id="not in srun"
        ),
        pytest.param(TORCHRUN | {"NODE_RANK": "2"}, None, "NODE_RANK=2, but ranks of NNODES=2 go from 0", id="beyond"),
        pytest.param(TORCHRUN | {"NODE_RANK": "x"}, None, "NODE_RANK=x is not a node rank", id="no number in it"),
        pytest.param({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[a-b]"}, None, "'a-b' in a node list", id="range"),
    ],
)
def test_contradictions_and_gaps(environ, nodes, message):
    with pytest.raises(AllocationError, match=re.escape(message)):
        read_allocation(environ, nodes)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "m"}, None, id="RANK may count processes"),
        pytest.param(PAI | {"LOCAL_RANK": "1"}, None, id="RANK of a process of torchrun"),
        pytest.param(PAI | {"ROOST_NUM_NODES": "4"}, None, id="WORLD_SIZE is not the number of nodes"),
        pytest.param(VOLCANO | {"VC_MASTER_HOSTS": "m"}, None, id="an index within a task of Volcano"),
        pytest.param(SLURM, Fact("SLURM_NODEID", "2"), id="Slurm"),
        pytest.param(SLURM | {"SLURMD_NODENAME": "n4"}, Fact("SLURMD_NODENAME", "3"), id="name of the Slurm node"),
        pytest.param({"ROOST_NODE_RANK": " x "}, Fact("ROOST_NODE_RANK", "x"), id="as written"),
        pytest.param({"ROOST_NODE_RANK": ""}, None, id="empty"),
    ],
)
def test_node_rank(environ, expected):
    assert node_rank(environ) == expected


@pytest.mark.parametrize(
    ("environ", "cpus", "gpus"),
    [
        pytest.param({"SLURM_CPUS_ON_NODE": "64", "SLURM_CPUS_PER_TASK": "16"}, 16, None, id="CPUs of the task"),
        pytest.param({"SLURM_CPUS_ON_NODE": "64", "SLURM_GPUS_ON_NODE": "8"}, 64, "8", id="of the node"),
        pytest.param({"SLURM_GPUS_PER_NODE": "a100:2,h100:1"}, None, "3", id="GPUs by type"),
    ],
)
def test_resources_of_a_slurm_node(environ, cpus, gpus):
    found = read_allocation(SLURM | environ)
    assert found.cpus == cpus
    assert (found.gpus and found.gpus.text) == gpus


def test_a_head_that_is_given_counts_more_than_the_schedulers():
    found = read_allocation(SLURM | {"ROOST_HEAD_ADDRESS": "10.0.0.1", "ROOST_JOB_ID": "mine"})
    assert (found.head, found.job) == ("10.0.0.1", "mine")


def test_component_and_rack():
    found = read_allocation(HETEROGENEOUS | {"SLURM_TOPOLOGY_ADDR": "spine.leaf3.cpu7"})
    assert (found.component, found.rack) == ("1", "spine.leaf3")
    assert not read_allocation(SLURM).component


@given(st.lists(st.tuples(st.sampled_from(["n", "gpu-", "r1c"]), st.integers(0, 120)), min_size=1, max_size=20))
def test_a_node_list_names_the_hosts_in_it(pairs):
    written = ",".join(f"{prefix}[{number:03}-{number + 2:03}]" for prefix, number in pairs)
    expected = [f"{prefix}{each:03}" for prefix, number in pairs for each in range(number, number + 3)]
    assert list(expand_hosts(written)) == expected
