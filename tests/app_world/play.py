"""Agents for the tests: one that follows the oracle, and one that calls at random with what it has read."""

import re
from random import Random

from roost.app_world.evaluate import evaluate
from roost.app_world.proxy import Apis
from roost.app_world.state import KEYS, ApiError
from roost.app_world.world import APPS

WORKING_APPS = [name for name in APPS if name not in ("api_docs", "supervisor")]


def run_code(world, source):
    exec(source, {"apis": Apis(world.call)})


def report_of(task, source):
    world = task.open_world()
    run_code(world, source)
    return evaluate(task, world)


def report_of_random_agent(task, seed, calls=3):
    """It knows the APIs, and takes its arguments from the instruction and from the world."""
    random = Random(f"{task.id} {seed}")
    world = task.open_world()
    words = [word for pair in re.findall(r'"([^"]+)"|(/[\w/.-]*\w)', task.instruction) for word in pair if word]
    for _ in range(calls):
        app = random.choice(WORKING_APPS)
        api = random.choice(list(APPS[app].apis.values()))
        try:
            world.call(app, api.name, arguments(random, api, task.initial, words))
        except ApiError:
            continue
    guesses = [None, "", 0, random.randrange(1000), random.choice(words or ["yes"])]
    world.call("supervisor", "complete_task", {"answer": random.choice(guesses) if task.answer is not None else None})
    return evaluate(task, world)


def arguments(random, api, snapshot, words):
    given = [one for one in api.parameters if one.is_required or random.random() < 0.3]
    return {one.name: argument(random, one, snapshot, words) for one in given}


def argument(random, parameter, snapshot, words):
    if parameter.name == "access_token":
        return snapshot["accounts"]["payments"]["access_token"]
    for table, key in KEYS.items():
        if parameter.name == key and snapshot["tables"][table] and random.random() < 0.9:
            return random.choice(snapshot["tables"][table])[key]
    if parameter.name in ("due", "birthday", "from_date", "to_date"):
        return snapshot["today"]
    if parameter.name == "start":
        return snapshot["today"] + "T10:00"
    texts = [*words, "milk", "ada@example.com"]
    choices = {
        "integer": [-1, 0, 1, 2, 30],
        "boolean": [True, False],
        "string": texts,
        "list of strings": [[], [random.choice(texts)]],
    }
    return random.choice(choices[parameter.type_name.removesuffix(" or null")])
