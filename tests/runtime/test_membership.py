"""Node ranks, who is missing, and whether nodes fit together, from what nodes say of themselves."""

from itertools import permutations

import pytest
from hypothesis import given, strategies as st

from roost.config.findings import Findings
from roost.runtime.membership import (
    NodeReport,
    check_device_counts,
    check_versions,
    how_to_join,
    missing_nodes,
    order_nodes,
    to_node,
)


def node(last, rank=None, hostname=None, **fields):
    address = last if isinstance(last, str) else f"10.0.0.{last}"
    fields = {"node_id": f"id-{address}", "hostname": hostname or f"host{last}", "rank_text": rank} | fields
    return NodeReport(address=address, **fields)


def ordered(reports, num_nodes=None):
    findings = Findings()
    nodes = order_nodes(reports, findings, num_nodes)
    return nodes and [report.address for report in nodes], findings


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        pytest.param([node(10), node(2), node(9)], ["10.0.0.2", "10.0.0.9", "10.0.0.10"], id="numbers-not-text"),
        pytest.param(
            [node(2), node(10, is_driver=True), node(9)], ["10.0.0.10", "10.0.0.2", "10.0.0.9"], id="driver-first"
        ),
        pytest.param([node(2, is_head=True), node(1)], ["10.0.0.1", "10.0.0.2"], id="the-head-is-nothing-special"),
        pytest.param([node("fd00::10"), node("fd00::9")], ["fd00::9", "fd00::10"], id="ipv6"),
        pytest.param([node("fd00::1"), node("10.0.0.1")], ["10.0.0.1", "fd00::1"], id="ipv4-before-ipv6"),
        pytest.param([node("zulu"), node("10.0.0.1"), node("mike")], ["10.0.0.1", "mike", "zulu"], id="names-last"),
        pytest.param([node(1, "2"), node(2, "0"), node(3, "1")], ["10.0.0.2", "10.0.0.3", "10.0.0.1"], id="ranks"),
        pytest.param(
            [node(4, "1-2"), node(9, "0"), node(3, "1-2"), node(1, "3-3")],
            ["10.0.0.9", "10.0.0.3", "10.0.0.4", "10.0.0.1"],
            id="ranges-of-ranks",
        ),
        pytest.param([node(1, "1"), node(2, " 00 ")], ["10.0.0.2", "10.0.0.1"], id="rank-with-blanks"),
        pytest.param([node(2, ""), node(1)], ["10.0.0.1", "10.0.0.2"], id="set-to-nothing-is-unset"),
        pytest.param([node(1, "1", is_driver=True), node(2, "0")], ["10.0.0.2", "10.0.0.1"], id="ranks-beat-driver"),
    ],
)
def test_order(reports, expected):
    addresses, findings = ordered(reports)
    assert addresses == expected
    assert not findings.found


@pytest.mark.parametrize(
    ("reports", "what", "fix"),
    [
        pytest.param(
            [node(1, "0"), node(2, "1"), node(7)],
            "1 of 3 nodes have no rank: 10.0.0.7 (host7)",
            "export ROOST_NODE_RANK=2 before `ray start` on 10.0.0.7, or unset it everywhere",
            id="mixed",
        ),
        pytest.param(
            [node(1, "0"), node(2, "0"), node(3, "1")],
            "2 nodes have the rank 0: 10.0.0.1 (host1), 10.0.0.2 (host2)",
            "export ROOST_NODE_RANK=2 before `ray start` on 10.0.0.2, or unset it everywhere",
            id="duplicate",
        ),
        pytest.param(
            [node(1, "0"), node(2, "1"), node(3, "3")],
            "no node has the rank 2",
            "export ROOST_NODE_RANK=2 before `ray start` on 10.0.0.3, or unset it everywhere",
            id="gap",
        ),
        pytest.param(
            [node(1, "1"), node(2, "2")],
            "no node has the rank 0",
            "export ROOST_NODE_RANK=0 before `ray start` on 10.0.0.2, or unset it everywhere",
            id="counted-from-one",
        ),
        pytest.param(
            [node(1, "0", rank_variable="RLINF_NODE_RANK"), node(2, "one", rank_variable="RLINF_NODE_RANK")],
            "10.0.0.2 (host2) has RLINF_NODE_RANK='one', which is not a node rank",
            "export RLINF_NODE_RANK=1 before `ray start` on 10.0.0.2, or unset it everywhere",
            id="unreadable",
        ),
        *(
            pytest.param([node(1, text)], f"10.0.0.1 (host1) has ROOST_NODE_RANK={text!r}, which", "=0 ", id=name)
            for text, name in [("-1", "negative"), ("1.0", "fraction"), ("1_0", "underscore"), ("٣", "other-digits")]
        ),
        pytest.param([node(1, "9" * 5000)], "10.0.0.1 (host1) has ROOST_NODE_RANK='999", "=0 ", id="huge"),
        pytest.param([], "expected 1 node, none joined", "run `ray start --head` on one node", id="no-node"),
    ],
)
def test_wrong_ranks(reports, what, fix):
    addresses, findings = ordered(reports)
    assert addresses is None
    (finding,) = findings.errors
    assert finding.what.startswith(what)
    assert fix in finding.fix


def test_all_mistakes_are_found_at_once_and_their_mends_go_together():
    reports = [node(1, "0"), node(2, "0"), node(3, "x"), node(4), node(5, "3")]
    _, findings = ordered(reports)
    assert [finding.what.split(":")[0] for finding in findings.errors] == [
        "1 of 5 nodes have no rank",
        "10.0.0.3 (host3) has ROOST_NODE_RANK='x', which is not a node rank",
        "2 nodes have the rank 0",
    ]
    offered = [finding.fix.split("=")[1][0] for finding in findings.errors]
    assert offered == ["1", "2", "4"]


SLURM = {"rank_variable": "SLURM_NODEID"}


def test_ranks_of_a_scheduler_order_the_nodes_of_a_part_of_its_job():
    addresses, findings = ordered([node(1, "3", **SLURM), node(2, "1", **SLURM)])
    assert addresses == ["10.0.0.2", "10.0.0.1"]
    assert not findings.found


@pytest.mark.parametrize("second", [node(1, "0", **SLURM), node(1)], ids=["repeated", "missing"])
def test_ranks_of_a_scheduler_that_order_nothing(second):
    addresses, findings = ordered([node(2, "0", **SLURM), second])
    assert addresses == ["10.0.0.1", "10.0.0.2"]
    assert [finding.code for finding in findings.found] == ["RST-R024"]
    assert "SLURM_NODEID=0 on 10.0.0.2" in findings.found[0].why


def test_variables_of_a_node_that_disagree():
    addresses, findings = ordered([node(1, rank_problem="A=1 and B=2 disagree about the node rank")])
    assert addresses is None
    assert "A=1 and B=2" in findings.errors[0].why


def test_more_nodes_than_asked_for():
    addresses, findings = ordered([node(3), node(1), node(2)], num_nodes=2)
    assert addresses == ["10.0.0.1", "10.0.0.2"]
    assert [finding.what for finding in findings.found] == ["1 of 3 nodes are not used: 10.0.0.3 (host3)"]


def test_ranks_past_num_nodes_may_have_gaps():
    addresses, findings = ordered([node(1, "7"), node(2, "0"), node(3, "1")], num_nodes=2)
    assert addresses == ["10.0.0.2", "10.0.0.3"]
    assert not findings.has_errors


def test_a_gap_within_num_nodes_is_filled_by_a_node_past_it():
    addresses, findings = ordered([node(1, "7"), node(2, "0")], num_nodes=1)
    assert addresses == ["10.0.0.2"]
    _, findings = ordered([node(1, "7"), node(2, "2")], num_nodes=1)
    assert findings.errors[0].fix.startswith("export ROOST_NODE_RANK=0 before `ray start` on 10.0.0.2")


def test_fewer_nodes_than_asked_for_is_one_finding():
    _, findings = ordered([node(1, "0", is_head=True), node(2, "2")], num_nodes=4)
    (finding,) = findings.found
    assert finding.what == "expected 4 nodes, 2 joined: 10.0.0.1 (host1), 10.0.0.2 (host2); missing are ranks 1,3"
    assert "`ray start --address=10.0.0.1:PORT`" in finding.fix


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param((2, []), "expected 2 nodes, none joined", id="none"),
        pytest.param((3, [node(1, hostname="alpha")]), "expected 3 nodes, 1 joined: 10.0.0.1 (alpha)", id="reports"),
        pytest.param((2, ["10.0.0.1"]), "expected 2 nodes, 1 joined: 10.0.0.1", id="addresses"),
        pytest.param((2, [node(1, "1")]), "expected 2 nodes, 1 joined: 10.0.0.1 (host1); missing is rank 0", id="rank"),
        pytest.param(
            (100, [str(number) for number in range(40)]),
            f"expected 100 nodes, 40 joined: {', '.join(map(str, range(16)))}, and 24 more",
            id="many",
        ),
    ],
)
def test_missing_nodes(arguments, expected):
    assert missing_nodes(*arguments) == expected


def test_how_to_join_an_ipv6_head():
    assert "--address=[fd00::1]:PORT" in how_to_join([node("fd00::1", is_head=True)])


@pytest.mark.parametrize(
    ("reports", "num_nodes", "warned"),
    [
        pytest.param([node(1, node_id=name) for name in "cab"], None, True, id="one-machine"),
        pytest.param([node(1, node_id="b", is_driver=True), node(1, node_id="a")], None, False, id="driver-is-told"),
        pytest.param([node(1), node(2, node_id="a"), node(2, node_id="b")], 1, False, id="left-out"),
        pytest.param([node(1), node(2, node_id="a"), node(2, node_id="b")], 2, True, id="half-left-out"),
        pytest.param([node(1, str(rank), node_id=str(rank)) for rank in range(2)], None, False, id="ranks-written"),
    ],
)
def test_nodes_that_share_an_address(reports, num_nodes, warned):
    findings = Findings()
    assert order_nodes(reports, findings, num_nodes)
    assert any("share the address" in finding.what for finding in findings.warnings) is warned


def test_nodes_that_share_an_address_are_ordered_by_id():
    nodes = order_nodes([node(1, node_id=name) for name in "cab"], Findings())
    assert [report.node_id for report in nodes] == ["a", "b", "c"]


addresses = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6), st.sampled_from(["10.0.0.2", "10.0.0.10", "h"]))


@st.composite
def clusters(draw):
    places = draw(st.lists(addresses.map(str), min_size=1, max_size=6))
    ranks = draw(
        st.one_of(st.none(), st.permutations(range(len(places))), st.lists(st.sampled_from(["0", "1", "", "x"])))
    )
    driver = draw(st.integers(0, len(places)))
    return [
        node(place, str(ranks[i]) if ranks and i < len(ranks) else None, node_id=str(i), is_driver=i == driver)
        for i, place in enumerate(places)
    ]


@given(clusters(), st.one_of(st.none(), st.integers(1, 7)), st.randoms(use_true_random=False))
def test_the_order_of_joining_means_nothing(reports, num_nodes, random):
    shuffled = random.sample(reports, len(reports))
    found, found_shuffled = Findings(), Findings()
    nodes = order_nodes(reports, found, num_nodes)
    assert nodes == order_nodes(shuffled, found_shuffled, num_nodes)
    assert found.found == found_shuffled.found
    assert (nodes is None) == found.has_errors
    if nodes is not None:
        assert len(nodes) == (num_nodes or len(reports))


@pytest.mark.parametrize("reports", list(permutations([node(9), node(10, is_driver=True), node(100)])))
def test_every_permutation(reports):
    assert ordered(reports)[0] == ["10.0.0.10", "10.0.0.9", "10.0.0.100"]


def versions(python="3.11.4", ray="2.60.0", roost="0.1.0", last=1, **fields):
    return node(last, python_version=python, ray_version=ray, roost_version=roost, **fields)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        pytest.param({}, [], id="equal"),
        pytest.param({"python": "3.11.9"}, [], id="python-patch"),
        pytest.param({"python": ""}, [], id="unknown"),
        pytest.param(
            {"python": "3.12.1"},
            ["error Python is 3.12 on 10.0.0.2 (host2), but 3.11 on 10.0.0.1 (host1)"],
            id="python",
        ),
        pytest.param(
            {"ray": "2.60.1"}, ["error Ray is 2.60.1 on 10.0.0.2 (host2), but 2.60.0 on 10.0.0.1 (host1)"], id="ray"
        ),
        pytest.param(
            {"roost": "0.2.0"},
            ["warning Roost is 0.2.0 on 10.0.0.2 (host2), but 0.1.0 on 10.0.0.1 (host1)"],
            id="roost",
        ),
    ],
)
def test_versions(other, expected):
    findings = Findings()
    check_versions([versions(**other, last=2), versions(is_driver=True)], findings)
    assert [f"{finding.severity.value} {finding.what}" for finding in findings.found] == expected


def test_one_finding_names_all_nodes_of_a_version():
    findings = Findings()
    check_versions([versions(is_head=True), versions(ray="2.59.0", last=2), versions(ray="2.59.0", last=3)], findings)
    (finding,) = findings.errors
    assert "10.0.0.2 (host2), 10.0.0.3 (host3)" in finding.what
    assert finding.fix == "install ray==2.60.0 there and start Ray again"


def devices(found, counted, **fields):
    return node(1, physical_ids=tuple(map(str, range(found))), ray_accelerators=counted, **fields)


@pytest.mark.parametrize(
    ("report", "what", "fix"),
    [
        pytest.param(
            devices(8, 0, accelerator_type="SIMULATED"),
            "Ray counts 0 GPU on 10.0.0.1 (host1), where Roost finds 8 accelerators",
            "start Ray there with ROOST_FAKE_ACCELERATORS=8 and `ray start --num-gpus 8`",
            id="simulated",
        ),
        pytest.param(
            devices(8, 4, accelerator_type="NV_GPU"),
            "Ray counts 4 GPU on 10.0.0.1 (host1), where Roost finds 8 accelerators",
            "start Ray there with `ray start --num-gpus 8`",
            id="fewer",
        ),
        pytest.param(
            devices(1, 0, accelerator_type="NPU", ray_resource="NPU"),
            "Ray counts 0 NPU on 10.0.0.1 (host1), where Roost finds 1 accelerator",
            "start Ray there with `ray start --resources '{\"NPU\": 1}'`",
            id="another-resource",
        ),
        pytest.param(
            devices(0, 8),
            "Ray counts 8 GPU on 10.0.0.1 (host1), where Roost finds no accelerators",
            "start Ray there without --num-gpus, or set ROOST_FAKE_ACCELERATORS=8 to simulate them",
            id="not-there",
        ),
        pytest.param(
            devices(0, 8, detection_problem="ROOST_FAKE_ACCELERATORS is 'x',\nnot a count"),
            "the accelerators of 10.0.0.1 (host1) cannot be counted: ROOST_FAKE_ACCELERATORS is 'x', not a count",
            "fix this on 10.0.0.1, then start Ray there again",
            id="detection-failed",
        ),
    ],
)
def test_device_counts(report, what, fix):
    findings = Findings()
    check_device_counts([report, devices(8, 8), devices(0, 0)], findings)
    assert [(finding.what, finding.fix) for finding in findings.errors] == [(what, fix)]


def test_report_as_a_node_of_an_inventory():
    made = to_node(devices(2, 2, accelerator_type="NPU", accelerator_model="910B", memory_gb=64, host_memory_gb=512))
    assert (made.accelerators, made.accelerator_type, made.accelerator_model) == (2, "NPU", "910B")
    assert (made.memory_gb, made.host_memory_gb, made.host) == (64, 512, "host1")
    assert to_node(node(1)).accelerator_type == "NO_ACCEL"
