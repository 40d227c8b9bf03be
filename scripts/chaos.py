"""Chaos run: inject a random fault every few seconds, then compare the policy with that of an undisturbed run.

python scripts/chaos.py [--seconds 600] [--every 20] [--seed 0] [--faults "kill learner,fill disk"]

Trains examples/arithmetic and restarts it with `--auto-resume` whenever it exits, as a batch system would. Fails unless
the weights equal the undisturbed run's bit for bit, every step was learned from once, and no process, shared memory or
temporary file is left behind; fails as well if the run makes no step for START_LIMIT seconds, or if a fault never finds
its process. After a failure the working folder is kept. Linux only; needs the right to mount (root, or user namespaces)
for the disk fault."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import psutil

ROOT = Path(__file__).resolve().parents[1]
JOB = ROOT / "examples/arithmetic/rlinf.yaml"
MARK = "ROOST_CHAOS"
DISK_MB = 256
HANG = 25.0  # seconds a process stays stopped, unless it is ended before
DISK_FULL = 15.0  # seconds
FIND_LIMIT = 120.0  # seconds for the process of a fault to appear
START_LIMIT = 900.0  # seconds for a run to make its next step
END_LIMIT = 600.0  # seconds for a run to stop after SIGTERM
LEFTOVER_LIMIT = 120.0  # seconds for its processes to be gone after it
ABORT_LIMIT = 30.0  # seconds for the same if this script is stopped or fails
FEWEST_STEPS = 5  # a shorter run proves nothing
RESTARTS = 3  # of a run that no more faults disturb; the last fault may end it
START_SHARE = 0.25  # of the faults may hit a run that has made no step since the last one

# Processes to kill, by a part of their command line. The driver is the process this script started.
KILLED = {
    "learner": "ray::LearnerWorker",
    "engine worker": "ray::EngineWorker",
    "engine server": "roost.torch_engine",
    "engine keeper": "server_keeper.py",
    "raylet": "raylet/raylet",
    "GCS": "gcs_server",
    "node daemon": "ray::NodeDaemonActor",
    "reservation keeper": "ray::Keeper",
    "reaper": "runtime/reaper.py",
}
HANGING = {"engine server": "roost.torch_engine"}


@dataclass
class Trial:
    """The disturbed run: its folder, its process if one is alive, and how its processes ended."""

    work: Path
    steps: int
    mark: str
    process: subprocess.Popen[bytes] | None = None
    exits: Counter[int] = field(default_factory=Counter)
    drivers: list[int] = field(default_factory=list)

    @property
    def runs(self) -> Path:
        return self.work / "runs"

    @property
    def folder(self) -> Path:
        return self.runs / "disturbed"

    def start(self) -> None:
        self.process = start_run(self.work, "disturbed", self.steps, self.mark)
        self.drivers.append(self.process.pid)

    def reap(self) -> bool:
        """Return True if the run has ended; count its exit code."""
        if self.process is None:
            return True
        code = self.process.poll()
        if code is None:
            return False
        self.exits[code] += 1
        say(f"the run exited with {code} at step {self.done}")
        self.process = None
        return True

    @property
    def has_ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    @property
    def done(self) -> int:
        return len(lines(self.folder / "metrics.jsonl"))

    def processes(self) -> list[psutil.Process]:
        return marked(self.mark)


def start_run(work: Path, name: str, steps: int, mark: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "roost", "train", str(JOB), f"actor.model.model_path={work / 'model'}"]
    command += [f"runner.max_steps={steps}", "+runner.save_interval=1", "--runs", str(work / "runs"), "--name", name]
    log = (work / f"{name}.log").open("ab")
    own = {MARK: mark, "TMPDIR": str(work / "tmp"), "PYTHONPATH": str(ROOT)}
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(work / "inductor")}  # kept between runs on purpose
    with log:
        return subprocess.Popen(
            [*command, "--auto-resume"],  # starts over if it was killed before its first checkpoint was whole
            cwd=work,
            env={**os.environ, **own, **caches},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


# Faults ---------------------------------------------------------------------------------------------------------------


def kill(trial: Trial, rng: random.Random, part: str) -> bool:
    """Send SIGKILL to one of the processes whose command line has this part; False if there is none."""
    victims = found_in_time(trial, part)
    if not victims:
        return False
    with contextlib.suppress(psutil.NoSuchProcess):
        rng.choice(victims).kill()
    return True


def hang(trial: Trial, rng: random.Random, part: str) -> bool:
    """Stop a process for a while."""
    victims = found_in_time(trial, part)
    if not victims:
        return False
    victim = rng.choice(victims)
    with contextlib.suppress(psutil.NoSuchProcess):
        victim.suspend()
        wait_until(lambda: not is_running(victim) or trial.has_ended, HANG)
        victim.resume()
    return True


def kill_driver(trial: Trial, rng: random.Random) -> bool:
    if trial.process is None:
        return False
    trial.process.kill()
    return True


def terminate_group(trial: Trial, rng: random.Random) -> bool:
    """Send SIGTERM to the process group, as `timeout`, Slurm and systemd do."""
    if trial.process is None:
        return False
    os.killpg(trial.process.pid, signal.SIGTERM)
    return True


def fill_disk(trial: Trial, rng: random.Random) -> bool:
    """Leave no byte free on the file system of the runs folder for a while."""
    ballast = trial.runs / "ballast"
    try:
        with ballast.open("wb", buffering=0) as file:
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(1 << 16))
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"\0")
        wait_until(lambda: trial.has_ended, DISK_FULL)
    finally:
        ballast.unlink()
    return True


Fault = Callable[[Trial, random.Random], bool]


def faults(can_fill: bool) -> dict[str, Fault]:
    """Return all faults by name."""
    found: dict[str, Fault] = {"kill driver": kill_driver, "SIGTERM to the group": terminate_group}
    for name, part in KILLED.items():
        found[f"kill {name}"] = lambda trial, rng, part=part: kill(trial, rng, part)
    for name, part in HANGING.items():
        found[f"hang {name}"] = lambda trial, rng, part=part: hang(trial, rng, part)
    if can_fill:
        found["fill disk"] = fill_disk
    return found


def found_in_time(trial: Trial, part: str) -> list[psutil.Process]:
    """Return the processes with this part in their command line; wait for the first while the run is alive."""
    victims: list[psutil.Process] = []

    def are_found() -> bool:
        victims[:] = named(trial, part)
        return bool(victims) or trial.has_ended

    wait_until(are_found, FIND_LIMIT)
    return victims


def named(trial: Trial, part: str) -> list[psutil.Process]:
    found = []
    for process in trial.processes():
        with contextlib.suppress(psutil.Error):
            if part in " ".join(process.cmdline()):
                found.append(process)
    return found


# The trial ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tries:
    """Count of tries of each fault, and of those that found their process."""

    tried: Counter[str] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)

    def never_found(self, chosen: Iterable[str]) -> list[str]:
        """Return the faults that never found their process, in a run long enough for every fault."""
        names = sorted(chosen)
        if self.hits.total() <= len(names):
            return []
        return [name for name in names if self.tried[name] and not self.hits[name]]


def disturb(trial: Trial, chosen: dict[str, Fault], seconds: float, every: float, seed: int) -> Tries:
    """Run with faults until the time is over; restart the run whenever it exits."""
    rng, tries = random.Random(seed), Tries()
    end = time.monotonic() + seconds
    bag: list[str] = []
    while time.monotonic() < end:
        if trial.reap():
            trial.start()
        pause = time.monotonic() + every * rng.uniform(0.5, 1.5)
        wait_until(lambda pause=pause: time.monotonic() > pause or trial.has_ended, 10 * every)
        if rng.random() > START_SHARE:  # let the run get out of its start, however slow the machine is
            before = trial.done
            if not wait_until(lambda before=before: trial.done != before or trial.has_ended, START_LIMIT):
                fail(f"no step after step {before} in {START_LIMIT:.0f} s; see {trial.work}/disturbed.log")
        if trial.reap():
            continue
        bag = bag or rng.sample(sorted(chosen), len(chosen))  # every fault once before any comes again
        name = bag.pop()
        tries.tried[name] += 1
        if chosen[name](trial, rng):
            tries.hits[name] += 1
            say(f"{name} at step {trial.done}")
        else:
            say(f"{name}: no such process at step {trial.done}")
    return tries


def stop(trial: Trial) -> int:
    """Let the run reach a few steps at least, stop it at the end of one and return the number of steps done."""
    for _ in range(1 + RESTARTS):
        if trial.reap():
            trial.start()
        if not wait_until(lambda: trial.done >= FEWEST_STEPS or trial.has_ended, START_LIMIT):
            fail(f"fewer than {FEWEST_STEPS} steps in {START_LIMIT:.0f} s; see {trial.work}/disturbed.log")
        if not trial.has_ended:
            break
    else:
        fail(f"the run exits again and again without faults; see {trial.work}/disturbed.log")
    trial.process.send_signal(signal.SIGTERM)
    exit_code(trial.process, END_LIMIT, "the run after SIGTERM")
    trial.reap()
    return trial.done


def finish(trial: Trial, last: int) -> None:
    """Run the remaining steps without faults, so that the run ends by itself."""
    trial.steps = last
    trial.start()
    code = exit_code(trial.process, START_LIMIT, "the last part, without faults,")
    trial.reap()
    if code:
        fail(f"the last part, without faults, exited with {code}; see {trial.work}/disturbed.log")


def exit_code(process: subprocess.Popen[bytes], limit: float, what: str) -> int:
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        fail(f"{what} did not exit in {limit:.0f} s")


def compare(trial: Trial, calm: Path) -> list[str]:
    """Return the differences between the disturbed and the undisturbed run."""
    wrong = []
    for file in sorted((calm / "policy").rglob("*.safetensors")):
        other = trial.folder / "policy" / file.relative_to(calm / "policy")
        if not other.exists() or other.read_bytes() != file.read_bytes():
            wrong.append(f"{other} differs from the undisturbed run's")
    steps = [record["step"] for record in lines(trial.folder / "metrics.jsonl")]
    if steps != list(range(1, len(steps) + 1)):
        wrong.append(f"steps are not 1, 2, 3, ...: {steps}")
    if lines(trial.folder / "learnt.jsonl") != lines(calm / "learnt.jsonl"):
        wrong.append("the groups of the steps differ from the undisturbed run's")
    if not list((calm / "policy").rglob("*.safetensors")):
        wrong.append("the undisturbed run exported no policy")
    return wrong


def leftovers(trial: Trial, shared_memory: set[str]) -> list[str]:
    """Return what the run left behind: processes, shared memory, temporary files, sessions of Ray."""
    wait_until(lambda: not trial.processes(), LEFTOVER_LIMIT)
    found = [f"process {process.pid}: {' '.join(process.cmdline())[:120]}" for process in trial.processes()]
    found += sorted(shared_segments() - shared_memory)
    found += [str(path) for path in (trial.work / "tmp").iterdir()]
    sessions = Path("/tmp/ray")
    if sessions.is_dir():
        ours = {str(pid) for pid in trial.drivers}
        found += [str(path) for path in sessions.glob("session_2*") if path.name.rpartition("_")[2] in ours]
    return found


def shared_segments() -> set[str]:
    return {str(path) for path in Path("/dev/shm").iterdir()}


# Helpers --------------------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def fail(*texts: str) -> NoReturn:
    for text in texts:
        say(f"FAILED: {text}")
    raise SystemExit(1)


def lines(file: Path) -> list[dict]:
    """Return the records of a JSON Lines file, without an incomplete last line."""
    if not file.exists():
        return []
    found = []
    for line in file.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def marked(mark: str) -> list[psutil.Process]:
    """Return the live processes that have the mark in their environment, and their children."""
    found = {process.pid: process for process in psutil.process_iter() if has_mark(process, mark)}
    for process in list(found.values()):
        with contextlib.suppress(psutil.Error):
            found |= {child.pid: child for child in process.children(recursive=True)}
    return [process for process in found.values() if is_running(process)]


def has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark
    except psutil.Error:
        return False


def is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], limit: float) -> bool:
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


@contextlib.contextmanager
def ended_afterwards(mark: str) -> Iterator[None]:
    """End all processes with the mark on the way out, also after Ctrl-C or an error."""
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in marked(mark):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT)
                    process.send_signal(number)
            wait_until(lambda: not marked(mark), ABORT_LIMIT)


@contextlib.contextmanager
def working_folder() -> Iterator[tuple[Path, bool]]:
    """Yield a working folder, and whether its `runs` are a separate file system. It is kept after a failure."""
    work = Path(tempfile.mkdtemp(prefix="chaos-"))
    for name in ("runs", "tmp"):
        (work / name).mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m,mode=700", "roost-chaos", str(work / "runs")]
    is_mounted = subprocess.run(mount, capture_output=True).returncode == 0
    if is_mounted:  # only then is this a mount namespace of our own
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=1777", "roost-chaos", "/dev/shm"], check=True)
    try:
        yield work, is_mounted
    except BaseException:
        if is_mounted:  # the mount ends with this script
            shutil.copytree(work / "runs", work / "kept")
        say(f"{work} is kept")
        raise
    if is_mounted:
        subprocess.run(["umount", "--lazy", str(work / "runs")], check=True)
    shutil.rmtree(work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600, help="how long faults are injected")
    parser.add_argument("--every", type=float, default=20, help="seconds between faults, on average")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", help="comma-separated names; all by default")
    arguments = parser.parse_args()
    names = sorted(faults(can_fill=True))
    wanted = [name.strip() for name in arguments.faults.split(",")] if arguments.faults else names
    unknown = sorted(set(wanted) - set(names))
    if unknown:
        parser.error(f"no fault is called {', '.join(unknown)}; there are: {', '.join(names)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the run is ended as well
    mark = uuid.uuid4().hex
    with working_folder() as (work, is_mounted), ended_afterwards(mark):
        if not is_mounted:
            say("cannot mount here: no disk fault, and shared memory of others may be reported")
        chosen = {name: fault for name, fault in faults(is_mounted).items() if name in wanted}
        chaos(work, mark, chosen, arguments)


def chaos(work: Path, mark: str, chosen: dict[str, Fault], arguments: argparse.Namespace) -> None:
    subprocess.run([sys.executable, str(JOB.parent / "make_model.py"), str(work / "model")], check=True, cwd=ROOT)
    trial, before = Trial(work, steps=1_000_000, mark=mark), shared_segments()
    say(f"faults for {arguments.seconds:.0f} s in {work}: {', '.join(sorted(chosen))}")
    tries = disturb(trial, chosen, arguments.seconds, arguments.every, arguments.seed)
    last = stop(trial) + 2
    finish(trial, last)
    wrong = [f"left behind: {what}" for what in leftovers(trial, before)]
    say(f"undisturbed run of {last} steps")
    calm = start_run(work, "calm", last, mark)
    if exit_code(calm, max(START_LIMIT, 10 * arguments.seconds), "the undisturbed run"):
        wrong.append(f"the undisturbed run exited with {calm.returncode}; see {work}/calm.log")
    else:
        wrong += compare(trial, trial.runs / "calm")
    wrong += [f"{name}: its process was never found" for name in tries.never_found(chosen)]
    hits = ", ".join(f"{tries.hits[name]} x {name}" for name in sorted(chosen))
    say(f"{last} steps, {tries.hits.total()} faults: {hits}")
    say("exit codes: " + ", ".join(f"{n} x {code}" for code, n in sorted(trial.exits.items())))
    if wrong:
        fail(*wrong)
    say("passed: the policy equals the undisturbed run's, each step counted once, nothing is left")


if __name__ == "__main__":
    if os.environ.get("ROOST_CHAOS_NAMESPACE") != "1" and shutil.which("unshare"):
        # A mount namespace of its own, so that the file systems mounted here are gone with it.
        prefix = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
        if subprocess.run([*prefix, "true"], capture_output=True).returncode == 0:
            os.environ["ROOST_CHAOS_NAMESPACE"] = "1"
            os.execvp(prefix[0], [*prefix, sys.executable, *sys.argv])
    main()
