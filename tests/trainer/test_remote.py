"""Runs on object storage: whole or not there after a kill at any moment, and continued from there alone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("s3fs")
pytest.importorskip("moto")

from roost.learner.checksums import Damaged, sums_of, write_sums
from roost.trainer.feed import Position
from roost.trainer.records import mirror as mirroring
from roost.trainer.records.checkpoints import Checkpoints, TrainerState
from roost.trainer.records.mirror import Mirror
from roost.trainer.records.remote import RemoteRun, StorageError, Taken
from roost.trainer.records.resuming import RunInUse, locked
from roost.trainer.records.run_folder import RunFolder
from roost.trainer.records.scale_requests import Change, ScaleRequests
from tests.limits import HANG_S
from tests.object_store import ObjectStore, kill

BUCKET = "lab"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server():
    store = ObjectStore()
    store.client().create_bucket(Bucket=BUCKET)
    yield store
    store.close()


@pytest.fixture
def store(server, monkeypatch):
    for name, value in server.env().items():
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture
def url(request):
    return f"s3://{BUCKET}/runs/{request.node.name[:60].strip('[]')}"


def train(folder, steps, every=2, keep=3, trend=1, weight=b"w"):
    """Continue a run as a trainer would: records of each step, and checkpoints; rewards rise, or fall."""
    run = RunFolder(folder)
    if not run.config_file.exists():
        run = RunFolder.create(folder, "train: {}\n", "{}")
    checkpoints = Checkpoints(run.checkpoints, keep)
    for step in range(len(run.steps()) + 1, steps + 1):
        run.add_step({"step": step, "reward/mean": trend * step / 100})
        run.add_learnt(step, [step])
        if step % every == 0:
            save(checkpoints.at(step), weight)
            checkpoints.prune()
    return run


def save(checkpoint, weight=b"w"):
    checkpoint.begin()
    checkpoint.learner.mkdir()
    for rank in range(2):
        (checkpoint.learner / f"rank_{rank}.distcp").write_bytes(weight * 100 * (checkpoint.step + rank))
    write_sums(checkpoint.learner, sums_of(checkpoint.learner.glob("*.distcp")))
    checkpoint.write_state(TrainerState(checkpoint.step, checkpoint.step, Position(checkpoint.step)))


def steps_in(folder):
    return [one.step for one in Checkpoints(RunFolder(folder).checkpoints, 1).found()]


def mirror_of(url, folder, keep=3):
    return Mirror(RemoteRun.open(url), folder, keep)


def fetch(url, folder, from_step=None, resumes=True, said=None, environ=None):
    say = said.append if said is not None else (lambda _: None)
    mirror_of(url, folder).fetch(resumes, False, from_step, environ or {}, say)
    return RunFolder(folder)


def uploaded(url, folder, keep=3):
    mirror = mirror_of(url, folder, keep)
    mirror.finish()
    return mirror


def test_a_run_is_continued_on_a_machine_that_has_nothing_of_it(store, url, tmp_path):
    run = train(tmp_path / "one", 5)
    (run.path / "failures").mkdir()
    (run.path / "failures" / "a.txt").write_text("why")
    (run.path / "adapters").mkdir()
    (run.path / "adapters" / "a").write_text("of a weight sync")
    uploaded(url, run.path)
    assert not any("adapters" in name or "lock" in name for name in store.names(BUCKET))
    other = fetch(url, tmp_path / "two")
    assert steps_in(other.path) == [4]
    assert other.steps() == run.steps()
    assert (other.path / "failures" / "a.txt").read_text() == "why"
    Checkpoints(other.checkpoints, 1).newest().verify()
    assert RemoteRun.open(url).complete_steps() == [2, 4]


def test_requests_to_scale_stay_on_the_machine_that_got_them(store, url, tmp_path):
    run = train(tmp_path / "one", 2)
    name = ScaleRequests(run.path).ask([Change("rollout", 2, False)], HANG_S)
    uploaded(url, run.path)
    RemoteRun.open(url).upload(run.path, [f"scale/{name}.request.json"])  # as earlier versions did
    assert ScaleRequests(fetch(url, tmp_path / "two").path).take() is None
    assert ScaleRequests(run.path).take()[0] == name


def test_a_record_that_is_removed_while_it_is_copied_is_passed_over(store, url, tmp_path, monkeypatch):
    run = train(tmp_path / "one", 2)
    (run.path / "failures").mkdir()
    for name in "ab":
        (run.path / "failures" / f"{name}.txt").write_text("why")
    gone = run.path / "failures" / "a.txt"
    mirror, put = mirror_of(url, run.path), RemoteRun.upload

    def after_listing(self, folder, names, *rest, **more):
        gone.unlink(missing_ok=True)
        put(self, folder, names, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(RemoteRun, "upload", after_listing)
        mirror.sync()
    there, names = RemoteRun.open(url), RemoteRun.names
    assert there.has("failures/b.txt") and not there.has("failures/a.txt")
    monkeypatch.setattr(RemoteRun, "names", lambda self: [*names(self), "failures/a.txt"])  # removed since the listing
    other = fetch(url, tmp_path / "two")
    assert [file.name for file in (other.path / "failures").iterdir()] == ["b.txt"]


def test_logs_of_the_machine_before_are_kept(store, url, tmp_path):
    """Processes append to their logs."""
    for machine in ("one", "two"):
        run = fetch(url, tmp_path / machine)
        log = train(run.path, 2).logs / "actor" / "rank_0.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            file.write(f"of {machine}\n")
        uploaded(url, run.path)
    RemoteRun.open(url).download_run(tmp_path / "seen")
    assert (tmp_path / "seen" / "logs" / "actor" / "rank_0.log").read_text() == "of one\nof two\n"


def test_files_of_a_download_that_was_killed_do_not_stay(store, url, tmp_path):
    uploaded(url, train(tmp_path / "one", 2).path)
    draft = train(tmp_path / "two.unfinished", 1)
    draft.finish(1)
    draft.mark_preempted(1)
    other = fetch(url, tmp_path / "two")
    assert other.finished_at() is None and not other.preempted_file.exists()
    assert len(other.steps()) == 2


CLIENT = """
import os, sys
from pathlib import Path
from roost.trainer.records.mirror import Mirror
from roost.trainer.records.remote import RemoteRun
url, folder, pid_file = sys.argv[1:]
for line in sys.stdin:
    child = os.fork()  # before the store is opened: its loop does not survive a fork
    if not child:
        Path(pid_file).write_text(str(os.getpid()))
        Mirror(RemoteRun.open(url + line.strip()), Path(folder), 1).finish()
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@pytest.mark.long
def test_a_kill_at_any_write_leaves_the_old_state_or_the_new_one(store, url, tmp_path):
    """The second upload of a run, killed before each of its writes: files, marks, and removals of old checkpoints."""
    folder, pid_file = tmp_path / "live", tmp_path / "pid"
    command = [sys.executable, "-c", CLIENT, url, str(folder), str(pid_file)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as client:
        moment, seen = 0, set()
        while True:
            moment += 1
            first = train(tmp_path / f"first-{moment}", 3, keep=1)
            uploaded(f"{url}-{moment}", first.path, keep=1)
            first.path.rename(folder)
            live = train(folder, 5, keep=1)

            def on_write(number, path, moment=moment):
                if number == moment:
                    kill(int(pid_file.read_text()))
                    return "503"
                return None

            with store.doing(on_write):
                client.stdin.write(f"-{moment}\n")
                client.stdin.flush()
                ended = int(client.stdout.readline())
            fresh = fetch(f"{url}-{moment}", tmp_path / f"fresh-{moment}")
            newest = steps_in(fresh.path)[-1]
            seen.add(newest)
            Checkpoints(fresh.checkpoints, 1).newest().verify()
            assert len(fresh.steps()) >= newest >= 2, moment
            if moment % 4 == 0:  # the machine is there again
                uploaded(f"{url}-{moment}", live.path, keep=1)
                assert RemoteRun.open(f"{url}-{moment}").complete_steps() == [4]
            live.path.rename(tmp_path / f"done-{moment}")
            if ended == 0:
                break
            assert os.WTERMSIG(ended) == signal.SIGKILL
        client.stdin.close()
    assert seen == {2, 4}
    assert moment > 8, "files, the mark, records and removals"


def test_old_checkpoints_are_removed_there_as_here_and_the_best_is_kept(store, url, tmp_path):
    run = train(tmp_path / "one", 4, every=1, keep=2, trend=-1)
    mirror = uploaded(url, run.path, keep=2)
    save(Checkpoints(run.checkpoints, 2).at(1))  # the best, which pruning with rewards keeps
    train(run.path, 6, every=1, keep=2, trend=-1)
    save(Checkpoints(run.checkpoints, 2).at(1))
    mirror.sync()
    assert RemoteRun.open(url).complete_steps() == [1, 5, 6]
    other = fetch(url, tmp_path / "two")
    train(other.path, 7, every=1, keep=2, trend=-1)
    uploaded(url, other.path, keep=2)
    assert RemoteRun.open(url).complete_steps() == [1, 6, 7], "those of another machine follow the same rule"


def test_a_failed_upload_is_noted_and_tried_again(store, url, tmp_path, monkeypatch):
    monkeypatch.setattr(mirroring, "LOOK_EVERY", 0.02)
    run, notes = train(tmp_path / "one", 2), []
    mirror = mirror_of(url, run.path)
    with store.doing(lambda number, path: "403" if number in (2, 6) else None):
        mirror.begin(0, notes.append)
        deadline = time.monotonic() + HANG_S
        while not any("succeed again" in note for note in notes) and time.monotonic() < deadline:
            time.sleep(0.02)
    assert "failed" in notes[0], notes
    assert "succeed again" in notes[-1]
    mirror.finish()
    assert steps_in(fetch(url, tmp_path / "two").path) == [2]


def test_the_end_of_a_run_fails_if_its_last_state_is_not_uploaded(store, url, tmp_path, monkeypatch):
    monkeypatch.setattr(mirroring, "RETRY_S", 0.01)
    run = train(tmp_path / "one", 2)
    mirror = mirror_of(url, run.path)
    with (
        store.doing(lambda number, path: "403" if "step-000002" in path else None),
        pytest.raises(StorageError, match=r"last state .* not in s3://.*--resume"),
    ):
        mirror.finish()
    assert RemoteRun.open(url).complete_steps() == []
    uploaded(url, run.path)  # --resume on this machine
    assert RemoteRun.open(url).complete_steps() == [2]


def test_a_machine_that_was_replaced_notices_and_its_folder_is_renamed(store, url, tmp_path):
    run = train(tmp_path / "one", 2)
    first = uploaded(url, run.path)
    other = fetch(url, tmp_path / "two")
    train(other.path, 4)
    uploaded(url, other.path)
    train(run.path, 6)
    with pytest.raises(Taken, match="is continued by a process on"):
        first.sync()
    fetch(url, tmp_path / "three")  # a download that nothing came of takes nothing over
    said = []
    back = fetch(url, run.path, said=said)
    assert steps_in(back.path) == [4]
    assert steps_in(tmp_path / "one.aside") == [2, 4, 6]
    assert "renamed to one.aside" in said[-1]
    train(other.path, 5)
    uploaded(url, other.path)
    again = fetch(url, back.path)
    assert len(again.steps()) == 5
    assert not (tmp_path / "one.aside-2").exists()


def test_a_run_that_was_continued_elsewhere_since_the_download_is_left_alone(store, url, tmp_path):
    uploaded(url, train(tmp_path / "one", 2).path)
    late = mirror_of(url, tmp_path / "two")
    late.fetch(True, False, None, {}, lambda _: None)
    other = fetch(url, tmp_path / "three")
    train(other.path, 4)
    uploaded(url, other.path)
    train(tmp_path / "two", 6)
    with pytest.raises(Taken, match="is continued by a process on"):
        late.sync()
    assert RemoteRun.open(url).complete_steps() == [2, 4]


def test_of_two_new_runs_of_one_name_the_first_is_kept(store, url, tmp_path):
    both = [mirror_of(url, tmp_path / name) for name in ("one", "two")]
    for mirror in both:
        mirror.fetch(False, False, None, {}, lambda _: None)
    for name in ("one", "two"):
        train(tmp_path / name, 2)
    both[0].sync()
    with pytest.raises(Taken):
        both[1].sync()
    both[0].sync()


def test_a_machine_that_is_replaced_during_an_upload_completes_nothing(store, url, tmp_path):
    run = train(tmp_path / "one", 2)
    mirror = uploaded(url, run.path)
    train(run.path, 4)

    def on_write(number, path):
        if path.endswith("step-000004/trainer.json"):
            key = f"{url.removeprefix(f's3://{BUCKET}/')}/writer.json"
            store.client().put_object(Bucket=BUCKET, Key=key, Body=b'{"writer": "other", "host": "beta"}')

    with store.doing(on_write), pytest.raises(Taken, match="on beta"):
        mirror.sync()
    assert RemoteRun.open(url).complete_steps() == [2]


def test_the_folder_that_wrote_last_goes_on_from_its_own_newer_state(store, url, tmp_path):
    run = train(tmp_path / "one", 2)
    uploaded(url, run.path)
    train(run.path, 4)  # killed before the upload
    assert steps_in(fetch(url, run.path).path) == [2, 4]


def test_a_folder_whose_uploads_all_failed_keeps_its_newer_records(store, url, tmp_path, monkeypatch):
    monkeypatch.setattr(mirroring, "RETRY_S", 0.01)
    uploaded(url, train(tmp_path / "one", 4).path)
    other = fetch(url, tmp_path / "two")
    mirror = mirror_of(url, other.path)
    with store.doing(lambda number, path: "403"):
        mirror.begin(4, lambda _: None)
        train(other.path, 8)
        with pytest.raises(StorageError, match="--resume on this machine"):
            mirror.finish()
    again = fetch(url, other.path)
    assert [record["step"] for record in again.steps()] == list(range(1, 9))
    assert steps_in(again.path)[-1] == 8
    uploaded(url, again.path)
    assert len(fetch(url, tmp_path / "three").steps()) == 8


def test_a_run_that_may_be_read_but_not_written_is_not_continued(store, url, tmp_path):
    uploaded(url, train(tmp_path / "one", 2).path)
    with store.doing(lambda number, path: "403"), pytest.raises(StorageError, match="cannot be used"):
        fetch(url, tmp_path / "two")
    assert not (tmp_path / "two").exists()


def test_a_folder_in_use_is_not_replaced(store, url, tmp_path):
    uploaded(url, train(tmp_path / "one", 2).path)
    other = train(tmp_path / "two", 1)
    with locked(other.path, lambda _: None), pytest.raises(RunInUse):
        fetch(url, other.path)


def test_a_name_that_is_taken_is_refused_unless_a_scheduler_started_the_run_again(store, url, tmp_path):
    run = train(tmp_path / "one", 2)
    uploaded(url, run.path)
    with pytest.raises(FileExistsError, match=r"holds a run already, with a checkpoint of step 2; .*--resume"):
        fetch(url, tmp_path / "two", resumes=False)
    fetch(url, tmp_path / "three", resumes=False, environ={"SLURM_RESTART_COUNT": "1"})
    run.mark_preempted(2)
    uploaded(url, run.path)
    assert fetch(url, tmp_path / "four", resumes=False).preempted_file.exists()
    run.mark_preempted(None)
    uploaded(url, run.path)
    assert not RemoteRun.open(url).has("preempted.json")


def test_a_run_that_goes_back_sets_later_checkpoints_aside(store, url, tmp_path):
    uploaded(url, train(tmp_path / "one", 6).path)
    other = fetch(url, tmp_path / "two", from_step=4)
    assert steps_in(other.path) == [4]
    RunFolder.resume(other.path, 4)
    mirror = mirror_of(url, other.path)
    mirror.begin(4, lambda _: None)
    mirror.finish()
    there = RemoteRun.open(url)
    assert there.complete_steps() == [2, 4]
    assert there.manifest("checkpoints/step-000006.aside") is not None
    with pytest.raises(FileNotFoundError, match="no complete checkpoint of step 5; there are: 2, 4"):
        fetch(url, tmp_path / "three", from_step=5)


def test_a_checkpoint_of_another_branch_is_not_taken_for_one_of_the_same_step(store, url, tmp_path):
    uploaded(url, train(tmp_path / "one", 4).path)
    other = fetch(url, tmp_path / "two", from_step=2)
    RunFolder.resume(other.path, 2)
    train(other.path, 4, weight=b"v")
    mirror = mirror_of(url, other.path)
    mirror.begin(2, lambda _: None)
    mirror.finish()
    seen = fetch(url, tmp_path / "three")
    assert (seen.checkpoints / "step-000004" / "learner" / "rank_0.distcp").read_bytes() == b"v" * 400
    assert RemoteRun.open(url).has("checkpoints/step-000004.aside")
    mirror = mirror_of(url, seen.path)
    mirror.begin(4, lambda _: None)
    mirror.finish()
    assert not RemoteRun.open(url).has("checkpoints/step-000004.aside-2"), "the same one stays"


def test_a_download_that_nothing_came_of_follows_a_run_that_goes_back(store, url, tmp_path):
    run = train(tmp_path / "one", 6)
    uploaded(url, run.path)
    other = fetch(url, tmp_path / "two")
    Checkpoints(run.checkpoints, 3).set_aside(4)
    RunFolder.resume(run.path, 4)
    train(run.path, 5)
    mirror = mirror_of(url, run.path)
    mirror.begin(4, lambda _: None)
    mirror.finish()
    assert steps_in(other.path) == [6]
    again = fetch(url, other.path)
    assert steps_in(again.path) == [4]
    assert len(again.steps()) == 5


def test_a_listing_that_failed_is_repeated(store, url, tmp_path, monkeypatch):
    uploaded(url, train(tmp_path / "one", 6).path)
    other = fetch(url, tmp_path / "two", from_step=2)
    RunFolder.resume(other.path, 2)
    remote = RemoteRun.open(url)
    mirror = Mirror(remote, other.path, 1)
    monkeypatch.setattr(mirror, "_loop", lambda: None)  # uploads are made below
    mirror.begin(2, lambda _: None)

    def refused():
        raise OSError("listing refused")

    with monkeypatch.context() as patch:
        patch.setattr(remote, "steps", refused)
        with pytest.raises(OSError, match="listing refused"):
            mirror.sync()
    mirror.sync()
    assert remote.complete_steps() == [2]
    for steps in (4, 6):
        train(other.path, steps, keep=1)
        mirror.sync()
    assert remote.complete_steps() == [4, 6], "those of the machine before are pruned"
    assert remote.has("checkpoints/step-000006.aside")


def test_an_attempt_that_begins_during_an_upload_is_seen_before_the_next_one(store, url, tmp_path, monkeypatch):
    run = train(tmp_path / "one", 6)
    mirror = mirror_of(url, run.path)
    monkeypatch.setattr(mirror, "_loop", lambda: None)

    def on_write(number, path):  # the run goes back while its newest checkpoint is uploaded
        if path.endswith("step-000006/complete.json") and run.checkpoints.joinpath("step-000006").exists():
            Checkpoints(run.checkpoints, 3).set_aside(2)
            mirror.begin(2, lambda _: None)

    with store.doing(on_write):
        mirror.sync()
    assert RemoteRun.open(url).complete_steps() == [2]


@pytest.mark.parametrize("how", ["changed", "cut", "removed"])
def test_a_damaged_newest_checkpoint_is_passed_over(store, url, tmp_path, how):
    url = f"{url.partition('[')[0]}-{how}"
    uploaded(url, train(tmp_path / "one", 4).path)
    key = f"{url.removeprefix(f's3://{BUCKET}/')}/checkpoints/step-000004/learner/rank_0.distcp"
    size = store.client().head_object(Bucket=BUCKET, Key=key)["ContentLength"]
    if how == "removed":
        store.client().delete_object(Bucket=BUCKET, Key=key)
    else:
        store.client().put_object(Bucket=BUCKET, Key=key, Body=b"x" * (size - (how == "cut")))
    said = []
    other = fetch(url, tmp_path / "two", said=said)
    assert steps_in(other.path) == [2]
    assert any("damaged" in text for text in said)
    RunFolder.resume(other.path, 2)
    mirror = mirror_of(url, other.path)
    mirror.begin(2, lambda _: None)
    mirror.finish()
    assert RemoteRun.open(url).complete_steps() == [2]
    if how != "changed":
        with pytest.raises(Damaged, match=r"damaged: learner/rank_0\.distcp (is missing|has)"):
            RemoteRun.open(url).download_whole("checkpoints/step-000004.aside", tmp_path / "aside")


def test_the_policy_is_whole_or_not_there(store, url, tmp_path):
    run = train(tmp_path / "one", 2)
    run.policy.mkdir()
    for name in ("model.safetensors", "roost.json"):
        (run.policy / name).write_text("{}")
    run.finish(2)
    mirror = mirror_of(url, run.path)
    mirror.sync()
    assert not RemoteRun.open(url).has("finished.json"), "not before the policy"
    with (
        store.doing(lambda number, path: "403" if path.endswith("model.safetensors") else None),
        pytest.raises(OSError),
    ):
        mirror.sync(is_last=True)
    assert not RemoteRun.open(url).has("finished.json")
    RemoteRun.open(url).download_run(tmp_path / "without")
    assert not (tmp_path / "without" / "policy").exists()
    mirror.sync(is_last=True)
    RemoteRun.open(url).download_run(tmp_path / "with", step=2)
    assert sorted(file.name for file in (tmp_path / "with" / "policy").iterdir()) == ["model.safetensors", "roost.json"]
    assert steps_in(tmp_path / "with") == [2]
    assert RunFolder(tmp_path / "with").finished_at() == 2
    run.finished_file.unlink()  # continued
    mirror.sync()
    assert not RemoteRun.open(url).has("finished.json")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("az://box/run", "az://box/run needs a package that is not installed: pip install adlfs"),
        ("nonsense://box/run", "nonsense://box/run cannot be used"),
        ("memory://box/run", "memory://box/run cannot keep a run: it is this process's own memory"),
        ("simplecache::memory://box/run", "cannot keep a run"),
    ],
)
def test_a_store_that_cannot_be_used_is_an_error_of_one_line(url, message):
    with pytest.raises(StorageError, match=message) as error:
        RemoteRun.open(url)
    assert "\n" not in str(error.value)


def test_a_bucket_that_does_not_exist_is_named_before_anything_starts(store, tmp_path):
    run = train(tmp_path / "one", 2)
    mirror = mirror_of(f"s3://no-such-bucket/{run.name}", run.path)
    with pytest.raises(FileNotFoundError, match="bucket"):
        mirror.fetch(False, False, None, {}, lambda _: None)


def test_a_store_that_refuses_is_not_taken_for_an_empty_one(store, url, monkeypatch):
    monkeypatch.setattr(store, "refuses_all", True)
    with pytest.raises(StorageError, match=r"cannot be reached: .*credentials"):
        RemoteRun.open(url)
