import asyncio
import sys

import pytest

pytest.importorskip("math_verify")

from roost.rollout.episode import Task
from roost.rollout.rewards.math_answer import AnsweringProcesses, MathAnswer, NotStarted, ProcessLost
from roost.rollout.rewards.reward import Answer, RewardFailed
from tests.limits import HANG_S

RIGHT = [
    ("0.5", "1/2", "decimal"),
    (r"it is $\frac{2}{4}$", r"\frac{1}{2}", "fraction"),
    (r"\boxed{(x-1)(x+1)}", "x^2-1", "expression"),
    (r"\boxed{\{2,1\}}", r"\{1,2\}", "set"),
    (r"$[1,2)$", "[1,2)", "interval"),
    (r"$x=5$", "5", "equation"),
    ("1,234", "1234", "thousands"),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", "root"),
    (r"\boxed{3}", ["2", "3"], "any of a list"),
    ("The answer is 42.", 42, "number in the data"),
]
WRONG = [
    (r"\boxed{3}", "4", "another number"),
    (r"$[1,2]$", "[1,2)", "another interval"),
    (r"\boxed{41} or \boxed{42}", "42", "two answers"),
    ("", "42", "nothing"),
    ("I do not know", "42", "words"),
    (r"\boxed{" * 2_000, "42", "open boxes"),
    ("(" * 5_000 + "1" + ")" * 5_000, "42", "deep brackets"),
    ("\x00\ud800 $\\frac{$", "42", "no text at all"),
    ("__import__('os').getpid()", "42", "code"),
]
CASES = [(1.0, *case) for case in RIGHT] + [(0.0, *case) for case in WRONG]
HANGS = r"\boxed{9^{9^{9^{9}}}}"


def answer_to(text, right):
    return Answer(Task("t", {"answer": right}), text)


async def score_all(reward, answers):
    try:
        return await asyncio.gather(*(reward.score(answer) for answer in answers), return_exceptions=True)
    finally:
        await reward.close()


def test_answers_side_by_side():
    answers = [answer_to(text, right) for _, text, right, _ in CASES]
    scores = asyncio.run(score_all(MathAnswer(processes=2, limit_s=HANG_S), answers))
    assert {case[3]: score for case, score in zip(CASES, scores, strict=True)} == {case[3]: case[0] for case in CASES}


def test_only_boxed():
    answers = [answer_to("4", "4"), answer_to(r"\boxed{4}", "4"), answer_to(r"\boxed{5} \boxed{4}", "4")]
    reward = MathAnswer(only_boxed=True, processes=1, limit_s=HANG_S, right=2, wrong=-1)
    assert asyncio.run(score_all(reward, answers)) == [-1, 2, 2]


def test_what_takes_too_long_is_wrong_and_counted_and_others_go_on():
    async def run():
        hung = await reward.score(answer_to(HANGS, "42"))
        reward._limit_s = HANG_S
        return [hung, *await score_all(reward, [answer_to("42", "42")])]

    reward = MathAnswer(processes=1, limit_s=1.0)
    assert asyncio.run(run()) == [0.0, 1.0]
    assert sum(reward.counts.values()) == 1


def test_a_right_answer_that_is_none_is_a_failure():
    (error,) = asyncio.run(score_all(MathAnswer(processes=1, limit_s=HANG_S), [answer_to("4", "")]))
    assert isinstance(error, RewardFailed)
    assert "is not mathematics" in str(error)


@pytest.mark.parametrize("keys", [{"processes": 0}, {"limit_s": 0}, {"memory_gb": -1}, {"longest": 0}], ids=str)
def test_wrong_keys(keys):
    with pytest.raises(ValueError, match=next(iter(keys))):
        MathAnswer(**keys)


ECHO = """
import json, os, sys, time
print("ready", flush=True)
for line in sys.stdin:
    question = json.loads(line)
    if question == "hang": time.sleep(3600)
    if question == "die": os._exit(3)
    print(json.dumps([question, os.getpid()]), flush=True)
"""


def echoes(most=1):
    return AnsweringProcesses([sys.executable, "-c", ECHO], most)


async def outcome(awaitable):
    try:
        return (await awaitable)[0]
    except (TimeoutError, ProcessLost) as error:
        return type(error)


@pytest.mark.parametrize(
    ("question", "limit_s", "expected"),
    [
        pytest.param("hang", 0.2, TimeoutError, id="hangs"),
        pytest.param("die", HANG_S, ProcessLost, id="dies"),
        pytest.param("x" * 300_000, HANG_S, ProcessLost, id="answers more than a line may hold"),
    ],
)
def test_a_program_that_does_not_answer_is_replaced(question, limit_s, expected):
    async def run():
        programs = echoes()
        try:
            first = await programs.ask("a", HANG_S)
            lost = await outcome(programs.ask(question, limit_s))
            return first, lost, await programs.ask("b", HANG_S)
        finally:
            await programs.close()

    first, lost, after = asyncio.run(run())
    assert lost is expected
    assert (first[0], after[0]) == ("a", "b")
    assert first[1] != after[1]


def test_an_answer_to_one_who_left_is_not_given_to_the_next():
    async def run():
        programs = echoes()
        await programs.ask("a", HANG_S)
        leaving = asyncio.create_task(programs.ask("hang", HANG_S))
        await asyncio.sleep(0.05)
        leaving.cancel()
        try:
            return await programs.ask("b", HANG_S)
        finally:
            await programs.close()

    assert asyncio.run(run())[0] == "b"


def test_a_program_that_cannot_start_is_told():
    with pytest.raises(NotStarted, match="the program ended with 3"):
        asyncio.run(AnsweringProcesses([sys.executable, "-c", "raise SystemExit(3)"], 1).ask("a", HANG_S))


def test_programs_are_used_again_and_bounded():
    async def run():
        programs = echoes(most=2)
        try:
            return await asyncio.gather(*(programs.ask(number, HANG_S) for number in range(20)))
        finally:
            await programs.close()

    answers = asyncio.run(run())
    assert [answer[0] for answer in answers] == list(range(20))
    assert len({answer[1] for answer in answers}) <= 2
