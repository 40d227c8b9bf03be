"""TRL jobs: processes by accelerate's own code, engines by TRL's, servers beside the learner, and traps."""

import json
from pathlib import Path

import pytest

import roost
from roost.config.findings import ConfigError
from tests.config.frameworks.test_jobs import codes, plan_of, processes_of
from tests.grid import grid

FOLDER = Path(__file__).parent / "golden"
ENGINES = [json.loads(line) for line in (FOLDER / "trl.jsonl").read_text().splitlines()]
LAUNCHES = [json.loads(line) for line in (FOLDER / "accelerate.jsonl").read_text().splitlines()]
SERVER = "--use_vllm --vllm_mode server"
LAUNCH = "accelerate launch --num_processes"


@grid("case", [pytest.param(case, id=f"golden-{index}") for index, case in enumerate(ENGINES)])
def test_engines_by_its_own_code(case, tmp_path):
    flags = f"--use_vllm --vllm_tensor_parallel_size {case['tensor']}" + " --vllm_enable_sleep_mode" * case["sleep"]
    command = f"{LAUNCH} {case['processes']} train_grpo.py {flags}"
    if case["engines"] == "refused":
        assert "RST-N056" in codes(tmp_path, command)
        return
    plan = plan_of(tmp_path, command)
    rollout = next(part for part in plan.components if part.name == "rollout")
    devices = [int(device) for device in rollout.table.device_numbers]
    size = len(devices) // rollout.world_size
    assert [devices[start : start + size] for start in range(0, len(devices), size)] == case["engines"]
    assert plan.settings["engines_sleep"] == case["sleeps"]


@grid("case", [pytest.param(case, id=case["args"]) for case in LAUNCHES])
def test_processes_by_the_code_of_accelerate(case, tmp_path):
    command = f"accelerate launch {case['args']} train_grpo.py"
    if "refused" in case or case["processes"] % case["machines"]:
        with pytest.raises(ConfigError):
            plan_of(tmp_path, command)
        return
    plan = plan_of(tmp_path, command)
    assert plan.components[0].world_size == case["processes"]
    assert len(plan.inventory.nodes) == case["machines"]


def test_a_script_of_python_says_the_mode(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = (
        "from trl import GRPOConfig\nargs = GRPOConfig(use_vllm=True,\n    vllm_tensor_parallel_size=4, beta=0.04)\n"
    )
    plan = plan_of(tmp_path, f"{LAUNCH} 8 train.py", train_py=script)
    assert processes_of(plan) == {
        "actor": "8 x 1 on 0-7",
        "reference": "8 x 1 on 0-7",
        "rollout": "2 x 4 on 0-7",
    }


@pytest.mark.parametrize(
    ("arguments", "reference", "settings"),
    [
        ("", True, {"advantage_estimator": "rloo", "kl_coef": 0.05, "kl_in": "reward"}),
        ("--beta 0", False, {"advantage_estimator": "rloo"}),
    ],
)
def test_rloo_has_a_reference_unless_beta_is_0(arguments, reference, settings, tmp_path):
    plan = plan_of(tmp_path, f"trl rloo --model_name_or_path small --num_processes 2 {arguments}")
    assert ("reference" in processes_of(plan)) == reference
    assert plan.settings == settings


def test_a_number_of_processes_that_is_not_known_is_the_one_finding(tmp_path):
    found = codes(tmp_path, "accelerate launch train_grpo.py --use_vllm --vllm_tensor_parallel_size 4")
    assert "RST-N081" in found and "RST-N056" not in found


def test_flags_of_a_script_that_reads_none_have_no_effect(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call = "GRPOConfig(use_vllm=True, vllm_tensor_parallel_size=4)\n"
    command = f"{LAUNCH} 8 train.py --beta 0.1 --vllm_tensor_parallel_size 2"
    plan = plan_of(tmp_path, command, train_py=call)
    assert processes_of(plan) == {"actor": "8 x 1 on 0-7", "rollout": "2 x 4 on 0-7"}
    (warning,) = (finding for finding in plan.warnings if finding.code == "RST-N068")
    assert warning.where.key_path == "--beta"
    parses = f"from trl import TrlParser\n{call}"
    assert processes_of(plan_of(tmp_path, command, train_py=parses))["rollout"] == "4 x 2 on 0-7"


@pytest.mark.parametrize("flag", ["--num_processes 4", "--num_gpus 4", "--nproc-per-node=4", "--num_machines 2"])
def test_arguments_after_the_script_are_not_those_of_the_launcher(flag, tmp_path):
    plan = plan_of(tmp_path, f"{LAUNCH} 8 train_grpo.py --use_vllm {flag}")
    assert processes_of(plan) == {"actor": "8 x 1 on 0-7", "rollout": "8 x 1 on 0-7"}
    (warning,) = (finding for finding in plan.warnings if finding.code == "RST-N068")
    assert "argument of train_grpo.py" in warning.what
    assert processes_of(plan_of(tmp_path, "trl grpo --num_processes 4 --use_vllm"))["actor"] == "4 x 1 on 0-3"


@pytest.mark.parametrize(("other", "is_known"), [("", True), ("TP = 4\n", False), ("def f():\n    TP = 1\n", False)])
def test_a_constant_of_a_script_is_its_value(other, is_known, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = f"TP = 2\n{other}GRPOConfig(use_vllm=True, vllm_tensor_parallel_size=TP)\n"
    (tmp_path / "train.py").write_text(script)
    assert ("RST-C022" not in codes(tmp_path, f"{LAUNCH} 8 train.py")) == is_known


def test_a_value_that_python_computes_is_not_guessed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("GRPOConfig(\n  use_vllm=True,\n  vllm_tensor_parallel_size=size())\n")
    found = codes(tmp_path, f"{LAUNCH} 8 train.py")
    assert found["RST-C022"].where.line == 3
    assert "size()" in found["RST-C022"].what


def test_nothing_of_a_script_of_python_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("open('harm', 'w')\nGRPOConfig(use_vllm=open('harm', 'w'))\n")
    codes(tmp_path, f"{LAUNCH} 8 train.py")
    assert not (tmp_path / "harm").exists()


def test_a_config_of_trl_is_under_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "use_vllm: true\nvllm_tensor_parallel_size: 2\nnum_processes: 8\n"
    plan = plan_of(tmp_path, "trl grpo --config job.yaml --vllm-tensor-parallel-size 4", job_yaml=text)
    assert processes_of(plan)["rollout"] == "2 x 4 on 0-7"


@pytest.mark.parametrize("given", ["--config job.yaml", "job.yaml", "--config=job.yaml --learning_rate 1e-6"])
def test_a_program_of_any_name_with_a_config_of_trl(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "model_name_or_path: m\nnum_generations: 4\nuse_vllm: true\nvllm_tensor_parallel_size: 2\n"
    plan = plan_of(tmp_path, f"{LAUNCH} 4 tune.py {given}", job_yaml=text)
    assert processes_of(plan) == {"actor": "4 x 1 on 0-3", "rollout": "2 x 2 on 0-3"}


def test_the_device_of_an_engine_of_an_old_version_is_named(tmp_path):
    found = codes(tmp_path, f"{LAUNCH} 3 train_grpo.py --use_vllm --vllm_device cuda:3")["RST-N068"]
    assert found.where.path[-1] == "--vllm_device"


def test_a_yaml_of_trl_is_recognised(tmp_path):
    file = tmp_path / "grpo.yaml"
    file.write_text("model_name_or_path: Qwen/Qwen3-0.6B\nuse_vllm: true\nnum_processes: 4\n")
    assert processes_of(roost.plan(file)) == {"actor": "4 x 1 on 0-3", "rollout": "4 x 1 on 0-3"}


@pytest.mark.parametrize(("own", "count"), [("", 8), ("num_processes: 2\n", 2)])
def test_a_yaml_names_a_config_of_accelerate(own, count, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = f"model_name_or_path: Qwen/Qwen3-0.6B\nuse_vllm: true\naccelerate_config: zero3\n{own}"
    (tmp_path / "grpo.yaml").write_text(text)
    for plan in (plan_of(tmp_path, "trl grpo --config grpo.yaml"), roost.plan(tmp_path / "grpo.yaml")):
        assert processes_of(plan)["actor"].startswith(f"{count} x 1")
        assert plan["actor"].model.sharding == "full"


@pytest.mark.parametrize("program", ["accelerate launch --num_processes 4 train_grpo.py", "trl grpo --num_processes 4"])
def test_an_environment_that_is_called_trl(program, tmp_path):
    plan = plan_of(tmp_path, f"conda run -n trl {program} --use_vllm --vllm_tensor_parallel_size 2")
    assert processes_of(plan) == {"actor": "4 x 1 on 0-3", "rollout": "2 x 2 on 0-3"}


def test_processes_that_only_the_machine_knows(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "RST-N081" in codes(tmp_path, "accelerate launch train_grpo.py --use_vllm")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    plan = plan_of(tmp_path, "accelerate launch train_grpo.py --use_vllm")
    assert processes_of(plan)["actor"] == "3 x 1 on 0-2"


def test_a_server_on_the_gpus_of_the_learner(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = codes(tmp_path, f"trl vllm-serve --model m --tensor_parallel_size 2 &\n{LAUNCH} 4 train_grpo.py {SERVER}")
    assert "0,1" in found["RST-N082"].what


@pytest.mark.parametrize(
    ("flags", "engines"),
    [
        ("-tp 4", "1 x 4 on 0-3"),
        ("-tp=2 -dp 2", "2 x 2 on 0-3"),
        ("--tensor-parallel-size 2 --pipeline-parallel-size 2", "1 x 4 on 0-3"),
        ("-pp 2", "1 x 2 on 0-1"),
    ],
)
def test_sizes_of_the_engines_of_a_server(flags, engines, tmp_path):
    server = f"CUDA_VISIBLE_DEVICES=0,1,2,3 vllm serve Qwen/Qwen2.5-7B {flags} --port 8000 &"
    plan = plan_of(tmp_path, f"{server}\nCUDA_VISIBLE_DEVICES=4,5,6,7 {LAUNCH} 4 train_grpo.py {SERVER}")
    assert processes_of(plan) == {"actor": "4 x 1 on 4-7", "rollout": engines}


def test_a_launcher_that_counts_the_gpus(tmp_path):
    command = "torchrun --nproc-per-node=gpu grpo.py --use_vllm"
    assert "write --nproc_per_node 8" in codes(tmp_path, command)["RST-N081"].fix
    plan = plan_of(tmp_path, f"CUDA_VISIBLE_DEVICES=2,3 {command}")
    assert processes_of(plan)["actor"] == "2 x 1 on 2-3"


def test_more_processes_than_gpus_are_shown(tmp_path):
    found = codes(tmp_path, f"CUDA_VISIBLE_DEVICES=4,5 {LAUNCH} 4 train_grpo.py --use_vllm")
    assert found["RST-N082"].what == "shows 2 GPUs to 4 processes"


def test_a_server_that_is_not_used(tmp_path):
    # the GRPO trainer page of its documentation starts one, and its script does not set vllm_mode
    server = "CUDA_VISIBLE_DEVICES=4 trl vllm-serve --model m &"
    found = codes(tmp_path, f"{server}\nCUDA_VISIBLE_DEVICES=0,1 {LAUNCH} 2 train_grpo.py --use_vllm")
    assert found["RST-N068"].what == "the server that the script starts is not used"


def test_a_mode_beside_a_config_that_is_not_here_is_not_judged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = f"{LAUNCH} 4 train_trl.py --config job.yaml --vllm_mode colocate"
    found = codes(tmp_path, command)
    assert "RST-N060" in found
    assert "RST-N068" not in found
    (tmp_path / "job.yaml").write_text("output_dir: runs\n")
    assert "RST-N068" in codes(tmp_path, command)


@pytest.mark.parametrize(
    "command",
    [
        "python3 train.py --lr 1e-5",
        "trl sft --model_name_or_path m --num_processes 8",
        "python train_grpo.py policy.model_name=m",
        "trl vllm-serve --model m",
    ],
)
def test_other_programs_are_no_jobs_of_trl(command, tmp_path):
    assert "RST-C038" in codes(tmp_path, command)
