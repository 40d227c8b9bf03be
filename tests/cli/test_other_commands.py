"""`roost diff`, `convert`, `explain`, `schema` and the grid as a person meets them."""

import json
import re
import sys
import tomllib
from contextlib import chdir
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import get_args

import pytest
import yaml

import roost
from roost.cli.diff import Target
from roost.cli.options import EXTRAS, not_installed
from roost.placement.convert.convert_plan import WRITTEN
from tests.cli.terminal import cluster_yaml, run, write
from tests.placement.test_routes import TWO_COPIES

EXAMPLES = Path(__file__).parents[2] / "examples"


def cluster_file(folder, name="job", nodes=1, **placement):
    return write(folder, cluster_yaml(nodes, **placement), f"{name}.yaml")


class TestDiff:
    def test_equal_plans(self, tmp_path):
        result = run("diff", cluster_file(tmp_path, "a", actor="all"), cluster_file(tmp_path, "b", actor="0-7"))
        assert (result.exit_code, result.stdout) == (0, "the plans are equal\n")

    def test_a_moved_process(self, tmp_path):
        result = run("diff", cluster_file(tmp_path, "a", actor="0-3"), cluster_file(tmp_path, "b", actor="0-2,7"))
        assert result.exit_code == 1
        assert result.stdout.splitlines() == ["actor 3: node 0 devices 3 -> node 0 devices 7", "1 change"]

    def test_a_config_and_its_saved_plan(self, tmp_path):
        config = cluster_file(tmp_path, nodes=300, **{"actor,rollout": "all"})
        saved = tmp_path / "plan.json"
        saved.write_text(run("plan", config, "--json").stdout)
        assert saved.stat().st_size > 1 << 20, "larger than a config may be"
        assert run("diff", config, saved).exit_code == 0

    def test_json(self, tmp_path):
        result = run("diff", cluster_file(tmp_path, "a", actor="0"), cluster_file(tmp_path, "b", actor="1"), "--json")
        (change,) = json.loads(result.stdout)["changes"]
        assert (change["subject"], change["component"], change["processes"]) == ("process", "actor", "0")

    @pytest.mark.parametrize("content", ["cluster: [", '{"schema": "roost.plan/1"}', '{"schema": "roost.plan/1", '])
    def test_what_cannot_be_read(self, tmp_path, content):
        broken = tmp_path / "broken.yaml"
        broken.write_text(content)
        result = run("diff", cluster_file(tmp_path, actor="all"), broken)
        assert result.exit_code == 2
        assert "error" in result.stderr

    def test_overrides_apply_to_both_or_to_one_side(self, tmp_path):
        job = cluster_file(tmp_path, actor="0-3")
        moved = "cluster.component_placement.actor=0-4"
        assert run("diff", job, job, moved).exit_code == 0
        for side, change in (("--before", "5 processes -> 4"), ("--after", "4 processes -> 5")):
            result = run("diff", job, job, side, moved)
            assert result.exit_code == 1
            assert change in result.stdout

    def test_an_override_with_a_slip_is_an_error(self, tmp_path):
        job = cluster_file(tmp_path, actor="0-3")
        result = run("diff", job, job, "cluster.num_node=2")
        assert result.exit_code == 2
        assert "num_node" in result.stderr

    def test_a_saved_plan_takes_no_overrides(self, tmp_path):
        job = cluster_file(tmp_path, actor="0-3")
        saved = write(tmp_path, run("plan", job, "--json").stdout, "plan.json")
        result = run("diff", saved, job, "cluster.num_nodes=2")
        assert result.exit_code == 2
        assert "is a saved plan, to which overrides cannot apply: cluster.num_nodes=2" in result.stderr
        assert run("diff", saved, job, "--after", "cluster.num_nodes=2").exit_code == 1


class TestCheck:
    def test_overrides_apply_to_every_config(self, tmp_path):
        jobs = [cluster_file(tmp_path, name, actor="0-3") for name in ("a", "b")]
        assert run("check", *jobs).exit_code == 0
        result = run("check", *jobs, "cluster.component_placement.actor=0-9")
        assert result.exit_code == 1
        assert "2 checked, 2 with errors" in result.stdout

    def test_overrides_add_and_remove_keys(self, tmp_path):
        job = cluster_file(tmp_path, actor="0-3", rollout="9")
        assert run("check", job).exit_code == 1
        assert run("check", job, "~cluster.component_placement.rollout").exit_code == 0
        assert "did you mean num_nodes?" in run("check", job, "+cluster.num_node=2").stdout

    def test_overrides_alone_are_no_config(self):
        assert run("check", "cluster.num_nodes=2").exit_code == 2


def test_train_prints_what_plan_warns_of(tmp_path):
    """The task's module does not exist, so that the run ends before it launches anything."""
    job = write(
        tmp_path,
        """
        num_gpus_per_node: 2
        pretrain: some/model
        mask_type: tokens
        is_use_additional_prompts: true
        adv_estimator: reinforce
        actor_train: {device_mapping: [0]}
        actor_infer: {device_mapping: [1], generating_args: {top_p: 1, top_k: -1}}
        train: {task: {_target_: no_such_module.Task}}
        """,
    )
    overrides = ("+length_loss_weight=true",)
    planned = [line for line in run("plan", job, *overrides, width=300).stderr.splitlines() if "warning" in line]
    keys = [line.split(": ")[1].split()[-1] for line in planned]
    assert keys == ["mask_type", "is_use_additional_prompts", "length_loss_weight"]
    trained = run("train", job, *overrides, "--runs", tmp_path / "runs", width=300)
    assert trained.exit_code == 1
    assert [line for line in trained.stderr.splitlines() if "warning" in line] == planned


class TestConvert:
    def test_what_is_printed_plans_the_same(self, tmp_path):
        result = run("convert", EXAMPLES / "placements/loop.yaml", "--to", "roll")
        assert result.exit_code == 0, result.stderr
        written = tmp_path / "roll.yaml"
        written.write_text(result.stdout)
        differences = run("diff", EXAMPLES / "placements/loop.yaml", written, width=200)
        assert (differences.exit_code, differences.stdout) == (0, "the plans are equal\n")
        assert yaml.safe_load(result.stdout)["actor_train"]["device_mapping"] == "list(range(0,6))"

    def test_a_loss_is_named_and_the_exit_code_says_so(self, tmp_path):
        roles = {"actor_train": {"device_mapping": [0]}, "actor_infer": {"device_mapping": [1]}}
        config = {"num_gpus_per_node": 2, "async_generation_ratio": 2, **roles}
        result = run("convert", write(tmp_path, yaml.safe_dump(config)), "--to", "rlinf", width=300)
        assert result.exit_code == 1
        assert "iterations that rollouts are ahead: 2 -> 0" in result.stderr
        assert yaml.safe_load(result.stdout)["cluster"]["num_nodes"] == 1

    def test_a_command_of_verl_is_printed(self, tmp_path):
        result = run("convert", EXAMPLES / "placements/loop.yaml", "--to", "verl", width=300)
        script = tmp_path / "run.sh"
        script.write_text(result.stdout)
        assert "python3 -m verl.experimental.fully_async_policy.fully_async_main" in result.stdout
        assert "actor" in run("plan", script).stdout

    def test_only_notations_that_are_written_are_offered(self):
        assert get_args(Target) == WRITTEN
        assert run("convert", EXAMPLES / "placements/loop.yaml", "--to", "trl").exit_code == 2

    def test_a_conversion_without_loss_succeeds(self, tmp_path):
        cluster = {"num_nodes": 1, "num_gpus_per_node": 2, "component_placement": {"actor": "0-1"}}
        result = run("convert", write(tmp_path, yaml.safe_dump({"cluster": cluster})), "--to", "rlinf")
        assert result.exit_code == 0, result.output

    def test_what_cannot_be_said_is_named(self):
        result = run("convert", EXAMPLES / "heterogeneous/cluster.yaml", "--to", "roll", "--gpus-per-node", "8")
        assert (result.exit_code, result.stdout) == (2, "")
        assert "ROLL has no word for Franka" in result.stderr


class TestExplain:
    def test_a_process(self):
        result = run("explain", EXAMPLES / "placements/rlinf.yaml", "rollout:3")
        assert result.exit_code == 0
        assert result.stdout.startswith("rollout 3 runs on node 0 with accelerators 5,7.\n")

    def test_by_the_name_in_the_config(self):
        assert (
            "actor (actor_train in the config)"
            in run("explain", EXAMPLES / "placements/roll.yaml", "actor_train").stdout
        )

    @pytest.mark.parametrize(
        ("wanted", "message"),
        [
            ("rolout", "there is no component rolout"),
            ("rollout:99", "rollout has no process '99'"),
            ("rollout:x", "rollout has no process 'x'"),
            ("rollout:", "give a rank after rollout:"),
        ],
    )
    def test_mistakes(self, wanted, message):
        result = run("explain", EXAMPLES / "placements/rlinf.yaml", wanted)
        assert result.exit_code == 1
        assert message in result.stderr and "fix" in result.stderr


def test_schema():
    assert "component_placement" in json.dumps(json.loads(run("schema", "--notation", "rlinf").stdout))
    result = run("schema", "--notation", "areal")
    assert result.exit_code == 2
    assert "there is no schema for AReaL jobs; there is one for rlinf, roll, loop" in " ".join(
        result.stderr.replace("│", " ").split()
    )


class TestGrid:
    def test_shared_devices_robots_and_cpu_processes(self):
        machines = EXAMPLES / "heterogeneous/machines.yaml"
        lines = [
            line.rstrip()
            for line in run(
                "plan", EXAMPLES / "heterogeneous/cluster.yaml", "--inventory", machines, "--grid"
            ).stdout.splitlines()
        ]
        assert "0-3    A A A A A A A A   Agx100" in lines
        assert "16-17                    Franka 0: E" in lines
        assert "A actor  R rollout  E env  Ag agent" in lines
        shared = run("plan", EXAMPLES / "placements/rlinf.yaml", "--grid").stdout
        assert "A0+R0 A1+R1 A2+R0 A3+R1" in shared
        assert "weights to rollout: 16 shards: 16 same device (CUDA IPC)" in shared

    def test_the_phases_of_ml_loops_diagram(self, tmp_path):
        """Document: ml-loop, RL trainer: servers that do not fit beside the learners are stopped and started again."""
        config = tmp_path / "loop.yaml"
        config.write_text(
            "rl: {gpu_allocation: {learning_gpus: [0,1,2,3,4,5,6,7], inference_gpus: [0,1,2,3,4,5,6,7]}}\n"
            "llm: {vllm_server: {enable_sleep_mode: false}}\n"
        )
        lines = [line.split("  ") for line in run("plan", config, "--grid", width=140).stdout.splitlines()]
        rows = {
            line[0]: [part.strip() for part in line[1:] if part.strip()]
            for line in lines
            if line[0] in ("actor 0-7", "rollout 0-7")
        }
        assert rows["actor 0-7"] == ["offloaded", "loads, runs", "runs", "runs, offloads"]
        assert rows["rollout 0-7"] == [
            "runs, stops",
            "stopped",
            "stopped",
            "starts, runs",
            "actor 0 starts and stops it",
        ]

    def test_large_clusters_are_folded(self, tmp_path):
        result = run("plan", cluster_file(tmp_path, nodes=4096, actor="all", rollout="0-63"), "--grid", width=80)
        assert len(result.stdout.splitlines()) < 40
        assert max(len(line) for line in result.stdout.splitlines()[1:]) <= 80

    def test_no_colour_means_no_escape_codes(self, tmp_path):
        assert "\x1b" not in run("plan", cluster_file(tmp_path, actor="all"), "--grid").stdout

    def test_memory_is_shown_where_it_is_known(self, tmp_path):
        (tmp_path / "config.json").write_text(
            '{"model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, '
            '"num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": true}'
        )
        config = tmp_path / "job.yaml"
        config.write_text(
            "cluster: {num_nodes: 1, component_placement: {'actor,rollout': all}}\n"
            f"actor: {{model: {{model_path: {tmp_path}}}}}\n"
            "rollout: {gpu_memory_utilization: 0.5}\n"
            "runner: {seq_length: 2048}\n"
        )
        machines = tmp_path / "machines.yaml"
        machines.write_text("nodes: [{accelerators: 8, memory_gb: 80}]")
        result = run("plan", config, "--inventory", machines, "--grid", width=140)
        row = next(line for line in result.stdout.splitlines() if line.startswith("8 x actor+rollout"))
        used = roost.plan(config, machines).residency.classes[0].used_gib("learn")
        assert f"{used:.1f}" in row
        assert "keep: together" in row


class TestPictures:
    def test_page_and_picture_are_written(self, tmp_path):
        page, picture = tmp_path / "plan.html", tmp_path / "plan.svg"
        result = run("plan", EXAMPLES / "placements/rlinf.yaml", "--html", page, "--svg", picture)
        assert result.exit_code == 0, result.output
        assert page.read_text().startswith("<!doctype html>")
        assert picture.read_text().startswith("<svg")

    def test_a_folder_that_is_not_there(self, tmp_path):
        result = run("plan", EXAMPLES / "placements/rlinf.yaml", "--html", tmp_path / "nowhere/plan.html")
        assert result.exit_code == 1
        assert "cannot be written" in result.stderr

    @pytest.mark.parametrize("kind", ["html", "svg"])
    def test_a_folder_in_place_of_a_file(self, kind, tmp_path):
        result = run("plan", EXAMPLES / "placements/rlinf.yaml", f"--{kind}", tmp_path, width=300)
        assert result.exit_code == 1
        assert f"name a file in it: {tmp_path}/plan.{kind}" in result.stderr


def import_error(code):
    with pytest.raises(ImportError) as raised:
        exec(code, {})
    return raised.value


def test_a_module_of_an_extra_that_is_absent_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "zmq", None)
    assert not_installed(import_error("import zmq"), "pip install it") == (
        "zmq is missing; install it with: pip install it"
    )


@pytest.mark.parametrize("code", ["import my_rewards", "from roost.config import no_such_part", "import numpy.no_such"])
def test_other_import_errors_are_shown_as_they_are(code):
    error = import_error(code)
    with pytest.raises(ImportError) as raised:
        not_installed(error, "pip install it")
    assert raised.value is error


def test_all_modules_of_the_extras_are_known():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {re.match(r"[\w-]+", line)[0] for line in [*extras["ray"], *extras["train"]]} - {"roost"}
    modules = {name: {each.replace("_", "-").lower() for each in of} for name, of in packages_distributions().items()}
    installed, known = set().union(*modules.values()), set().union(*(modules.get(name, ()) for name in EXTRAS))
    assert wanted & installed <= known


TRAINABLE = """
cluster: {num_nodes: 1, num_gpus_per_node: 2, component_placement: {actor: 0, rollout: 1}}
actor: {model: {model_path: tiny}, fsdp_config: {strategy: fsdp}}
train: {task: {_target_: roost.rollout.arithmetic.Arithmetic}}
"""


def test_check_train_tells_what_could_train_and_the_keys_ignored(tmp_path):
    trains, places = tmp_path / "trains.yaml", tmp_path / "places.yaml"
    trains.write_text(TRAINABLE)
    places.write_text(TRAINABLE.replace("train:", "other:"))
    checked = run("check", "--train", trains, places)
    assert checked.exit_code == 1
    assert f"{trains}: can train; 1 key ignored" in checked.output
    assert "actor.fsdp_config.strategy, line 3" in checked.output
    assert f"{places}: cannot train: 1 error" in checked.output and "RST-T001" in checked.output
    assert "2 checked, 1 with errors, 1 can train" in checked.output
    report = json.loads(run("check", "--train", "--json", trains).stdout)[str(trains)]
    assert report["can_train"] and [each["key"] for each in report["ignored"]] == ["actor.fsdp_config.strategy"]
    assert run("check", places).exit_code == 0  # it only places


def test_a_misspelt_override_gets_one_answer(tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text(TRAINABLE)
    told = run("plan", job, "cluster.gpu_per_node=8", width=200).output
    assert "num_gpus_per_node?" in told and "fix  correct the key" in told and "+cluster" not in told


def test_a_script_without_data_is_told_of_its_own_key(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo\n")
    told = run("check", "--train", script, width=200).output
    assert "write data.train_files=" in told and "section train" not in told


def test_no_unused_keys_is_said(tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text(TRAINABLE.replace("fsdp_config: {strategy: fsdp}", ""))
    assert run("explain", job, "keys").output == "Every key is used.\n"
    assert run("explain", job, "keys.foo").output == "No key below foo is unused.\n"


@pytest.mark.parametrize("width", [40, 80, 200])
def test_names_of_keys_stay_whole(width, tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text(TRAINABLE.replace("strategy: fsdp", "strategy: fsdp, gradient_checkpointing_use_reentrant: true"))
    reported = run("check", "--train", job, width=width).output.splitlines()
    for key in ("actor.fsdp_config.strategy", "actor.fsdp_config.gradient_checkpointing_use_reentrant"):
        assert any(line.startswith(f"{key}, line 3") for line in reported)


@pytest.mark.parametrize(
    ("model", "line"),
    [
        pytest.param("runs/sums", "warning RST-E003", id="beside other folders"),
        pytest.param("sums", "warning RST-E003", id="no organisation"),
        pytest.param("team/sums", "note RST-E009", id="possible hub name"),
        pytest.param("team/cached", "", id="downloaded before"),
        pytest.param("models/sums", "", id="here"),
    ],
)
def test_check_train_reports_a_model_that_is_not_here(model, line, tmp_path, monkeypatch):
    for folder in ("runs", "models/sums", "hub/models--team--cached/snapshots/1"):
        (tmp_path / folder).mkdir(parents=True)
    for folder in ("models/sums", "hub/models--team--cached/snapshots/1"):
        (tmp_path / folder / "config.json").write_text("{}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    job = tmp_path / "job.yaml"
    job.write_text(TRAINABLE.replace("tiny", model))
    with chdir(tmp_path):
        checked, plain = run("check", "--train", job, width=300), run("check", job, width=300)
    assert checked.exit_code == 0
    reported = [each for each in checked.output.splitlines() if "RST-E0" in each]
    assert len(reported) == bool(line) and all(each.startswith(line) for each in reported)
    assert not line or f"actor.model.model_path: '{model}'" in reported[0]
    assert "E009" not in line or "correct it if it is a path" in " ".join(checked.output.split())
    assert "RST-E0" not in plain.output


def test_check_train_names_the_script_that_makes_the_model(tmp_path):
    job, script = tmp_path / "job.yaml", tmp_path / "make_model.py"
    job.write_text(TRAINABLE.replace("tiny", "team/sums"))
    script.touch()
    assert f"make it first: python {script}" in run("check", "--train", job, width=300).output
    warm_start = tmp_path / "sft.yaml"
    warm_start.touch()
    job.write_text(TRAINABLE.replace("tiny", "runs/warm/policy"))
    fix = f"make it first: python {script}, then roost sft {warm_start}"
    assert fix in run("check", "--train", job, width=600).output


def roll_job(folder, pipeline=1, model="Qwen/Qwen2.5-7B", **more):
    sizes = {"strategy_name": "megatron_train", "strategy_config": {"pipeline_model_parallel_size": pipeline}}
    job = {
        "num_gpus_per_node": 4,
        "pretrain": str(model),
        "adv_estimator": "reinforce",
        "whiten_advantages": True,
        "actor_train": {"device_mapping": "0-3", "strategy_args": sizes},
        "actor_infer": {"device_mapping": "0-3", "strategy_args": {"strategy_name": "vllm"}},
        **more,
    }
    return write(folder, yaml.safe_dump(job), "roll.yaml")


def test_plan_and_explain_name_the_same_estimator(tmp_path):
    """ROLL's reinforce takes rewards as they are; whiten_advantages is a setting of its own."""
    assert "advantage_estimator=reward" in run("plan", roll_job(tmp_path)).stdout
    file = roll_job(tmp_path, train={"task": {"_target_": "package.module.Class"}})
    assert "advantage_estimator=reward" in run("plan", file).stdout
    assert "advantage_estimator is reward" in run("explain", file, "train.advantage_estimator").stdout


def test_plan_and_diff_name_the_same_estimator(tmp_path):
    """The estimator of another framework whose advantages are whitened had one name in plans and another in diff."""
    placed = "cluster: {n_nodes: 1, n_gpus_per_node: 8}\nrollout: {backend: 'vllm:d4'}"
    whole = "adv_norm: {mean_level: batch, std_level: batch}"
    one = write(tmp_path, f"{placed}\nactor: {{backend: 'fsdp:d4', {whole}}}\n", "one.yaml")
    group = "reward_norm: {mean_level: group, std_level: group}"
    other = write(tmp_path, f"{placed}\nactor: {{backend: 'fsdp:d4', {group}}}\n", "other.yaml")
    settings = run("plan", one, width=500).stdout
    assert "advantage_estimator=reinforce++" in settings and "whiten_advantages" not in settings
    assert "advantage_estimator: reinforce++ -> grpo" in run("diff", one, other).stdout.splitlines()


def test_keys_that_training_follows_are_not_under_a_heading_of_unused_ones(tmp_path):
    """They were in a column `not used because`, beside an empty column."""
    keys = "trainer.n_gpus_per_node=1 actor_rollout_ref.model.path=m data.train_batch_size=8 data.train_files=a.jsonl"
    engine = "actor_rollout_ref.rollout.name=hf actor_rollout_ref.rollout.tensor_model_parallel_size=1"
    file = write(tmp_path, f"python3 -m verl.trainer.main_ppo {keys} {engine}\n", "run.sh")
    header, *rows = run("explain", file, "data", width=300).stdout.splitlines()
    assert header.split() == ["key", "use"]
    (row,) = (row for row in rows if row.startswith("data.train_batch_size"))
    assert row.rstrip().endswith("  followed: by training alone, as prompts_per_step in train")


def test_the_grid_says_why_memory_is_not_known():
    shown = " ".join(run("plan", EXAMPLES / "placements/rlinf.yaml", "--grid").stdout.split())
    assert shown.count("?: the job names no model (actor, rollout); the memory of the devices is not given") == 1


@pytest.mark.parametrize(("sign", "is_taken"), [("", False), ("+", True), ("++", True)])
def test_a_setting_that_the_config_lacks_is_added_with_a_plus(tmp_path, sign, is_taken):
    """Document: Notations, Hydra; a script has no config, and takes it either way."""
    placed = "cluster: {num_nodes: 1, num_gpus_per_node: 2, component_placement: {actor: 0, rollout: 1}}"
    file = tmp_path / "job.yaml"
    file.write_text(f"{placed}\ntrain: {{model: some/model, max_steps: 1, task: {{_target_: my_tasks.Sums}}}}\n")
    result = run("explain", file, "train.learning_rate", f"{sign}train.learning_rate=0.5")
    assert ("learning_rate is 0.5" in result.stdout) == is_taken
    assert is_taken or "use +train.learning_rate=0.5" in result.stderr
    script = tmp_path / "run.sh"
    keys = "trainer.n_gpus_per_node=2 actor_rollout_ref.model.path=some/model data.train_files=a.parquet"
    script.write_text(f'python3 -m verl.trainer.main_ppo {keys} "$@"\n')
    result = run("explain", script, "train.max_steps", "--", f"{sign}train.max_steps=5")
    assert "max_steps is 5" in result.stdout


def test_a_name_of_several_components_explains_each(tmp_path):
    file = tmp_path / "run.sh"
    file.write_text("python3 train.py --actor-num-nodes 1 --rollout-num-gpus 8 --prefill-num-servers 2\n")
    result = run("explain", file, "rollout")
    assert result.exit_code == 0
    assert "rollout.prefill " in result.stdout and "rollout.decode " in result.stdout
    result = run("explain", file, "rollout:1")
    assert result.exit_code == 1
    assert "rollout is 2 components" in result.stderr
    assert "use rollout.prefill:1 or rollout.decode:1" in result.stderr
    assert "rollout.decode 1 runs on node" in run("explain", file, "rollout.decode:1").stdout


def test_a_setting_is_explained_before_the_errors_of_the_job(tmp_path):
    file = roll_job(tmp_path, pipeline=2, train={"task": {"_target_": "package.module.Class"}})
    result = run("explain", file, "train.loss_type")
    assert result.exit_code == 1
    assert "loss_type is ppo, from" in result.stdout
    assert "One of ppo, cispo, sapo, topr, kimi15." in result.stdout
    assert "RST-T034" in result.output


def test_one_process_is_not_several(tmp_path):
    file = cluster_file(tmp_path, actor="5")
    assert "has 1 process on node 0." in run("explain", file, "actor").stdout
    assert "1 rank for 1 process." in run("explain", file, "actor").stdout
    assert "It sees accelerator 5: only its own." in run("explain", file, "actor:0").stdout


def test_the_mesh_of_a_learner_is_shown(tmp_path):
    file = write(tmp_path, yaml.safe_dump(TWO_COPIES), "job.yaml")
    assert "mesh  actor 2 replicate x 4 shard x 2 tensor" in run("plan", "--layout", "as_written", file).stdout


def test_the_mesh_says_over_how_many_ranks_the_weights_are(tmp_path):
    """A context size lies within the ranks of FSDP: 2 shard x 4 context read as weights over 2 ranks."""
    keys = "trainer.n_gpus_per_node=8 actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.rollout.name=vllm"
    size = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4"
    file = write(tmp_path, f'python3 -m verl.trainer.main_ppo {keys} {size} "$@"\n', "run.sh")
    assert "mesh  actor 2 shard x 4 context (weights over 8 ranks)" in run("plan", file).stdout
    half = run("plan", file, "--", "actor_rollout_ref.actor.fsdp_config.fsdp_size=4").stdout
    assert "mesh  actor 2 replicate x 4 context (weights over 4 ranks)" in half


SIZES = {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
QWEN = {"model_type": "qwen2", "intermediate_size": 18944, "vocab_size": 152064, **SIZES}


@pytest.mark.parametrize(
    ("backend", "mesh"),
    [
        pytest.param({"training_backend": "fsdp"}, "4 shard x 2 tensor", id="fsdp"),
        pytest.param({}, "4 shard x 2 tensor", id="none-written"),
        pytest.param({"training_backend": "megatron"}, "", id="megatron"),
    ],
)
def test_the_mesh_and_the_traffic_of_an_rlinf_job_are_those_of_its_learner(backend, mesh, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    actor = {**backend, "model": {"model_path": str(tmp_path), "tensor_model_parallel_size": 2}}
    job = {
        "cluster": {"num_nodes": 1, "num_gpus_per_node": 9, "component_placement": {"actor": "0-7", "rollout": 8}},
        "actor": actor,
        "train": {"task": {"_target_": "package.module.Class"}},
    }
    file = write(tmp_path, yaml.safe_dump(job), "job.yaml")
    shown, page = run("plan", file).stdout, tmp_path / "plan.html"
    assert (f"mesh  actor {mesh}" in shown) == ("traffic  actor sends" in shown) == bool(mesh)
    found = json.loads(run("plan", file, "--json").stdout)["components"]["actor"]
    sizes = {"replicate": 1, "shard": 4, "context": 1, "tensor": 2, "expert": 1}
    assert found["mesh"] == (sizes if mesh else None)
    assert bool(found["traffic"] and found["traffic"]["tensor"]) == bool(mesh)
    run("plan", file, "--html", page)
    assert (f'"{mesh or "tensor 2"}"' in page.read_text()) and ('"traffic":[]' in page.read_text()) != bool(mesh)


def test_the_sizes_of_a_learner_with_megatron_are_shown(tmp_path):
    """They were in the JSON alone; FSDP had its mesh."""
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2}
    strategy = {"strategy_name": "megatron_train", "strategy_config": sizes | {"expert_tensor_parallel_size": 1}}
    file = write(
        tmp_path,
        yaml.safe_dump(
            {
                "pretrain": "some/model",
                "num_gpus_per_node": 8,
                "actor_train": {"device_mapping": "0-7", "strategy_args": strategy},
                "actor_infer": {"device_mapping": "0-7", "strategy_args": {"strategy_name": "vllm"}},
            }
        ),
    )
    spelt = "tensor 2, pipeline 2, expert 2, expert tensor 1"
    assert f"sizes  actor {spelt}\n" in run("plan", file).stdout
    assert f"Its parallel sizes are {spelt}.\n" in run("explain", file, "actor").stdout
    mesh = write(tmp_path, yaml.safe_dump(TWO_COPIES), "mesh.yaml")
    explained = run("explain", "--layout", "as_written", mesh, "actor").stdout
    assert "Its device mesh is 2 replicate x 4 shard x 2 tensor.\n" in explained


def test_layers_that_auto_recomputes_are_shown(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    job = {
        "cluster": {"num_nodes": 1, "component_placement": {"actor": "0-3", "rollout": "4-7"}},
        "actor": {"model": {"model_path": str(tmp_path)}},
        "train": {
            "task": {"_target_": "package.module.Class"},
            "activation_checkpointing": "auto",
            "micro_batch_tokens": 32768,
        },
    }
    file = write(tmp_path, yaml.safe_dump(job), "job.yaml")
    machines = write(tmp_path, "nodes: [{accelerators: 8, memory_gb: 80}]", "machines.yaml")
    layers = json.loads(run("plan", file, "--inventory", machines, "--json").stdout)["components"]["actor"]["model"]
    shown = run("plan", file, "--inventory", machines).stdout
    assert 0 < layers["recomputed_layers"] < 28
    assert f"activations  actor recomputes those of {layers['recomputed_layers']} of 28 layers" in shown


def test_pipeline_stages_of_a_mixture_are_not_replaced_by_a_tensor_size(tmp_path):
    """A tensor size alone would be the next error."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 64}
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 2, **sizes, **experts}
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = roll_job(tmp_path, pipeline=2, model=tmp_path, train={"task": {"_target_": "package.module.Class"}})
    said = " ".join(run("check", file).stdout.split())
    assert "write pipeline size 1; an expert size divides the experts of a mixture, a context size its tokens" in said


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("trainer.n_gpus_per_node", "trainer.n_gpus_per_node is 4, from {}:2:3.\nThe plan follows it.\n"),
        ("trainer.nnodes", "trainer.nnodes is 2, from command line.\nThe plan follows it.\n"),
    ],
)
def test_a_key_of_placement_is_explained(tmp_path, key, sentence):
    """Only keys of training and keys without effect could be asked for."""
    start = "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=vllm \\\n"
    file = write(tmp_path, f'{start}  trainer.n_gpus_per_node=4 "$@"\n', "run.sh")
    assert run("explain", file, key, "--", "trainer.nnodes=2").stdout == sentence.format(file)
    assert "there is no component trainer" in run("explain", file, "trainer").stderr


def test_a_flag_and_a_key_of_a_known_section_are_explained(tmp_path):
    script = write(tmp_path, "python3 train.py --actor-num-nodes 1 --rollout-num-gpus 8\n", "run.sh")
    assert f"--rollout-num-gpus is 8, from {script}:1:38." in run("explain", script, "rollout-num-gpus").stdout
    result = run("explain", EXAMPLES / "placements/rlinf.yaml", "cluster.num_nodes")
    assert "cluster.num_nodes is 2, from" in result.stdout and "rlinf.yaml:3:3." in result.stdout
