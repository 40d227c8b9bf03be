"""Attempts that are followed by another, and checks before a run is resumed."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest

from roost.config.findings import ConfigError, Findings, Where
from roost.engines.protocol import EnginesBehind, UpdateFailed
from roost.learner.checksums import Damaged, write_sums
from roost.procs import signals
from roost.procs.files import FolderLock
from roost.runtime.control_watch import ControlLost
from roost.trainer import setup, train as train_module
from roost.trainer.records.checkpoints import Checkpoints, TrainerState
from roost.trainer.records.resuming import RunInUse, clearing_preempted_mark
from roost.trainer.records.run_folder import RunFolder
from roost.trainer.targets import make_scenario
from roost.trainer.train import (
    RESTARTS,
    Broken,
    EndedAtStart,
    EndedEarly,
    Launch,
    RunOptions,
    attempts,
    check_ended,
    train,
)
from roost.transport.context import Address, Failure, FailureKind, WorkerFailed
from tests.limits import HANG_S
from tests.trainer.live.jobs import config, job_of


def failed(*kinds):
    return WorkerFailed([Failure(Address("actor", rank), kind, "gone", rank) for rank, kind in enumerate(kinds)])


RAISED, DIED = FailureKind.RAISED, FailureKind.DIED


@pytest.mark.parametrize(
    ("error", "steps", "was_stopped", "again"),
    [
        pytest.param(failed(DIED), 0, False, True, id="a worker was killed"),
        pytest.param(failed(RAISED, DIED), 0, False, True, id="others raised because of it"),
        pytest.param(failed(RAISED), 0, False, False, id="a constructor raised, and would again"),
        pytest.param(failed(RAISED), 3, False, True, id="it had worked until then"),
        pytest.param(UpdateFailed("no engine"), 3, False, True, id="no engine was left"),
        pytest.param(UpdateFailed("no engine"), 0, False, False, id="no engine ever worked"),
        pytest.param(EnginesBehind("no weights"), 0, False, True, id="engines lost the weights of a checkpoint"),
        pytest.param(ControlLost("GCS died"), 0, False, True, id="Ray was lost"),
        pytest.param(failed(DIED), 3, True, False, id="somebody had stopped it"),
    ],
)
def test_what_is_tried_again(error, steps, was_stopped, again):
    assert Broken(error, steps, was_stopped).is_retryable is again


@pytest.mark.parametrize(
    ("done", "was_stopped", "is_error"), [(4, False, False), (1, True, False), (1, False, True), (4, True, False)]
)
def test_a_run_that_ends_early_without_a_signal_is_an_error(done, was_stopped, is_error):
    if not is_error:
        check_ended(done, 4, was_stopped)
        return
    with pytest.raises(EndedEarly, match="ended after step 1 of 4"):
        check_ended(done, 4, was_stopped)


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_after_the_first_signal_either_ends_the_process_at_once(first, monkeypatch):
    monkeypatch.setattr(signals, "SAME_SIGNAL_S", 0.0)
    came = []

    def handlers():
        return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    async def signalled():
        with signals.first_signal(came.append):
            for number in (first, first, signal.SIGTERM, signal.SIGINT):  # at once: these count as one
                os.kill(os.getpid(), number)
            while handlers() != [signal.default_int_handler, signal.SIG_DFL]:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(signalled(), HANG_S))
    assert came == [first]


def test_without_a_signal_the_handlers_from_before_come_back():
    def handlers():
        return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    async def no_signal():
        before = handlers()
        with signals.first_signal(lambda _: None):
            assert handlers() != before
        assert handlers() == before

    with signals.SigtermInterrupts():
        asyncio.run(no_signal())


def test_sigterm_interrupts_once_and_then_ends_the_process():
    """As it does while a run is launched, before the trainer's own handlers."""
    code = """
        import os, signal
        from roost.procs import signals
        with signals.SigtermInterrupts() as sigterm:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            except KeyboardInterrupt:
                os.kill(os.getpid(), signal.SIGTERM)  # at once: these count as one
                print("came" if sigterm.came else "did not come", flush=True)
                signals.SAME_SIGNAL_S = 0.0
                os.kill(os.getpid(), signal.SIGTERM)
                print("not ended", flush=True)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert (ended.stdout, ended.returncode) == ("came\n", -signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupt_that_a_finalizer_swallows_arrives_later(number):
    code = f"""
        import os, signal, time
        from roost.procs import signals
        class Resource:
            def __del__(self):
                os.kill(os.getpid(), {int(number)})
                time.sleep(0)  # a signal handler runs between two instructions
        with signals.SigtermInterrupts() as sigterm:
            try:
                Resource()
                time.sleep({HANG_S})
            except KeyboardInterrupt:
                print("SIGTERM" if sigterm.came else "SIGINT")
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == (f"{number.name}\n", "")


def test_a_signal_during_a_relaunch_tells_what_is_done():
    assert str(EndedAtStart(signal.SIGTERM, 0)).startswith("SIGTERM ended the run before its first step; ")
    error = EndedAtStart(signal.SIGTERM, 500)
    assert str(error).startswith("SIGTERM ended the run while it was starting; ")
    assert str(error).endswith("500 steps done: to continue, add --resume to the command")
    assert error.exit_code == 143


@pytest.fixture
def job(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return job_of(config(tmp_path / "model", {"actor": "0", "rollout": "1"}))


def resumed(job, folder, reported):
    return train(job, RunOptions(folder, resumes=True), reported.append, None, None)


def test_a_run_without_a_checkpoint_is_not_erased_by_going_on_with_it(job, tmp_path):
    run = RunFolder.create(tmp_path / "run", "train: {}", "{}")
    run.add_step({"step": 1, "reward/mean": 0.5})
    with pytest.raises(FileNotFoundError, match="no complete checkpoint to continue from"):
        resumed(job, tmp_path / "run", [])
    assert len(run.steps()) == 1


def test_a_scheduler_may_start_a_run_again_that_had_no_checkpoint(job, tmp_path):
    run = RunFolder.create(tmp_path / "run", "train: {}", "{}")
    run.add_step({"step": 1, "reward/mean": 0.5})
    notes = []
    with pytest.raises(ValueError, match="has no tokenizer that can be loaded"):
        train(job, RunOptions(tmp_path / "run", auto_resumes=True), notes.append, None, None)
    assert f"{tmp_path / 'run'} has no checkpoint yet: starting from the beginning" in notes


def test_a_run_that_does_not_exist_is_started_by_auto_resume(job, tmp_path):
    notes = []
    with pytest.raises(ValueError, match="has no tokenizer that can be loaded"):
        train(job, RunOptions(tmp_path / "run", auto_resumes=True), notes.append, None, None)
    assert not [note for note in notes if "continuing" in note]


def test_a_config_that_changed_is_told(job, tmp_path):
    values = json.loads(json.dumps(dict(job.source.values), default=dict))
    values["train"]["prompts_per_step"] = 99
    RunFolder.create(tmp_path / "run", json.dumps(values), "{}")
    reported = []
    with pytest.raises(ValueError, match="has no tokenizer that can be loaded"):
        resumed(job, tmp_path / "run", reported)
    assert "the config is not the one that the run began with; changed: train.prompts_per_step" in reported


HOLDS = "from roost.procs.files import FolderLock as L; import sys; h = L.take(sys.argv[1]); input('held')"


def test_a_folder_in_use_is_refused_until_its_holder_ends_however_it_ends(job, tmp_path):
    RunFolder.create(tmp_path / "run", "train: {}", "{}")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout.read(4) == b"held"
        with pytest.raises(
            RunInUse, match=rf"in use by process {holder.pid} on \S+ since .*: .*; give this run another"
        ):
            resumed(job, tmp_path / "run", [])
        RunFolder(tmp_path / "run").add_step({"step": 1})
        with pytest.raises(RunInUse, match=f"in use by process {holder.pid}"):
            train(job, RunOptions(tmp_path / "run"), [].append, None, None)
    finally:
        holder.kill()
        holder.wait()
    with pytest.raises(FileExistsError, match="holds a run already, with 1 step up to step 1"):
        train(job, RunOptions(tmp_path / "run"), [].append, None, None)
    RunFolder(tmp_path / "run").metrics.path.unlink()
    with pytest.raises(ValueError, match="has no tokenizer that can be loaded"):  # what comes next
        resumed(job, tmp_path / "run", [])


@pytest.mark.parametrize(
    ("error", "is_kept"),
    [(RuntimeError("fails"), False), (ConfigError([]), True), (EndedAtStart(signal.SIGUSR1, 1), True)],
    ids=["failure", "config", "signal"],
)
def test_a_preempted_run_is_started_again_unless_it_fails(error, is_kept, tmp_path):
    run = RunFolder.create(tmp_path / "run", "train: {}", "{}")
    run.mark_preempted(1)
    with pytest.raises(type(error)), clearing_preempted_mark(run, EndedAtStart, ConfigError):
        raise error
    assert run.preempted_file.exists() is is_kept


def test_a_second_start_leaves_a_preempted_run_as_it_is(job, tmp_path):
    run = run_with(tmp_path / "run", 1)
    run.mark_preempted(1)
    with FolderLock.take(run.path), pytest.raises(RunInUse):
        train(job, RunOptions(run.path), [].append, None, None)
    with pytest.raises(ValueError, match="has no tokenizer that can be loaded"):
        train(job, RunOptions(run.path), [].append, None, None)
    assert run.preempted_file.exists()


def test_a_folder_that_cannot_be_is_the_error_that_is_raised(job, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="has no tokenizer that can be loaded"):
        train(job, RunOptions(tmp_path / "file" / "run"), [].append, None, None)
    run = RunFolder(tmp_path / "file" / "run")
    with pytest.raises(RuntimeError, match="fails"), clearing_preempted_mark(run):
        raise RuntimeError("fails")


EPOCHS = "runner.max_epochs"


def run_with(folder, *steps):
    """A run with checkpoints of these steps."""
    run = RunFolder.create(folder, "train: {}", "{}")
    for step in steps:
        checkpoint = Checkpoints(run.checkpoints, 1).at(step)
        checkpoint.begin()
        checkpoint.learner.mkdir()
        write_sums(checkpoint.learner, {})
        checkpoint.write_state(TrainerState(step, step))
    return run


def launch_of(job, folder, reported, **options):
    return Launch(job, job.training, None, None, None, RunOptions(folder, **options), reported.append, None, None)


def losing_ray(patch, before=lambda address: None):
    """Have every attempt lose Ray while it connects, after a call with the address."""

    @contextlib.contextmanager
    def lost(job, address, log_dir, say, former):
        before(address)
        raise ControlLost("GCS died")
        yield

    patch.setattr(train_module, "open_cluster", lost)


def test_the_step_to_resume_from_is_kept_until_the_folder_is_reopened(job, tmp_path, monkeypatch):
    run, reported = run_with(tmp_path / "run", 1, 2), []
    losing_ray(monkeypatch)
    with pytest.raises(ControlLost):
        attempts(launch_of(job, run.path, reported), TrainerState(1, 1))
    assert [line.splitlines()[-1] for line in reported] == ["continuing from step 1"] * RESTARTS
    assert [one.step for one in Checkpoints(run.checkpoints, 1).found()] == [1, 2]


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over(job, tmp_path, monkeypatch):
    run, reported = run_with(tmp_path / "run", 1, 2), []
    for step in (1, 2):
        (Checkpoints(run.checkpoints, 1).at(step).folder / "trainer.json").write_text("{}")

    def breaks(launch, address, state, former):
        raise Broken(failed(DIED), 1, was_stopped=False)

    monkeypatch.setattr(train_module, "_attempt", breaks)
    with pytest.raises(Damaged, match=r"step-000002.*step-000001.*there is no other checkpoint: .*--resume 0"):
        attempts(launch_of(job, run.path, reported), TrainerState(2, 2))
    assert reported == [str(failed(DIED))]
    assert len(list(run.checkpoints.iterdir())) == 2


def test_a_ray_that_was_joined_and_is_lost_is_joined_again(job, tmp_path, monkeypatch):
    server = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("ROOST_FAKE_ACCELERATORS", "3")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(address)
    (tmp_path / "ray" / "ray_current_cluster").chmod(0o600)
    addresses = []

    def connect(named):
        addresses.append(named)
        server.close()  # without it, no cluster is found on this machine

    losing_ray(monkeypatch, connect)
    with pytest.raises(ControlLost):
        attempts(launch_of(job, tmp_path / "run", []), None)
    assert addresses == [address] * (RESTARTS + 1)


@pytest.mark.parametrize(
    ("keys", "decides"),
    [
        ({"train": {"max_steps": 3}}, "train.max_steps"),
        ({"train": {"max_steps": None}, "runner": {"max_steps": 3}}, "runner.max_steps"),
        ({"train": {"max_steps": None}, "runner": {"task_type": "embodied", "max_steps": -1, "max_epochs": 3}}, EPOCHS),
    ],
)
def test_a_finished_run_is_not_launched_again(job, tmp_path, keys, decides):
    values = config(job.training.learner.model, {"actor": "0", "rollout": "1"}, **keys["train"])
    run = run_with(tmp_path / "run", 3)
    run.finish(3)
    reported = []
    assert resumed(job_of({**keys, **values}), tmp_path / "run", reported).state.step == 3
    assert reported[-1] == f"{tmp_path / 'run'} is finished: 3 steps done; raise {decides} to train on"
    assert not [text for text in reported if "continuing" in text]


class Sized:
    """A scenario with whatever number of tasks it is given."""

    def __init__(self, tokenizer, size):
        self._size = size

    def size(self, split):
        if self._size == "unknown":
            raise KeyError("no such table")
        return self._size

    def task(self, split, index): ...

    async def run_episode(self, task, transcript): ...


@pytest.mark.parametrize(
    ("steps", "reported"),
    [
        (None, "30 steps: max_epochs 5 over 25 tasks, 4 of them a step"),
        (31, "30 steps: the data end before max_steps 31; max_epochs 5 over 25 tasks, 4 of them a step"),
        (1, "1 step: max_steps 1 ends the run; max_epochs 5 over 25 tasks, 4 of them a step, would be 30"),
    ],
)
def test_the_setting_that_ends_the_run_is_named(job, steps, reported):
    lines = []
    training = replace(job.training, max_steps=steps, max_epochs=5)
    settings = setup.with_step_count(training, Sized(None, 25), lines.append)
    assert lines == [reported]
    ended = "the data ended at step 30, before max_steps 31: 25 tasks; raise train.max_epochs to train on"
    said = setup.data_end(replace(job, training=training), settings, Sized(None, 25))
    assert said == (ended if steps == 31 else "")


@pytest.mark.parametrize(
    ("size", "why"),
    [(0, "is 0"), (None, "is None"), (2.5, "is 2.5"), ("unknown", "raises KeyError: 'no such table'")],
)
def test_a_scenario_without_tasks_is_found_before_anything_starts(size, why):
    findings = Findings()
    task = {"_target_": f"{__name__}.Sized", "size": size}
    assert make_scenario(task, None, Where("job.yaml"), findings) is None
    assert [finding.why for finding in findings.found] == [f"size(Split.TRAIN) {why}"]
