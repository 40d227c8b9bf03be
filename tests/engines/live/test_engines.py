"""The same questions to every real engine, with transformers as the judge of the answers; and its key."""

import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path

import aiohttp
import psutil
import pytest

from roost.engines.command import EngineKind
from roost.engines.protocol import EngineRefused, Finish, InFlight, Sampling, VersionSpan
from tests.engines.live.conftest import KEY, MAX_CONTEXT, SCENARIO_LIMIT
from tests.engines.live.policies import PROMPT

TOLERANCE = 1e-3
PROMPTS = [
    pytest.param([5], id="one-token"),
    pytest.param([72, 101, 108, 108, 111], id="hello"),
    pytest.param([(17 * i) % 250 for i in range(70)], id="several-blocks"),
]
GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
LONG = Sampling(max_tokens=30_000, temperature=0.0, ignore_eos=True)
OUT_OF_VOCABULARY = 5000


@pytest.fixture(scope="module")
def judge(model_folder):
    """The model as transformers runs it: the log-probabilities of what follows each prefix of some tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()

    def logprobs(token_ids):
        with torch.no_grad():
            return torch.log_softmax(model(torch.tensor([list(token_ids)])).logits[0].double(), dim=-1)

    return logprobs


def judged(judge, prompt, made):
    """The log-probability of each token that was made, and the best there was in its place."""
    found = judge([*prompt, *made])[len(prompt) - 1 : -1]
    return [float(row[token]) for row, token in zip(found, made, strict=True)], [float(row.max()) for row in found]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_are_the_likeliest_and_log_probabilities_are_right(running_engine, judge, prompt):
    done = running_engine.run(lambda engine: engine.generate(prompt, GREEDY))
    theirs, best = judged(judge, prompt, done.token_ids)
    assert len(done.token_ids) == GREEDY.max_tokens and done.finish is Finish.LENGTH
    assert theirs == pytest.approx(best, abs=TOLERANCE)
    assert done.logprobs == pytest.approx(theirs, abs=TOLERANCE)


def test_drawn_tokens_have_the_log_probability_they_were_drawn_with(running_engine, judge):
    prompt, temperature = [72, 105], 0.7
    sampling = Sampling(max_tokens=20, temperature=temperature, seed=7, ignore_eos=True)
    done = running_engine.run(lambda engine: engine.generate(prompt, sampling))
    rows = (judge([*prompt, *done.token_ids]) / temperature).log_softmax(-1)[len(prompt) - 1 : -1]
    theirs = [float(row[token]) for row, token in zip(rows, done.token_ids, strict=True)]
    assert done.logprobs == pytest.approx(theirs, abs=TOLERANCE)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_score_is_the_models_own_and_the_cache_does_not_change_it(running_engine, judge, prompt):
    tokens = [*prompt, 9, 8, 7]

    async def scenario(engine):
        first = await engine.score(tokens)
        await engine.generate(tokens, GREEDY)  # leaves the prompt in the prefix cache
        return first, await engine.score(tokens)

    first, again = running_engine.run(scenario)
    rows = judge(tokens)
    theirs = [float(rows[place, token]) for place, token in enumerate(tokens[1:])]
    assert first == pytest.approx(theirs, abs=TOLERANCE)
    assert again == pytest.approx(theirs, abs=TOLERANCE)


def test_the_route_that_every_release_has_gives_the_same(running_engine):
    sampling = Sampling(max_tokens=12, seed=5, ignore_eos=True, min_p=0.01)

    async def scenario(engine):
        by_tokens = await engine.generate([1, 2, 3], sampling), await engine.score([1, 2, 3])
        # As on a server whose route for token ids is closed.
        engine._known = replace(await engine.capabilities(), takes_tokens=False, reports_versions=False)
        by_text = await engine.generate([1, 2, 3], sampling), await engine.score([1, 2, 3])
        named = await under_way(engine, "named")
        await engine.abort(["named"])
        return by_tokens, by_text, await named

    (completion, score), (same, same_score), aborted = running_engine.run(scenario)
    assert (same.token_ids, same.finish) == (completion.token_ids, completion.finish)
    assert same.logprobs == pytest.approx(completion.logprobs, abs=TOLERANCE)
    assert same_score == pytest.approx(score, abs=TOLERANCE)
    assert aborted.finish is Finish.ABORT


def test_a_seed_decides_what_is_drawn(running_engine):
    async def scenario(engine):
        drawn = [Sampling(max_tokens=16, seed=seed, ignore_eos=True) for seed in (1, 1, 2, 3)]
        return await asyncio.gather(*(engine.generate([1, 2, 3], sampling) for sampling in drawn))

    first, same, *others = running_engine.run(scenario)
    assert first.token_ids == same.token_ids
    assert all(first.token_ids != other.token_ids for other in others)


def test_several_completions_of_a_request_are_those_of_consecutive_seeds(running_engine):
    async def scenario(engine):
        sampling = Sampling(max_tokens=12, seed=40, ignore_eos=True)
        together = await engine.generate_n([1, 2, 3], sampling, 4)
        return together, [await engine.generate([1, 2, 3], sampling.nth(index)) for index in range(4)]

    together, alone = running_engine.run(scenario)
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]
    assert len({each.token_ids for each in together}) == 4
    for one, other in zip(together, alone, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=TOLERANCE) and one.versions == other.versions


def test_a_stop_token_ends_a_completion_and_is_its_last_token(running_engine):
    async def scenario(engine):
        whole = await engine.generate([1, 2, 3], GREEDY)
        stop = whole.token_ids[4]
        sampling = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True, stop_token_ids=(stop,))
        return whole, stop, await engine.generate([1, 2, 3], sampling)

    whole, stop, stopped = running_engine.run(scenario)
    assert stopped.finish is Finish.STOP
    assert stopped.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert len(stopped.logprobs) == len(stopped.token_ids)


@pytest.mark.long
def test_guided_decoding_holds_a_completion_to_its_schema(running_engine):
    if running_engine.spec.kind is not EngineKind.VLLM:
        pytest.skip("the built-in engine has no guided decoding")
    sampling = Sampling(max_tokens=32, seed=3, json_schema='{"enum": ["yes", "no"]}')
    done = running_engine.run(lambda engine: engine.generate([72, 105], sampling))
    from transformers import AutoTokenizer

    text = AutoTokenizer.from_pretrained(running_engine.model_folder).decode(done.token_ids, skip_special_tokens=True)
    assert json.loads(text) in ("yes", "no") and done.finish is Finish.STOP


def test_log_probs_that_are_not_requested_are_unknown(running_engine):
    def generate(sampling):
        return running_engine.run(lambda engine: engine.generate([1, 2, 3], sampling))

    with_them, without = generate(GREEDY), generate(replace(GREEDY, logprobs=False))
    assert without.token_ids == with_them.token_ids
    assert [math.isnan(logprob) for logprob in without.logprobs] == [True] * len(without.token_ids)


async def under_way(engine, request_id=None):
    """A long request that has made some tokens: one that was sent after it, and is worked on beside it, is done."""
    task = asyncio.create_task(engine.generate([1, 2, 3], LONG, request_id))
    await asyncio.sleep(0)
    await engine.generate([4, 5, 6], GREEDY)
    assert not task.done()
    return task


def test_a_held_request_waits_and_then_goes_on_as_if_nothing_had_been(running_engine):
    short = Sampling(max_tokens=400, temperature=0.0, ignore_eos=True)

    async def scenario(engine):
        undisturbed = await engine.generate([1, 2, 3], short)
        held = await under_way(engine)
        await engine.pause(InFlight.HOLD)
        queued = asyncio.create_task(engine.generate([4, 5, 6], GREEDY))
        done, _ = await asyncio.wait({held, queued}, timeout=1.0)
        assert not done
        await engine.resume()
        assert (await queued).finish is Finish.LENGTH
        await engine.abort()
        return undisturbed.token_ids, (await held).token_ids

    undisturbed, held = running_engine.run(scenario)
    assert len(held) > GREEDY.max_tokens
    assert held[: len(undisturbed)] == undisturbed[: len(held)]


def test_draining_lets_requests_finish(running_engine):
    async def scenario(engine):
        task = asyncio.create_task(engine.generate([1, 2, 3], GREEDY))
        await asyncio.sleep(0)
        await engine.generate([4, 5, 6], GREEDY)
        await engine.pause(InFlight.DRAIN)
        await engine.resume()
        return await task

    assert running_engine.run(scenario).finish is Finish.LENGTH


def test_dropping_returns_what_was_made(running_engine):
    async def scenario(engine):
        task = await under_way(engine)
        await engine.pause(InFlight.DROP)
        done = await task
        await engine.resume()
        return done, await engine.generate([1, 2, 3], GREEDY)

    done, after = running_engine.run(scenario)
    assert done.finish is Finish.ABORT
    assert 0 < len(done.token_ids) < LONG.max_tokens
    assert done.token_ids[:12] == after.token_ids[: len(done.token_ids)]


def test_abort_ends_the_named_request_only_and_returns_what_it_made(running_engine):
    async def scenario(engine):
        named, other = await under_way(engine, "named"), await under_way(engine, "other")
        await engine.abort([])
        await engine.abort(["named"])
        first = await named
        assert not other.done()
        await engine.abort()
        return first, await other

    first, other = running_engine.run(scenario)
    assert (first.finish, other.finish) == (Finish.ABORT, Finish.ABORT)
    assert 0 < len(first.token_ids) == len(first.logprobs) < LONG.max_tokens
    assert [span.end for span in first.versions][-1:] == [len(first.token_ids)]


def test_a_cancelled_call_frees_the_server(running_engine):
    async def scenario(engine):
        task = await under_way(engine)
        await engine.pause(InFlight.HOLD)  # it cannot finish by itself, so its memory is free only if it was ended
        task.cancel()
        await engine.reset_cache()
        await engine.resume()

    running_engine.run(scenario)


def test_the_version_is_told_and_set(running_engine):
    async def scenario(engine):
        await engine.set_version(41)
        task = await under_way(engine)
        await engine.pause(InFlight.HOLD)
        await engine.set_version(42)
        await engine.resume()
        await engine.generate([4, 5, 6], GREEDY)
        await engine.abort()
        return await engine.version(), await task, await engine.generate([1], GREEDY)

    version, across, after = running_engine.run(scenario)
    assert version == 42
    assert [span.version for span in across.versions] == [41, 42]
    assert (across.versions[0].start, across.versions[-1].end) == (0, len(across.token_ids))
    assert across.versions[0].end == across.versions[1].start
    assert after.versions == (VersionSpan(42, 0, 12),)


REFUSED = [
    pytest.param([1, OUT_OF_VOCABULARY], r"(?i)token.*5000.*vocab|vocab", id="out-of-vocabulary"),
    pytest.param([1] * (MAX_CONTEXT + 1), str(MAX_CONTEXT), id="too-long"),
    pytest.param([], r"(?i)token_ids|empty|at least", id="empty"),
]


@pytest.mark.parametrize(("prompt", "message"), REFUSED)
def test_a_prompt_that_no_engine_takes_is_refused_with_the_reason(running_engine, prompt, message):
    async def scenario(engine):
        with pytest.raises(EngineRefused, match=message) as raised:
            await engine.generate(prompt, GREEDY)
        assert f"a prompt of {len(prompt)} tokens" in str(raised.value)
        assert await engine.alive()

    running_engine.run(scenario)


def test_an_adapter_that_is_not_there_is_refused(running_engine):
    async def scenario(engine):
        with pytest.raises(EngineRefused, match="none-such"):
            await engine.generate([1, 2, 3], GREEDY, adapter="none-such")

    running_engine.run(scenario)


def test_many_at_once_get_what_each_would_get_alone(running_engine):
    prompts = [[i + 1, 2 * i + 1, 3] for i in range(64)]

    async def scenario(engine):
        together = await asyncio.gather(*(engine.generate(prompt, GREEDY) for prompt in prompts))
        return together, [await engine.generate(prompt, GREEDY) for prompt in prompts[::16]]

    together, alone = running_engine.run(scenario)
    assert [done.token_ids for done in together[::16]] == [done.token_ids for done in alone]
    assert all(len(done.token_ids) == 12 for done in together)


def test_the_cache_can_be_emptied_and_fingerprints_stay(running_engine):
    async def scenario(engine):
        before = await engine.fingerprints()
        await engine.generate([1] * 40, GREEDY)
        await engine.reset_cache()
        return before, await engine.fingerprints()

    before, after = running_engine.run(scenario)
    assert before and before == after


def test_the_plain_openai_client_works(running_engine):
    import openai

    client = openai.OpenAI(base_url=f"{running_engine.url}/v1", api_key=running_engine.spec.api_key, max_retries=0)
    model = client.models.list().data[0].id
    done = client.completions.create(model=model, prompt="Hello", max_tokens=4, temperature=0.0)
    assert done.usage is not None and done.usage.prompt_tokens == 5
    messages = [{"role": "user", "content": "Hi"}]
    chat = client.chat.completions.create(model=model, messages=messages, max_tokens=4, temperature=0.0)
    assert chat.choices[0].message.role == "assistant"
    pieces = list(client.completions.create(model=model, prompt="Hello", max_tokens=4, temperature=0.0, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == done.choices[0].text
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="none-such", prompt="Hello")


def test_what_the_server_can_do_is_known(running_engine):
    known = running_engine.run(lambda engine: engine.capabilities())
    assert known.takes_tokens and known.reports_versions
    assert known.max_context == MAX_CONTEXT
    assert known.has("/pause") and known.has("/update_weights")


CONTROLS = {
    *("/collective_rpc", "/sleep", "/wake_up", "/pause", "/resume", "/reset_prefix_cache", "/update_weights"),
    *("/start_weight_update", "/finish_weight_update", "/init_weight_transfer_engine", "/update_weight_version"),
    *("/v1/completions", "/inference/v1/generate", "/v1/models"),
}


async def _answers(url, key):
    """The status that each listed route answers with, by method and path."""
    async with asyncio.timeout(SCENARIO_LIMIT), aiohttp.ClientSession() as session:
        headers = {"Authorization": f"Bearer {KEY}"}
        async with session.get(f"{url}/openapi.json", headers=headers) as listed:
            paths = (await listed.json())["paths"]
        found = {}
        for path, methods in paths.items():
            for method in methods:
                own = {"Authorization": f"Bearer {key}"} if key else {}
                async with session.request(method, url + path, headers=own, data=b"{}") as answer:
                    found[method.upper(), path] = answer.status
        async with session.get(f"{url}/openapi.json") as answer:
            found["GET", "/openapi.json"] = answer.status
        return found


@pytest.mark.parametrize("key", [None, "wrong", KEY[:-1]], ids=["none", "wrong", "shorter"])
def test_no_route_answers_without_the_key(running_engine, key):
    found = asyncio.run(_answers(running_engine.url, key))
    assert {path for _, path in found} >= CONTROLS
    open_to_all = {path: status for (_, path), status in found.items() if status != 401}
    assert open_to_all == {"/health": 200}
    made = running_engine.run(lambda engine: engine.generate(PROMPT, Sampling(max_tokens=2)))
    assert len(made.token_ids) == 2, "with the key it works"


def test_the_key_is_in_no_command_line_and_no_log(running_engine):
    server = psutil.Process(running_engine.process.pid)
    lines = [" ".join(process.cmdline()) for process in (server, *server.children(recursive=True))]
    assert not [line for line in lines if KEY in line]
    log = Path(running_engine.process.log_path)
    assert KEY not in log.read_text()
    assert log.stat().st_mode & 0o077 == 0
