"""Runs one test of a module of tests, in the sandbox of the tests.

This file is run as a program there and must stay without imports beyond the standard library.
"""

from __future__ import annotations

import types
import unittest
from collections.abc import Sequence
from typing import Any


def run_test(module: types.ModuleType, call: str, entry_points: Sequence[str]) -> None:
    """Call a function or method of the tests, or `check`. Raises if the test fails."""
    if not call:
        return  # the module was the test
    owner, _, name = call.rpartition(".")
    if owner:
        _run_method(module.__dict__[owner], name)
        return
    function = module.__dict__[call]
    if not isinstance(function, types.FunctionType):
        raise AssertionError(f"{call} is not a function of the tests")  # the code may define one of the same name
    function(*(module.__dict__[point] for point in entry_points[:1] if call == "check"))


def _run_method(kind: Any, name: str) -> None:
    if not isinstance(kind, type):
        raise AssertionError(f"{kind} is not a class of the tests")
    if not issubclass(kind, unittest.TestCase):
        getattr(kind(), name)()
        return
    result = unittest.TestResult()
    unittest.TestSuite([kind(name)]).run(result)  # with what is set up for its class and module
    if result.testsRun != 1 or not result.wasSuccessful() or result.skipped:
        raise AssertionError(f"{kind.__name__}.{name} fails: {result.errors or result.failures or result.skipped}")
