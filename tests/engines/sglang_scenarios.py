"""Shared by the tests of SGLang's client: a client and a stand-in, and a request that runs."""

import asyncio

from roost.engines.command import EngineKind
from roost.engines.connect import connect
from roost.engines.protocol import Sampling
from tests.engines.sglang_standin import next_token, running_standin
from tests.limits import HANG_S

PROMPT = [3, 1, 4]
ENDLESS = Sampling(max_tokens=90_000, temperature=0.0)
OLD = 3  # the sum of the weights that the stand-in starts with


def completion_versions(*weights):
    """The tokens that follow the prompt when each is made with the given weight."""
    tokens = list(PROMPT)
    for weight in weights:
        tokens.append(next_token(weight, tokens))
    return tuple(tokens[len(PROMPT) :])


def on_standin(scenario, limits=None, **settings):
    """Run a scenario with a client and the stand-in it talks to."""

    async def body(url, state):
        engine = connect(EngineKind.SGLANG, url, limits=limits)
        try:
            async with asyncio.timeout(HANG_S):
                await scenario(engine, state)
        finally:
            await engine.close()

    with running_standin(**settings) as (url, state):
        asyncio.run(body(url, state))


async def until(condition):
    while not condition():
        await asyncio.sleep(0.002)


async def started(engine, state, tokens=3, request_id="long"):
    """A request without an end that has made some tokens."""
    task = asyncio.create_task(engine.generate(PROMPT, ENDLESS, request_id))
    await until(lambda: any(one.rid == request_id and len(one.generated) >= tokens for one in state.running))
    return task
