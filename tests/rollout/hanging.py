"""A process in which other people's code hangs: `python -m tests.rollout.hanging KIND` ends all the same."""

import asyncio
import sys
import threading

from roost.rollout.episode import Task

HANGS = threading.Event()


def hang(*arguments, **keys):
    HANGS.set()
    threading.Event().wait()


class Worlds:
    """Environments that hang in one of their methods."""

    def __init__(self, hanging):
        setattr(self, hanging, hang)

    def prepare(self):
        pass

    def open(self):
        return self

    def step(self, action):
        pass

    def close(self):
        pass


async def reward():
    from roost.rollout.rewards.config import Function
    from roost.rollout.rewards.reward import Answer

    await Function(hang).score(Answer(Task(""), ""))


async def prepare():
    await worlds("prepare").prepare()


async def opening():
    await worlds("open").open()


async def step():
    await (await worlds("step").open()).step("")


async def close():
    await worlds("close").close()


def worlds(hanging):
    from roost.rollout.environments.environment import make_environments

    return make_environments(Worlds(hanging))


async def robot():
    await robots("act")


async def robot_stop():
    await robots("stop")


async def robots(hanging):
    from roost.rollout.environments.driven_robot import DrivenRobots
    from roost.rollout.environments.simulator import SimulatedArm

    driver = SimulatedArm()
    setattr(driver, hanging, hang)
    bounds = {"action_low": [-1, -1, -1, 0], "action_high": [1, 1, 1, 1]}
    made = DrivenRobots(lambda: driver, **bounds, robots=1, real_time=False)
    environment = await made.open()
    await environment.reset(Task(""), 0)
    try:
        await environment.step([0.0] * 4)
    finally:
        await made.close()


async def simulator():
    import gymnasium

    from roost.rollout.environments.gymnasium_envs import GymnasiumEnvironments

    class Hanging(gymnasium.Env):
        observation_space = action_space = gymnasium.spaces.Discrete(2)
        reset = hang

    gymnasium.register("Hanging-v0", Hanging)
    environments = GymnasiumEnvironments("Hanging-v0", slots=1)
    environment = await environments.open()
    try:
        await environment.reset(Task(""), 0)
    finally:
        await environments.close()


KINDS = {work.__name__: work for work in (reward, prepare, opening, step, close, robot, robot_stop, simulator)}


async def main(kind):
    work = asyncio.create_task(KINDS[kind]())
    while not HANGS.is_set() and not work.done():
        await asyncio.sleep(0.01)
    if work.done():
        raise RuntimeError(f"nothing hangs; it came to {work}")
    print("hangs", flush=True)
    work.cancel()  # as when an episode is over; what it closes then hangs as well, and is cancelled with the loop
    await asyncio.wait([work], timeout=0.1)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
    print("ends", flush=True)
