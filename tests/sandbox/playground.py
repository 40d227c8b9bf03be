"""Code in sandboxes, and the same code outside of them."""

import asyncio
import subprocess
import sys

from roost.sandbox.limits import Limits
from roost.sandbox.sandbox import Sandbox
from tests.limits import HANG_S

PATIENT = Limits(wall_s=HANG_S)  # where time is not what ends it
REACHED = "REACHED"  # what code prints that got where it should not


def ran(coroutine):
    async def bounded():
        async with asyncio.timeout(HANG_S):
            return await coroutine

    return asyncio.run(bounded())


def executed(*codes, limits=PATIENT, call=None, folder=None):
    """Results of pieces of code, one after another in one sandbox."""

    async def run():
        async with await Sandbox.start(limits, call, folder) as sandbox:
            return [await sandbox.execute(code) for code in codes]

    return ran(run())


def outside(code, **options):
    """Output of the code without a sandbox."""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S, **options)
    return ended.stdout + ended.stderr
