"""Samples as people read them: every message, which of them the policy generated, and bounds on their size."""

import asyncio
import json

import pytest

from roost.engines.protocol import ContextFull, Finish
from roost.rollout.agents.chat import ChatPolicy
from roost.rollout.agents.chat_format import parse_reply
from roost.rollout.episode import Episode, EpisodeReward, Group, Task, Transcript, token_numbers
from roost.trainer.records import samples
from roost.trainer.records.samples import conversation, samples_of
from tests.rollout.script import completion
from tests.trainer.example_groups import example_group


def letters(token_ids, has_special):
    return "".join(chr(one) for one in token_ids if has_special or one != ord("$"))


class Letters:
    """A chat format in which a token is a character."""

    parse = staticmethod(parse_reply)

    def opening(self, messages, tools=None):
        return tuple(map(ord, self._written(messages)))

    def continuation(self, known, generated, ending, new, tools=None):
        return tuple(map(ord, self._written(new)))

    def text(self, token_ids):
        return letters(token_ids, False)

    def _written(self, messages):
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"


def engine(*replies):
    """Draws these texts, one for each turn."""
    left = list(replies)

    async def sample(token_ids, turn, max_tokens):
        scripted = left.pop(0)
        if scripted is None:
            raise ContextFull("no room")
        text, version, finish = scripted
        return completion(tuple(map(ord, text)), version, finish)

    return sample


def episode_of(transcript, **score):
    return Episode(transcript.sequences(), EpisodeReward(**{"reward": 1.0, **score}), 1.0)


def sample_of(episode, version=5):
    (found,) = samples_of([Group(3, Task("add", tag="math"), version, (episode,))], "train", 6, version, letters)
    return found


def talked(*turns, **score):
    """An episode of a chat agent, with an observation after each turn but the last."""

    async def run_episode():
        transcript = Transcript(engine(*turns))
        policy = ChatPolicy(transcript, Letters())
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2?"}]
        for number in range(len(turns)):
            try:
                reply = await policy.chat(messages)
            except ContextFull:
                break
            messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": f"seen {number}"}]
        return episode_of(transcript, **score)

    return asyncio.run(run_episode())


def test_a_conversation_has_every_message_and_what_was_generated():
    sample = sample_of(talked(("hm$", 4, Finish.STOP), ("four", 5, Finish.LENGTH), shown="", answer="four"))
    messages = [(one["role"], one["content"], one["generated"]) for one in sample["messages"]]
    assert messages == [
        ("system", "be brief", False),
        ("user", "2+2?", False),
        ("assistant", "hm", True),
        ("user", "seen 0", False),
        ("assistant", "four", True),
    ]
    assert sample["messages"][2] | {"content": ""} == {
        "role": "assistant", "content": "", "generated": True, "turn": 0, "finish": "stop", "tokens": 3,
        "versions": [4, 4],
    }  # fmt: skip
    assert (sample["finish"], sample["truncated"], sample["versions"], sample["staleness"]) == (
        "length",
        True,
        [4, 5],
        1,
    )
    assert (sample["group"], sample["tag"], sample["tokens"]) == (3, "math", 7)
    assert sample["prompt_tokens"] == len("<system>be brief<user>2+2?<assistant>")


@pytest.mark.parametrize(
    ("score", "shown"),
    [
        pytest.param({"shown": "> print(4)"}, "> print(4)", id="what the environment shows"),
        pytest.param({"answer": "the answer"}, "the answer", id="nothing shown"),
        pytest.param({}, "no code here", id="neither: what the policy said last"),
    ],
)
def test_a_completion_is_never_empty_where_the_policy_said_something(score, shown):
    assert sample_of(talked(("no code here", 0, Finish.STOP), **score))["completion"] == shown


def test_a_full_context_is_a_truncation():
    sample = sample_of(talked(("hm", 0, Finish.STOP), None))
    assert sample["truncated"] and sample["finish"] == "length"
    assert sample["messages"][-1] | {"turn": 1, "content": "", "tokens": 0} == sample["messages"][-1]


def test_scenarios_without_messages_show_the_text_of_their_tokens():
    async def run_episode():
        transcript = Transcript(engine(("7$", 0, Finish.STOP), ("8$", 0, Finish.STOP)))
        transcript.give(list(map(ord, "$3+4=")))
        await transcript.take()
        other = transcript.branch()
        other.give(list(map(ord, "4+4=")))
        await other.take()
        return episode_of(transcript)

    messages = [
        (one["role"], one["content"], one["sequence"]) for one in conversation(asyncio.run(run_episode()), letters)
    ]
    assert messages == [("prompt", "$3+4=", 0), ("assistant", "7", 0), ("prompt", "4+4=", 1), ("assistant", "8", 1)]


def test_episodes_that_were_stored_without_parts_are_told_by_turns():
    (sample,) = samples_of([example_group(0, [1.0])], "train", 1, 0, token_numbers)
    assert [(one["role"], one["content"]) for one in sample["messages"]] == [("prompt", "1 2"), ("assistant", "100")]
    assert sample["truncated"] is False


def test_a_sample_has_a_bounded_size():
    turns = [("x" * 3_000, 0, Finish.STOP)] * 150
    sample = sample_of(talked(*turns))
    assert len(sample["messages"]) == samples.MOST_MESSAGES + 1
    assert any("messages omitted" in one["content"] for one in sample["messages"])
    assert len(json.dumps(sample)) < 2 * samples.MOST_OF_SAMPLE
