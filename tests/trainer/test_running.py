"""`roost status`, `logs`, `scale`, `stop` and `watch`, on a run whose folder a real process holds."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml

from roost.procs.files import holder_of
from roost.trainer.guards import EndedAtStart
from roost.trainer.records.fan_out import MetricSettings, free_name, open_metrics
from roost.trainer.records.resuming import recorded_end
from roost.trainer.records.run_folder import RunFolder, RunState, runs_in, status_of
from roost.trainer.records.scale_requests import Change, ScaleAnswer, ScaleRequests, ScaleState
from roost.trainer.report.live_view import LiveView
from roost.trainer.report.page import LivePage
from tests.cli.terminal import run
from tests.limits import HANG_S
from tests.trainer.example_run import make_run

MONITORING = Path(__file__).parents[2] / "monitoring"
# Holds the folder as a run does, and is ended by signals, also where the process that runs the tests ignores them.
HOLD = """
import signal, sys, time
from roost.procs.files import FolderLock
for number in (signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, signal.SIG_DFL)
with FolderLock.take(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def made(tmp_path):
    return make_run(tmp_path / "runs", steps=3)


@pytest.fixture
def held(made):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(made.path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def log(made, name, text):
    path = made.logs / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_held_folder_is_a_running_run(made, held):
    holder = holder_of(made.path)
    assert (holder.pid, holder.is_here) == (held.pid, True)
    made.status_file.write_text(json.dumps({"step": 3, "steps": 60, "phase": "generate", "phase_done": 120,
                                            "phase_total": 256, "time": time.time()}))  # fmt: skip
    status = status_of(made)
    assert (status.state, status.step, status.steps, status.phase) == (RunState.RUNNING, 3, 60, "generate 120/256")
    assert status.mode == "disaggregated" and status.components == ("actor 2", "rollout 2")
    done = run("status", made.path.parent, width=200)
    assert re.search(rf"sums +running +3/60 .*generate 120/256, \d+ s ago .*{held.pid} on ", done.stdout), done.stdout
    assert json.loads(run("status", made.path, "--json").stdout)[0]["holder"]["pid"] == held.pid


def test_a_run_that_is_starting_is_shown(made, held):
    """Before its config is written, and after a resume, when the status is still that of the earlier process."""
    made.status_file.write_text('{"phase": "learn", "step": 2}')
    os.utime(made.status_file, (1, 1))
    assert (status_of(made).state, status_of(made).phase) == (RunState.RUNNING, "start")
    for file in (made.config_file, made.plan_file, made.metrics.path):
        file.unlink()
    done = run("status", made.path.parent, width=200)
    assert re.search(rf"sums +running +0 .*start, \d+ s ago .*{held.pid} on ", done.stdout), done.stdout
    assert run("stop", made.path, "--wait", HANG_S).exit_code == 0
    assert run("status", made.path).stdout.startswith("no run is active")


ENDS = [
    pytest.param(None, "killed", "", id="killed"),
    pytest.param(KeyboardInterrupt(), "stopped", "", id="interrupted"),
    pytest.param(EndedAtStart(signal.SIGTERM, 3), "stopped", "", id="ended-at-start"),
    pytest.param(RuntimeError("rollout:0 died\nlog"), "failed", "rollout:0 died", id="failed"),
]


@pytest.mark.parametrize(("error", "state", "reason"), ENDS)
def test_a_run_that_ended_says_how(made, error, state, reason):
    if error is not None:
        with pytest.raises(type(error)), recorded_end(made, EndedAtStart):
            raise error
    status = status_of(made)
    assert (status.state, status.reason, status.phase, status.holder) == (state, reason, None, None)
    alone, with_all = run("status", made.path, width=200).stdout, run("status", made.path.parent, "--all", width=200)
    assert re.search(rf"sums +{state} +3.*{reason}", alone) and alone == with_all.stdout
    hidden = run("status", made.path.parent).stdout
    assert "1 run ended before (--all shows)" in " ".join(hidden.split())
    with recorded_end(made):
        assert not made.ended_file.exists()  # it goes on
    made.finish(3)
    assert status_of(made).state is RunState.FINISHED


@pytest.mark.parametrize("option", ["--all", "--json", None])
def test_the_status_of_no_folder_is_an_error(tmp_path, monkeypatch, option):
    monkeypatch.chdir(tmp_path)
    options = [option] if option else []
    done = run("status", tmp_path / "nope", *options)
    assert done.exit_code == 2 and "nope does not exist" in " ".join(done.stderr.split()) and not done.stdout
    assert run("status", *options).exit_code == 0, "the default folder is there after the first run"


def test_a_run_has_one_line_in_a_terminal_of_80_columns(tmp_path):
    made = make_run(tmp_path, "gsm8k-qwen3-4b", steps=3)
    made.finish(3)
    lines = run("status", made.path, width=80).stdout.splitlines()
    assert len(lines) == 2 and "actor 2, rollout 2" in lines[1]


def test_a_folder_that_nobody_holds_has_ended(made):
    assert holder_of(made.path) is None
    assert status_of(made).state is RunState.KILLED
    made.status_file.write_text('{"phase": "generate"}')  # left by a run that was killed
    assert status_of(made).phase is None
    make_run(made.path.parent, "other", steps=2)
    done = run("status", made.path.parent)
    assert "2 runs ended before" in done.stdout
    made.finish(3)
    done = run("status", made.path.parent, "--all", width=200)
    assert "finished" in done.stdout and "killed" in done.stdout
    assert [one.name for one in runs_in(made.path.parent)] == ["other", "sums"]


def test_a_preempted_run_waits_for_its_requeue(made):
    make_run(made.path.parent, "other", steps=2)
    made.mark_preempted(3)
    assert status_of(made).state is RunState.PREEMPTED
    shown = run("status", made.path.parent, width=200).stdout
    assert "preempted" in shown and "other" not in shown
    made.finish(3)
    assert status_of(made).state is RunState.FINISHED


def test_a_holder_of_another_machine_is_known_by_its_lock(made, held):
    text = (made.path / ".lock").read_text()
    (made.path / ".lock").write_text(text.replace(f" on {holder_of(made.path).host} ", " on elsewhere "))
    assert holder_of(made.path).host == "elsewhere"
    done = run("stop", made.path)
    assert done.exit_code == 1 and f"kill -INT {held.pid}" in done.output
    held.kill()
    held.wait()
    assert holder_of(made.path) is None


@pytest.mark.parametrize(("options", "number"), [([], signal.SIGINT), (["--preempt"], signal.SIGUSR1)])
def test_stop_ends_the_process_that_holds_the_run(made, held, options, number):
    done = run("stop", made.path, "--wait", HANG_S, *options)
    assert done.exit_code == 0, done.output
    assert held.wait(HANG_S) == -number
    again = run("stop", made.path)
    assert again.exit_code == 1 and "is not running" in again.output
    assert run("stop", made.path / "none").exit_code == 2


def test_logs_of_one_process_or_all(made):
    log(made, "actor/rank_0.log", "one\ntwo\nthree\n")
    log(made, "rollout/rank_1.log", "\x1b[31mred\n")
    assert run("logs", made.path, "actor:0", "-n", "2").stdout == "[actor:0] two\n[actor:0] three\n"
    both = run("logs", made.path).stdout
    assert "[actor:0] one" in both and "[rollout:1] " in both and "\x1b" not in both
    wrong = run("logs", made.path, "actr:0")
    assert wrong.exit_code == 1 and "actor" in wrong.output
    # Nobody runs, so that following ends with what there is.
    assert run("logs", made.path, "actor", "-f", "-n", "0").stdout == ""


def test_logs_are_followed_until_the_run_ends(made, held):
    path = log(made, "actor/rank_0.log", "one\n")
    words = [sys.executable, "-m", "roost", "logs", str(made.path), "actor:0", "-f"]
    follower = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert follower.stdout.readline() == "[actor:0] one\n"
    with path.open("a") as file:
        file.write("two\nthr")
    assert follower.stdout.readline() == "[actor:0] two\n"
    with path.open("a") as file:
        file.write("ee\n")
    held.terminate()
    held.wait()
    assert follower.communicate(timeout=HANG_S)[0] == "[actor:0] three\n"
    assert follower.returncode == 0


def fetch(url, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=HANG_S) as answer:
        return answer.read().decode(), answer.headers


def test_the_page_follows_the_run(made, held):
    with LivePage(made) as page:
        thread = threading.Thread(target=page.serve, daemon=True)
        thread.start()
        first, headers = fetch(page.url)
        assert headers["Refresh"] == "5" and "sums: Roost run" in first
        made.add_step({"step": 4, "reward/mean": 0.123456})
        assert "0.123456" not in first and "0.123456" in fetch(page.url)[0]
        assert json.loads(fetch(f"{page.url}plan.json")[0])["mode"] == "disaggregated"
        root = page.url.removesuffix("/").rpartition("/")[0]
        for path in ("/", "/report.html", "/plan.json", "/wrong/", f"/{'x' * 43}/plan.json", "/%C3%A9/"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                fetch(root + path)
            assert refused.value.code == 404
        for path, code in (("../../etc/passwd", 404), ("%2e%2e/other", 404), (".lock", 404)):
            with pytest.raises(urllib.error.HTTPError) as refused:
                fetch(page.url + path)
            assert refused.value.code == code
        with pytest.raises(urllib.error.HTTPError) as refused:
            fetch(page.url, Host="evil.example")
        assert refused.value.code == 403
        held.terminate()
        held.wait()
        assert "Refresh" not in fetch(page.url)[1]
        page._server.shutdown()
        thread.join(HANG_S)


def test_pages_have_addresses_that_cannot_be_guessed(made):
    with LivePage(made) as first, LivePage(made) as second:
        one, other = (page.url.split("/")[3] for page in (first, second))
    assert one != other and len(one) >= 32


def test_a_live_view_writes_where_a_run_is(made):
    from rich.console import Console

    with LiveView(9, Console(quiet=True), clock=lambda: 0.0, status_file=made.status_file) as view:
        view.phase("generate", 256)
        view.advance(7)  # within a second: not written
        assert json.loads(made.status_file.read_text()) | {"time": 0} == {
            "step": 0, "steps": 9, "phase": "generate", "phase_done": 0, "phase_total": 256, "time": 0,
        }  # fmt: skip
        view.step({"step": 1})
        assert json.loads(made.status_file.read_text())["step"] == 1


def test_prometheus_finds_a_run_by_its_file(tmp_path):
    made = RunFolder.create(tmp_path / "runs" / "math", "", "{}")
    metrics = open_metrics(made, MetricSettings(("prometheus",)), lambda _: None)
    (found,) = yaml.safe_load((MONITORING / "prometheus.yml").read_text())["scrape_configs"][0]["file_sd_configs"]
    (pattern,) = found["files"]
    (tmp_path / "monitoring").mkdir()
    (file,) = (tmp_path / "monitoring").parent.glob(pattern.removeprefix("../"))
    (group,) = json.loads(file.read_text())
    metrics.write(1, {"reward/mean": 0.5})
    assert 'roost_reward_mean{run="math"} 0.5' in fetch(f"http://{group['targets'][0]}/metrics")[0]
    metrics.close()
    assert not file.exists()


def test_the_dashboard_shows_metrics_that_runs_have(made):
    """Names of the dashboard, against those of a run and of docs/runs.md."""
    exported = {free_name(key, set()) for step in made.steps() for key in step}
    table = (Path(__file__).parents[2] / "docs" / "runs.md").read_text()
    described = {free_name(name, set()) for name in re.findall(r"`([a-z]+(?:/[\w/]+)?)`", table)}
    described |= {"roost_length_completion_p50", "roost_length_completion_p90", "roost_length_completion_max"}
    described |= {"roost_evaluation_reward_mean", "roost_step", "roost_reward_max", "roost_loss_total"}
    described |= {f"roost_time_{name}" for name in ("score", "learn", "sync", "switch")}
    described |= {f"roost_samples_{name}" for name in ("failed", "cancelled")}
    board = json.loads((MONITORING / "grafana.json").read_text())
    shown = {name for panel in board["panels"] for target in panel["targets"]
             for name in re.findall(r"^roost_\w+", target["expr"])}  # fmt: skip
    assert len(shown) > 20
    assert shown - exported - described == set()
    assert {"roost_reward_mean", "roost_tokens_per_second"} <= exported


def answering(made, state, *lines):
    """Take the next request as a run does, and answer it."""
    requests, taken = ScaleRequests(made.path), None
    while taken is None:
        taken = requests.take()
        time.sleep(0.01)
    requests.answer(taken[0], ScaleAnswer(ScaleState.WORKING, lines[:1]))
    requests.answer(taken[0], ScaleAnswer(state, lines))


SCALED = [
    pytest.param(ScaleState.APPLIED, 0, "rollout: 2 -> 4 processes\ndone\n", "", id="applied"),
    pytest.param(ScaleState.REFUSED, 1, "rollout: 2 -> 4 processes\n", "error: done", id="refused"),
]


@pytest.mark.parametrize(("state", "code", "shown", "error"), SCALED)
def test_scale_waits_for_the_answer_of_the_run(made, held, state, code, shown, error):
    driver = threading.Thread(target=answering, args=(made, state, "rollout: 2 -> 4 processes", "done"), daemon=True)
    driver.start()
    done = run("scale", made.path, "rollout=+2", "--wait", HANG_S)
    assert (done.exit_code, done.stdout) == (code, shown)
    assert error in done.stderr
    assert not list((made.path / "scale").iterdir())


def test_a_refusal_with_a_finding_says_error_once(made, held):
    finding = "error RST-P042: rollout: needs 1 more accelerator\n  fix: remove engines"
    driver = threading.Thread(target=answering, args=(made, ScaleState.REFUSED, "working", finding), daemon=True)
    driver.start()
    done = run("scale", made.path, "rollout=+2", "--wait", HANG_S, width=200)
    assert done.stderr.strip() == finding and done.exit_code == 1
    assert stat.S_IMODE((made.path / "scale").stat().st_mode) == 0o700


@pytest.mark.parametrize("command", ["stop", "scale"])
def test_a_time_to_wait_is_not_negative(made, held, command):
    words = ["rollout=+1"] if command == "scale" else []
    done = run(command, made.path, *words, "--wait", "-1")
    assert done.exit_code == 2 and "-1.0 is not in the range x>=0.0" in done.stderr


NOT_SCALED = [
    pytest.param("rollout=+1", 1, "the run did not take the request within 0 s", id="not-taken"),
    pytest.param("rolout=+1", 1, "rolout is not an engine of", id="unknown"),
    pytest.param("actor=-1", 1, "actor is not an engine of", id="a-learner"),
    pytest.param("rollout", 2, "is not a change; write rollout=+2", id="no-number"),
    pytest.param("rollout=+two", 2, "is not a change; write rollout=+2", id="a-word"),
]


@pytest.mark.parametrize(("change", "code", "message"), NOT_SCALED)
def test_scale_says_why_not(made, held, change, code, message):
    done = run("scale", made.path, change, "--wait", "0", width=200)
    assert done.exit_code == code and message in done.output
    assert not (made.path / "scale").exists() or not list((made.path / "scale").iterdir())


def test_scale_needs_a_running_run_with_engines(made, held):
    plan = json.loads(made.plan_file.read_text())
    made.write_plan(json.dumps(plan | {"training": {"objective": {"value": "sft"}}}))
    assert "has no engines: it is a run of roost sft" in run("scale", made.path, "rollout=+1", width=200).output
    made.write_plan(json.dumps(plan | {"components": {"actor": plan["components"]["actor"]}}))
    assert "has no engines" in run("scale", made.path, "rollout=+1", width=200).output
    held.kill()
    held.wait()
    ended = run("scale", made.path, "rollout=+1", width=200)
    assert ended.exit_code == 1 and "is not running" in ended.output


def test_a_request_is_taken_once_or_withdrawn(tmp_path):
    requests, change = ScaleRequests(tmp_path), Change("rollout", 2, is_total=False)
    first, second = (requests.ask([change], HANG_S) for _ in range(2))
    assert requests.withdraw(first) and not requests.withdraw(first)
    assert requests.take() == (second, (change,)) and requests.take() is None
    assert not requests.withdraw(second) and requests.answer_to(second).state is ScaleState.WORKING
    requests.clear()  # by the next process of the run
    assert requests.answer_to(second) == ScaleAnswer(ScaleState.REFUSED, ("the run was started again",))
    (tmp_path / "scale" / "x.request.json").write_text('{"rollout": 1}')
    assert requests.take() is None
    assert requests.answer_to("x").lines == ("the request cannot be read",)


def test_requests_are_taken_in_their_order_and_not_after_their_time(tmp_path):
    """A command that was killed leaves its request, and the next process of the run may come days later."""
    requests = ScaleRequests(tmp_path)
    late = requests.ask([Change("rollout", 9, is_total=True)], wait=-1.0)
    names = [requests.ask([Change("rollout", number, is_total=True)], HANG_S) for number in range(6)]
    taken = [requests.take() for _ in names]
    assert [(name, changes[0].number) for name, changes in taken] == [(name, n) for n, name in enumerate(names)]
    assert requests.take() is None and requests.answer_to(late).state is ScaleState.REFUSED
    for name in names[:3]:
        requests.answer(name, ScaleAnswer(ScaleState.APPLIED))
    requests.clear()
    states = [requests.answer_to(name).state for name in names]
    assert states == [ScaleState.APPLIED] * 3 + [ScaleState.REFUSED] * 3
    requests.clear()
    assert not list((tmp_path / "scale").iterdir())


class TakenAtOnce(ScaleRequests):
    """The driver takes a request as soon as it is there."""

    def ask(self, changes, wait):
        name = super().ask(changes, HANG_S)
        assert self.take() is not None
        return name


def test_a_command_that_waited_for_long_says_that_the_run_goes_on_with_the_change(made, held, monkeypatch):
    monkeypatch.setattr("roost.cli.runs.ScaleRequests", TakenAtOnce)
    done = run("scale", made.path, "rollout=+2", "--wait", 1, width=200)
    assert done.exit_code == 1
    assert done.stderr == "the run is still working on it after 1 s; roost status shows its plan\n", "no refusal"


def test_logs_of_engines_that_joined_are_those_of_their_component(made):
    log(made, "rollout-3/rank_0.log", "joined\n")
    assert (
        run("logs", made.path, "rollout").stdout
        == run("logs", made.path, "rollout-3").stdout
        == "[rollout-3:0] joined\n"
    )
