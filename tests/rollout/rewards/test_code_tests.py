import asyncio

import pytest

from roost.rollout.episode import Task
from roost.rollout.rewards.code_tests import CodeTests, found_code, same_output
from roost.rollout.rewards.reward import Answer, RewardFailed
from roost.sandbox.sandbox import TooWeak, run_once
from tests.limits import HANG_S


@pytest.fixture(scope="module", autouse=True)
def held():
    """Skipped where the machine cannot hold code."""
    try:
        asyncio.run(run_once("pass"))
    except TooWeak as error:
        pytest.skip(str(error))


def scored(text, tests, data=None, **keys):
    answer = Answer(Task("t", {"tests": tests, **(data or {})}), text)
    return asyncio.run(CodeTests(**{"limit_s": HANG_S, **keys}).score(answer))


ADD = "def add(a, b):\n    return a + b\n"
DOUBLE = [{"input": "4", "output": "8"}, {"input": "5\n", "output": "10\n"}]
ALWAYS = """
class Yes:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __gt__ = __le__ = __ge__ = __lt__
    def __sub__(self, other): return 0
    __rsub__ = __add__ = __radd__ = __sub__
    def __abs__(self): return 0
    def __float__(self): return 5.0
    def __contains__(self, other): return True
    def __hash__(self): return 0
def add(a, b): return Yes()
"""


@pytest.mark.parametrize(
    ("text", "tests", "keys", "expected"),
    [
        pytest.param("print(int(input()) * 2)", DOUBLE, {}, 1.0, id="right"),
        pytest.param("Here:\n```python\nprint(int(input()) * 2)\n```", DOUBLE, {}, 1.0, id="fenced"),
        pytest.param("print(8)", DOUBLE, {}, 0.5, id="half"),
        pytest.param("print(8)", DOUBLE, {"count": "all"}, 0.0, id="half is nothing"),
        pytest.param("print(int(input()) * 2)", DOUBLE, {"count": "all"}, 1.0, id="all"),
        pytest.param("print('all tests passed')", DOUBLE, {}, 0.0, id="says that it passed"),
        pytest.param("raise SystemExit(0)", DOUBLE, {}, 0.0, id="exits early"),
        pytest.param("import os; os._exit(0)", DOUBLE, {}, 0.0, id="exits at once"),
        pytest.param("print(int(input()) * 2); exit()", DOUBLE, {}, 1.0, id="exits at its end"),
        pytest.param("print(int(input()) * 2); 1 / 0", DOUBLE, {}, 0.0, id="raises at its end"),
        pytest.param("while True: pass", DOUBLE[:1], {"limit_s": 0.3}, 0.0, id="hangs"),
        pytest.param("x = ' ' * (1 << 40)", DOUBLE, {}, 0.0, id="fills the memory"),
        pytest.param("while True: print('8')", DOUBLE[:1], {"limit_s": 0.5}, 0.0, id="floods"),
        pytest.param("no python at all", DOUBLE, {}, 0.0, id="no Python"),
        pytest.param("", DOUBLE, {}, 0.0, id="nothing"),
        pytest.param("```sh\nls\n```", DOUBLE, {}, 0.0, id="another language"),
        pytest.param("print(int(input()) * 2)", DOUBLE, {"only_fenced": True}, 0.0, id="not fenced"),
        pytest.param(
            "import sys; print('hm', file=sys.stderr); print(int(input()) * 2)", DOUBLE, {}, 1.0, id="complains as well"
        ),
        pytest.param("if __name__ == '__main__':\n  print(int(input()) * 2)", DOUBLE, {}, 1.0, id="as a program"),
        pytest.param(
            "from __future__ import annotations\nprint(int(input()) * 2)", DOUBLE, {}, 1.0, id="from the future"
        ),
        pytest.param("print(2 / 3)", [{"input": "", "output": "0.66667"}], {"tolerance": 1e-4}, 1.0, id="tolerance"),
        pytest.param("print(*open(0))", [{"input": ["a", "b"], "output": ["a", " b"]}], {}, 1.0, id="lists of lines"),
    ],
)
def test_input_and_output(text, tests, keys, expected):
    assert scored(text, tests, **keys) == expected


@pytest.mark.parametrize(
    ("text", "test", "expected"),
    [
        pytest.param(ADD, "assert add(1, 2) == 3", 1.0, id="right"),
        pytest.param(ADD, "assert add(1, 2) == 4", 0.0, id="wrong"),
        pytest.param(ADD, "assert add(b=[1], a=(2,)[:0] or [0]) == [0, 1]", 1.0, id="lists by name"),
        pytest.param(
            ADD, "def test_it():\n  assert add(1, 2) == 3\ndef test_no():\n  assert add(1, 1) == 3", 0.5, id="test_"
        ),
        pytest.param(ADD, "from solution import add as plus\nassert plus(1, 2) == 3", 1.0, id="imported"),
        pytest.param(ADD, "assert add(2**70, 1) == 2**70 + 1 and add(0.1, 0.2) == 0.1 + 0.2", 1.0, id="large numbers"),
        pytest.param(ADD, "import math\nassert math.isnan(add(float('nan'), 1))", 1.0, id="nan"),
        pytest.param(
            "def f(): return {(1, 2): {3}, 'a': b'x', None: 1j}",
            "assert f() == {(1, 2): {3}, 'a': b'x', None: 1j}",
            1.0,
            id="values",
        ),
        pytest.param("def f(x): x.sort()", "a = [3, 1]\nf(a)\nassert a == [1, 3]", 1.0, id="in place"),
        pytest.param(
            "def f(g, x): return g(g(x))", "assert f(lambda x: x + 1, 1) == 3", 1.0, id="a function as argument"
        ),
        pytest.param("def f(n): return lambda x: x + n", "assert f(2)(3) == 5", 1.0, id="a function as value"),
        pytest.param(
            "def f():\n  yield from range(3)", "assert list(f()) == [0, 1, 2] and 2 in f()", 1.0, id="a generator"
        ),
        pytest.param(
            "class Stack:\n  def __init__(self): self.all = []\n  def push(self, x): self.all.append(x)\n"
            "  def __len__(self): return len(self.all)",
            "s = Stack()\ns.push(4)\nassert len(s) == 1 and s.all == [4] and isinstance(s, Stack) and s == s",
            1.0,
            id="a class",
        ),
        pytest.param(
            "def f(): raise ValueError('bad')",
            "try:\n  f()\nexcept ValueError as e:\n  assert str(e) == 'bad'\nelse:\n  assert False",
            1.0,
            id="an error",
        ),
        pytest.param(
            "class Odd(KeyError): pass\ndef f(): raise Odd('x')",
            "try:\n  f()\n  assert False\nexcept Odd:\n  pass",
            1.0,
            id="an error of its own",
        ),
        pytest.param(ALWAYS, "assert add(1, 2) == 3", 0.0, id="equal to everything"),
        pytest.param(ALWAYS, "assert 3 == add(1, 2)", 0.0, id="equal from the other side"),
        pytest.param(ALWAYS, "assert not add(1, 2) != 3", 0.0, id="not unequal"),
        pytest.param(ALWAYS, "assert abs(add(1, 2) - 3) < 1e-6", 0.0, id="no distance"),
        pytest.param(ALWAYS, "assert 3 in add(1, 2)", 0.0, id="contains everything"),
        pytest.param(ALWAYS, "assert add(1, 2) < 0", 0.0, id="less than everything"),
        pytest.param(ALWAYS, "assert [add(1, 2)] == [3]", 0.0, id="equal within a list"),
        pytest.param(
            "class Int(int):\n  def __eq__(self, o): return True\ndef add(a, b): return Int(0)",
            "assert add(1, 2) == 3",
            0.0,
            id="a number that is equal to everything",
        ),
        pytest.param(
            "def abs(x): return 0\ndef add(a, b): return 9", "assert abs(add(1, 2) - 3) < 1", 0.0, id="its own abs"
        ),
        pytest.param(
            "class math:\n  isclose = lambda *a: True\ndef add(a, b): return 9",
            "assert math.isclose(add(1, 2), 3)",
            0.0,
            id="its own math",
        ),
        pytest.param("import math\ndef add(a, b): return a + b", "assert math.isclose(add(1, 2), 3)", 1.0, id="math"),
        pytest.param("import sys\ndef add(a, b): sys.exit(0)", "assert add(1, 2) == 3", 0.0, id="exits when called"),
        pytest.param("import os\ndef add(a, b): os._exit(0)", "assert add(1, 2) == 3", 0.0, id="ends when called"),
        pytest.param("import sys; sys.exit(0)", "assert add(1, 2) == 3", 0.0, id="exits before"),
        pytest.param("import os; os._exit(0)", "assert add(1, 2) == 3", 0.0, id="ends before"),
        pytest.param("print('all tests passed')", "assert add(1, 2) == 3", 0.0, id="says that it passed"),
        pytest.param(
            "import builtins\nbuiltins.AssertionError = ValueError\n__debug__ and 0\ndef add(a, b): return 9",
            "assert add(1, 2) == 3",
            0.0,
            id="its own AssertionError",
        ),
        pytest.param(
            "def add(a, b):\n  apis.other.say(message={'value': None, 'changed': []})\n  return 9",
            "assert add(1, 2) == 3",
            0.0,
            id="knows nothing of the link",
        ),
        pytest.param(
            "import sys\ndef add(a, b):\n"
            "  exchange = sys.modules['__main__'].exchange\n"
            "  exchange({'do': 'get', 'of': 0, 'with': ['__globals__'], 'named': ['dict', []]})\n"
            "  return 9",
            "assert add(1, 2) == 3",
            0.0,
            id="asks the other sandbox",
        ),
        pytest.param(
            "import sys\nexchange = sys._getframe(1).f_locals['exchange']\n"
            "forged = {'__builtins__': ['dict', [['abs', ['mine', 0]]]], 'add': ['mine', 1]}\n"
            "asked = exchange({'names': forged, 'modules': [], 'errors': {}})\n"
            "while True: asked = exchange({'value': 9 if asked['of'] == 1 else 0, 'changed': []})",
            "assert abs(add(1, 2) - 3) < 1",
            0.0,
            id="its own builtins",
        ),
        pytest.param("from __future__ import annotations\n" + ADD, "assert add(1, 2) == 3", 1.0, id="from the future"),
        pytest.param(
            "import gc, re\ndef add(a, b):\n"
            "  for o in gc.get_objects():\n"
            "    for s in o if type(o) is tuple else ():\n"
            "      found = type(s) is str and re.search(r'add\\(1, 2\\) =' '= (\\d+)', s)\n"
            "      if found: return int(found[1])\n"
            "  return 0",
            "assert add(1, 2) == 987",
            0.0,
            id="looks for what is expected",
        ),
    ],
)
def test_unit_tests(text, test, expected):
    assert scored(text, [test], limit_s=HANG_S) == expected


def test_a_check_with_an_entry_point():
    check = "def check(candidate):\n    assert candidate(2, 3) == 5\n"
    assert scored(ADD, check, {"entry_point": "add"}) == 1.0
    assert scored(ADD.replace("+", "-"), check, {"entry_point": "add"}) == 0.0
    assert scored("def sum(a, b): return a + b", check, {"entry_point": "sum"}) == 1.0


SUITE = """
import unittest
from solution import add

class Adding(unittest.TestCase):
    @classmethod
    def setUpClass(cls): cls.zero = 0
    def setUp(self): self.one = 1
    def test_numbers(self): self.assertEqual(add(self.one, self.zero), 1)
    def test_lists(self):
        for size in range(3):
            with self.subTest(size): self.assertEqual(add([1] * size, [2]), [1] * size + [2])
    def test_refuses(self):
        with self.assertRaises(TypeError): add(1, "a")
    def test_near(self): self.assertAlmostEqual(add(0.1, 0.2), 0.3)
    @unittest.skip("later")
    def test_skipped(self): self.fail()

class More(Adding):
    def test_near(self): self.assertIn(add(1, 1), [2])

if __name__ == "__main__":
    unittest.main()
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(ADD, 1.0, id="right"),
        pytest.param("def add(a, b): return a + b if isinstance(a, int) else None", 5 / 8, id="numbers only"),
        pytest.param("import unittest\n" + ALWAYS, 0.0, id="equal to everything"),
        pytest.param("def add(a, b): raise TypeError", 2 / 8, id="always refuses"),
        pytest.param("from unittest import SkipTest\ndef add(a, b): raise SkipTest", 0.0, id="skips"),
        pytest.param("import sys\ndef add(a, b): sys.exit(0)", 0.0, id="exits"),
        pytest.param(
            "import unittest\nunittest.TestResult.wasSuccessful = lambda self: True\n"
            "unittest.TestCase.assertEqual = lambda *a: None\ndef add(a, b): return 9",
            0.0,
            id="patches unittest",
        ),
        pytest.param(
            "class Adding:\n  test_lists = test_near = lambda self: 1\ndef add(a, b): 0", 0.0, id="its own suite"
        ),
        pytest.param("while True: pass", 0.0, id="hangs"),
    ],
)
def test_a_file_of_unittest(text, expected):
    assert scored(text, SUITE, limit_s=0.5 if "while" in text else HANG_S) == expected


FUNCTIONS = """
import pytest
from solution import add

class TestAdding:
    def test_one(self): assert add(1, 1) == 2
    def test_text(self): assert add("a", "b") == "ab"

def near(value): return pytest.approx(value)
def test_near(): assert add(0.1, 0.2) == near(0.3)
def test_refuses():
    with pytest.raises(TypeError): add(1, "a")
"""


def test_a_file_of_pytest():
    assert scored(ADD, FUNCTIONS) == 1.0
    assert scored("def add(a, b): return 2", FUNCTIONS) == 0.25
    assert scored(ALWAYS, FUNCTIONS) == 0.0


def test_each_assertion_of_a_text_counts():
    asserts = "one = 1\nassert add(one, 1) == 2\nassert add(one, 2) == 3\nfor x in [3]: assert add(x, x) == 6"
    assert scored(ADD, asserts) == 1.0
    assert scored("def add(a, b): return 2", asserts) == pytest.approx(1 / 3)


def test_setup():
    assert scored(ADD, "assert isclose(add(1, 2), 3)", {"setup": "from math import isclose"}) == 1.0


def test_what_takes_too_long_is_counted():
    reward = CodeTests(limit_s=0.5)
    tests = ["assert add(1, 2) == 3", {"input": "", "output": "1"}]
    assert asyncio.run(reward.score(Answer(Task("t", {"tests": tests}), "while True: pass"))) == 0.0
    assert reward.counts == {"cases": 2, "timeouts": 2}


def test_all_or_nothing_stops_at_the_first_failure():
    reward = CodeTests(count="all", at_a_time=1)
    tests = [{"input": "", "output": "1"}] * 50
    assert asyncio.run(reward.score(Answer(Task("t", {"tests": tests}), "print(2)"))) == 0.0
    assert reward.counts["cases"] <= 2


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        pytest.param([], "a list of tests is needed", id="none"),
        pytest.param(5, "a list of tests is needed", id="a number"),
        pytest.param([5], "is 5; write Python", id="a number among them"),
        pytest.param([{"input": 1}], "a mapping with input and output", id="no output"),
        pytest.param(["assert ("], "is not Python", id="no Python"),
        pytest.param(
            "from main import add\nassert add(1, 1) == 2", "import names of the tested code from solution", id="main"
        ),
        pytest.param("def check(candidate): assert candidate(1)", "write entry_point", id="a check of nothing"),
        pytest.param(
            "def test_a(tmp_path): assert 1", "takes tmp_path, and fixtures are not supported", id="a fixture"
        ),
    ],
)
def test_tasks_without_tests_cannot_be_scored(tests, message):
    with pytest.raises(RewardFailed, match=message):
        scored("print(1)", tests)


@pytest.mark.parametrize("keys", [{"count": "some"}, {"at_a_time": 0}], ids=str)
def test_wrong_keys(keys):
    with pytest.raises(ValueError, match=next(iter(keys))):
        CodeTests(**keys)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("```\na\n```\n```py\nb\n```", "b\n", id="the last"),
        pytest.param("```python\na\n```\n```json\n{}\n```", "a\n", id="the last of Python"),
        pytest.param("```python\na", "a", id="never closed"),
        pytest.param("~~~python\na\n~~~", "a\n", id="tildes"),
        pytest.param("````python\n'''\n```\n'''\n````", "'''\n```\n'''\n", id="longer fences"),
        pytest.param("```Python title=x\na\n```", "a\n", id="more words"),
        pytest.param("`a`", "`a`", id="no fence"),
        pytest.param("```\n" * 50_001, "", id="fifty thousand fences"),
    ],
)
def test_code_is_found(text, expected):
    assert found_code(text) == expected


@pytest.mark.parametrize(
    ("reported", "wanted", "tolerance", "expected"),
    [
        ("1\n", "1", None, True),
        ("1\n2", "1 2", None, False),
        ("", "", None, True),
        ("1.0001", "1", 1e-3, True),
        ("1.01", "1", 1e-3, False),
        ("x 1", "y 1", 1e-3, False),
        ("nan", "1", 1e-3, False),
        ("inf", "1", 1e-3, False),
        ("1 1", "1", 1e-3, False),
    ],
)
def test_outputs(reported, wanted, tolerance, expected):
    assert same_output(reported, wanted, tolerance) is expected
