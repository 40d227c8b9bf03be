"""Spans: lanes that nest whatever threads and tasks do, bounded memory, and times by tag."""

import asyncio
import contextvars
import threading
from itertools import count

import pytest
from hypothesis import given, strategies as st

from roost.trace.spans import Clock, Span, SpanRecorder


def recorder(**options):
    """A recorder whose clock goes on by 1 at each reading."""
    ticks = count(0)
    return SpanRecorder(Clock(lambda: next(ticks), lambda: 1), **options)


def lanes(spans):
    return {span.name: span.thread for span in spans}


def misplaced(spans):
    """Pairs of spans of one lane that overlap without one being inside the other."""
    return [
        (one, two)
        for one in spans
        for two in spans
        if one.thread == two.thread and one.start_ns < two.start_ns < one.end_ns < two.end_ns
    ]


def test_the_clock_goes_with_the_monotonic_one_and_asks_the_wall_once():
    walls, readings = iter([1_000]), iter([100, 110, 120, 121, 500])
    clock = Clock(lambda: next(readings), lambda: next(walls))
    assert [clock.now() for _ in range(3)] == [1_015, 1_016, 1_395]


def test_a_span_has_its_name_category_times_and_args():
    spans = recorder()
    with spans.span("step", category="call", name="kept", step=3):
        pass
    assert spans.drain() == [Span("step", "call", 3, 4, 0, {"name": "kept", "step": 3})]
    assert spans.drain() == []


def test_nested_spans_share_a_lane():
    spans = recorder()
    with spans.span("a"), spans.span("b"):
        with spans.span("c", "wait"):
            pass
        with spans.span("d"):
            pass
    assert lanes(spans.drain()) == {"a": 0, "b": 0, "c": 0, "d": 0}


def test_a_span_that_fails_says_so_and_lets_the_error_through():
    spans = recorder()
    with pytest.raises(ZeroDivisionError), spans.span("step", batch=4):
        1 / 0  # noqa: B018
    (span,) = spans.drain()
    assert span.args == {"batch": 4, "error": "ZeroDivisionError"}


def test_threads_take_the_lowest_free_lane():
    spans = recorder()
    opened, close = threading.Event(), threading.Event()

    def other():
        with spans.span("other"), spans.span("inside other"):
            opened.set()
            close.wait()

    thread = threading.Thread(target=other)
    with spans.span("main"):
        thread.start()
        opened.wait()
    with spans.span("main again"):
        pass
    close.set()
    thread.join()
    assert lanes(spans.drain()) == {"main": 0, "main again": 0, "other": 1, "inside other": 1}


def test_concurrent_calls_of_one_loop_take_lanes_of_their_own():
    spans = recorder()

    async def call(name):
        with spans.span(name, "call"):
            await asyncio.sleep(0)
            with spans.span(f"{name} waits", "wait"):
                await asyncio.sleep(0)

    async def serve():
        await asyncio.gather(*(call(f"call {number}") for number in range(3)))
        await call("later")

    asyncio.run(serve())
    made = spans.drain()
    assert lanes(made) == {
        **{f"call {number}{part}": number for number in range(3) for part in ("", " waits")},
        "later": 0,
        "later waits": 0,
    }
    assert not misplaced(made)


@pytest.mark.parametrize(
    "await_it",
    [
        pytest.param(lambda wait: asyncio.wait_for(wait(), None), id="wait_for"),
        pytest.param(lambda wait: asyncio.ensure_future(wait()), id="task"),
        pytest.param(lambda wait: asyncio.to_thread(asyncio.run, wait()), id="thread"),
    ],
)
def test_what_a_call_awaits_is_in_its_lane(await_it):
    """Else a call that waits in a task of its own would be taken for busy."""
    spans = recorder()

    async def wait():
        with spans.span("wait", "wait"):
            await asyncio.sleep(0)

    async def call():
        with spans.span("call", "call"):
            await await_it(wait)

    asyncio.run(call())
    assert lanes(spans.drain()) == {"wait": 0, "call": 0}


def test_of_tasks_side_by_side_in_a_call_one_shares_its_lane():
    spans = recorder()

    async def part(name):
        with spans.span(name):
            await asyncio.sleep(0)

    async def call():
        with spans.span("call", "call"):
            await asyncio.gather(*(part(f"part {number}") for number in range(3)))

    asyncio.run(call())
    assert lanes(spans.drain()) == {"part 0": 0, "part 1": 1, "part 2": 2, "call": 0}


def test_a_call_that_leaves_a_task_behind_does_not_overlap_it():
    spans = recorder()

    async def background(started, stop):
        with spans.span("background"):
            started.set()
            await stop.wait()
        with spans.span("background again"):
            pass

    async def serve():
        started, stop = asyncio.Event(), asyncio.Event()
        with spans.span("start", "call"):
            task = asyncio.create_task(background(started, stop))
            await started.wait()
        with spans.span("next", "call"):
            stop.set()
            await task

    asyncio.run(serve())
    made = spans.drain()
    assert not misplaced(made)
    assert lanes(made) == {"background": 0, "start": 1, "next": 1, "background again": 0}


def test_tasks_that_start_each_other_do_not_keep_each_others_spans():
    spans = recorder()
    depths = []

    async def tick(left):
        with spans.span("tick") as span:
            following = asyncio.create_task(tick(left - 1)) if left else None
            await asyncio.sleep(0)
        depths.append(chain_length(span))
        if following:
            await following

    asyncio.run(tick(50))
    assert max(depths) <= 3


def chain_length(span):
    """Number of spans that a span keeps alive."""
    length = 0
    while span is not None:
        span, length = span._parent, length + 1
    return length


def test_a_generator_closed_too_early_leaves_the_outer_span_usable():
    spans = recorder()

    def rows():
        with spans.span("rows"):
            yield

    with spans.span("outer"):
        generator = rows()
        next(generator)
        with spans.span("row"):
            generator.close()
        with spans.span("after"):
            pass
    made = spans.drain()
    assert not misplaced(made)
    assert lanes(made) == {"rows": 1, "row": 0, "after": 0, "outer": 0}


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60))
def test_lanes_nest_whatever_is_opened_and_closed(actions):
    """Opening and closing in any order, as tasks and generators can, in four contexts."""
    spans = recorder()
    contexts = [contextvars.copy_context() for _ in range(4)]
    open_spans = []
    for number, (where, opens) in enumerate(actions):
        if opens or not open_spans:
            span = spans.span(str(number))
            contexts[where].run(span.__enter__)
            open_spans.append(span)
            contexts[(where + 1) % 4] = contexts[where].run(contextvars.copy_context)
        else:
            span = open_spans.pop(number * 7 % len(open_spans))
            contexts[where].run(span.__exit__, None, None, None)
    for span in open_spans:
        span.__exit__(None, None, None)
    made = spans.drain()
    assert len({span.name for span in made}) == len(made)
    assert not misplaced(made)
    assert {span.thread for span in made} <= set(range(len(made)))


def test_many_threads_lose_nothing():
    spans = SpanRecorder()

    def work():
        for _ in range(200):
            with spans.timer("outer"), spans.span("inner"):
                pass

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made = spans.drain()
    assert len(made) == 8 * 200 * 2
    assert all(span.start_ns <= span.end_ns for span in made)
    assert {span.thread for span in made} <= set(range(8))
    by_lane = {}
    for span in sorted(made, key=lambda span: (span.start_ns, -span.end_ns)):
        ends = by_lane.setdefault(span.thread, [])
        while ends and ends[-1] <= span.start_ns:
            ends.pop()
        assert not ends or span.end_ns <= ends[-1]
        ends.append(span.end_ns)


def test_undrained_spans_are_bounded_and_the_oldest_go():
    spans = recorder(limit=3)
    for number in range(5):
        with spans.span(str(number)):
            pass
    assert [span.name for span in spans.drain()] == ["2", "3", "4"]
    assert spans.dropped == 2


def test_recorders_do_not_see_each_other():
    one, two = recorder(), recorder()
    with one.span("a"), two.span("b"), one.span("c"), two.span("d"):
        pass
    assert lanes([*one.drain(), *two.drain()]) == {"a": 0, "b": 0, "c": 0, "d": 0}


def test_times_of_a_tag_add_up_until_popped():
    spans = recorder()
    for _ in range(3):
        with spans.timer("learn"):
            pass
    with spans.timer("sync", "call"), spans.span("learn"), spans.span("lock", "wait"):
        pass
    assert spans.pop_time("learn") == 3e-9
    assert spans.pop_times() == {"sync": 5e-9}
    assert spans.pop_times() == {}


def test_a_timer_can_leave_no_span():
    spans = recorder()
    with spans.timer("learn", trace=False):
        pass
    assert spans.drain() == []
    assert spans.pop_time("learn") == 1e-9


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        pytest.param("forwad", "did you mean forward?", id="misspelt"),
        pytest.param("sync", "there are backward, forward", id="unknown"),
    ],
)
def test_a_tag_without_time_is_a_key_error_that_helps(tag, message):
    spans = recorder()
    for known in ("forward", "backward"):
        with spans.timer(known):
            pass
    with pytest.raises(KeyError, match="no time under") as caught:
        spans.pop_time(tag)
    assert message in str(caught.value)


def entered_twice(spans):
    span = spans.span("step")
    with span, span:
        pass


@pytest.mark.parametrize(
    ("act", "error"),
    [
        pytest.param(lambda spans: spans.span("step", "idle"), ValueError, id="unknown category"),
        pytest.param(lambda spans: spans.timer("lock", "wait"), ValueError, id="timer of a wait"),
        pytest.param(lambda spans: SpanRecorder(limit=0), ValueError, id="no room"),
        pytest.param(entered_twice, RuntimeError, id="entered twice"),
    ],
)
def test_misuse_is_refused(act, error):
    with pytest.raises(error):
        act(recorder())
