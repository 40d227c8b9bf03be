"""Many cases of one cheap check as one test: pytest and xdist take 6 ms for each test, most checks less than one."""

import functools
import inspect

import pytest


def grid(names, cases, ids=None):
    """Like `pytest.mark.parametrize`, but one test for all cases; it fails with every case that fails, by its id.

    Cases share the fixtures of the test, apart from `tmp_path`, which is a new folder for each.
    """
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    params = [_param(case, len(names)) for case in cases]
    spelled = [_spelled(index, param, ids) for index, param in enumerate(params)]

    def decorate(check):
        @functools.wraps(check)
        def run_all(*arguments, **fixtures):
            folder, failed = fixtures.get("tmp_path"), []
            for index, (name, param) in enumerate(zip(spelled, params, strict=True)):
                if folder is not None:
                    fixtures["tmp_path"] = folder / str(index)
                    fixtures["tmp_path"].mkdir()
                try:
                    check(*arguments, **fixtures, **dict(zip(names, param.values, strict=True)))
                except (Exception, pytest.fail.Exception) as error:
                    error.add_note(f"case: {name}")
                    failed.append((name, error))
            if failed:
                wrong = [name for name, _ in failed]
                what = f"{len(wrong)} of {len(params)} cases fail: {wrong}"
                raise BaseExceptionGroup(what, [error for _, error in failed])

        signature = inspect.signature(check)
        kept = [parameter for name, parameter in signature.parameters.items() if name not in names]
        run_all.__signature__ = signature.replace(parameters=kept)
        return run_all

    return decorate


def _param(case, count):
    if type(case) is not type(pytest.param()):
        case = pytest.param(*(case if count > 1 else (case,)))
    if case.marks:
        raise TypeError(f"{case} has marks; parametrize such cases")
    return case


def _spelled(index, param, ids):
    if param.id is not None:
        return param.id
    if callable(ids):
        return "-".join(str(ids(value)) for value in param.values)
    return "-".join(map(str, param.values))[:80] if ids is None else str(list(ids)[index])
