import pytest

from roost.rollout.rewards.code_tests import UnsupportedTests, found_tests, imported_modules

CASE = "import unittest\nclass Adding(unittest.TestCase):\n"


@pytest.mark.parametrize(
    ("source", "calls"),
    [
        pytest.param(
            "def test_b(): pass\ndef helper(): pass\ndef test_a(): pass", ["test_b", "test_a"], id="functions"
        ),
        pytest.param(f"{CASE}  def test_a(self): pass\n  def help(self): pass", ["Adding.test_a"], id="unittest"),
        pytest.param(
            "from unittest import TestCase\nclass A(TestCase):\n  def test_a(self): pass", ["A.test_a"], id="by name"
        ),
        pytest.param(
            f"{CASE}  def test_a(self): pass\nclass More(Adding):\n  def test_b(self): pass",
            ["Adding.test_a", "More.test_a", "More.test_b"],
            id="derived",
        ),
        pytest.param(
            "import unittest\nclass Mixin:\n  def test_a(self): pass\nclass A(Mixin, unittest.TestCase): pass",
            ["A.test_a"],
            id="a mixin",
        ),
        pytest.param(
            "class TestA:\n  def test_a(self): pass\nclass B:\n  def test_a(self): pass", ["TestA.test_a"], id="pytest"
        ),
        pytest.param(
            f"{CASE}  @unittest.skip('x')\n  def test_a(self): pass\n  def test_b(self): pass",
            ["Adding.test_b"],
            id="skipped",
        ),
        pytest.param(f"{CASE}  @patch('a')\n  def test_a(self, a): pass", ["Adding.test_a"], id="given by a decorator"),
        pytest.param("def test_a(x=1): assert f(x)", ["test_a"], id="a default"),
        pytest.param("assert f(1)\ndef test_a(): pass", ["test_a"], id="asserts beside functions are run with each"),
    ],
)
def test_calls(source, calls):
    found = found_tests(source)
    assert [test.call for test in found] == calls
    assert {test.source for test in found} == {source}


@pytest.mark.parametrize(
    ("source", "cases"),
    [
        pytest.param("assert f(1)", ["assert f(1)"], id="one"),
        pytest.param(
            "x = 1\nassert f(x)\nx = 2\nassert f(x)", ["x = 1\nassert f(x)", "x = 1\nx = 2\nassert f(x)"], id="two"
        ),
        pytest.param("assert f(1)\nf(2)", ["assert f(1)\nf(2)"], id="what follows"),
        pytest.param("f(1)\nf(2)", ["f(1)\nf(2)"], id="none"),
        pytest.param("for x in a:\n    assert x\nassert 1", ["for x in a:\n    assert x", "assert 1"], id="in a loop"),
        pytest.param(
            "def g(x):\n    assert x\ng(1)", ["def g(x):\n    assert x\ng(1)"], id="in a function that is called"
        ),
    ],
)
def test_assertions(source, cases):
    assert [test.source for test in found_tests(source)] == cases
    assert {test.call for test in found_tests(source)} == {""}


def test_a_check_is_one_case():
    check = "def check(candidate):\n    assert candidate(1)\n    assert candidate(2)"
    assert [test.call for test in found_tests(check, has_entry_point=True)] == ["check"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        pytest.param("def check(candidate): pass", "write entry_point", id="a check of nothing"),
        pytest.param("def test_a(tmp_path): pass", "test_a takes tmp_path", id="a fixture"),
        pytest.param("class TestA:\n  def test_a(self, x, y): pass", "TestA.test_a takes x, y", id="of a method"),
        pytest.param("@pytest.fixture\ndef a(): pass\ndef test_a(): pass", "a is a fixture", id="defines a fixture"),
        pytest.param("@pytest.fixture(autouse=True)\ndef a(): pass", "a is a fixture", id="which is called"),
        pytest.param("@pytest.mark.parametrize('x', [1])\ndef test_a(x): pass", "has parametrize", id="parametrize"),
        pytest.param("async def test_a(): pass", "asynchronous", id="asynchronous"),
        pytest.param(
            "class TestA:\n  def setup_method(self): pass\n  def test_a(self): pass", "setUp", id="setup_method"
        ),
        pytest.param("import math\n'''About.'''\ndef helper(): assert 1", "they contain no test", id="no test"),
        pytest.param("", "they contain no test", id="nothing"),
    ],
)
def test_what_is_not_run(source, message):
    with pytest.raises(UnsupportedTests, match=message):
        found_tests(source)


def test_imports_that_would_fail_later_are_none():
    source = "import a.b, solution\nfrom c import d\nfrom . import e\ntry:\n    import f\nexcept ImportError: pass"
    assert imported_modules(source) == ("a", "c")
