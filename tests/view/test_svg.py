"""A plan as an SVG: well formed whatever its names, complete, and as it was when somebody last looked at it."""

import json
from xml.etree import ElementTree

import pytest

import roost
from roost.view.svg import plan_to_svg
from tests.view.pictures import PICTURES

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg):
    return [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def titles(svg):
    return [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}title")]


def test_cells_say_who_holds_them():
    shown = titles(plan_to_svg(PICTURES["hybrid"]()))
    assert "node 0, accelerator 1: actor 1, rollout 0" in shown
    assert "node 1, accelerator 7: actor 15" in shown
    assert "node 1, CPU: reward.code_sandbox 1,3,5,7" in shown


def test_legend_and_phases_are_there():
    shown = texts(plan_to_svg(PICTURES["taking-turns"]()))
    assert {"actor 8", "rollout 8", "generate", "runs, sleeps", "asleep", "wakes, runs", "loads, runs"} <= set(shown)
    assert any("of 79.15 GiB" in words for words in shown)


def test_a_large_cluster_is_folded():
    svg = plan_to_svg(
        roost.plan(
            {"cluster": {"num_nodes": 4096, "num_gpus_per_node": 8, "component_placement": {"actor,rollout": "all"}}}
        )
    )
    assert "nodes 0-4095" in texts(svg)
    assert len(svg) < 50_000


def test_an_irregular_cluster_is_cut_and_says_so():
    mapping = [node * 8 + node * node % 509 % 8 for node in range(4000)]
    svg = plan_to_svg(roost.plan({"num_gpus_per_node": 8, "actor_train": {"device_mapping": mapping}}))
    assert any(words.startswith("and ") and "more nodes in" in words for words in texts(svg))
    assert len(svg) < 300_000


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("</svg><script>alert(1)</script>", id="markup"),
        pytest.param("a&b \"c\" 'd'", id="quotes"),
        pytest.param("演员 🐦", id="unicode"),
        pytest.param("n" * 500, id="long"),
    ],
)
def test_any_name_gives_a_picture(name):
    svg = plan_to_svg(
        roost.plan({"cluster": {"num_nodes": 1, "num_gpus_per_node": 1, "component_placement": {name: "all"}}})
    )
    root = ElementTree.fromstring(svg.encode())
    assert not [element for element in root.iter() if element.tag in (f"{SVG}script", f"{SVG}foreignObject")]
    assert any(name in title for title in titles(svg))


def test_nothing_is_loaded_and_nothing_runs():
    svg = plan_to_svg(PICTURES["hybrid"]())
    for element in ElementTree.fromstring(svg).iter():
        for attribute, value in element.attrib.items():
            assert not attribute.startswith("on") and "href" not in attribute
            assert "url(" not in value or value.startswith("url(#")


@pytest.mark.parametrize(
    ("placement", "machines"),
    [
        pytest.param({"agent": "0:0-2"}, {"accelerators": 0}, id="no-accelerators"),
        pytest.param({"actor": "all"}, {"accelerators": 64}, id="64-on-a-node"),
        pytest.param({f"role_{number}": "all" for number in range(20)}, {"accelerators": 1}, id="twenty-on-a-device"),
        pytest.param({"env": "0:0-999"}, {"accelerators": 1}, id="a-thousand-processes-on-a-device"),
    ],
)
def test_unusual_plans(placement, machines):
    plan = roost.plan({"cluster": {"num_nodes": 1, "component_placement": placement}}, {"nodes": [machines]})
    assert "node 0" in texts(plan_to_svg(plan))


def test_a_saved_plan_gives_the_same_picture():
    plan = PICTURES["hybrid"]()
    assert plan_to_svg(roost.Plan.from_dict(json.loads(plan.to_json()))) == plan_to_svg(plan)


def test_learners_that_work_in_turn_are_not_added_up(tmp_path):
    """The bar of a phase is its worst moment, whoever takes turns in it."""
    sizes = '"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4'
    (tmp_path / "config.json").write_text(
        f'{{"model_type": "qwen2", {sizes}, "intermediate_size": 18944, "vocab_size": 152064}}'
    )
    learner = {"device_mapping": "0-7", "strategy_args": {"strategy_name": "fsdp2_train"}}
    config = {"num_gpus_per_node": 8, "pretrain": str(tmp_path), "actor_train": learner, "critic": learner}
    plan = roost.plan(config, {"nodes": [{"accelerators": 8, "memory_gb": 24}]})
    used = plan.residency.classes[0].used_gib("learn")
    assert f"{used:.1f} of 24 GiB" in texts(plan_to_svg(plan))
