"""The view of a running run: plain lines where nobody can look at a panel, a panel on a terminal."""

import asyncio
import io
import math

import pytest
from rich.console import Console

from roost.trainer.report.live_view import LiveView, Phase, Progress, panel
from tests.limits import HANG_S


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def values(step, **more):
    named = {"reward/mean": step / 10, "staleness/mean": 0.5, "tokens/per_second": 1500.0, "time/step": 2.0}
    return {"step": step, **named, **{key.replace("__", "/"): value for key, value in more.items()}}


def drawn(progress, now, width=100):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(panel(progress, now))
    return console.file.getvalue()


class TestPlain:
    @pytest.fixture
    def console(self):
        return Console(file=io.StringIO(), width=40)

    def test_one_line_for_each_step(self, console, clock):
        with LiveView(3, console, clock=clock) as view:
            for step in (1, 2, 3):
                view.phase("generate", total=8)
                view.advance(4)
                clock.now += 30 if step > 1 else 500  # with what came before the first
                view.step(values(step))
        assert console.file.getvalue().splitlines() == [
            "step 1/3  reward 0.100  mean 0.100  staleness 0.5  1,500 tokens/s  2.0 s  left 0:04",
            "step 2/3  reward 0.200  mean 0.150  staleness 0.5  1,500 tokens/s  2.0 s  left 0:30",
            "step 3/3  reward 0.300  mean 0.200  staleness 0.5  1,500 tokens/s  2.0 s",
        ]

    def test_distillation_shows_both_losses(self, console, clock):
        with LiveView(1, console, clock=clock) as view:
            view.step({"step": 1, "loss/supervised": 2.5, "loss/distillation": 0.125, "loss/total": 1.3})
        assert console.file.getvalue().startswith("step 1/1  loss 2.500  distillation 0.125")

    def test_a_resumed_run_continues_the_running_mean(self, console, clock):
        with LiveView(3, console, first_step=2, clock=clock, rewards=[0.5, 1.0]) as view:
            view.step({"step": 3, "reward/mean": 0.0})
        assert "reward 0.000  mean 0.500" in console.file.getvalue()

    def test_a_resumed_run_counts_from_where_it_was(self, console, clock):
        with LiveView(14, console, first_step=10, clock=clock) as view:
            clock.now += 60
            view.step({"reward/mean": 1.0, "time/step": 20.0})
            clock.now += 25
            view.step({"reward/mean": 1.0, "time/step": 20.0})
        assert console.file.getvalue().splitlines() == [
            "step 11/14  reward 1.000  mean 1.000  20.0 s  left 1:00",
            "step 12/14  reward 1.000  mean 1.000  20.0 s  left 0:50",
        ]

    @pytest.mark.parametrize(
        ("measured", "line"),
        [
            pytest.param({}, "step 1/1", id="nothing"),
            pytest.param(
                {"reward/mean": math.nan, "loss/policy": math.inf}, "step 1/1  reward -  mean -  loss -", id="nan"
            ),
            pytest.param({"reward/mean": -123456.0}, "step 1/1  reward -123,456  mean -123,456", id="large"),
            pytest.param({"what/ever": 3.0, "busy/actor": math.nan}, "step 1/1", id="unknown"),
        ],
    )
    def test_whatever_is_measured(self, console, clock, measured, line):
        with LiveView(1, console, clock=clock) as view:
            view.step(measured)
        assert console.file.getvalue() == line + "\n"

    def test_notes_cannot_take_over_the_terminal(self, console):
        with LiveView(1, console) as view:
            view.note("wrote \x1b[31m[bold]report[/bold]\r\n" + "x" * 60)
        written = console.file.getvalue()
        assert written == "wrote [bold]report[/bold]  " + "x" * 60 + "\n"

    def test_phases_without_a_step_say_nothing(self, console):
        with LiveView(1, console) as view:
            view.advance(3)
            view.phase("learn")
        assert console.file.getvalue() == ""


class TestPicture:
    def test_how_far_it_is(self):
        progress = Progress(steps=60, started=0.0)
        for step in range(1, 13):
            progress.add(values(step, busy__actor=0.62, busy__rollout=0.35, loss__policy=0.0123), now=step * 10.0)
        progress.phase = Phase("generate", total=256, since=100.0, done=120)
        lines = [line.rstrip() for line in drawn(progress, now=125.0).splitlines()]
        assert lines[0].startswith("step 12/60") and lines[0].endswith("2:05 elapsed, 8:00 left")
        assert lines[1].startswith("generate 120/256") and lines[1].endswith("0:25")
        assert lines[2].startswith("reward 1.200") and "▁▂▂▃▄▄▅▅▆▇▇█" in lines[2] and "last 10: 0.750" in lines[2]
        assert lines[3] == "staleness 0.5   loss 0.012   1,500 tokens/s   2.0 s"
        assert lines[4] == "busy   actor ▅ 62%   rollout ▃ 35%"

    def test_before_anything_is_known(self):
        assert "step 0/9" in drawn(Progress(9, 0.0), 3.0)
        assert "-:-- left" in drawn(Progress(9, 0.0), 3.0)

    def test_a_narrow_terminal_cuts_and_does_not_wrap(self):
        progress = Progress(60, 0.0)
        progress.add(values(1, **{f"busy__component_{number}": 0.5 for number in range(20)}), 1.0)
        assert all(len(line) <= 40 for line in drawn(progress, 2.0, width=40).splitlines())
        assert len(drawn(progress, 2.0, width=40).splitlines()) == 4


def test_a_run_on_a_terminal(clock):
    """Through the real thing, from a loop: every call returns, what is noted stays, the last panel too."""
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)

    async def run(view):
        for step in (1, 2):
            view.phase("generate", total=256)
            view.advance(100)
            view.advance(120)
            view.note(f"note {step}")
            while "generate 120/256" not in console.file.getvalue():  # until the thread has drawn it
                await asyncio.sleep(0.01)
            view.step(values(step))

    with LiveView(2, console, clock=clock) as view:
        asyncio.run(asyncio.wait_for(run(view), HANG_S))
    written = console.file.getvalue()
    assert "note 1" in written and "note 2" in written
    last = written[written.rindex("step") :]
    assert last.startswith("step 2/2") and "reward 0.200" in last and "generate" not in last


def test_the_cursor_comes_back_after_an_error():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with pytest.raises(RuntimeError), LiveView(2, console):
        raise RuntimeError("a worker died")
    assert console.file.getvalue().rindex("\x1b[?25h") > console.file.getvalue().rindex("\x1b[?25l")


def test_skipped_optimizer_steps_are_shown():
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    with LiveView(3, console) as view:
        view.step({"step": 1, "loss/policy": 0.5, "steps/skipped": 0.0})
        view.step({"step": 2, "loss/policy": math.nan, "steps/skipped": 2.0, "critic/skipped": 1.0})
        view.step({"step": 3, "steps/skipped": 1.0})
    first, second, third = console.file.getvalue().splitlines()
    assert "skipped" not in first and "skipped 2 optimizer steps  skipped 1 of the critic" in second
    assert third.endswith("skipped 1 optimizer step")
