import asyncio

import pytest

from roost.rollout.episode import Task
from roost.rollout.rewards.math_answer import ExactAnswer
from roost.rollout.rewards.reward import Answer, RewardFailed
from tests.grid import grid


def scored(text, wanted, **keys):
    return asyncio.run(ExactAnswer(**keys).score(Answer(Task("t", {"answer": wanted}), text)))


BOXED = {"find": "boxed"}
MARKER = {"find": "marker"}
LAST = {"find": "last_line"}
EXACT = {"ignore_case": False, "ignore_spaces": False, "read_numbers": False}


@grid(
    ("text", "right", "keys", "expected"),
    [
        pytest.param("Paris", "Paris", {}, 1.0, id="same"),
        pytest.param("London", "Paris", {}, 0.0, id="another"),
        pytest.param("  PARIS\n", "Paris", {}, 1.0, id="case and spaces"),
        pytest.param("new  york", "New York", {}, 1.0, id="spaces inside"),
        pytest.param("newyork", "New York", {}, 0.0, id="a missing space"),
        pytest.param("paris", "Paris", {"ignore_case": False}, 0.0, id="case matters"),
        pytest.param("Paris ", "Paris", {"ignore_spaces": False}, 0.0, id="spaces matter"),
        pytest.param("Paris", "Paris", EXACT, 1.0, id="nothing ignored"),
        pytest.param("STRASSE", "Straße", {}, 1.0, id="case of other languages"),
        pytest.param("1,234", "1234", {}, 1.0, id="thousands"),
        pytest.param("1234.0", 1234, {}, 1.0, id="a number in the data"),
        pytest.param("1,234", "1234", {"read_numbers": False}, 0.0, id="numbers as text"),
        pytest.param("12,34", "1234", {}, 0.0, id="commas that group nothing"),
        pytest.param("+5.", "5", {}, 1.0, id="sign and point"),
        pytest.param("1e3", "1000", {}, 1.0, id="exponent"),
        pytest.param("0.1", "0.10000000000000001", {}, 0.0, id="numbers are exact"),
        pytest.param("1e999999", "1e999998", {}, 0.0, id="huge numbers"),
        pytest.param("1e99999999999999999999", "1", {}, 0.0, id="an exponent beyond all"),
        pytest.param("nan", "nan", {}, 1.0, id="nan is a word"),
        pytest.param(".", "0", {}, 0.0, id="a point is no number"),
        pytest.param("e5", "0", {}, 0.0, id="an exponent alone is no number"),
        pytest.param("٣", "3", {}, 0.0, id="other digits"),
        pytest.param("True", True, {}, 1.0, id="true"),
        pytest.param("2", ["1", "2"], {}, 1.0, id="any of a list"),
        pytest.param("no", "yes", {"right": 2, "wrong": -1}, -1, id="score of a wrong one"),
        pytest.param("yes", "yes", {"right": 2, "wrong": -1}, 2, id="score of a right one"),
        pytest.param("so\nit is\n4\n\n", "4", LAST, 1.0, id="last line"),
        pytest.param("4\nor 5", "4", LAST, 0.0, id="not the last line"),
        pytest.param("", "4", LAST, 0.0, id="no line"),
        pytest.param("2+2\n#### 4\nbye", "4", MARKER, 1.0, id="marker"),
        pytest.param("#### 5\n#### 4", "4", MARKER, 1.0, id="the last marker counts"),
        pytest.param("#### 4\n#### 5", "4", MARKER, 0.0, id="the first does not"),
        pytest.param("4", "4", MARKER, 0.0, id="no marker"),
        pytest.param("#### ", "4", MARKER, 0.0, id="nothing after the marker"),
        pytest.param("####\n4", "4", MARKER, 0.0, id="the answer on another line"),
        pytest.param("Answer: 4", "4", {**MARKER, "marker": "Answer:"}, 1.0, id="another marker"),
        pytest.param(r"so \boxed{4}.", "4", BOXED, 1.0, id="boxed"),
        pytest.param(r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", BOXED, 1.0, id="braces in a box"),
        pytest.param(r"\boxed{5} \boxed{4}", "4", BOXED, 1.0, id="the last box counts"),
        pytest.param(r"\boxed{4} \boxed{5}", "4", BOXED, 0.0, id="the first box does not"),
        pytest.param(r"\boxed{4} \boxed{5", "4", BOXED, 1.0, id="an open box is none"),
        pytest.param(r"\boxed{\{4\}}", r"\{4\}", BOXED, 1.0, id="escaped braces"),
        pytest.param("4", "4", BOXED, 0.0, id="no box"),
        pytest.param("}}}{{{ " + r"\boxed{4}", "4", BOXED, 1.0, id="stray braces"),
        pytest.param(r"\boxed{" * 100_000 + "4}", "4", BOXED, 1.0, id="a hundred thousand boxes"),
        pytest.param("9" * 100_000, "9", {}, 0.0, id="a hundred thousand digits"),
    ],
)
def test_scores(text, right, keys, expected):
    assert scored(text, right, **keys) == expected


def test_the_key_is_the_users():
    answer = Answer(Task("t", {"solution": "4"}), "4")
    assert asyncio.run(ExactAnswer(answer="solution").score(answer)) == 1.0


@pytest.mark.parametrize("right", [None, [], [None]], ids=["null", "empty", "list of null"])
def test_a_task_without_a_right_answer_cannot_be_scored(right):
    with pytest.raises(RewardFailed, match="no right answer"):
        scored("4", right)


@pytest.mark.parametrize("right", [{"value": 4}, [["4"]], [{"value": 4}]], ids=str)
def test_an_answer_of_the_wrong_kind_cannot_be_scored(right):
    with pytest.raises(RewardFailed, match=r"'answer' of task 't' is .*; text, a number or a list of these is needed"):
        scored("4", right)


def test_a_task_without_the_key_cannot_be_scored():
    with pytest.raises(RewardFailed, match="has no 'answer'; it has nothing"):
        asyncio.run(ExactAnswer().score(Answer(Task("t"), "4")))


@pytest.mark.parametrize(
    ("keys", "message"),
    [({"find": "box"}, "find is 'box'"), ({"marker": ""}, "marker is empty")],
    ids=["find", "marker"],
)
def test_wrong_keys(keys, message):
    with pytest.raises(ValueError, match=message):
        ExactAnswer(**keys)
