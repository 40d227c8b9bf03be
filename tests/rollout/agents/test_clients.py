"""The clients of OpenAI and Anthropic, as programs use them, on a real server of the built-in engine."""

import contextlib
import json

import openai
import pytest

from roost.engines.protocol import Sampling
from roost.engines.vllm import VllmEngine
from roost.rollout.agents.chat import ChatPolicy
from roost.rollout.agents.chat_format import ChatFormat
from roost.rollout.agents.recording import Recorder
from roost.rollout.agents.scenario import AgentScenario
from roost.rollout.episode import NOT_GENERATED, Task, Transcript, TurnOptions
from tests.rollout.agents.talk import QWEN_TOKENIZER, user
from tests.rollout.agents.taught import ANSWER, ASKS, CALL, COUNT, COUNTED, FIND, TOOLS, write_taught_model
from tests.rollout.agents.world import Tasks
from tests.rollout.script import ran
from tests.torch_engine.running_server import forked_server

END = "<|im_end|>"
FIND_OF_ANTHROPIC = {"name": "find", "input_schema": FIND["parameters"]}
FIND_OF_RESPONSES = {"type": "function", "strict": False, **FIND}
WAYS = pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with forked_server(write_taught_model(tmp_path_factory.mktemp("taught"))) as started:
        yield started


@contextlib.asynccontextmanager
async def episode_on(server):
    """An episode whose turns come from the server, greedily; with its transcript."""
    engine, recorder = VllmEngine(server.url), Recorder("served")

    async def sample(token_ids, turn, max_tokens, options=None):
        options = options or TurnOptions()
        sampling = Sampling(min(max_tokens or 80, 80), 0.0, stop=options.stop, json_schema=options.json_schema)
        return await engine.generate(token_ids, sampling)

    transcript = Transcript(sample)
    try:
        async with recorder.episode(ChatPolicy(transcript, ChatFormat(QWEN_TOKENIZER))) as episode:
            yield episode, transcript
    finally:
        await recorder.close()
        await engine.close()


def of_openai(episode):
    return openai.AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=0)


def of_anthropic(episode):
    import anthropic  # not where tests are collected: it takes two seconds, in every process

    return anthropic.AsyncAnthropic(base_url=episode.base_url, api_key=episode.api_key, max_retries=0)


def made(transcript):
    """For each sequence the generated text, where every generated token has a log-prob and a version."""
    texts = []
    for tokens in transcript.sequences():
        is_generated = tokens.turns != NOT_GENERATED
        assert (tokens.logprobs[is_generated] <= 0).all() and (tokens.versions[is_generated] == 0).all()
        assert (tokens.logprobs[~is_generated] == 0).all() and (tokens.versions[~is_generated] == NOT_GENERATED).all()
        texts.append(QWEN_TOKENIZER.decode(tokens.token_ids[is_generated]))
    return texts


async def by_chat(client, streams):
    messages = [ASKS]
    for _ in range(2):
        asked = {"model": "served", "messages": messages, "tools": TOOLS}
        if streams:
            async with client.chat.completions.stream(**asked) as stream:
                answer = await stream.get_final_completion()
        else:
            answer = await client.chat.completions.create(**asked)
        reported = answer.choices[0].message
        if not reported.tool_calls:
            return reported.content
        assert json.loads(reported.tool_calls[0].function.arguments) == {"word": "sun"}
        result = {"role": "tool", "tool_call_id": reported.tool_calls[0].id, "content": "yellow"}
        messages = [*messages, reported.model_dump(exclude_none=True), result]
    return None


async def by_messages(client, streams):
    messages = [ASKS]
    for _ in range(2):
        asked = {"model": "served", "max_tokens": 80, "messages": messages, "tools": [FIND_OF_ANTHROPIC]}
        if streams:
            async with client.messages.stream(**asked) as stream:
                answer = await stream.get_final_message()
        else:
            answer = await client.messages.create(**asked)
        if answer.stop_reason == "end_turn":
            return answer.content[0].text
        assert (answer.stop_reason, answer.content[0].input) == ("tool_use", {"word": "sun"})
        result = {"type": "tool_result", "tool_use_id": answer.content[0].id, "content": "yellow"}
        messages = [*messages, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    return None


async def by_responses(client, streams, uses_id=False):
    items, before = [ASKS], None
    for _ in range(2):
        asked = {"model": "served", "input": items, "tools": [FIND_OF_RESPONSES]}
        if before is not None:
            asked["previous_response_id"] = before
        if streams:
            async with client.responses.stream(**asked) as stream:
                answer = await stream.get_final_response()
        else:
            answer = await client.responses.create(**asked)
        call = answer.output[0]
        if call.type == "message":
            return answer.output_text
        assert json.loads(call.arguments) == {"word": "sun"}
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "yellow"}
        before = answer.id if uses_id else None
        items = [result] if uses_id else [*items, *(each.model_dump() for each in answer.output), result]
    return None


async def by_response_ids(client, streams):
    return await by_responses(client, streams, uses_id=True)


@WAYS
@pytest.mark.parametrize(
    ("client_of", "program"),
    [
        pytest.param(of_openai, by_chat, id="chat"),
        pytest.param(of_anthropic, by_messages, id="messages"),
        pytest.param(of_openai, by_responses, id="responses"),
        pytest.param(of_openai, by_response_ids, id="previous response"),
    ],
)
def test_a_conversation_with_a_tool_is_one_sequence(server, client_of, program, streams):
    async def run_episode():
        async with episode_on(server) as (episode, transcript), client_of(episode) as client:
            return await program(client, streams), made(transcript)

    assert ran(run_episode()) == (ANSWER, [f"{CALL}{END}{ANSWER}{END}"])


@WAYS
def test_several_samples_have_a_sequence_each(server, streams):
    async def run_episode():
        async with episode_on(server) as (episode, transcript), of_openai(episode) as client:
            asked = {"model": "served", "messages": [COUNT], "n": 3}
            if streams:
                async with client.chat.completions.stream(**asked) as stream:
                    answer = await stream.get_final_completion()
            else:
                answer = await client.chat.completions.create(**asked)
            texts = [choice.message.content for choice in answer.choices]
            more = [COUNT, {"role": "assistant", "content": texts[1]}, user("More.")]
            await client.chat.completions.create(model="served", messages=more, max_tokens=1)
            return texts, answer.usage, made(transcript)

    texts, usage, sequences = ran(run_episode())
    assert texts == [COUNTED] * 3
    assert streams or usage.completion_tokens == 3 * (len(QWEN_TOKENIZER(COUNTED).input_ids) + 1)
    assert [text.startswith(f"{COUNTED}{END}") for text in sequences] == [True] * 3
    assert sum(len(text) > len(f"{COUNTED}{END}") for text in sequences) == 1, "one of them continues"


def test_stop_strings_cut_the_text_and_not_the_tokens(server):
    """` thr` ends inside what follows; the tokens up to its end are recorded, and the turn goes on from them."""

    async def run_episode():
        async with episode_on(server) as (episode, transcript):
            async with of_openai(episode) as client:
                chosen = (await client.chat.completions.create(model="served", messages=[COUNT], stop=" thr")).choices[
                    0
                ]
                more = [COUNT, chosen.message.model_dump(exclude_none=True), user("More.")]
                await client.chat.completions.create(model="served", messages=more, max_tokens=1)
            async with of_anthropic(episode) as client:
                described = await client.messages.create(
                    model="served", max_tokens=50, messages=[COUNT], stop_sequences=["four"]
                )
            return chosen, described, made(transcript)

    chosen, described, sequences = ran(run_episode())
    assert (chosen.message.content, chosen.finish_reason) == ("one two", "stop")
    assert (described.content[0].text, described.stop_reason, described.stop_sequence) == (
        "one two three ",
        "stop_sequence",
        "four",
    )
    assert sequences[0].startswith("one two thr") and not sequences[0].startswith("one two thre")
    assert len(sequences) == 2 and sequences[1] == "one two three four"


@pytest.mark.parametrize(
    "form", [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}]
)
def test_the_built_in_engine_says_that_it_has_no_guided_decoding(server, form):
    async def run_episode():
        async with episode_on(server) as (episode, transcript), of_openai(episode) as client:
            with pytest.raises(openai.BadRequestError, match="has no guided decoding"):
                await client.chat.completions.create(model="served", messages=[COUNT], response_format=form)
            return await client.chat.completions.create(model="served", messages=[COUNT]), made(transcript)

    answer, sequences = ran(run_episode())
    assert answer.choices[0].message.content == COUNTED
    assert sequences == [f"{COUNTED}{END}"]


def test_errors_have_the_form_that_anthropic_s_client_knows(server):
    import anthropic

    async def run_episode():
        async with episode_on(server) as (episode, _), of_anthropic(episode) as client:
            counted = await client.messages.count_tokens(model="served", messages=[COUNT])
            with pytest.raises(anthropic.BadRequestError, match="cannot force a tool call") as caught:
                await client.messages.create(
                    model="served",
                    max_tokens=5,
                    messages=[COUNT],
                    tools=[FIND_OF_ANTHROPIC],
                    tool_choice={"type": "any"},
                )
            return caught.value.body["error"]["type"], counted.input_tokens

    kind, counted = ran(run_episode())
    assert kind == "invalid_request_error"
    assert counted == len(ChatFormat(QWEN_TOKENIZER).opening([COUNT]))


class Find:
    """The tool that the model was taught to call."""

    description, parameters = "", FIND["parameters"]

    async def call(self, arguments):
        return {"sun": "yellow"}[arguments["word"]]

    async def close(self):
        pass


def test_a_tool_agent_on_the_built_in_engine(server):
    async def playing():
        async with episode_on(server) as (_, transcript):
            scenario = AgentScenario(
                QWEN_TOKENIZER,
                Tasks(1),
                {"_target_": "roost.rollout.agents.tools.ToolAgent", "stop": [" blue"]},
                {
                    "_target_": "roost.rollout.environments.tools.ToolEnvironments",
                    "tools": {"find": {"_target_": f"{__name__}.Find"}},
                },
            )
            score = await scenario.run_episode(Task("sun", {"messages": [ASKS]}), transcript)
            await scenario.close()
        return score, transcript

    score, transcript = ran(playing())
    assert made(transcript) == [f"{CALL}{END}{ANSWER}{END}"], "one sequence, without what the tool says"
    assert "<tool_response>\nyellow\n</tool_response>" in QWEN_TOKENIZER.decode(transcript.token_ids)
    assert (score.answer, score.parts["tool_calls"]) == (CALL + ANSWER, 1.0)
