import asyncio

import httpx
import pytest

from roost.engines.protocol import ContextFull, EngineLost, EngineRefused
from roost.rollout.episode import Transcript
from roost.rollout.gateway import PATH, Contact, Gateway, GatewaySamplers
from tests.limits import HANG_S
from tests.rollout.script import completion, for_ever, ran, settled


class Samplers:
    """Answers with who asked for what; `does` may go wrong first."""

    def __init__(self, does=None):
        self.does = does
        self.asked, self.cancelled = [], 0

    def open(self, number, episode, attempt):
        async def sample(token_ids, turn, max_tokens):
            self.asked.append((list(token_ids), turn, max_tokens))
            try:
                if self.does is not None:
                    await self.does()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            return completion((number, episode, attempt), version=7)

        return sample


def through_gateway(samplers, ask):
    """Result of `ask(contact, client)` while the gateway serves."""

    async def run():
        gateway = Gateway()
        gateway.serve("group", samplers.open)
        async with gateway.serving() as contact:
            client = GatewaySamplers(contact)
            try:
                return await ask(contact, client)
            finally:
                await client.close()

    return ran(run())


def test_a_turn_is_drawn_for_the_attempt_that_asks_and_comes_back_whole():
    samplers = Samplers()

    async def ask(contact, client):
        transcript = Transcript(client.opener("group")(3, 1, 2))
        transcript.give([5, 6])
        await transcript.take(max_tokens=4)
        await transcript.take()
        return transcript.tokens()

    tokens = through_gateway(samplers, ask)
    assert tokens.token_ids.tolist() == [5, 6, 3, 1, 2, 3, 1, 2]
    assert tokens.completion_versions.tolist() == [7] * 6
    assert samplers.asked == [([5, 6], 0, 4), ([5, 6, 3, 1, 2], 1, None)]


def test_many_turns_at_a_time():
    async def ask(contact, client):
        opened = [client.opener("group")(number, 0, 0) for number in range(200)]
        return [made.token_ids[0] for made in await asyncio.gather(*(sample([1], 0, None) for sample in opened))]

    assert through_gateway(Samplers(), ask) == list(range(200))


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        pytest.param(EngineRefused("a token is wrong"), EngineRefused, id="refused"),
        pytest.param(ContextFull("the context length is 64"), ContextFull, id="full"),
        pytest.param(EngineLost("every engine has failed"), EngineLost, id="lost"),
    ],
)
def test_what_engines_say_is_said_to_the_player(error, raised):
    async def fails():
        raise error

    async def ask(contact, client):
        await client.opener("group")(0, 0, 0)([1], 0, None)

    with pytest.raises(raised, match=f"episode 0 of group 0.*{error}"):
        through_gateway(Samplers(fails), ask)


def test_a_turn_that_nobody_waits_for_any_more_is_cancelled():
    samplers = Samplers(for_ever)

    async def ask(contact, client):
        asking = asyncio.create_task(client.opener("group")(0, 0, 0)([1], 0, None))
        while not samplers.asked:
            await asyncio.sleep(0.01)
        asking.cancel()
        while not samplers.cancelled:
            await asyncio.sleep(0.01)

    through_gateway(samplers, ask)
    assert samplers.cancelled == 1


@pytest.mark.parametrize(
    ("key", "path", "body", "status"),
    [
        pytest.param("", PATH, b"{}", 401, id="no key"),
        pytest.param("wrong", PATH, b"{}", 401, id="another key"),
        pytest.param(None, "/other", b"{}", 404, id="another path"),
        pytest.param(None, PATH, b"{", 400, id="no JSON"),
        pytest.param(None, PATH, b"[]", 400, id="no mapping"),
        pytest.param(None, PATH, b'{"label": "nobody"}', 400, id="nobody draws for it"),
    ],
)
def test_what_is_refused(key, path, body, status):
    samplers = Samplers()

    async def ask(contact, client):
        header = {} if key == "" else {"Authorization": f"Bearer {key or contact.key}"}
        async with httpx.AsyncClient(timeout=HANG_S, trust_env=False) as http:
            return (await http.post(contact.url + path, content=body, headers=header)).status_code

    assert through_gateway(samplers, ask) == status
    assert not samplers.asked


def test_one_that_ends_leaves_nobody_waiting():
    samplers = Samplers(for_ever)

    async def run():
        gateway = Gateway()
        gateway.serve("group", samplers.open)
        async with gateway.serving() as contact:
            client = GatewaySamplers(contact)
            asking = asyncio.create_task(client.opener("group")(0, 0, 0)([1], 0, None))
            while not samplers.asked:
                await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await client.close()
        await settled()
        return isinstance(contact, Contact)

    assert ran(run())
    assert samplers.cancelled == 1
