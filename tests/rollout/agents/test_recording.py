import asyncio
import contextlib
import json

import httpx
import openai
import pytest

from roost.engines.protocol import ContextFull, EngineRefused
from roost.rollout.agents.recording import Recorder
from roost.rollout.episode import NOT_GENERATED
from tests.limits import HANG_S
from tests.rollout.agents.talk import QWEN_TOKENIZER, Engine, assistant, ids, talk, tool, user
from tests.rollout.script import others_running, ran, settled

HELLO = [user("x")]
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}]
CALL = 'Look.\n<tool_call>\n{"name": "find", "arguments": {"word": "sun"}}\n</tool_call>'


def client_of(episode):
    return openai.AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=0)


@contextlib.asynccontextmanager
async def recorded(*says, max_turns=None):
    """An endpoint for an episode: its client, the engine, the transcript and the episode."""
    engine, recorder = Engine(*says), Recorder("served")
    policy, transcript = talk(engine)
    try:
        async with recorder.episode(policy, max_turns) as episode, client_of(episode) as client:
            yield client, engine, transcript, episode
    finally:
        await recorder.close()


def chat(client, messages=HELLO, **more):
    return client.chat.completions.create(model="served", messages=messages, **more)


def made_text(transcript):
    tokens = transcript.tokens()
    return QWEN_TOKENIZER.decode(tokens.token_ids[tokens.turns != NOT_GENERATED])


def test_a_conversation_by_the_client_is_recorded_as_one_sequence():
    a_then_b = (*ids("a"), *ids("b"), QWEN_TOKENIZER.eos_token_id)

    async def run_episode():
        async with recorded(a_then_b, "two") as (client, engine, transcript, _):
            first = await chat(client)
            again = [*HELLO, first.choices[0].message.model_dump(), user("y")]
            second = await chat(client, again, temperature=0.1, top_p=0.5, seed=3)
            return first, second, engine, transcript

    first, second, engine, transcript = ran(run_episode())
    assert [answer.choices[0].message.content for answer in (first, second)] == ["ab", "two"]
    assert first.choices[0].finish_reason == "stop"
    assert (first.model, first.object) == ("served", "chat.completion")
    assert first.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}) == {
        "prompt_tokens": len(engine.asked[0]),
        "completion_tokens": 3,
        "total_tokens": len(engine.asked[0]) + 3,
    }
    assert len(transcript.sequences()) == 1
    place = len(engine.asked[0])
    assert engine.asked[1][place : place + 3] == a_then_b, "the very tokens, not those of the text"
    assert made_text(transcript) == "ab<|im_end|>two<|im_end|>"


def test_a_stream_says_the_same():
    async def run_episode():
        async with recorded("hello there", "two") as (client, _, transcript, _):
            stream = await chat(client, stream=True, stream_options={"include_usage": True}, logprobs=True)
            chunks = [chunk async for chunk in stream]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            await chat(client, [*HELLO, assistant(text), user("y")])
            return chunks, text, len(transcript.sequences())

    chunks, text, sequences = ran(run_episode())
    assert (text, sequences) == ("hello there", 1)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert "".join(token.token for token in chunks[1].choices[0].logprobs.content) == "hello there"
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], len(ids("hello there")) + 1)


def test_the_synchronous_client_in_a_thread():
    def talked(base_url, api_key):
        with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            names = [model.id for model in client.models.list()]
            whole = chat(client).choices[0].message.content
            parts = [chunk.choices[0].delta.content for chunk in chat(client, [user("y")], stream=True)]
            return names, whole, "".join(part or "" for part in parts)

    async def run_episode():
        async with recorded("one", "two") as (_, _, transcript, episode):
            heard = await asyncio.to_thread(talked, episode.base_url, episode.api_key)
            return heard, len(transcript.sequences())

    assert ran(run_episode()) == ((["served"], "one", "two"), 2)


def test_log_probabilities_where_they_are_asked_for():
    async def run_episode():
        async with recorded("ab", "cd") as (client, *_):
            with_them = await chat(client, logprobs=True)
            return with_them, await chat(client, [user("y")])

    with_them, without = ran(run_episode())
    described = with_them.choices[0].logprobs.content
    assert [(one.token, one.logprob, one.bytes) for one in described] == [("ab", -0.5, [97, 98])]
    assert without.choices[0].logprobs is None


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_a_turn_that_was_cut_says_so(limit):
    async def run_episode():
        async with recorded(ids("ab")) as (client, *_):
            return await chat(client, **{limit: 1})

    assert ran(run_episode()).choices[0].finish_reason == "length"


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_tools(streams):
    async def run_episode():
        async with recorded(CALL, "done") as (client, engine, transcript, _):
            if streams:
                chunks = [chunk async for chunk in await chat(client, tools=TOOLS, stream=True)]
                calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
                finish = chunks[-1].choices[0].finish_reason
            else:
                choice = (await chat(client, tools=TOOLS)).choices[0]
                calls, finish = choice.message.tool_calls, choice.finish_reason
            functions = [{"name": call.function.name, "arguments": call.function.arguments} for call in calls]
            sent = [
                {"id": call.id, "type": "function", "function": each}
                for call, each in zip(calls, functions, strict=True)
            ]
            reported = {"role": "assistant", "content": "Look.", "tool_calls": sent}
            answer = {**tool("yellow"), "tool_call_id": calls[0].id}
            await chat(client, [*HELLO, reported, answer], tools=TOOLS)
            return functions, finish, engine, len(transcript.sequences())

    functions, finish, engine, sequences = ran(run_episode())
    assert functions == [{"name": "find", "arguments": '{"word": "sun"}'}]
    assert (finish, sequences) == ("tool_calls", 1)
    assert json.dumps(TOOLS[0]) in engine.shown[0]
    assert "<tool_response>\nyellow" in engine.shown[1]


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS, "tool_choice": "none"}], ids=["no tools", "none chosen"])
def test_calls_that_nobody_offered_are_text(more):
    async def run_episode():
        async with recorded(CALL) as (client, engine, _, _):
            return (await chat(client, **more)).choices[0], engine.shown[0]

    choice, shown = ran(run_episode())
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (CALL, None, "stop")
    assert "find" not in shown


def test_completions_go_on_from_their_own_text():
    async def run_episode():
        async with recorded("ab", "cd", "ef", "gh") as (client, engine, transcript, _):
            complete = client.completions.create
            first = await complete(model="served", prompt="Say:", logprobs=1)
            await complete(model="served", prompt="Say:ab<|im_end|>\nMore:")
            await complete(model="served", prompt=["Other:"])
            parts = [part async for part in await complete(model="served", prompt=list(ids("Ids")), stream=True)]
            return first, parts, engine, transcript

    first, parts, engine, transcript = ran(run_episode())
    assert (first.choices[0].text, first.choices[0].finish_reason) == ("ab", "stop")
    assert first.choices[0].logprobs.tokens == ["ab"]
    assert engine.shown == ["Say:", "Say:ab<|im_end|>\nMore:", "Other:", "Ids"]
    assert parts[0].choices[0].text == "gh"
    assert len(transcript.sequences()) == 3


async def refused():
    raise EngineRefused("a token is wrong")


async def full():
    raise ContextFull("the context length is 64 tokens")


@pytest.mark.parametrize(
    ("request_", "described"),
    [
        pytest.param({"messages": HELLO, "n": 0}, "n: Input should be greater", id="none"),
        pytest.param({"messages": HELLO, "max_tokens": 0}, "max_tokens: Input should be greater", id="no tokens"),
        pytest.param({"messages": []}, "messages: List should have at least 1 item", id="no messages"),
        pytest.param({"messages": [{"content": "x"}]}, "a mapping with role", id="nobody says it"),
        pytest.param({"messages": [user([{"type": "image_url"}])]}, "without an image", id="no picture"),
        pytest.param({"messages": HELLO}, "a token is wrong", id="the engine refuses"),
    ],
)
def test_requests_that_cannot_be_answered(request_, described):
    async def run_episode():
        async with recorded(refused) as (_, _, _, episode), httpx.AsyncClient(timeout=HANG_S) as client:
            return await client.post(f"{episode.base_url}/chat/completions", json=request_)

    answer = ran(run_episode())
    assert answer.status_code == 400
    assert described in answer.json()["error"]["message"]


@pytest.mark.parametrize(("before", "is_used_up"), [([], False), (["one"], True)], ids=["at once", "later"])
def test_a_full_context_is_told_as_openai_tells_it(before, is_used_up):
    """After the policy has generated something, an error of the program is the end and no failure."""

    async def run_episode():
        async with recorded(*before, full) as (client, _, _, episode):
            for _ in before:
                await chat(client)
            with pytest.raises(openai.BadRequestError, match="the context length is 64 tokens") as caught:
                await chat(client, [user("y")])
            return caught.value.code, caught.value.type, episode.is_used_up

    assert ran(run_episode()) == ("context_length_exceeded", "invalid_request_error", is_used_up)


def test_a_program_that_shows_less_and_goes_on_may_fail_later():
    async def run_episode():
        async with recorded("one", full, "two") as (client, _, _, episode):
            await chat(client)
            with pytest.raises(openai.BadRequestError):
                await chat(client, [user("long")])
            await chat(client, [user("short")])
            return episode.is_used_up

    assert ran(run_episode()) is False


def test_several_prompts_are_refused():
    async def run_episode():
        async with recorded() as (client, *_):
            with pytest.raises(openai.BadRequestError, match="there are 2 prompts"):
                await client.completions.create(model="served", prompt=["a", "b"])

    ran(run_episode())


def test_turns_beyond_the_last_are_refused_at_once():
    async def run_episode():
        async with recorded("one", "two", max_turns=1) as (client, _, _, episode):
            await chat(client)
            assert not episode.is_used_up
            with pytest.raises(openai.APIStatusError, match="its 1 turns are used up") as caught:
                await chat(client, [user("y")])
            return caught.value.status_code, episode.is_used_up

    assert ran(run_episode()) == (410, True)


def test_episodes_are_apart():
    async def run_episode():
        recorder = Recorder()
        engines = [Engine("left"), Engine("right")]
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(recorder.close)
            episodes = [await stack.enter_async_context(recorder.episode(talk(each)[0])) for each in engines]
            clients = [await stack.enter_async_context(client_of(each)) for each in episodes]
            reported = await asyncio.gather(*(chat(client) for client in clients))
            assert episodes[0].base_url.split("/episodes/")[0] == episodes[1].base_url.split("/episodes/")[0]
            wrong = episodes[0].base_url.replace(episodes[0].api_key, "guessed")
            async with httpx.AsyncClient(timeout=HANG_S) as client:
                stranger = await client.get(f"{wrong}/models")
            return [each.choices[0].message.content for each in reported], stranger.status_code

    assert ran(run_episode()) == (["left", "right"], 410)


def test_an_episode_that_ends_answers_whoever_waits():
    async def for_ever():
        await asyncio.Event().wait()

    async def run_episode():
        async with recorded(for_ever) as (client, engine, _, episode):
            waiting = asyncio.create_task(chat(client))
            while not engine.asked:
                await asyncio.sleep(0.001)
            episode.close()
            with pytest.raises(openai.APIStatusError, match="cancelled") as caught:
                await waiting
            with pytest.raises(openai.APIStatusError, match="is over"):
                await chat(client)
            status = caught.value.status_code
        await settled()
        return status, others_running()

    assert ran(run_episode()) == (410, set())


def test_a_turn_is_given_up_when_whoever_asked_is_gone_and_may_be_asked_for_again():
    cancelled = asyncio.Event()

    async def for_ever():
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def run_episode():
        async with recorded(for_ever, "again") as (client, engine, transcript, _):
            asking = asyncio.create_task(chat(client))
            while not engine.asked:
                await asyncio.sleep(0.001)
            asking.cancel()
            await cancelled.wait()
            answer = await chat(client)
            return answer.choices[0].message.content, engine.asked, len(transcript.sequences())

    reported, asked, sequences = ran(run_episode())
    assert (reported, sequences) == ("again", 1)
    assert asked[0] == asked[1]


def test_one_conversation_has_one_turn_at_a_time():
    async def run_episode():
        gate = asyncio.Event()

        async def slowly():
            await gate.wait()
            return "late"

        async with recorded(slowly) as (client, engine, _, _):
            first = asyncio.create_task(chat(client))
            while not engine.asked:
                await asyncio.sleep(0.001)
            with pytest.raises(openai.BadRequestError, match="wait for its reply"):
                await chat(client)
            gate.set()
            return (await first).choices[0].message.content

    assert ran(run_episode()) == "late"
