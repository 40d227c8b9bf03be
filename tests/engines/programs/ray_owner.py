"""An actor of Ray owns a stand-in server, and is killed; then the driver waits to be killed itself."""

import sys
import time

import owner
import ray


@ray.remote
class Actor:
    def start(self, python, folder, words):
        self.server = owner.start(python, folder, words)


def main(python, folder, words):
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    actor = Actor.remote()
    ray.get(actor.start.remote(python, folder, words))
    print("ready", flush=True)
    sys.stdin.readline()
    ray.kill(actor)
    print("killed", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
