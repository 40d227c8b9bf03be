"""Starts a stand-in server and waits to be killed; with the word `forked`, a fork of it lives on."""

import asyncio
import os
import sys
import threading
import time

from roost.engines.readiness import start_ready
from roost.engines.spec import EngineKind, ServerSpec


def start(python, folder, words):
    env = {"STAND_IN": words, "STAND_IN_FOLDER": folder}
    return asyncio.run(start_ready(ServerSpec(EngineKind.TORCH, "none", python=python, env=env), folder, limit=60))


def main(python, folder, words, how):
    started = []
    # From a thread that ends, as in a Ray worker: the server is not to end with the thread.
    thread = threading.Thread(target=lambda: started.append(start(python, folder, words)))
    thread.start()
    thread.join()
    assert started[0].alive
    if how == "forked" and os.fork() == 0:
        time.sleep(600)
    print("ready", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
