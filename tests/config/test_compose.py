"""Whole configs: Hydra defaults, overrides, interpolations, and what happens where they cannot be had."""

import sys
from pathlib import Path
from textwrap import dedent

import pytest
from omegaconf import OmegaConf

import roost
from roost.config import interpolation
from roost.config.compose import load
from roost.config.findings import Findings
from roost.config.interpolation import resolve
from roost.config.source import Unresolved

CLUSTER = {"num_nodes": 1, "num_gpus_per_node": 8, "component_placement": {"actor": "all"}}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(text))
    return folder / next(iter(files))


@pytest.fixture
def loop_config(tmp_path):
    """A config laid out as ml-loop's: option files in groups, mounted by a defaults list."""
    return write(
        tmp_path,
        {
            "config.yaml": """
                defaults:
                  - rl/gpu_allocation: four_and_four
                  - llm: big
                  - _self_
                rl:
                  async_rollouts: false
                """,
            "rl/gpu_allocation/four_and_four.yaml": "learning_gpus: [0, 1, 2, 3]\ninference_gpus: [4, 5, 6, 7]\n",
            "rl/gpu_allocation/single.yaml": "learning_gpus: [0]\ninference_gpus: [0]\n",
            "rl/gpu_allocation/wrong.yaml": "learning_gpus: [0]\ninference_gpu: [0]\n",
            "llm/big.yaml": "vllm_server:\n  gpus_per_vllm_server: 4\n",
        },
    )


def sizes(plan):
    return {component.name: component.world_size for component in plan.components}


class TestDefaults:
    def test_groups_are_composed(self, loop_config):
        assert sizes(roost.plan(loop_config)) == {"actor": 4, "rollout": 1}

    def test_another_option_is_chosen(self, loop_config):
        plan = roost.plan(loop_config, overrides=["rl/gpu_allocation=single", "llm.vllm_server.gpus_per_vllm_server=1"])
        assert sizes(plan) == {"actor": 1, "rollout": 1}

    def test_findings_point_into_the_group_file(self, loop_config):
        with pytest.raises(roost.ConfigError) as caught:
            roost.plan(loop_config, overrides=["rl/gpu_allocation=wrong"])
        places = {str(finding.where) for finding in caught.value.findings}
        file = loop_config.parent / "rl/gpu_allocation/wrong.yaml"
        assert f"{file}:2:1 rl.gpu_allocation.inference_gpu" in places

    def test_findings_point_at_the_command_line(self, loop_config):
        with pytest.raises(roost.ConfigError) as caught:
            roost.plan(loop_config, overrides=["rl.gpu_allocation.learning_gpus=[0,0]"])
        assert [str(finding.where) for finding in caught.value.findings] == [
            "command line rl.gpu_allocation.learning_gpus"
        ]

    def test_missing_files_are_warned_about_and_left_out(self, tmp_path):
        file = write(
            tmp_path,
            {
                "job.yaml": """
                    defaults:
                      - env/libero@env.train
                      - model: pi0
                      - override hydra/job_logging: stdout
                    hydra:
                      searchpath: ["file://${oc.env:NOWHERE_AT_ALL}/config/"]
                    cluster: {num_nodes: 1, num_gpus_per_node: 8, component_placement: {"actor,env": all}}
                    """
            },
        )
        plan = roost.plan(file)
        assert sizes(plan) == {"actor": 8, "env": 8}
        assert ["env/libero, model/pi0" in warning.what for warning in plan.warnings] == [True]

    def test_defaults_that_only_steer_hydra_are_silent(self, tmp_path):
        text = "defaults:\n  - override hydra/job_logging: stdout\n" + OmegaConf.to_yaml({"cluster": CLUSTER})
        assert roost.plan(write(tmp_path, {"job.yaml": text})).warnings == ()

    def test_search_path_from_the_environment(self, tmp_path, monkeypatch):
        monkeypatch.setenv("EXTRA_CONFIG", str(tmp_path / "extra"))
        files = {
            "jobs/job.yaml": """
                defaults: [placement: wide, _self_]
                hydra:
                  searchpath: ["file://${oc.env:EXTRA_CONFIG}"]
                cluster: {num_nodes: 1, num_gpus_per_node: 8}
                """,
            "extra/placement/wide.yaml": "# @package cluster.component_placement\nactor: 0-5\n",
        }
        assert sizes(roost.plan(write(tmp_path, files))) == {"actor": 6}

    def test_nested_missing_file_is_a_warning(self, tmp_path):
        files = {
            "job.yaml": """
                defaults: [base, _self_]
                cluster: {num_nodes: 1, num_gpus_per_node: 8, component_placement: {actor: all}}
                """,
            "base.yaml": "defaults: [nowhere]\n",
        }
        plan = roost.plan(write(tmp_path, files))
        assert sizes(plan) == {"actor": 8}
        assert "nowhere" in plan.warnings[0].what


class TestOverrides:
    @pytest.mark.parametrize(
        ("override", "size"),
        [
            pytest.param("cluster.component_placement.actor=0-3", 4, id="change"),
            pytest.param("+cluster.component_placement.rollout=0-1", 8, id="add"),
            pytest.param("cluster.num_nodes=2", 16, id="number"),
        ],
    )
    def test_values(self, override, size, tmp_path):
        file = write(tmp_path, {"job.yaml": OmegaConf.to_yaml({"cluster": CLUSTER})})
        assert sizes(roost.plan(file, overrides=[override]))["actor"] == size
        assert sizes(roost.plan({"cluster": CLUSTER}, overrides=[override]))["actor"] == size

    @pytest.mark.parametrize("override", ["nonsense", "cluster.nowhere=1", "a=[", "group/nowhere=x"])
    def test_mistakes_are_findings(self, override):
        with pytest.raises(roost.ConfigError) as caught:
            roost.plan({"cluster": CLUSTER}, overrides=[override])
        assert caught.value.findings[0].where.file == "command line"


class TestInterpolation:
    def test_values_are_resolved(self):
        config = {"size": 4, "cluster": {**CLUSTER, "num_gpus_per_node": "${size}"}}
        assert sizes(roost.plan(config)) == {"actor": 4}

    def test_what_is_not_needed_may_stay_unresolved(self):
        assert sizes(roost.plan({"cluster": CLUSTER, "data": {"length": "${subtract:${nowhere}, 1}"}})) == {"actor": 8}

    def test_a_dict_config_is_taken(self):
        config = OmegaConf.create({"nodes": 2, "cluster": {**CLUSTER, "num_nodes": "${nodes}"}})
        assert sizes(roost.plan(config)) == {"actor": 16}
        assert roost.HybridComponentPlacement(config).get_world_size("actor") == 16

    def test_values_that_double_at_each_step_are_refused(self):
        values = {f"a{level}": f"${{a{level + 1}}}" * 2 for level in range(60)} | {"a60": "x"}
        assert isinstance(resolve(values)["a0"], Unresolved)

    def test_a_value_that_leads_to_itself_is_refused(self):
        assert isinstance(resolve({"a": "${b}", "b": "${a}"})["a"], Unresolved)

    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("${subtract:${whole}, 1024}", 1024),
            ("${multiply:${whole},2}", 4096),
            ("${int_div:${whole}, 3}", 682),
            ("${divide:1, 4}", 0.25),
            ("${not:${flag}}", False),
            ("${safe_min:null, ${whole}, 7}", 7),
        ],
    )
    def test_what_the_three_systems_compute(self, text, value):
        assert resolve({"whole": 2048, "flag": True, "found": text})["found"] == value

    @pytest.mark.parametrize("text", ["${multiply:aaaa,1000000000000}", "${int_div:1,0}", "${subtract:1}"])
    def test_what_cannot_be_computed_is_kept_until_it_is_needed(self, text):
        assert isinstance(resolve({"found": text})["found"], Unresolved)


class TestValues:
    def test_a_config_that_contains_itself_is_a_finding(self):
        config: dict = {"cluster": dict(CLUSTER)}
        config["cluster"]["loop"] = config
        with pytest.raises(roost.ConfigError, match="contains itself"):
            roost.plan(config)

    @pytest.mark.parametrize("config", [None, 3, [1], "", "/nowhere/at/all.yaml"])
    def test_what_is_no_config_is_a_finding(self, config):
        with pytest.raises(roost.ConfigError):
            roost.plan(config)

    def test_findings_are_collected_not_raised(self):
        findings = Findings()
        from roost.placement.planner import try_plan

        assert try_plan({"cluster": {}}, findings) is None
        assert findings.errors


class TestIncludes:
    """Files that configs bring in, and what can be wrong with them."""

    job = "cluster: {num_nodes: 1, num_gpus_per_node: 8, component_placement: {actor: all}}\n"

    def test_only_the_missing_leaf_is_left_out(self, tmp_path):
        files = {
            "job.yaml": f"defaults: [size: wide, other: a, _self_]\n{self.job}",
            "size/wide.yaml": "# @package cluster.component_placement\nrollout: 0-3\n",
            "other/a.yaml": "defaults: [/nowhere/at_all]\n",
        }
        plan = roost.plan(write(tmp_path, files))
        assert sizes(plan) == {"rollout": 4, "actor": 8}
        assert "nowhere/at_all" in plan.warnings[0].what

    def test_files_that_include_each_other(self, tmp_path):
        files = {
            "job.yaml": f"defaults: [a, _self_]\n{self.job}",
            "a.yaml": "defaults: [b]\n",
            "b.yaml": "defaults: [a]\n",
        }
        with pytest.raises(roost.ConfigError, match="include each other: a -> b -> a"):
            roost.plan(write(tmp_path, files))

    def test_files_that_double(self, tmp_path):
        files = {"job.yaml": f"defaults: [x0, _self_]\n{self.job}"}
        files |= {f"x{level}.yaml": f"defaults: [x{level + 1}@a, x{level + 1}@b]\n" for level in range(12)}
        files["x12.yaml"] = "z: 1\n"
        with pytest.raises(roost.ConfigError, match="files in all, more than 200"):
            roost.plan(write(tmp_path, files))

    def test_a_broken_file_is_reported_in_itself(self, tmp_path):
        files = {"job.yaml": f"defaults: [size: wide, _self_]\n{self.job}", "size/wide.yaml": "a: 1\nb: [\n"}
        with pytest.raises(roost.ConfigError, match="not valid YAML") as caught:
            roost.plan(write(tmp_path, files))
        assert caught.value.findings[0].where.file.endswith("size/wide.yaml")

    def test_an_optional_file_that_exists_is_taken(self, tmp_path):
        files = {
            "job.yaml": f"defaults: [optional size: wide, optional size@none: nowhere, _self_]\n{self.job}",
            "size/wide.yaml": "# @package cluster.component_placement\nrollout: 0-3\n",
        }
        assert sizes(roost.plan(write(tmp_path, files))) == {"rollout": 4, "actor": 8}

    def test_a_group_without_an_option_can_be_chosen(self, tmp_path):
        files = {
            "job.yaml": f"defaults: [size: null, _self_]\n{self.job}",
            "size/wide.yaml": "# @package cluster.component_placement\nrollout: 0-3\n",
        }
        file = write(tmp_path, files)
        assert sizes(roost.plan(file)) == {"actor": 8}
        assert sizes(roost.plan(file, overrides=["size=wide"])) == {"rollout": 4, "actor": 8}

    def test_search_path_on_the_command_line(self, tmp_path):
        files = {
            "jobs/job.yaml": f"defaults: [size: wide, _self_]\n{self.job}",
            "extra/size/wide.yaml": "# @package cluster.component_placement\nrollout: 0-3\n",
        }
        override = f"hydra.searchpath=[file://{tmp_path / 'extra'}]"
        assert sizes(roost.plan(write(tmp_path, files), overrides=[override])) == {"rollout": 4, "actor": 8}

    def test_an_override_of_a_mapping_is_on_the_command_line(self, tmp_path):
        file = write(tmp_path, {"job.yaml": self.job})
        with pytest.raises(roost.ConfigError) as caught:
            roost.plan(file, overrides=["cluster.component_placement={actor:0-9}"])
        assert str(caught.value.findings[0].where) == "command line cluster.component_placement.actor"

    def test_the_last_file_to_write_a_key_is_named(self, tmp_path):
        files = {"job.yaml": f"defaults: [_self_, later]\n{self.job}", "later.yaml": "cluster:\n  num_nodes: none\n"}
        with pytest.raises(roost.ConfigError) as caught:
            roost.plan(write(tmp_path, files))
        assert str(caught.value.findings[0].where).endswith("later.yaml:2:3 cluster.num_nodes")

    def test_inside_a_hydra_program_and_in_threads(self, tmp_path):
        from concurrent.futures import ThreadPoolExecutor

        from hydra import compose, initialize_config_dir

        file = write(tmp_path, {"job.yaml": self.job})
        with initialize_config_dir(str(tmp_path), version_base=None), ThreadPoolExecutor(4) as pool:
            outer = compose("job")
            plans = list(pool.map(lambda size: roost.plan(file, overrides=[f"cluster.num_nodes={size}"]), range(1, 9)))
            assert compose("job") == outer
        assert [plan["actor"].world_size for plan in plans] == [8 * size for size in range(1, 9)]


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        pytest.param(
            "appworld/agent@rl.scenario_runner.appworld_config.agent=defalt", "did you mean default?", id="option"
        ),
        pytest.param(
            "appworld/agnt@rl.scenario_runner.appworld_config.agent=default", "did you mean appworld/agent?", id="group"
        ),
        pytest.param(
            "appworld/agent@rl.scenario_runner.appworld_config.agent=mine", "choose one of these", id="neither"
        ),
    ],
)
def test_what_was_meant_by_an_option_that_is_not_there(tmp_path, override, meant):
    file = tmp_path / "job.yaml"
    file.write_text("defaults: [/global@_global_: appworld, _self_]\nllm: {base_model_path: m}\n")
    findings = Findings()
    assert load(file, [override], findings) is None
    (finding,) = findings.errors
    assert meant in finding.fix


def test_an_option_like_none_of_those_that_there_are_lists_them_all(tmp_path):
    (tmp_path / "model").mkdir()
    for name in ("base", "large", "small", "tiny"):
        (tmp_path / "model" / f"{name}.yaml").write_text("layers: 1\n")
    file = tmp_path / "job.yaml"
    file.write_text("defaults: [model: base, _self_]\n")
    findings = Findings()
    assert load(file, ["model=qwen"], findings) is None
    assert findings.errors[0].why == "Available options in 'model': base, large, small, tiny"


def test_an_agent_of_the_users_own_folder_is_chosen_by_one_override(tmp_path):
    (tmp_path / "appworld" / "agent").mkdir(parents=True)
    (tmp_path / "appworld" / "agent" / "mine.yaml").write_text("_target_: my_agents.Mine\nstyle: short\n")
    file = tmp_path / "job.yaml"
    file.write_text("defaults: [/global@_global_: appworld, _self_]\nllm: {base_model_path: m}\n")
    found = load(file, ["appworld/agent@rl.scenario_runner.appworld_config.agent=mine"], Findings())
    runner = found.values["rl"]["scenario_runner"]
    assert runner["_target_"] == "roost.app_world.serving.runner.AppWorldScenarioRunner"
    assert runner["appworld_config"] == {
        "agent": {"_target_": "my_agents.Mine", "style": "short"},
        "max_interactions": 40,
    }


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("runner.max_step=7", "did you mean max_steps?"),
        ("runer.max_steps=7", "did you mean runner?"),
        ("runner.max_steps.of=7", ""),
        ("other=7", ""),
    ],
)
def test_an_override_of_an_unknown_key_names_a_near_one(override, hint):
    findings = Findings()
    assert load({"runner": {"max_steps": 5}}, [override], findings) is None
    (finding,) = findings.found
    assert hint in finding.why and ("did you mean" in finding.why) == bool(hint)


def test_a_config_whose_notation_is_in_a_missing_file(tmp_path, monkeypatch):
    monkeypatch.delenv("NOWHERE_AT_ALL", raising=False)
    text = """
        defaults: [rl/gpu_allocation: six_learn_two_infer, _self_]
        hydra: {searchpath: ["file://${oc.env:NOWHERE_AT_ALL}/config/"]}
        rl: {seed: null}
        """
    with pytest.raises(roost.ConfigError) as caught:
        roost.plan(write(tmp_path, {"config.yaml": text}))
    (finding,) = caught.value.findings
    assert finding.what == "places nothing without the files that its defaults name"
    assert "rl/gpu_allocation/six_learn_two_infer: not there" in finding.why
    assert "hydra.searchpath needs NOWHERE_AT_ALL, which is not set" in finding.why
    assert finding.fix.startswith("set NOWHERE_AT_ALL, or")


@pytest.mark.parametrize(
    "values",
    [
        {"a": {"b": 2, "c": "${a.b}", "d": "${.b}", "e": {"f": "${..b}"}}},
        {"a": "${b}", "b": "${c}", "c": 1.5},
        {"a": {"n": 3, "m": "${mul:${.n}, 4}"}, "x": "${div:${a.m},8}", "y": "${max:${a.n},-2}"},
        {"a": None, "b": "${a}", "c": True, "d": "${not:${c}}"},
        {"rows": [{"a": 1, "b": "${.a}"}, {"b": "${..rows}"}]},
        {"a": "${b.c}", "b": {"c": "word"}, "d": "${a}"},
        {"a": "${b}", "b": "${a}"},
        {"a": "${nowhere}", "b": "x${c}y", "c": 2},
        {"a": r"\${b}", "b": 1, "c": "${b}"},
        {"a": "???", "b": "${a}"},
        {"a": {"b": 1}, "c": "${a}"},
    ],
)
def test_plain_references_are_what_omegaconf_makes_of_them(values, monkeypatch):
    plainly = interpolation.resolve(values)

    def refuse(self, path, text, depth=0):
        raise interpolation._NotPlain

    monkeypatch.setattr(interpolation._Plain, "look_up", refuse)
    assert repr(plainly) == repr(interpolation.resolve(values))


def test_plain_references_do_without_omegaconf(monkeypatch):
    monkeypatch.setitem(sys.modules, "omegaconf", None)  # an import of it fails
    values = {"policy": {"length": 512, "batch": "${mul:${.length}, 2}"}, "data": {"length": "${policy.length}"}}
    assert interpolation.resolve(values) == {"policy": {"length": 512, "batch": 1024}, "data": {"length": 512}}
