"""Rewards by rule: tables of texts, right answers and rewards, after the semantics of RLinf's and ROLL's."""

import asyncio
import json

import pytest

from roost.rollout.episode import Split, Task
from roost.rollout.rewards.code_tests import RollCode
from roost.rollout.rewards.instructions import CHECKS, InstructionFollowing, follows
from roost.rollout.rewards.math_answer import RlinfMath, RollMath, Rstar2Math
from roost.rollout.rewards.reward import Answer, RewardFailed
from roost.rollout.rewards.rules import BoxedAnswer, CrossThink, SearchAnswer, VqaAnswer
from tests.limits import HANG_S


def scores(reward, rows, key="answer", **facts):
    """The rewards of (text, right answer) pairs."""

    async def run():
        answers = [Answer(Task("t", {key: right}, tag=facts.pop("tag", "")), text, **facts) for text, right in rows]
        try:
            return await asyncio.gather(*map(reward.score, answers))
        finally:
            await reward.close()

    return [getattr(one, "reward", one) for one in asyncio.run(run())]


RLINF_MATH = [  # text, right answer, whether it is right
    (r"so \boxed{7}", r"\boxed{7}", True),
    (r"so \boxed{7}", ["8", "7"], True),
    (r"\boxed{7}, no, \boxed{8}", "7", False),
    ("the final answer is $7$. I hope it is correct.", "7", True),
    ("The answer is 7.", "7", True),
    ("答案是 7\n\n再见", "7", True),
    ("it is 7", "7", False),
    ("", "7", False),
    (r"\boxed{50}", "0.5", True),
    (r"\boxed{50\%}", "0.5", True),
    (r"\boxed{1,000}", "1000", True),
    (r"\boxed{3.14159}", "3.1416", True),
    (r"\boxed{3.2}", "3.1416", False),
    (r"\boxed{\dfrac12}", r"\frac{1}{2}", True),
    (r"\boxed{1/2}", r"\frac12", True),
    (r"\boxed{12 \text{ cm}}", "12", True),
    (r"\boxed{12 inches}", "12", True),
    (r"\boxed{90^\circ}", "90", True),
    (r"\boxed{x = 5}", "5", True),
    (r"\boxed{(B)}", "B", True),
    (r"\boxed{(C)}", "B", False),
    (r"\boxed{x+1}", "1+x", True),
    (r"\boxed{2(x+1)}", "2x+2", True),
    (r"\boxed{x+2}", "x+1", False),
    (r"\boxed{(1, \frac{2}{4})}", r"(1, \frac12)", True),
    (r"\boxed{(1, 3)}", "(1, 2)", False),
    (r"\boxed{x + y = 3}", "y + x - 3 = 0", True),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", True),
    (r"\boxed{\begin{bmatrix}1 & 2\\3 & 4\end{bmatrix}}", r"\begin{pmatrix}1 & 2\\3 & 4\end{pmatrix}", True),
    (r"\boxed{__import__('os').getcwd()}", "7", False),
]


def test_rlinf_s_math():
    reward = RlinfMath(scale=5.0, processes=1, limit_s=HANG_S)
    found = scores(reward, [(text, right) for text, right, _ in RLINF_MATH])
    wrong = [row for row, score in zip(RLINF_MATH, found, strict=True) if score != (5.0 if row[2] else -5.0)]
    assert not wrong


def test_rlinf_s_math_has_a_range():
    rows = [(r"\boxed{7}", "7"), (r"\boxed{8}", "7")]
    assert scores(RlinfMath(2.0, min_val=0.0, max_val=3.0, processes=1), rows) == [6.0, 0.0]


def test_rstar2():
    rows = [(r"\boxed{\frac{1}{2}}", "0.5"), ("The answer is 7", "7"), (r"\boxed{\{1,2\}}", r"\{2,1\}")]
    assert scores(Rstar2Math(2.0, processes=1, limit_s=HANG_S), rows) == [2.0, 0.0, 2.0]


def test_roll_s_math():
    rows = [
        (r"<think>2+2</think>So \boxed{4}", "4", 1.0),
        (r"2+2" + "\n\n" + r"So \boxed{4}", "4", 1.0),
        (r"So \boxed{4}", "4", 0.0),  # neither thinking nor a blank line
        (r"<think>a</think>b</think>\boxed{4}", "4", 0.0),
        (r"so <think>a</think>\boxed{4}", "4", 0.0),
        (r"<think>a</think>\boxed{1}, \boxed{\frac{8}{2}}", "4", 1.0),
        ("<think>a</think>It is $4$", "4", 1.0),
        ("<think>a</think>It is 4", "5", 0.0),
    ]
    found = scores(RollMath(processes=1, limit_s=HANG_S), [row[:2] for row in rows], "ground_truth")
    assert found == [row[2] for row in rows]


def test_a_prompt_that_begins_the_thinking():
    reward = RollMath(processes=1, limit_s=HANG_S)
    task = Task("t", {"ground_truth": "4", "prompt_text": "2+2?<think>\n"})

    async def run():
        found = [
            await reward.score(Answer(task, text)) for text in (r"a</think>\boxed{4}", r"<think>a</think>\boxed{4}")
        ]
        await reward.close()
        return found

    assert asyncio.run(run()) == [1.0, 0.0]


def test_search():
    rows = [
        ("<answer>Rome</answer> <answer>The Paris.</answer>", ["paris", "Paris, France"], 1.0),
        ("<answer>Paris</answer> <answer>Rome</answer>", "Paris", 0.0),
        ("Paris", "Paris", 0.0),
        ("<answer>" * 11 + "</answer> <answer>Paris</answer>", "Paris", 0.25),
    ]
    assert scores(SearchAnswer(), [row[:2] for row in rows]) == [row[2] for row in rows]


def test_vqa():
    weights = {"qa_accuracy": 1.0, "think_format": 0.1, "answer_format": 0.01}
    right = {"choices": "['Yes', 'No']", "correct_answer": 1}
    rows = [
        ("<think>x</think><answer>B. No</answer>", right, 1.11),
        ("<think>x</think><answer>B. no, it is not</answer>", right, 1.11),
        ("<think>x</think><answer>B. Yes</answer>", right, 0.11),
        ("<answer>A. No</answer>", right, 0.01),
        ("<think>x<think></think> B. No", right, 0.0),
    ]
    assert scores(VqaAnswer(weights), [row[:2] for row in rows]) == pytest.approx([row[2] for row in rows])
    with pytest.raises(ValueError, match="it needs qa_accuracy"):
        VqaAnswer({"qa_accuracy": 1.0})


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("loose", [1, 1, -1, -1]), ("soft", [1, 0.5, -0.5, -1]), ("strict", [1, -1, -1, -1])],
)
def test_cross_think(kind, expected):
    texts = [r"A </think> \boxed{B}", "the answer is B", r"\boxed{C}", "the answer is C"]
    assert scores(CrossThink(kind), [(text, "B") for text in texts], "ground_truth", tokens=900) == expected


def test_cross_think_s_penalties():
    reported = r"\boxed{B} " + "so it is " * 9
    (repeated,) = scores(CrossThink("loose"), [(reported, "B")], "ground_truth")
    assert repeated == pytest.approx(1 - 0.5 * (1 - 4 / 26))
    assert scores(CrossThink("loose", 1.0), [(r"\boxed{B}", "B")], "ground_truth", tokens=250) == [0.75]
    with pytest.raises(ValueError, match="write one of loose, soft, strict"):
        CrossThink(None)


@pytest.mark.parametrize(("split", "expected"), [(Split.TRAIN, [0, 0]), (Split.EVALUATION, [1, 0])])
def test_rewards_of_evaluations(split, expected):
    rows = [(r"<think>\boxed{A}</think> \boxed{B}", "B"), ("B", "B")]
    assert scores(BoxedAnswer(choices=True), rows, "ground_truth", split=split) == expected
    assert scores(BoxedAnswer(), rows, "ground_truth", split=split) == expected


INSTRUCTIONS = [  # check, its arguments, a text that follows it, one that does not
    ("verify_keywords", {"keyword_list": ["sun", "moon"]}, "Sun and moon", "sun"),
    ("verify_keyword_frequency", {"word": "sun", "N": 2}, "sun, Sun", "sun sunny"),
    ("validate_forbidden_words", {"forbidden_words": ["sun"]}, "sunny", "the Sun"),
    ("verify_letter_frequency", {"letter": "a", "N": 2}, "a a b", "a"),
    ("verify_paragraph_count", {"N": 2}, "one\n***\ntwo", "one\n\ntwo"),
    ("validate_word_constraint", {"N": 3, "quantifier": "at least"}, "a b c", "a b"),
    ("validate_word_constraint", {"N": 20, "quantifier": "around"}, "a " * 22, "a " * 23),
    ("verify_sentence_constraint", {"N": 2, "quantifier": "at most"}, "One. Two!", "One. Two! Three?"),
    ("validate_paragraphs", {"N": 2, "first_word": "so", "i": 2}, "one\n\nSo two", "So one\n\ntwo"),
    ("verify_postscript", {"postscript_marker": "P.S."}, "x\nP.S. y", "x\nP.S."),
    ("validate_placeholders", {"N": 2}, "[name] at [place]", "[name]"),
    ("verify_bullet_points", {"N": 2}, "* a\n- b", "* a"),
    ("validate_title", {}, "<<Title>>\ntext", "<Title>"),
    ("validate_choice", {"options": ["yes", "no"]}, "My answer is no.", "perhaps"),
    ("validate_highlighted_sections", {"N": 1}, "a *b* c", "a b c"),
    ("validate_sections", {"N": 2, "section_splitter": "SECTION"}, "SECTION 1\na\nSECTION 2\nb", "SECTION 1"),
    ("validate_json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("validate_repeat_prompt", {"original_prompt": "Say hi."}, "Say hi. Hi.", "Hi."),
    ("validate_two_responses", {}, "a ****** b", "a ****** a"),
    ("validate_uppercase", {}, "ABC 1", "Abc"),
    ("validate_lowercase", {}, "abc 1", "Abc"),
    ("validate_frequency_capital_words", {"N": 2, "quantifier": "at least"}, "NASA and ESA", "NASA"),
    ("validate_end", {"end_phrase": "The end."}, "So. The end.", "The end. So."),
    ("validate_quotation", {}, '"quoted"', '"quoted'),
    ("validate_no_commas", {}, "a b", "a, b"),
]


@pytest.mark.parametrize(("name", "arguments", "right", "wrong"), INSTRUCTIONS)
def test_instructions(name, arguments, right, wrong):
    instruction = {"func_name": name, "N": None, **arguments}
    assert follows(right, instruction)
    assert not follows(wrong, instruction)


def test_every_instruction_is_tried():
    assert set(CHECKS) - {name for name, *_ in INSTRUCTIONS} == {"validate_response_language"}
    assert len(CHECKS) == 25


def test_instructions_are_read_from_the_row():
    rows = [
        ("<think>a, b</think>no comma", json.dumps({"func_name": "validate_no_commas", "N": None})),
        ("x", {"func_name": "unheard_of"}),
    ]
    assert scores(InstructionFollowing(), rows, "ground_truth", tag="ifeval")[0] == 1.0
    assert scores(InstructionFollowing(), rows[1:], "ground_truth", tag="ifeval") == [0.0]
    assert scores(InstructionFollowing(), rows[:1], "ground_truth", tag="other") == [0.0]
    with pytest.raises(RewardFailed, match="needs keyword_list"):
        follows("x", {"func_name": "verify_keywords"})


ADDS = "<think>so</think>\n```python\ndef add(a, b):\n    return a + b\n```"


@pytest.mark.parametrize(
    ("text", "row", "expected"),
    [
        (ADDS, {"case_type": "assert", "test_cases": [{"assert_code": "assert add(1, 2) == 3"}]}, 1.0),
        (ADDS, {"case_type": "assert", "test_cases": [{"assert_code": "assert add(1, 2) == 4"}]}, 0.0),
        (
            "```python\nprint(sum(map(int, input().split())))\n```",
            {"case_type": "input", "test_cases": [{"stdin": "1 2", "expected_stdout": "3"}]},
            1.0,
        ),
        (
            "```python\nclass Solution:\n    def add(self, a, b):\n        return a + b\n```",
            {
                "case_type": "input",
                "test_case_function": "add",
                "test_cases": [{"stdin": "1\n2", "expected_stdout": "3"}],
            },
            1.0,
        ),
    ],
)
def test_roll_s_code(text, row, expected):
    reward = RollCode(allow_weak=True, limit_s=HANG_S)
    row = {**row, "test_cases": json.dumps(row["test_cases"])}
    assert asyncio.run(reward.score(Answer(Task("t", row), text))) == expected


def test_roll_s_code_on_a_remote_sandbox_punishes_errors():
    reward = RollCode(on_error=-1.0, allow_weak=True, limit_s=HANG_S)
    row = {"case_type": "input", "test_cases": [{"stdin": "", "expected_stdout": "3"}]}

    async def run():
        return [await reward.score(Answer(Task("t", row), text)) for text in ("1/0", "print(4)", "print(3)")]

    assert asyncio.run(run()) == [-1.0, 0.0, 1.0]
