"""Arms that write down where they are, whose config they have, and what they played."""

import json
import os
from pathlib import Path

from roost.rollout.environments.arm import ArmEnvironments, SimulatedArm


class Witness(SimulatedArm):
    def __init__(self, config, notes):
        super().__init__(config)
        # The parent of a worker is the raylet of its node.
        self._about = {"config": config, "node": int(os.environ["CLUSTER_NODE_RANK"]), "raylet": os.getppid()}
        self._notes = Path(notes) / f"{os.getpid()}.jsonl"

    def begin(self, task, seed):
        with self._notes.open("a") as file:
            print(json.dumps({**self._about, "seed": seed}), file=file)
        super().begin(task, seed)


class WitnessedArms(ArmEnvironments):
    def __init__(self, notes, **keys):
        self._notes = notes
        super().__init__(**keys)

    def driver_of(self, config):
        return Witness(config, self._notes)
