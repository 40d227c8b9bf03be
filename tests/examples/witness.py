"""A driver of a lab's own: an arm that writes down where it is, whose config it has, and what it played."""

import json
import os
from pathlib import Path

from roost.rollout.environments.simulator import SimulatedArm


class Witness(SimulatedArm):
    def __init__(self, notes):
        super().__init__()
        self._notes = Path(notes) / f"{os.getpid()}.jsonl"

    def connect(self, config):
        # The parent of a worker is the raylet of its node.
        self._about = {"config": config, "node": int(os.environ["CLUSTER_NODE_RANK"]), "raylet": os.getppid()}
        super().connect(config)

    def reset(self, task, seed):
        with self._notes.open("a") as file:
            print(json.dumps({**self._about, "seed": seed}), file=file)
        super().reset(task, seed)
