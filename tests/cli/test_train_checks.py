"""`roost train` reports what is wrong before it loads torch or starts Ray."""

import sys
import threading
from contextlib import chdir
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub")

from huggingface_hub import constants

from roost.cli.options import open_console
from roost.config.compose import load
from roost.config.findings import ConfigError, Findings
from roost.config.notations.notation import read_job
from roost.net.hub import Answer, ask_hub, check_on_hub
from roost.rollout.data.tables import DataError, open_rows
from roost.trainer.preflight import ThisMachine, accelerators_to_simulate, check_before_launch, machine_of_run
from tests.cli.terminal import run, write

ARITHMETIC = Path(__file__).parents[2] / "examples/arithmetic"
LOADING = "loading torch and Ray"  # what is said before they are imported
NOBODY = "http://127.0.0.1:9"  # a port at which nothing listens


@pytest.fixture(autouse=True)
def laptop(monkeypatch, tmp_path):
    """A machine without accelerators, without Ray and without a network."""
    for name in ("RAY_ADDRESS", "ROOST_FAKE_ACCELERATORS", "ROOST_HARDWARE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    environ = {"CUDA_VISIBLE_DEVICES": "", "HF_ENDPOINT": NOBODY, "HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model").mkdir()
    write(tmp_path / "model", '{"model_type": "qwen3", "max_position_embeddings": 64}', "config.json")
    return tmp_path / "model"


def trained(folder, *words, address="local"):
    with chdir(folder):
        return run("train", *words, "--address", address, "--runs", folder / "runs", width=300)


CASES = {
    "path": (["actor.model.model_path=./nowhere"], "'./nowhere' does not exist"),
    "no-accelerators": (
        ["cluster.num_gpus_per_node=null"],
        "write cluster.num_gpus_per_node: 2, or name a Ray cluster with --address",
    ),
    "vllm": (
        ["+train.engine=vllm", "+train.engine_options.python=/no/such/python"],
        "train.engine_options.python: vLLM cannot be started with /no/such/python",
    ),
    "sglang": (
        ["+train.engine=sglang", "+train.engine_options.python=/no/such/python"],
        "or write train.engine: torch for the built-in engine",
    ),
    "wide-built-in-engine": (
        ["+rollout.tensor_parallel_size=2", "cluster.num_gpus_per_node=3", "cluster.component_placement.rollout=1-2:0"],
        "is torch, which runs on one device, but rollout is split over several",
    ),
    "context": (["train.engine_options.max_context=65"], "is 65, but the model has 64 positions"),
    "option": (["+train.engine_options.max_contex=64"], "did you mean max_context?"),
    "placement": (["cluster.component_placement.rollout=7"], "names rank 7, which is out of range"),
}


@pytest.mark.parametrize(("overrides", "reported"), CASES.values(), ids=CASES)
def test_found_before_anything_starts(tmp_path, model, overrides, reported):
    words = [f"actor.model.model_path={model}", *overrides]
    result = trained(tmp_path, ARITHMETIC / "rlinf.yaml", *words)
    assert result.exit_code == 1
    assert reported in result.stderr and LOADING not in result.stdout, result.output
    assert result.stdout.startswith("roost: checking ")
    assert not (tmp_path / "runs").exists()


def test_errors_of_a_job_for_a_cluster_are_found_before_it_is_joined(tmp_path, model):
    words = [f"actor.model.model_path={model}", "cluster.component_placement.rollout=7"]
    result = trained(tmp_path, ARITHMETIC / "rlinf.yaml", *words, address="127.0.0.1:9")
    assert "names rank 7, which is out of range" in result.stderr and LOADING not in result.stdout


@pytest.mark.parametrize("has_runs", [False, True], ids=["fresh-clone", "beside-runs"])
def test_the_first_command_without_its_model(tmp_path, has_runs):
    """README's first training command: one error with the command that makes the model."""
    if has_runs:
        (tmp_path / "runs").mkdir()
    result = trained(tmp_path, ARITHMETIC / "rlinf.yaml")
    error, fix = result.stderr.splitlines()
    assert result.exit_code == 1 and LOADING not in result.stdout
    assert "'runs/arithmetic-model' is not a folder here, and the Hugging Face hub cannot be reached" in error
    assert fix.strip() == f"fix  make it first: python {ARITHMETIC / 'make_model.py'}"


def test_the_step_to_resume_from_may_stand_before_the_config(tmp_path, model):
    wrong = "cluster.component_placement.rollout=7"
    words = ["--resume", "4", ARITHMETIC / "rlinf.yaml", f"actor.model.model_path={model}", wrong]
    result = trained(tmp_path, *words)
    assert result.stdout.startswith(f"roost: checking {ARITHMETIC / 'rlinf.yaml'}"), result.output
    assert "names rank 7, which is out of range" in result.stderr


def test_errors_of_a_run_go_to_stderr(tmp_path, model):
    result = trained(tmp_path, "--resume", ARITHMETIC / "rlinf.yaml", f"actor.model.model_path={model}")
    assert result.exit_code == 1 and result.stderr.startswith("error: "), result.output
    assert "error" not in result.stdout


def test_paths_of_a_diverged_run_are_on_one_line(tmp_path, capsys):
    from roost.cli.train_run import _print_divergence
    from tests.trainer.example_run import make_run

    made = make_run(tmp_path / ("long-" * 20), steps=3)
    _print_divergence(made, open_console())
    printed = capsys.readouterr().out.splitlines()
    assert printed == ["no policy was exported; there is no checkpoint", f"report   {made.report_file}"]


@pytest.mark.parametrize("words", [[ARITHMETIC / "rlinf.yaml", "abc"], ["abc", ARITHMETIC / "rlinf.yaml"]])
def test_resume_takes_the_number_of_a_step(tmp_path, words):
    result = trained(tmp_path, "--resume", *words)
    assert result.exit_code == 2 and "takes the number of a step, not 'abc'" in result.output, result.output


# The hub ----------------------------------------------------------------------------------------------------------


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does: 401 for what is not there."""

    def do_HEAD(self):
        known = {"/api/models/org/there": HTTPStatus.OK, "/api/models/org/gated": HTTPStatus.FORBIDDEN}
        self.server.asked.append(self.path)
        if self.headers.get("Authorization") == "Bearer expired":
            known = {}
        self.send_response(known.get(self.path, HTTPStatus.UNAUTHORIZED))
        self.end_headers()

    def log_message(self, *_): ...


@pytest.fixture(scope="module")
def hub():
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.asked = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize(
    ("name", "answer"), [("org/there", Answer.THERE), ("org/gated", Answer.THERE), ("org/other", Answer.ABSENT)]
)
def test_the_hub_is_asked_once(hub, name, answer):
    hub.asked.clear()
    assert ask_hub(name, f"http://127.0.0.1:{hub.server_port}") == (answer, "")
    assert hub.asked == [f"/api/models/{name}"]


def test_a_name_that_the_hub_does_not_have(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
    result = trained(tmp_path, ARITHMETIC / "rlinf.yaml", "actor.model.model_path=org/other")
    assert "'org/other' is neither a folder here nor a model on the Hugging Face hub" in result.stderr
    assert check_on_hub("org/there", print) is None


def test_a_data_set_that_the_hub_does_not_have(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
    (tmp_path / "data").mkdir()
    hub.asked.clear()
    with chdir(tmp_path), pytest.raises(DataError, match=r"dta/train is neither a local path nor .*; .* has data"):
        open_rows("dta/train", None, "train")
    assert hub.asked == ["/api/datasets/dta/train"], "asked once, not until retries are used up"


def test_a_data_set_in_the_cache_is_read_where_the_hub_does_not_show_it(hub, tmp_path, monkeypatch):
    """The hub answers 401 for a private one without a token."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "sets"))
    rows = datasets.Dataset.from_list([{"prompt": "1+1=", "answer": 2}])
    version = tmp_path / "sets/org___rows/default/0.0.0"
    rows.save_to_disk(tmp_path / "saved")
    (version / "abc").mkdir(parents=True)
    (made,) = (tmp_path / "saved").glob("*.arrow")
    made.rename(version / "abc/rows-train.arrow")
    split = datasets.SplitDict({"train": datasets.SplitInfo("train", num_examples=1, dataset_name="rows")})
    info = datasets.DatasetInfo(features=rows.features, config_name="default", dataset_name="rows", splits=split)
    info.write_to_directory(version / "abc")
    for endpoint in (f"http://127.0.0.1:{hub.server_port}", NOBODY):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        (found,) = open_rows("org/rows", None, "train")
        assert found.read(0, 1) == [{"prompt": "1+1=", "answer": 2}]
    assert not datasets.config.HF_HUB_OFFLINE and not constants.HF_HUB_OFFLINE


def test_a_scenario_with_a_misspelt_data_set_asks_once(hub, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    from roost.cli.eval import _job
    from roost.rollout.arithmetic import write_arithmetic_model
    from roost.trainer.setup import load_scenario

    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
    path = write_arithmetic_model(tmp_path / "tiny", hidden_size=32, intermediate_size=32)
    job = _job("nobody/rows", str(path), "exact", {}, ())
    hub.asked.clear()
    with pytest.raises(ConfigError, match="nobody/rows is neither a local path nor a data set"):
        load_scenario(job, job.training)
    assert hub.asked == ["/api/datasets/nobody/rows"]


def test_a_token_that_the_hub_refuses_is_named(hub, monkeypatch):
    """The hub then answers 401 for public models too."""
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
    monkeypatch.setenv("HF_TOKEN", "expired")
    assert "the Hugging Face hub refuses the token: HF_TOKEN is expired or wrong" in check_on_hub("org/there", print)


class NoHub(BaseHTTPRequestHandler):
    """Something at the port that is no web server."""

    def do_HEAD(self):
        self.wfile.write(b"220 smtp.example.org\r\n")

    def log_message(self, *_): ...


def test_an_endpoint_that_is_no_hub_is_one_that_cannot_be_reached():
    assert ask_hub("org/there", "hub.local") == (
        Answer.UNREACHABLE,
        "unknown url type: 'hub.local/api/models/org/there'",
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), NoHub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        answer, reason = ask_hub("org/there", f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert answer is Answer.UNREACHABLE and "220 smtp" in reason


def test_without_a_network_the_cached_copy_is_used(tmp_path):
    folder = tmp_path / "cache/models--org--mine"
    (folder / "snapshots/abc").mkdir(parents=True)
    write(folder / "snapshots/abc", "{}", "config.json")
    (folder / "refs").mkdir()
    write(folder / "refs", "abc", "main")
    reported = []
    assert check_on_hub("org/mine", reported.append) is None
    assert "using the cached copy of org/mine" in reported[0]
    assert constants.HF_HUB_OFFLINE is True, "else the library would retry for a minute"
    assert check_on_hub("org/mine", reported.append) is None and len(reported) == 1
    assert "HF_HUB_OFFLINE is set" in check_on_hub("org/other", reported.append)


def test_accelerators_of_a_registered_vendor_are_seen(tmp_path, monkeypatch):
    write(
        tmp_path,
        "from roost.cluster.hardware.accelerator import Accelerator, DetectedAccelerators\n"
        "found = DetectedAccelerators(2, 'Acme 1', 40.0, ('0', '1'))\n"
        "names = ('ACME_GPU', 'Acme', 'ACME_VISIBLE_DEVICES', 'gloo', 'GLOO_SOCKET_IFNAME', 'GPU')\n"
        "ACME = Accelerator(*names, lambda environ: found)\n",
        "cards_of_a_test.py",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    environ = {"ROOST_HARDWARE": "cards_of_a_test:ACME"}
    job = read_job(load(ARITHMETIC / "rlinf.yaml", (), Findings()), Findings())
    assert accelerators_to_simulate(job, "local", environ) == 0
    assert machine_of_run(job, "local", environ) == ThisMachine(2, "Acme 1", 40.0)


WITHOUT_TORCHAO = ("sitecustomize.py", "import sys\nsys.modules['torchao'] = None\n")  # also where it is installed


@pytest.mark.parametrize(
    ("file", "content", "code"), [(*WITHOUT_TORCHAO, 1), ("torchao.py", "", 0)], ids=["missing", "installed"]
)
def test_check_and_doctor_look_for_the_package_of_the_optimizer(model, tmp_path, monkeypatch, file, content, code):
    """Only `roost train` said that it is missing."""
    pytest.importorskip("torch")
    write(tmp_path, content, file)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    job = ARITHMETIC / "rlinf.yaml", "+train.optimizer=adamw_8bit", f"actor.model.model_path={model}"
    result = run("check", "--train", "--imports", *job, width=300)
    assert result.exit_code == code, result.output
    assert ("RST-E011" in result.stdout and f"{sys.executable} has no torchao" in result.stdout) == (code == 1)
    assert "RST-E011" not in run("check", "--train", *job, width=300).stdout
    looked = run("doctor", *job, "--runs", tmp_path, width=300).stdout
    (row,) = [line for line in looked.splitlines() if line.startswith("optimizer")]
    assert row.split()[1] == ("failed" if code else "ok")


def test_no_package_is_looked_for_in_an_interpreter_of_other_machines(model, tmp_path):
    pytest.importorskip("torch")
    text = (ARITHMETIC / "rlinf.yaml").read_text()
    software = "{node_ranks: 0, python_interpreter_path: /far/python}"
    group = f"node_groups: [{{label: far, node_ranks: 0, env_configs: [{software}]}}]"
    text = text.replace("    actor: 0\n", "    actor: {node_group: far, placement: 0}\n")
    text = text.replace("  num_nodes: 1\n", f"  num_nodes: 1\n  {group}\n")
    job = write(tmp_path, text), "+train.optimizer=adamw_8bit", f"actor.model.model_path={model}"
    result = run("check", "--train", "--imports", *job, width=300)
    assert result.exit_code == 0 and "can train" in result.stdout, result.output
    looked = run("doctor", *job, "--runs", tmp_path, width=300).stdout
    assert "uses 2 accelerators" in looked and "optimizer" not in looked


def test_a_package_is_looked_for_where_the_learner_will_be(model, tmp_path):
    """The environment of its node group counts, as here a folder with the package."""
    write(tmp_path, "", "torchao.py")
    software = {"node_ranks": 0, "python_interpreter_path": sys.executable, "env_vars": [{"PYTHONPATH": str(tmp_path)}]}
    config = {
        "cluster": {
            "num_nodes": 1,
            "num_gpus_per_node": 2,
            "component_placement": {"actor": {"node_group": "train", "placement": 0}, "rollout": 1},
            "node_groups": [{"label": "train", "node_ranks": 0, "env_configs": [software]}],
        },
        "actor": {"model": {"model_path": str(model)}},
        "train": {"optimizer": "adamw_8bit", "task": {"_target_": "a.Task"}},
    }
    findings = Findings()
    job = read_job(load(config, (), findings), findings)
    findings.raise_errors()
    check_before_launch(job, job.training, "local", {})
