"""Owns a stand-in server and waits to be killed.

`plain`: itself. `forked`: itself, and a fork of it lives on. `actor`: an actor of Ray owns the server; it is killed
once a line comes in.
"""

import asyncio
import os
import sys
import threading
import time

from roost.engines.command import EngineKind, ServerSpec
from roost.engines.server_process import start_ready


def start(python, folder, words):
    env = {"STAND_IN": words, "STAND_IN_FOLDER": folder}
    return asyncio.run(start_ready(ServerSpec(EngineKind.TORCH, "none", python=python, env=env), folder, limit=600))


def own(python, folder, words, is_forked):
    started = []
    # From a thread that ends, as in a worker of Ray: the server is not to end with the thread.
    thread = threading.Thread(target=lambda: started.append(start(python, folder, words)))
    thread.start()
    thread.join()
    assert started[0].alive
    if is_forked and os.fork() == 0:
        time.sleep(3600)
    print("ready", flush=True)
    time.sleep(3600)


class Actor:
    def start(self, python, folder, words):
        self.server = start(python, folder, words)


def own_by_actor(python, folder, words):
    import ray

    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    actor = ray.remote(Actor).remote()
    ray.get(actor.start.remote(python, folder, words))
    print("ready", flush=True)
    sys.stdin.readline()
    ray.kill(actor)
    print("killed", flush=True)
    time.sleep(3600)


if __name__ == "__main__":
    how, *rest = sys.argv[1:]
    if how == "actor":
        own_by_actor(*rest)
    else:
        own(*rest, is_forked=how == "forked")
