"""Ctrl-C or SIGTERM while `roost train` starts: it says so, ends with 130 or 143, and leaves nothing behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.limits import HANG_S

psutil = pytest.importorskip("psutil")
pytest.importorskip("ray")
pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
MARK = "ROOST_TEST_MARK"  # the variable by which processes of a test are known
STRAY = ("SIGTERM received", "never awaited", "Traceback", "never retrieved", "Exception ignored", "RuntimeWarning")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from roost.rollout.arithmetic import write_arithmetic_model

    folder = tmp_path_factory.mktemp("models") / "arithmetic"
    return write_arithmetic_model(folder, hidden_size=32, intermediate_size=32, num_hidden_layers=1)


class Command:
    """`roost train` in a process group of its own, as a shell starts it."""

    def __init__(self, model, folder, path=ROOT):
        self.mark, self.folder, self.printed = uuid.uuid4().hex, folder, folder / "printed.txt"
        environ = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "ROOST_NODE_RANK")}
        environ |= {MARK: self.mark, "ROOST_FAKE_ACCELERATORS": "2", "PYTHONPATH": str(path), "COLUMNS": "200"}
        words = ["train", ROOT / "examples/arithmetic/rlinf.yaml", f"actor.model.model_path={model}"]
        words += ["--address", "local", "--runs", folder, "--name", "run"]
        with self.printed.open("w") as printed:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "roost", *map(str, words)],
                cwd=folder,
                env=environ,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for(self, condition):
        deadline = time.monotonic() + HANG_S
        while not condition():
            assert self.process.poll() is None, self.printed.read_text()
            assert time.monotonic() < deadline, self.printed.read_text()
            time.sleep(0.02)

    def has_said(self, text):
        return text in self.printed.read_text()

    def engine_starts(self):
        return any((self.folder / "run/logs").glob("rollout/rollout-*.log"))

    def raylet_starts(self):
        """Ray's last daemon is there, and ray.init has not come back for a while yet."""
        with contextlib.suppress(psutil.Error):  # one that ended meanwhile
            return any("raylet/raylet" in " ".join(process.cmdline()[:1]) for process in self.left())
        return False

    def signalled(self, number, send):
        """The exit code and what was printed after a signal."""
        send(self.process.pid, number)
        code = self.process.wait(HANG_S)
        return code, self.printed.read_text()

    def left(self):
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found


@pytest.fixture
def command(model, tmp_path):
    made = Command(model, tmp_path)
    yield made
    for process in made.left():
        process.kill()
    made.process.wait()


POINTS = {
    "imports": lambda command: command.has_said("loading torch and Ray"),
    "tokenizer": lambda command: command.has_said("loading the tokenizer"),
    "ray": lambda command: command.has_said("starting Ray on this machine"),
    "raylet": Command.raylet_starts,
    "launch": lambda command: command.has_said("starting learners"),
    "engines": Command.engine_starts,
}


def check_ended(command, number, point, send=os.killpg):
    """To the process group, as a terminal and `timeout` signal it, or to the process alone (os.kill)."""
    command.wait_for(lambda: POINTS[point](command))
    code, printed = command.signalled(number, send)
    assert code == 128 + number, printed
    last = printed.rstrip().splitlines()[-1]
    assert last.startswith("roost: ") and "ended" in last, printed
    assert number == signal.SIGINT or "SIGTERM ended the run" in last, printed
    assert not [word for word in STRAY if word in printed], printed
    deadline = time.monotonic() + HANG_S
    while command.left():
        assert time.monotonic() < deadline, command.left()
        time.sleep(0.1)


def test_while_torch_is_loaded(command):
    check_ended(command, signal.SIGINT, "imports")


def test_while_a_module_builds_its_classes(model, tmp_path):
    """namedtuple and dataclass run source text, where CPython 3.11 treats an interrupt differently."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "torch.py").write_text('exec("raise KeyboardInterrupt")\n')
    command = Command(model, tmp_path, f"{modules}{os.pathsep}{ROOT}")
    assert command.process.wait(HANG_S) == 130, command.printed.read_text()
    assert command.has_said("interrupted; all processes of the run have ended")


@pytest.mark.long
@pytest.mark.parametrize("point", ["tokenizer", "ray", "launch", "engines"])
def test_at_other_points(command, point):
    check_ended(command, signal.SIGINT, point)


def test_sigterm_while_torch_is_loaded(command):
    check_ended(command, signal.SIGTERM, "imports")


# To the driver alone where most runs already. All that it starts has a session of its own: its group is the driver.
@pytest.mark.long
@pytest.mark.parametrize(
    ("point", "send"), [("ray", os.killpg), ("raylet", os.killpg), ("launch", os.killpg), ("engines", os.kill)]
)
def test_sigterm_at_other_points(command, point, send):
    check_ended(command, signal.SIGTERM, point, send)
