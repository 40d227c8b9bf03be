"""Run vLLM's or SGLang's server with the job's key from the environment: `python keyed_server.py MODULE OPTION ...`.

On a command line every user of the machine could read the key. For SGLang it is added to `sys.argv`, in this process.
vLLM's own key does not protect its control routes, so a middleware checks it.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

FOLDER = str(Path(__file__).parent)


def main() -> None:
    if FOLDER not in sys.path:  # PYTHONSAFEPATH leaves it out
        sys.path.insert(0, FOLDER)
    from roost_key_guard import KEY_VARIABLE  # type: ignore[import-not-found]

    _, module, *options = sys.argv
    if module.startswith("sglang"):
        key = os.environ[KEY_VARIABLE]
        # After the user's options, so that this key wins: the job's clients have no other.
        options += ["--api-key", key, "--admin-api-key", key]  # the admin key is for control routes
    elif module.startswith("vllm"):
        options += ["--middleware", "roost_key_guard.KeyGuard"]
    else:
        raise SystemExit(f"{module} is neither vLLM's nor SGLang's server; add it to {Path(__file__).name}")
    sys.argv = [module, *options]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":  # not in processes that the server spawns
    main()
