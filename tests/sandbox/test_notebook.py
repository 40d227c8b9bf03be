"""An agent's view of its sandbox."""

import asyncio

import pytest

from roost.sandbox.execution import Fault
from roost.sandbox.limits import Limits
from roost.sandbox.sandbox import Sandbox, run_once
from tests.limits import HANG_S
from tests.sandbox.playground import PATIENT, executed, ran


@pytest.mark.parametrize(
    ("codes", "output", "error"),
    [
        pytest.param(["x = 1", "print(x)"], "1\n", None, id="variables stay"),
        pytest.param(["import math", "print(math.floor(1.5))"], "1\n", None, id="imports stay"),
        pytest.param(["def f():\n  return 3", "print(f())"], "3\n", None, id="functions stay"),
        pytest.param(["x = 1\n1/0", "print(x)"], "1\n", None, id="what was done before an error stays"),
        pytest.param(["x = 1\nexit()", "print(x)"], "1\n", None, id="exit does not end the process"),
        pytest.param(["3"], "", None, id="an expression is not shown"),
        pytest.param(["import sys; sys.exit(0)"], "", Fault.EXITED, id="exit is told from the end"),
        pytest.param(["raise SystemExit('no')"], "", Fault.EXITED, id="exit with a message"),
        pytest.param(["import os; os.write(1, b'a'); os.write(2, b'b')"], "ab", None, id="both descriptors"),
        pytest.param(["import os; os.write(1, b'\\xff')"], "\ufffd", None, id="no text"),
        pytest.param(["print('\\ud800')"], None, Fault.RAISED, id="half a character"),
        pytest.param(["input()"], None, Fault.RAISED, id="nobody to ask"),
        pytest.param(["import sys; sys.stdout.close(); sys.stderr.close()"], "", None, id="closed streams"),
        pytest.param(["open('a', 'w').write('b')", "print(open('a').read())"], "b\n", None, id="files stay"),
        pytest.param(
            ["import builtins, sys\nbuiltins.print = None\nsys.settrace(lambda *a: 1/0)", "x = 1"],
            "",
            None,
            id="patched builtins and tracing",
        ),
        pytest.param(
            ["import atexit\natexit.register(lambda: open('/dev/stderr', 'w'))"], "", None, id="hooks for the end"
        ),
    ],
)
def test_pieces_of_code(codes, output, error):
    last = executed(*codes)[-1]
    assert last.error == error
    assert output is None or last.output == output


@pytest.mark.parametrize(
    ("code", "parts"),
    [
        pytest.param(
            "def f():\n    return 1 / 0\nprint('before')\nf()",
            ["before\nTraceback", 'File "<execution 1>", line 2, in f\n    return 1 / 0', "ZeroDivisionError"],
            id="with its lines",
        ),
        pytest.param("x = = 1", ["x = = 1", "SyntaxError"], id="syntax"),
        pytest.param("def f(): f()\nf()", ["RecursionError"], id="recursion"),
        pytest.param("try:\n  1/0\nexcept Exception as e:\n  raise ValueError from e", ["direct cause"], id="causes"),
        pytest.param("raise BaseException('all')", ["BaseException: all"], id="of any kind"),
    ],
)
def test_tracebacks_are_those_of_the_code(code, parts):
    (execution,) = executed(code)
    assert execution.error == Fault.RAISED
    assert all(part in execution.output for part in parts), execution.output
    assert "inside" not in execution.output  # where this package's own files are


STANDARD_LIBRARY = """
import asyncio, bz2, collections, concurrent.futures, csv, dataclasses, datetime, decimal, hashlib, json, pickle, random
import re, shutil, sqlite3, ssl, statistics, tempfile, threading, uuid, zipfile, zlib, zoneinfo
@dataclasses.dataclass
class Point:
    x: "int"
assert pickle.loads(pickle.dumps(Point(3))) == Point(3)
async def work():
    return await asyncio.to_thread(sum, [1, 2])
assert asyncio.run(work()) == 3
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    assert list(pool.map(abs, [-1, 2])) == [1, 2]
with tempfile.NamedTemporaryFile("w") as file:
    shutil.copy2(file.name, "copied")
base = sqlite3.connect("base.db")
base.execute("create table t (a)")
base.execute("insert into t values (1)")
base.commit()
assert list(base.execute("select a from t")) == [(1,)]
print(datetime.datetime.now(zoneinfo.ZoneInfo("UTC")).tzinfo, random.random() < 1, file=open("/dev/null", "w"))
print("works")
"""


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(STANDARD_LIBRARY, id="standard library"),
        pytest.param("import numpy; assert numpy.eye(200) @ numpy.eye(200) is not None; print('works')", id="numpy"),
    ],
)
def test_libraries_work(code):
    (execution,) = executed(code)
    assert (execution.output, execution.error) == ("works\n", None)


def test_long_output_is_cut_in_the_middle():
    (execution,) = executed("print('a' * 500 + 'b' * 500, end='')", limits=Limits(wall_s=HANG_S, output_chars=100))
    assert execution.output == "a" * 50 + "\n[900 characters omitted]\n" + "b" * 50


async def library(app, api, arguments):
    if api == "missing":
        raise LookupError("no such song")
    await asyncio.sleep(0)
    return {"called": f"{app}.{api}", **arguments}


@pytest.mark.parametrize(
    ("code", "output"),
    [
        pytest.param("print(apis.music.run_episode(song='a', at=[1, None]))",
                     "{'called': 'music.run_episode', 'song': 'a', 'at': [1, None]}\n", id="answered"),
        pytest.param("try:\n  apis.music.missing()\nexcept ApiError as e:\n  print(e)", "no such song\n", id="refused"),
        pytest.param("try:\n  apis.music.run_episode(a=print)\nexcept TypeError as e:\n  print(e)",
                     "Object of type builtin_function_or_method is not JSON serializable\n", id="not to be sent"),
        pytest.param("try:\n  apis.music.run_episode(a='a' * 2**21)\nexcept ValueError as e:\n  print(str(e)[:12])",
                     "a message of\n", id="too large to be sent"),
        pytest.param("print(hasattr(apis, '__wrapped__'), hasattr(apis.a, '_b'))", "False False\n", id="names"),
        pytest.param("from concurrent.futures import ThreadPoolExecutor as Pool\nwith Pool(4) as pool:\n"
                     "  print(sorted(pool.map(lambda i: apis.a.b(i=i)['i'], range(50))) == list(range(50)))",
                     "True\n", id="from threads"),
    ],
)  # fmt: skip
def test_calls_are_answered_outside(code, output):
    (execution,) = executed(code, call=library)
    assert (execution.output, execution.error) == (output, None)


def test_large_answers_arrive():
    async def large(app, api, arguments):
        return "a" * (5 << 20)

    (execution,) = executed("print(len(apis.a.b()))", call=large)
    assert execution.output == f"{5 << 20}\n"


def test_without_calls_there_are_no_apis():
    assert "NameError" in executed("apis")[0].output


@pytest.mark.parametrize(
    ("code", "stdin", "output", "error"),
    [
        pytest.param("print(sum(map(int, input().split())))", "1 2 3\n", "6\n", None, id="a line"),
        pytest.param("import sys; print(len(sys.stdin.read()))", "a" * (3 << 20), f"{3 << 20}\n", None, id="much"),
        pytest.param("print(1)", "a" * (3 << 20), "1\n", None, id="much that is not read"),
        pytest.param("print(input())\nexit(0)", "a", "a\n", Fault.EXITED, id="exit"),
        pytest.param(
            "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
            "",
            "late\n",
            None,
            id="threads are waited for",
        ),
    ],
)
def test_programs_that_run_once(code, stdin, output, error):
    execution = ran(run_once(code, stdin, PATIENT))
    assert (execution.output, execution.error) == (output, error)


def test_a_closed_sandbox_says_so():
    async def use():
        sandbox = await Sandbox.start()
        await sandbox.close()
        await sandbox.close()
        await sandbox.execute("1")

    with pytest.raises(RuntimeError, match="closed"):
        ran(use())
