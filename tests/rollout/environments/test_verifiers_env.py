"""Rollouts of verifiers as episodes; those that need the library run where it is installed."""

import importlib.util
import string
import sys
from types import SimpleNamespace

import pytest

from roost.rollout.environments.verifiers_env import VerifiersEnvironments, VerifiersTasks, metrics_of, reward_of
from roost.rollout.episode import Split, Task, Transcript
from tests.rollout.script import completion, ran

IS_INSTALLED = importlib.util.find_spec("verifiers") is not None
needs_verifiers = pytest.mark.skipif(not IS_INSTALLED, reason="verifiers is not installed")
AGENT = {"_target_": "roost.rollout.environments.verifiers_env.VerifiersAgent"}
SEAT = {"runtime": {"type": "subprocess"}}
SUMS = '''
import httpx
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult
from tests.limits import HANG_S

__all__ = ["SumsTaskset", "SumsHarness"]


class SumsData(vf.TaskData):
    answer: str


class SumsTask(vf.Task[SumsData]):
    @vf.reward
    async def is_right(self, trace):
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def length(self, trace):
        return float(len(trace.last_reply))


class SumsTaskset(vf.Taskset[SumsTask, vf.TasksetConfig]):
    def load(self):
        for left in range(3):
            yield SumsTask(SumsData(name=f"{left}+1", prompt=f"{left}+1=", answer=str(left + 1)), self.config.task)


class SumsHarness(vf.Harness[vf.HarnessConfig]):
    """Asks once, without a program of its own."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        _, prompt = self.resolve_prompt(data)
        body = {"model": ctx.model, "messages": [{"role": "user", "content": prompt}]}
        async with httpx.AsyncClient(timeout=HANG_S, trust_env=False) as client:
            url = f"{endpoint}/chat/completions"
            answer = await client.post(url, json=body, headers={"authorization": f"Bearer {secret}"})
        return ProgramResult(0 if answer.is_success else 1, "", answer.text)
'''


def episode(*traces, ok=True, errors=()):
    return SimpleNamespace(ok=ok, errors=list(errors), traces=list(traces))


def trace(reward=0.0, is_scored=True, metrics=None, error=None, rewards=None, trainable=True):
    return SimpleNamespace(
        reward=reward,
        rewards=rewards or ({"r": reward} if is_scored else {}),
        metrics=metrics or {},
        last_error=error,
        agent=SimpleNamespace(trainable=trainable),
    )


@pytest.mark.parametrize(
    ("found", "reward"),
    [
        pytest.param(episode(trace(0.5)), 0.5, id="one trace"),
        pytest.param(episode(trace(1.0), trace(0.0)), 0.5, id="two traces"),
        pytest.param(episode(trace(1.0), trace(is_scored=False)), 1.0, id="a judge that is not scored"),
        pytest.param(episode(trace(1.0), trace(rewards={"r": None})), 1.0, id="one whose scoring did not run"),
        pytest.param(episode(trace(1.0), trace(0.0, trainable=False)), 1.0, id="a judge that does not learn"),
    ],
)
def test_the_reward_is_that_of_scored_traces(found, reward):
    assert reward_of(found) == reward


@pytest.mark.parametrize(
    ("found", "described"),
    [
        pytest.param(episode(), "scored none of 0 traces", id="no trace"),
        pytest.param(episode(trace(is_scored=False)), "scored none of 1 traces", id="nothing scored"),
        pytest.param(episode(trace(rewards={"r": None})), "scored none of 1 traces", id="scoring did not run"),
        pytest.param(episode(trace(1.0, trainable=False)), "none of 0 traces of the policy", id="only a judge"),
        pytest.param(
            episode(trace(error=SimpleNamespace(type="HarnessError", message="exit 1")), ok=False),
            "HarnessError: exit 1",
            id="a trace that failed",
        ),
        pytest.param(episode(ok=False), "reports no error", id="no reason"),
    ],
)
def test_a_rollout_that_failed_has_no_score(found, described):
    with pytest.raises(RuntimeError, match=described):
        reward_of(found)


def test_what_else_was_measured_is_kept():
    assert metrics_of(episode(trace(metrics={"length": 2, "none": None}))) == {"length": 2.0}


@pytest.mark.skipif(IS_INSTALLED, reason="verifiers is installed")
def test_that_the_library_is_missing_is_told_with_the_remedy():
    async def run():
        environment = await VerifiersEnvironments("sums").open()
        await environment.reset(Task("0", {"index": 0}))

    with pytest.raises(ImportError, match="pip install 'verifiers"):
        ran(run())
    with pytest.raises(ImportError, match="pip install 'verifiers"):
        VerifiersTasks("sums").size(Split.TRAIN)


@pytest.fixture
def sums(tmp_path, monkeypatch):
    """A package of verifiers' kind: a taskset, and the harness that it brings."""
    (tmp_path / "roost_sums.py").write_text(SUMS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "roost-sums"
    sys.modules.pop("roost_sums", None)


def characters():
    """A tokenizer with a token for every character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [*string.printable, "<end>"]
    made = Tokenizer(models.WordLevel({name: at for at, name in enumerate(names)}, unk_token="<end>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), behavior="isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


@needs_verifiers
@pytest.mark.parametrize(
    ("reported", "reward"),
    [pytest.param("2", 1.0, id="right"), pytest.param("9", 0.0, id="wrong")],
)
def test_verifiers_plays_against_the_policy_and_scores_it(sums, reported, reward):
    from roost.rollout.agents.scenario import AgentScenario

    tokenizer = characters()
    shown = []

    async def sample(token_ids, turn, max_tokens):
        shown.append(tokenizer.decode(token_ids))
        return completion([*tokenizer(reported).input_ids, tokenizer.eos_token_id])

    async def run():
        environments = VerifiersEnvironments(sums, agent=SEAT)
        scenario = AgentScenario(tokenizer, VerifiersTasks(sums, evaluation=1), AGENT, environments)
        assert (scenario.size(Split.TRAIN), scenario.size(Split.EVALUATION)) == (2, 1)
        assert scenario.task(Split.EVALUATION, 0).name == "2+1"
        transcript = Transcript(sample)
        score = await scenario.run_episode(scenario.task(Split.TRAIN, 1), transcript)
        await scenario.close()
        return score, transcript.turns

    score, turns = ran(run())
    assert (score.reward, turns, score.turn_rewards) == (reward, 1, ())
    assert "1+1=" in shown[0]
