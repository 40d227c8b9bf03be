"""Translation of requests and replies, with an engine that says what a test wants."""

import asyncio

import openai
import pytest

from tests.rollout.agents.talk import ids, user
from tests.rollout.agents.test_recording import HELLO, TOOLS, chat, made_text, recorded
from tests.rollout.script import ran

THOUGHT = "<think>\nIs it?\n</think>\n\nYes."


def of_anthropic(episode):
    import anthropic  # not where tests are collected: it takes two seconds, in every process

    return anthropic.AsyncAnthropic(base_url=episode.base_url, api_key="any", max_retries=0)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_reasoning_is_told_apart_in_every_protocol_and_stays_in_the_sequence(streams):
    async def run_episode():
        async with recorded(THOUGHT, "a", THOUGHT, "b", THOUGHT, "c") as (client, engine, transcript, episode):
            if streams:
                chunks = [chunk async for chunk in await chat(client, stream=True)]
                parts = [chunk.choices[0].delta.model_extra.get("reasoning_content") for chunk in chunks]
                described = ["".join(filter(None, parts))]
            else:
                described = [(await chat(client)).choices[0].message.reasoning_content]
            await chat(client, [*HELLO, {"role": "assistant", "content": "Yes."}, user("y")])
            async with of_anthropic(episode) as other:
                asked = {"model": "served", "max_tokens": 9}
                async with other.messages.stream(messages=[user("2")], **asked) as stream:
                    answer = await stream.get_final_message()
                described.append(answer.content[0].thinking)
                after = [user("2"), {"role": "assistant", "content": answer.content}, user("y")]
                await other.messages.create(messages=after, **asked)
            response = await client.responses.create(model="served", input="3")
            described.append(response.output[0].content[0].text)
            assert response.output_text == "Yes."
            await client.responses.create(model="served", input="y", previous_response_id=response.id)
            return described, engine.shown, len(transcript.sequences())

    described, shown, sequences = ran(run_episode())
    assert described == ["Is it?"] * 3
    assert sequences == 3 and all(THOUGHT in prompt for prompt in shown[1::2])


def test_instructions_and_system_prompts_come_first():
    async def run_episode():
        async with recorded("a", "b") as (client, engine, _, episode):
            await client.responses.create(model="served", instructions="Be kind.", input="x")
            async with of_anthropic(episode) as other:
                blocks = [{"type": "text", "text": "Be kind."}]
                await other.messages.create(model="served", max_tokens=5, system=blocks, messages=HELLO)
            return engine.shown

    first, second = ran(run_episode())
    assert first.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nx")
    assert second == first


def test_forms_reach_the_engine():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}

    async def run_episode():
        async with recorded("{}", "{}", "{}") as (client, engine, _, _):
            await chat(client, response_format=wanted, stop=["END"])
            form = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
            await client.responses.create(model="served", input="2", text=form)
            await chat(client, [user("3")], response_format={"type": "json_object"})
            return [(each.stop, each.json_schema) for each in engine.options]

    first, second, third = ran(run_episode())
    assert first[0] == ("END",) and first[1] == second[1]
    assert '"integer"' in first[1] and third == ((), '{"type": "object"}')


def test_samples_are_all_recorded_or_none():
    """One of three fails: the others were not delivered, so they are not learnt from; a retry has no more sequences."""

    async def fails():
        await asyncio.sleep(0)
        raise ValueError("not this time")

    async def run_episode():
        async with recorded("a", fails, "c", "d", "e", "f") as (client, engine, transcript, _):
            with pytest.raises(openai.BadRequestError, match="not this time"):
                await chat(client, n=3)
            before = made_text(transcript)
            answer = await chat(client, n=3)
            texts = [choice.message.content for choice in answer.choices]
            return (
                before,
                texts,
                [len(tokens.completion_versions) for tokens in transcript.sequences()],
                set(engine.asked),
            )

    before, texts, sequences, asked = ran(run_episode())
    assert (before, texts, sequences, len(asked)) == ("", ["d", "e", "f"], [2, 2, 2], 1)


def test_samples_count_as_turns():
    async def run_episode():
        async with recorded("a", "b", max_turns=3) as (client, *_):
            await chat(client, n=2)
            with pytest.raises(openai.APIStatusError, match="n is 2, but 1 turns are left"):
                await chat(client, [user("y")], n=2)

    ran(run_episode())


def test_a_text_goes_on_after_its_stop_string():
    async def run_episode():
        async with recorded((*ids("a"), *ids("END")), "b") as (client, engine, transcript, _):
            first = await client.completions.create(model="served", prompt="Say:", stop=["END"])
            await client.completions.create(model="served", prompt=f"Say:{first.choices[0].text}END more")
            return first.choices[0].text, engine.shown[1], len(transcript.sequences())

    assert ran(run_episode()) == ("a", "Say:aEND more", 1)


@pytest.mark.parametrize(
    ("asked", "described"),
    [
        pytest.param({"input": [{"type": "computer_call"}]}, "an input item is of type computer_call", id="item"),
        pytest.param({"input": "x", "tools": [{"type": "web_search"}]}, "only functions can be offered", id="tool"),
        pytest.param({"input": "x", "background": True}, "background is not offered", id="background"),
    ],
)
def test_what_responses_cannot_do_is_refused(asked, described):
    async def run_episode():
        async with recorded() as (client, *_):
            with pytest.raises(openai.BadRequestError, match=described):
                await client.responses.create(model="served", **asked)
            with pytest.raises(openai.NotFoundError, match="no response resp_1"):
                await client.responses.create(model="served", input="x", previous_response_id="resp_1")

    ran(run_episode())


@pytest.mark.parametrize(
    ("more", "described"),
    [
        pytest.param({"messages": [{"role": "assistant", "content": "So"}]}, "the last message is", id="prefill"),
        pytest.param({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "of type bash_20250124", id="tool"),
        pytest.param({"messages": [user([{"type": "image", "source": {}}])]}, "only text is read", id="image"),
    ],
)
def test_what_messages_cannot_do_is_refused(more, described):
    import anthropic

    async def run_episode():
        async with recorded() as (_, _, _, episode), of_anthropic(episode) as client:
            with pytest.raises(anthropic.BadRequestError, match=described):
                await client.messages.create(**{"model": "served", "max_tokens": 5, "messages": HELLO, **more})

    ran(run_episode())


def test_a_call_by_anthropic_s_client_may_go_on_by_openai_s():
    """The same conversation in another protocol is the same sequence."""
    call = '<tool_call>\n{"name": "find", "arguments": {"word": "sun"}}\n</tool_call>'

    async def run_episode():
        async with recorded(call, "done") as (client, _, transcript, episode):
            async with of_anthropic(episode) as other:
                tool = {"name": "find", "input_schema": TOOLS[0]["function"]["parameters"]}
                reported = await other.messages.create(model="served", max_tokens=9, messages=HELLO, tools=[tool])
            function = {"name": reported.content[0].name, "arguments": reported.content[0].input}
            calls = [{"id": reported.content[0].id, "type": "function", "function": function}]
            after = [{"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool", "content": "yellow"}]
            await chat(client, [*HELLO, *after], tools=TOOLS)
            return len(transcript.sequences())

    assert ran(run_episode()) == 1
