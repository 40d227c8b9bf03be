"""Requests to the recording endpoint by OpenAI's own client: served, or refused with a reason."""

import asyncio
import logging

import openai
import pytest

from roost.rollout.agents.recording import Recorder
from tests.rollout.agents.talk import KINDS, QWEN_TOKENIZER, Engine, ids, talk, user
from tests.rollout.agents.test_recording import TOOLS, chat, recorded
from tests.rollout.script import ran

FORCED = {"type": "function", "function": {"name": "find"}}


@pytest.mark.parametrize(
    ("more", "described"),
    [
        pytest.param({"response_format": {"type": "xml"}}, "response_format is xml", id="form"),
        pytest.param({"response_format": {"type": "json_schema"}}, "has no schema", id="no schema"),
        pytest.param({"logit_bias": {"5": 10}}, "logit_bias is not offered", id="bias"),
        pytest.param({"logprobs": True, "top_logprobs": 3}, "top_logprobs is not offered", id="alternatives"),
        pytest.param(
            {"tools": TOOLS, "tool_choice": "required"}, "tool_choice cannot force a tool call", id="any tool"
        ),
        pytest.param({"tools": TOOLS, "tool_choice": FORCED}, "tool_choice cannot force a tool call", id="this tool"),
        pytest.param({"functions": [{"name": "f"}]}, "functions is not offered: write them as tools", id="functions"),
        pytest.param({"extra_body": {"chat_template_kwargs": {"a": 1}}}, "chat_template_kwargs is not", id="template"),
    ],
)
@pytest.mark.parametrize("way", ["async", "sync"])
def test_what_cannot_be_done_is_refused(more, described, way):
    def blocking(episode):
        with openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=0) as client:
            chat(client, **more)

    async def run_episode():
        async with recorded("never") as (client, engine, _, episode):
            with pytest.raises(openai.BadRequestError, match=described) as refused:
                await (chat(client, **more) if way == "async" else asyncio.to_thread(blocking, episode))
            return refused.value.status_code, engine.asked

    assert ran(run_episode()) == (400, []), "and the policy was not asked"


@pytest.mark.parametrize(
    ("more", "described"),
    [
        pytest.param({"logprobs": 5}, "logprobs is 5", id="alternatives"),
        pytest.param({"echo": True}, "echo is not offered", id="echo"),
        pytest.param({"suffix": "end"}, "suffix is not offered", id="suffix"),
        pytest.param({"best_of": 3}, "best_of is not offered", id="best of"),
    ],
)
def test_what_cannot_be_done_with_a_text_is_refused(more, described):
    async def run_episode():
        async with recorded("never") as (client, *_):
            with pytest.raises(openai.BadRequestError, match=described):
                await client.completions.create(model="served", prompt="Say:", **more)

    ran(run_episode())


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"stop": None, "response_format": {"type": "text"}, "logit_bias": {}}, id="nothing asked for"),
        pytest.param({"user": "me", "metadata": {"a": "b"}, "store": False}, id="for nobody"),
        pytest.param({"tools": TOOLS, "tool_choice": "auto"}, id="tools"),
        pytest.param({"max_completion_tokens": 5, "max_tokens": 5, "n": 1}, id="limits"),
    ],
)
def test_what_asks_for_nothing_else_is_answered_without_a_word(more, caplog):
    async def run_episode():
        async with recorded("hello") as (client, *_):
            return (await chat(client, **more)).choices[0].message.content

    with caplog.at_level(logging.WARNING, "roost.rollout.agents"):
        assert ran(run_episode()) == "hello"
    assert not caplog.records


def test_that_drawing_is_the_run_s_own_matter_is_told_once(caplog):
    async def run_episode():
        async with recorded("one", "two") as (client, *_):
            await chat(client, temperature=0.2, seed=3)
            return (await chat(client, [user("y")], temperature=0.3)).choices[0].message.content

    with caplog.at_level(logging.WARNING, "roost.rollout.agents"):
        assert ran(run_episode()) == "two"
    [record] = caplog.records
    assert record.getMessage().startswith("a request sets seed, temperature, which is ignored: ")


def test_tools_that_a_template_does_not_show_are_refused():
    async def run_episode():
        engine, recorder = Engine("never", of=KINDS["plain"]), Recorder("served")
        try:
            async with recorder.episode(talk(engine)[0]) as episode:
                client = openai.AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=0)
                async with client:
                    with pytest.raises(openai.BadRequestError, match="does not show tools"):
                        await chat(client, tools=TOOLS)
            return engine.asked
        finally:
            await recorder.close()

    assert ran(run_episode()) == []


def test_a_stream_of_a_call_alone_has_log_probabilities():
    call = '<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>'

    async def run_episode():
        async with recorded(call) as (client, *_):
            stream = await chat(client, tools=TOOLS, stream=True, logprobs=True)
            return [chunk async for chunk in stream]

    described = [chunk.choices[0].logprobs for chunk in ran(run_episode())]
    assert ["".join(token.token for token in each.content) for each in described if each] == [call]


@pytest.mark.parametrize("way", ["async", "sync"])
def test_calls_of_one_episode_in_parallel_have_a_sequence_each(way):
    """Each is answered with what the policy said to it, and goes on in its own sequence."""
    count = 16

    def blocking(episode, number):
        with openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=0) as client:
            first = chat(client, [user(f"{number}")]).choices[0].message.content
            reported = [user(f"{number}"), {"role": "assistant", "content": first}, user("again")]
            return first, chat(client, reported).choices[0].message.content

    async def asked(client, number):
        first = (await chat(client, [user(f"{number}")])).choices[0].message.content
        reported = [user(f"{number}"), {"role": "assistant", "content": first}, user("again")]
        return first, (await chat(client, reported)).choices[0].message.content

    async def run_episode():
        async with recorded(*["a"] * (2 * count)) as (client, engine, transcript, episode):
            if way == "async":
                answers = await asyncio.gather(*(asked(client, number) for number in range(count)))
            else:
                answers = await asyncio.gather(
                    *(asyncio.to_thread(blocking, episode, number) for number in range(count))
                )
            return answers, transcript.sequences(), engine

    answers, sequences, engine = ran(run_episode())
    assert answers == [("a", "a")] * count
    assert len(sequences) == count and len(engine.asked) == 2 * count
    made = [tokens.token_ids[tokens.turns >= 0].tolist() for tokens in sequences]
    assert made == [[*ids("a"), QWEN_TOKENIZER.eos_token_id] * 2] * count
