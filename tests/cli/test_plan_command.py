"""`roost plan` and `roost check` as a person meets them."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import roost
from roost.cli import main
from tests.cli.terminal import cluster_yaml, lines_of, run, write
from tests.limits import HANG_S

EXAMPLES = Path(__file__).parents[2] / "examples"
HETEROGENEOUS = EXAMPLES / "heterogeneous/cluster.yaml"
MACHINES = EXAMPLES / "heterogeneous/machines.yaml"


def test_the_heterogeneous_example():
    result = run("plan", HETEROGENEOUS, "--inventory", MACHINES)
    assert result.exit_code == 0, result.output
    lines = lines_of(result.stdout)
    assert lines[0].endswith("cluster.yaml: rlinf notation, disaggregated")
    assert lines[1] == "18 nodes, 128 accelerators, 2 Franka"
    assert "actor             64  a800    0-63   flexible" in lines
    assert "rollout 0-63  8-15          8  0-7, 1 each  GLOO_SOCKET_IFNAME=eth1" in lines
    assert "env 0-1       16-17         1  Franka 0" in lines
    assert "agent 0-399   0-3         100  -" in lines
    assert result.stderr == ""


@pytest.mark.parametrize("name", ["rlinf", "roll", "loop"])
def test_the_placement_examples(name):
    result = run("plan", EXAMPLES / f"placements/{name}.yaml")
    assert result.exit_code == 0, result.output
    assert f"{name} notation" in result.stdout


def shown_in_docs(printed):
    """Whether docs/planning.md shows these lines, one below the other."""
    shown = lines_of((EXAMPLES.parent / "docs/planning.md").read_text())
    start = shown.index(printed[0])
    return shown[start : start + len(printed)]


def test_the_docs_show_the_plan_that_is_printed(monkeypatch):
    monkeypatch.chdir(EXAMPLES.parent)
    printed = lines_of(run("plan", "examples/placements/roll.yaml", width=80).stdout)
    assert shown_in_docs(printed) == printed


def test_the_docs_show_the_grid_that_is_printed(monkeypatch):
    monkeypatch.chdir(EXAMPLES.parent)
    printed = lines_of(run("plan", "examples/placements/rlinf.yaml", "--grid", width=80).stdout)
    start = printed.index("nodes  accelerators 0-7")
    assert shown_in_docs(printed[start : start + 3]) == printed[start : start + 3]


def test_the_docs_show_the_mistakes_that_are_printed(monkeypatch, tmp_path):
    text = (EXAMPLES.parent / "docs/planning.md").read_text()
    config = next(block for block in text.split("```yaml\n")[1:] if "num_gpu_per_node" in block).split("```")[0]
    write(tmp_path, config)
    monkeypatch.chdir(tmp_path)
    printed = lines_of(run("check", "job.yaml", "--gpus-per-node", "8", width=200).stdout)
    assert shown_in_docs(printed) == printed


def test_a_terminal_without_unicode(tmp_path):
    file = write(tmp_path, cluster_yaml(1, 演员="all"))
    command = [sys.executable, "-c", "from roost.cli.main import run; run()", "plan", str(file)]
    done = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}, timeout=HANG_S)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"?? 0-7" in done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk(tmp_path):
    file = write(tmp_path, cluster_yaml(1, actor="all"))
    command = [sys.executable, "-c", "from roost.cli.main import run; run()", "plan", str(file)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=HANG_S)
    assert done.returncode == 1
    assert done.stderr == b"error: the output cannot be written: No space left on device\n"


def test_only_failed_writes_are_shown_without_a_traceback(monkeypatch):
    def failing(error):
        def command():
            raise error

        monkeypatch.setattr(main, "build_app", lambda names: command)
        main.run()

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(FileNotFoundError):
        failing(FileNotFoundError(errno.ENOENT, "No such file or directory", "weights.bin"))
    with pytest.raises(SystemExit, match="error: there is no Ray cluster"):
        failing(ConnectionError("there is no Ray cluster"))


@pytest.mark.parametrize("nodes", [1, 1000, 16384])
def test_a_table_fits_the_terminal_whatever_the_size(nodes, tmp_path):
    file = write(tmp_path, cluster_yaml(nodes, **{"actor,rollout": "all", "env": "0-3"}))
    result = run("plan", file, width=80)
    assert result.exit_code == 0
    assert len(lines_of(result.stdout)) < 20
    assert max(len(line) for line in lines_of(result.stdout)[1:]) <= 80


def test_a_layout_that_cannot_be_folded_is_cut(tmp_path):
    devices = [device for pair in range(400) for device in (pair * 8, pair * 8 + pair % 7 + 1)]
    config = {"num_gpus_per_node": 8, "actor_train": {"device_mapping": devices}}
    result = run("plan", write(tmp_path, json.dumps(config)))
    assert len(lines_of(result.stdout)) < 70
    assert "more rows; see --json" in result.stdout


def test_json_is_the_whole_plan(tmp_path):
    file = write(tmp_path, cluster_yaml(2, actor="all"))
    result = run("plan", file, "--json")
    assert roost.Plan.from_json(result.stdout) == roost.plan(file)


def test_json_of_one_component(tmp_path):
    file = write(tmp_path, cluster_yaml(1, actor="all", env="0"))
    assert list(json.loads(run("plan", file, "--json", "--component", "env").stdout)["components"]) == ["env"]


def test_json_of_mistakes(tmp_path):
    result = run("plan", write(tmp_path, cluster_yaml(1, actor="0-8")), "--json")
    assert result.exit_code == 1
    (finding,) = json.loads(result.stdout)["findings"]
    assert finding["severity"] == "error"
    assert finding["path"] == ["cluster", "component_placement", "actor"]


def test_one_component(tmp_path):
    result = run("plan", write(tmp_path, cluster_yaml(1, actor="all", env="0")), "--component", "env")
    assert "env 0" in result.stdout
    assert "actor" not in result.stdout


def test_an_unknown_component_is_a_finding(tmp_path):
    result = run("plan", write(tmp_path, cluster_yaml(1, actor="all")), "--component", "actr")
    assert result.exit_code == 1
    assert "did you mean actor?" in result.stderr


def test_the_grid_has_the_memory_of_what_does_not_fit(tmp_path):
    """And nothing else of a plan that is refused; other errors leave no table."""
    shape = {"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
             "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    job = json.loads(cluster_yaml(1, **{"actor,rollout": "all"}))
    job["actor"] = {"model": {"model_path": str(tmp_path)}}
    file = write(tmp_path, json.dumps(job))
    machines = write(tmp_path, "nodes: [{accelerators: 8, memory_gb: 24}]", "machines.yaml")
    refused = run("plan", file, "--inventory", machines, "--grid")
    assert refused.exit_code == 1 and "RST-M004" in refused.stderr
    head, row, *_ = lines_of(refused.stdout)
    assert re.fullmatch(r"GiB on each device +generate +infer +learn +sync +of +decision", head)
    assert re.match(r"8 x actor\+rollout( +\d+\.\d){4} +24 ", row)
    assert run("plan", file, "--inventory", machines).stdout == ""
    assert run("plan", file, "cluster.num_nodes=2", "--inventory", machines, "--grid").stdout == ""


def test_overrides_and_options(tmp_path):
    file = write(tmp_path, "cluster: {num_nodes: 1, component_placement: {actor: all}}")
    result = run("plan", file, "cluster.num_nodes=3", "--gpus-per-node", "4")
    assert "3 nodes, 12 accelerators" in result.stdout


def test_mistakes_show_place_reason_and_mend(tmp_path):
    result = run(
        "plan", write(tmp_path, "cluster:\n  num_nodes: 1\n  num_gpus_per_node: 8\n  component_placement: {actor: 0-8}")
    )
    assert result.exit_code == 1
    assert result.stdout == ""
    assert lines_of(result.stderr) == [
        f"error RST-P007: {tmp_path}/job.yaml:4:25 cluster.component_placement.actor: "
        "'0-8' names rank 8, which is out of range",
        "  why  cluster has 8 accelerators, counted from 0",
        "  fix  use ranks up to 7",
    ]


def test_check_many_files(tmp_path):
    good = write(tmp_path, cluster_yaml(1, actor="all"), "good.yaml")
    bad = write(tmp_path, cluster_yaml(1, actor="9"), "bad.yaml")
    result = run("check", good, bad, good)
    assert result.exit_code == 1
    assert "bad.yaml:1" in result.stdout
    assert lines_of(result.stdout)[-1] == "2 checked, 1 with errors; 1 error, 0 warnings"
    assert run("check", good).exit_code == 0
    assert json.loads(run("check", bad, "--json").stdout)[str(bad)][0]["severity"] == "error"


def test_check_imports_what_a_config_names(tmp_path):
    """Only when it is asked to: whoever plans need not have what a run needs."""
    pytest.importorskip("torch")
    text = (EXAMPLES / "arithmetic" / "rlinf.yaml").read_text()
    config = write(tmp_path, text.replace("roost.rollout.arithmetic.Arithmetic", "roost.rollout.arithmetic.Aritmetic"))
    assert run("check", config).exit_code == 0
    result = run("check", config, "--imports")
    assert (result.exit_code, "did you mean Arithmetic?" in result.stdout) == (1, True), result.stdout


def test_markup_in_a_config_is_printed_as_it_is(tmp_path):
    file = write(tmp_path, cluster_yaml(1, **{"[red]x[/red]": "all"}))
    assert "[red]x[/red] 0-7" in run("plan", file).stdout


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(bytes(range(256)) * 100, id="binary"),
        pytest.param(b"a" * 10_000_000, id="ten-megabytes"),
        pytest.param(b"cluster: [", id="broken-yaml"),
        pytest.param(b"[" * 100_000, id="deep"),
        pytest.param(b"cluster: &c {num_nodes: *c}", id="recursive"),
        pytest.param(b"cluster: 3", id="cluster-is-a-number"),
        pytest.param(b"cluster: {num_nodes: 1e400, component_placement: {actor: all}}", id="infinite-nodes"),
        pytest.param(
            b"cluster: {num_nodes: 999999999999, component_placement: {actor: all}}", id="huge-number-of-nodes"
        ),
        pytest.param(b"cluster: {num_nodes: 999999999, component_placement: {actor: all}}", id="many-nodes"),
        pytest.param(b"cluster: {num_nodes: 1, component_placement: {actor: '0:0-999999999'}}", id="many-processes"),
        pytest.param(b"cluster: {num_nodes: [1], component_placement: [1]}", id="wrong-types"),
        pytest.param(b"cluster: {num_nodes: 1, component_placement: {actor: {placement: {}}}}", id="mapping-as-ranks"),
        pytest.param(b"cluster: {num_nodes: 1, node_groups: [1], component_placement: {a: 0}}", id="group-is-a-number"),
        pytest.param(b"actor_train: {device_mapping: 'list(range(0,99999999999))'}", id="huge-expression"),
        pytest.param(b"actor_train: {device_mapping: [999999999]}", id="huge-device"),
        pytest.param(b"rewards: {a: {world_size: 999999999}}", id="many-workers"),
        pytest.param(b"rl: {gpu_allocation: {learning_gpus: [999999999], inference_gpus: [0]}}", id="huge-gpu"),
        pytest.param(b"rl: {gpu_allocation: 3}", id="allocation-is-a-number"),
        pytest.param(b"defaults: 3\ncluster: {num_nodes: 1, component_placement: {a: 0}}", id="defaults-is-a-number"),
        pytest.param(b"defaults: [[1]]\ncluster: {num_nodes: 1, component_placement: {a: 0}}", id="defaults-of-lists"),
    ],
)
def test_bad_input_gives_findings_and_never_a_traceback(content, tmp_path):
    file = tmp_path / "job.yaml"
    file.write_bytes(content)
    for command in ("plan", "check"):
        result = run(command, file)
        assert result.exit_code == 1, result.output
        assert result.exception is None or isinstance(result.exception, SystemExit)
        assert "error" in result.output
    assert json.loads(run("plan", file, "--json").stdout)["findings"]


def test_planning_imports_only_what_it_needs(tmp_path):
    """A planning user pays for nothing that planning does not need."""
    file = write(tmp_path, cluster_yaml(1, actor="all"))
    code = (
        "import sys; from roost.cli.main import build_app\n"
        f"try: build_app(['plan'])(['plan', {str(file)!r}])\n"
        "except SystemExit as stop: assert not stop.code\n"
        "small = sorted(sys.modules.keys() & {'roost.config.shell', 'pydantic'}); build_app()\n"
        "print(small, sorted(sys.modules.keys() & {'ray', 'torch', 'hydra', 'omegaconf'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=HANG_S)
    assert lines_of(done.stdout)[-1] == "[] []"


def test_a_closed_pipe_gives_no_traceback(tmp_path):
    file = write(tmp_path, cluster_yaml(64, actor="all"))
    command = [sys.executable, "-c", "from roost.cli.main import run; run()", "plan", str(file), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    process.wait(HANG_S)


def test_help_and_version():
    assert "plan" in run("--help").stdout
    assert run("--version").stdout == f"roost {roost.__version__}\n"
