"""The tests in a piece of Python: each function or method of a test, or each assertion, is one case."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

CHECK = "check"  # a function that is given the code
SOLUTION = "solution"  # the module that has the code under test
_BY_PYTEST = frozenset({"setup_method", "teardown_method", "setup_class", "teardown_class"})
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_DEFINING = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


class NotRun(ValueError):
    """Tests of an unsupported kind; the message says which, and what to write instead."""


@dataclass(frozen=True, slots=True)
class FoundTest:
    """A case: Python that is run, and what is called in it then, such as `TestAdd.test_zero`; nothing: that is all."""

    source: str
    call: str = ""


def found_tests(source: str, has_entry_point: bool = False) -> tuple[FoundTest, ...]:
    """The cases of a text; `SyntaxError` where it is no Python.

    >>> [test.call for test in found_tests("def test_a(): assert f(1) == 2\\ndef test_b(): assert f(2) == 3")]
    ['test_a', 'test_b']
    >>> [test.source for test in found_tests("x = 1\\nassert f(x) == 2\\nassert f(3) == 4")]
    ['x = 1\\nassert f(x) == 2', 'x = 1\\nassert f(3) == 4']
    """
    module = ast.parse(source)
    calls = [*_functions(module), *_methods(module)]
    if any(isinstance(one, ast.FunctionDef) and one.name == CHECK and len(one.args.args) == 1 for one in module.body):
        if not has_entry_point:
            raise NotRun("check(candidate) needs the name of the function that it is given; write entry_point")
        calls.insert(0, CHECK)
    return tuple(FoundTest(source, call) for call in calls) or tuple(_assertions(module))


def imported_modules(source: str) -> tuple[str, ...]:
    """The top-level names of what a text imports unconditionally, but for the code under test.

    >>> imported_modules("import numpy.linalg as la\\nfrom solution import add\\ndef f():\\n    import never_mind")
    ('numpy',)
    """
    found: list[str] = []
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Import):
            found += [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            found.append(statement.module)
    return tuple(name for name in dict.fromkeys(one.partition(".")[0] for one in found) if name != SOLUTION)


def _functions(module: ast.Module) -> Iterator[str]:
    for one in module.body:
        if isinstance(one, _Function):
            if _is_decorated(one, "fixture"):
                raise NotRun(f"{one.name} is a fixture, which are not run; let the tests call a plain function")
            if one.name.startswith("test"):
                _check(one, one.name, own_arguments=0)
                yield one.name


def _methods(module: ast.Module) -> Iterator[str]:
    classes = {one.name: one for one in module.body if isinstance(one, ast.ClassDef)}
    for name, one in classes.items():
        is_case = _is_test_case(one, classes)
        if not is_case and not name.startswith("Test"):
            continue
        methods = _all_methods(one, classes)
        left = sorted(_BY_PYTEST & set(methods))
        if left and not is_case:
            raise NotRun(
                f"{name}.{left[0]} is not run; derive {name} from unittest.TestCase and write setUp or tearDown"
            )
        for method, function in methods.items():
            if method.startswith("test") and not _is_decorated(function, "skip"):
                _check(function, f"{name}.{method}", own_arguments=1)
                yield f"{name}.{method}"


def _is_test_case(one: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> bool:
    names = [ast.unparse(each) for each in one.bases]
    is_own = any(name.endswith("TestCase") and name not in classes for name in names)
    return is_own or any(
        _is_test_case(classes[name], classes) for name in names if name in classes and name != one.name
    )


def _all_methods(one: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> dict[str, _Function]:
    """Its own and those of the classes here that it derives from."""
    found: dict[str, _Function] = {}
    for each in reversed(one.bases):
        parent = classes.get(ast.unparse(each))
        if parent is not None and parent is not one:
            found |= _all_methods(parent, classes)
    return found | {each.name: each for each in one.body if isinstance(each, _Function)}


def _check(function: _Function, name: str, own_arguments: int) -> None:
    if isinstance(function, ast.AsyncFunctionDef):
        raise NotRun(f"{name} is asynchronous, and such tests are not run; test plain functions")
    if _is_decorated(function, "parametrize"):
        raise NotRun(f"{name} has parametrize, which is not run; write a loop, or a test for each")
    arguments = function.args
    needed = len(arguments.posonlyargs) + len(arguments.args) - len(arguments.defaults)
    given = [one.arg for one in (*arguments.posonlyargs, *arguments.args)][own_arguments:needed]
    if given and not function.decorator_list:  # a decorator such as unittest.mock.patch may give them
        raise NotRun(f"{name} takes {', '.join(given)}, and fixtures are not run; make it in the test")


def _is_decorated(function: _Function, word: str) -> bool:
    """Return True if a decorator has this name: `pytest.mark.parametrize(...)`, `unittest.skip("...")`, `fixture`."""
    called = (one.func if isinstance(one, ast.Call) else one for one in function.decorator_list)
    return any(ast.unparse(one).rpartition(".")[2] == word for one in called)


def _assertions(module: ast.Module) -> Iterator[FoundTest]:
    """For each statement that asserts, what stands before it but for others that do; what follows the last is its."""
    places = [place for place, one in enumerate(module.body) if _asserts(one)]
    if not places:
        if all(
            isinstance(one, _DEFINING) or isinstance(getattr(one, "value", None), ast.Constant) for one in module.body
        ):
            raise NotRun("there is no test in them; write asserts, functions test_..., or a unittest.TestCase")
        yield FoundTest(ast.unparse(module))  # what is called there may raise
        return
    for place in places:
        before = [one for one in module.body[:place] if not _asserts(one)]
        after = module.body[place + 1 :] if place == places[-1] else []
        yield FoundTest(_unparsed([*before, module.body[place], *after]))


def _asserts(statement: ast.stmt) -> bool:
    return not isinstance(statement, _DEFINING) and any(isinstance(one, ast.Assert) for one in ast.walk(statement))


def _unparsed(statements: Sequence[ast.stmt]) -> str:
    return ast.unparse(ast.Module(list(statements), type_ignores=[]))
