import asyncio
import contextlib

import pytest

from roost.rollout.agents.chat import TurnInProgress
from roost.rollout.agents.chat_format import TemplateRefused
from roost.rollout.episode import NOT_GENERATED
from tests.rollout.agents.talk import KINDS, QWEN_TOKENIZER, Engine, assistant, ids, system, talk, tool, user
from tests.rollout.script import ran, settled


def whole(of, messages, **arguments):
    """A conversation as the template renders it, up to the policy's turn."""
    if of.chat_template is None:
        arguments["chat_template"] = (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}"
            "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}assistant: "
        )
    return of.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **arguments)


@pytest.mark.parametrize("kind", ["qwen", "thinking", "llama", "plain"])
@pytest.mark.parametrize("opening", [[user("ask")], [system("rules"), user(" ask ")]], ids=["user", "system"])
def test_a_conversation_goes_on_as_the_template_writes_it(kind, opening):
    of = KINDS[kind]
    engine = Engine("one", "two", "three", of=of)
    policy, transcript = talk(engine)

    async def run_episode():
        messages = list(opening)
        for more in ([user("and then")], [user("a"), user("b")], []):
            reply = await policy.chat(messages)
            messages += [assistant(reply.text), *more]
        return messages

    messages = ran(run_episode())
    assert engine.shown == [whole(of, messages[: len(opening) + n]) for n in (0, 2, 5)]
    assert engine.asked == [ids(shown, of) for shown in engine.shown], "which tokenised as a whole is the same here"
    assert len(transcript.sequences()) == 1
    made = transcript.tokens().token_ids[transcript.tokens().turns != NOT_GENERATED]
    assert of.decode(made) == of.eos_token.join(["one", "two", "three", ""]), "ends of turns are learnt, too"


def test_what_the_policy_made_is_never_tokenised_again():
    a_then_b = (*ids("a"), *ids("b"))
    assert ids("ab") != a_then_b, "the text has other tokens than the policy made"
    engine = Engine((*a_then_b, QWEN_TOKENIZER.eos_token_id), "done")
    policy, transcript = talk(engine)

    async def run_episode():
        reply = await policy.chat([user("x")])
        assert reply.text == "ab"
        await policy.chat([user("x"), assistant("ab"), user("y")])

    ran(run_episode())
    place = len(engine.asked[0])
    assert engine.asked[1][place : place + 2] == a_then_b
    assert engine.shown[1] == whole(QWEN_TOKENIZER, [user("x"), assistant("ab"), user("y")])
    assert [turn for turn in transcript.tokens().turns if turn != NOT_GENERATED] == [0] * 3 + [1] * 5


@pytest.mark.parametrize("kind", ["qwen", "llama", "plain"])
def test_a_turn_that_was_cut_is_ended_for_it(kind):
    of = KINDS[kind]
    engine = Engine(ids("ab", of), "done", of=of)
    policy, transcript = talk(engine)

    async def run_episode():
        reply = await policy.chat([user("x")], max_tokens=1)
        assert (reply.text, reply.is_cut) == ("ab", True)
        await policy.chat([user("x"), assistant("ab"), user("y")])

    ran(run_episode())
    assert engine.shown[1] == whole(of, [user("x"), assistant("ab"), user("y")])
    ended = len(engine.asked[0]) + len(ids("ab", of))
    tokens = transcript.tokens()
    assert (tokens.token_ids[ended], tokens.turns[ended]) == (of.eos_token_id, NOT_GENERATED)


def test_a_turn_that_ends_otherwise_is_ended_as_the_template_does():
    of = KINDS["plain"]
    made = (*ids("ab", of), of.convert_tokens_to_ids("<|im_end|>"))
    engine = Engine(made, "done", of=of)
    policy, _ = talk(engine)

    async def run_episode():
        await policy.chat([user("x")])
        await policy.chat([user("x"), assistant("ab"), user("y")])

    ran(run_episode())
    assert "assistant: ab<|im_end|><|endoftext|>\nuser: y\n" in engine.shown[1]


@pytest.mark.parametrize("kept", ["ab ", " ab", "ab"], ids=["blank after", "blank before", "as it was"])
def test_blanks_around_a_reply_are_no_other_conversation(kept):
    policy, transcript = talk(Engine("ab ", "done"))

    async def run_episode():
        await policy.chat([user("x")])
        await policy.chat([user("x"), assistant(kept), user("y")])

    ran(run_episode())
    assert len(transcript.sequences()) == 1


@pytest.mark.parametrize(
    ("second", "sequences"),
    [
        pytest.param([user("x"), assistant("one"), user("y")], 1, id="goes on"),
        pytest.param([user("x"), assistant("one")], 1, id="goes on with nothing new"),
        pytest.param([user("x"), assistant("changed"), user("y")], 2, id="another reply"),
        pytest.param([user("other"), assistant("one"), user("y")], 2, id="another beginning"),
        pytest.param([system("s"), user("x"), assistant("one"), user("y")], 2, id="a system message before"),
        pytest.param([user("x")], 2, id="the same again"),
        pytest.param([user("y")], 2, id="something else"),
    ],
)
def test_what_does_not_go_on_begins_a_sequence(second, sequences):
    engine = Engine("one", "two")
    policy, transcript = talk(engine)

    async def run_episode():
        await policy.chat([user("x")])
        await policy.chat(second)

    ran(run_episode())
    assert len(transcript.sequences()) == sequences
    assert engine.shown[1] == whole(QWEN_TOKENIZER, second)


def test_a_branch_begins_with_the_very_tokens_of_what_it_leaves():
    a_then_b = (*ids("a"), *ids("b"))
    engine = Engine((*a_then_b, QWEN_TOKENIZER.eos_token_id), "left", "right", "left again", "right again")
    policy, transcript = talk(engine)
    known = [user("x"), assistant("ab")]
    left, right = [*known, user("left?")], [*known, user("right?")]

    async def run_episode():
        for messages in (known[:1], left, right):
            await policy.chat(messages)
        await policy.chat([*left, assistant("left"), user("more")])
        await policy.chat([*right, assistant("right"), user("more")])

    ran(run_episode())
    common = len(engine.asked[0]) + 3
    assert engine.asked[1][:common] == engine.asked[2][:common]
    first, second = transcript.sequences()
    assert [sorted(set(each.turns.tolist())) for each in (first, second)] == [
        [NOT_GENERATED, 0, 1, 3],
        [NOT_GENERATED, 2, 4],
    ]
    assert engine.shown[4] == whole(QWEN_TOKENIZER, [*right, assistant("right"), user("more")])


def test_conversations_at_the_same_time():
    """Different ones go on side by side, also those that leave the same one; the same one twice is refused."""

    async def run_episode():
        gate = asyncio.Event()

        async def slowly():
            await gate.wait()
            return "later"

        engine = Engine("one", slowly, slowly)
        policy, transcript = talk(engine)
        known = [user("x"), assistant("one")]
        await policy.chat(known[:1])
        turns = [asyncio.create_task(policy.chat([*known, user(way)])) for way in ("left", "right")]
        await settled()
        with pytest.raises(TurnInProgress, match="wait for its reply"):
            await policy.chat([*known, user("left")])
        gate.set()
        await asyncio.gather(*turns)
        return len(transcript.sequences())

    assert ran(run_episode()) == 2


def test_a_turn_that_failed_may_be_asked_for_again():
    async def fail():
        raise OSError("lost")

    engine = Engine("one", fail, "two", "three")
    policy, transcript = talk(engine)
    messages = [user("x"), assistant("one"), user("y")]

    async def run_episode():
        await policy.chat(messages[:1])
        with pytest.raises(OSError):
            await policy.chat(messages)
        await policy.chat(messages)
        await policy.chat([*messages, assistant("two"), user("z")])

    ran(run_episode())
    assert engine.asked[1] == engine.asked[2]
    assert len(transcript.sequences()) == 1
    assert engine.shown[3] == whole(QWEN_TOKENIZER, [*messages, assistant("two"), user("z")])


THOUGHT = "<think>\nhm\n</think>\n\nyes"


@pytest.mark.parametrize(
    ("settings", "new", "sequences"),
    [
        pytest.param({}, user("y"), 2, id="left out by the template: shown and recorded as the template has it"),
        pytest.param({}, tool("y"), 1, id="not left out"),
        pytest.param({"keeps_reasoning": True}, user("y"), 1, id="kept all the same"),
    ],
)
def test_reasoning_of_earlier_turns(settings, new, sequences):
    of = KINDS["thinking"]
    engine = Engine(THOUGHT, "done", of=of)
    policy, transcript = talk(engine, **settings)

    async def run_episode():
        await policy.chat([user("x")])
        await policy.chat([user("x"), assistant(THOUGHT), new])

    ran(run_episode())
    assert len(transcript.sequences()) == sequences
    assert ("hm" in engine.shown[1]) == (sequences == 1)
    if sequences == 2:
        assert engine.shown[1] == whole(of, [user("x"), assistant(THOUGHT), new])


@pytest.mark.parametrize(("keeps", "sequences"), [(False, [1, 2]), (True, [1, 1])], ids=["as the template", "kept"])
def test_reasoning_that_the_template_begins(keeps, sequences):
    """The policy's turn begins in the middle of its reasoning: outputs of tools leave it there, a user does not."""
    of = KINDS["reasoning"]
    turns = ["hm\n</think>\n\nlook", "so\n</think>\n\ndone", "last"]
    engine = Engine(*turns, of=of)
    policy, transcript = talk(engine, keeps_reasoning=keeps)
    messages = [user("x"), assistant(turns[0]), tool("seen"), assistant(turns[1]), user("y")]

    async def run_episode():
        counts = []
        for count in (1, 3, 5):
            await policy.chat(messages[:count])
            counts.append(len(transcript.sequences()))
        return counts

    assert ran(run_episode())[1:] == sequences
    assert engine.shown[1] == whole(of, messages[:3])
    assert ("hm" in engine.shown[2], "so" in engine.shown[2]) == (keeps, keeps)
    assert engine.shown[2].endswith("done<|im_end|>\n<|im_start|>user\ny<|im_end|>\n<|im_start|>assistant\n<think>\n")


def test_a_template_that_prompts_turns_with_more_than_it_shows_of_them_later():
    engine = Engine("one", "two", of=KINDS["thinking"])
    policy, transcript = talk(engine, arguments={"enable_thinking": False})

    async def run_episode():
        await policy.chat([user("x")])
        await policy.chat([user("x"), assistant("one"), user("y")])

    ran(run_episode())
    assert len(transcript.sequences()) == 1
    turn = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    asked, answer = "<|im_start|>user\n{}<|im_end|>\n", "one<|im_end|>\n"
    assert engine.shown[1] == asked.format("x") + turn + answer + asked.format("y") + turn


def test_a_template_that_moves_what_was_shown_begins_a_sequence():
    of = KINDS["mistral"]
    messages = [system("s"), user("x"), assistant("one"), user("y")]
    engine = Engine("one", "two", of=of)
    policy, transcript = talk(engine)

    async def run_episode():
        await policy.chat(messages[:2])
        await policy.chat(messages)

    ran(run_episode())
    assert len(transcript.sequences()) == 2
    assert engine.shown == [whole(of, messages[:2]), whole(of, messages)]


@pytest.mark.parametrize(
    ("kind", "messages", "described"),
    [
        pytest.param("qwen", [], "at least one message", id="none"),
        pytest.param("qwen", ["hello"], "a mapping with role", id="no mapping"),
        pytest.param("qwen", [{"content": "x"}], "a mapping with role", id="nobody says it"),
        pytest.param("qwen", [user([{"type": "image_url"}])], "without an image", id="no picture"),
        pytest.param("mistral", [tool("x")], "only user and assistant", id="the template raises"),
        pytest.param("qwen", [user("x"), {"role": "robot", "content": "y"}], "leaves out .* robot", id="left out"),
    ],
)
def test_messages_that_cannot_be_shown(kind, messages, described):
    policy, transcript = talk(Engine(of=KINDS[kind]))
    with pytest.raises(ValueError, match=described):
        ran(policy.chat(messages))
    assert transcript.token_ids == ()


def test_a_template_that_hides_what_was_said_is_refused():
    of = KINDS["qwen"]
    hiding = "{% for m in messages %}{{ m.role }}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    engine = Engine("", "x", of=of)
    policy, _ = talk(engine, arguments={})
    policy.format._template = hiding

    async def run_episode():
        await policy.chat([user("x")])
        await policy.chat([user("x"), assistant(""), user("y")])

    with pytest.raises(TemplateRefused, match="0 times"):
        ran(run_episode())


def test_stand_ins_are_not_taken_for_what_people_write():
    messages = [user("policy-turn1."), assistant("policy-turn1. policy-turn-"), user("policy-turn1.")]
    engine = Engine(messages[1]["content"], "done")
    policy, _ = talk(engine)

    async def run_episode():
        await policy.chat(messages[:1])
        await policy.chat(messages)

    ran(run_episode())
    assert engine.shown[1] == whole(QWEN_TOKENIZER, messages)


@pytest.mark.parametrize(
    ("kind", "written", "shown"),
    [
        ("qwen", "ipython", "user"),
        ("llama", "ipython", "ipython"),
        ("plain", "ipython", "ipython"),
        ("qwen", "developer", "system"),
        ("plain", "developer", "developer"),
    ],
)
def test_messages_are_shown_under_a_role_that_the_template_has(kind, written, shown):
    of = KINDS[kind]
    engine = Engine("one", of=of)
    policy, _ = talk(engine)
    ran(policy.chat([user("x"), {"role": written, "content": "printed"}]))
    assert engine.shown[0] == whole(of, [user("x"), {"role": shown, "content": "printed"}])


@pytest.mark.parametrize(
    ("template", "described"),
    [
        pytest.param(
            "{% for m in messages %}{% if m.role != 'tool' %}{{ m.role + m.content }}{% endif %}{% endfor %}",
            "leaves out a message of the role tool",
            id="left out",
        ),
        pytest.param(
            "{% if messages[-1].role != 'tool' %}{{ raise_exception('no answer') }}{% endif %}"
            "{% for m in messages %}{{ m.role + m.content }}{% endfor %}",
            None,
            id="needed",
        ),
    ],
)
def test_what_tools_answered_is_shown(template, described):
    policy, _ = talk(Engine("one"))
    policy.format._template = template
    refused = pytest.raises(TemplateRefused, match=described) if described else contextlib.nullcontext()
    with refused:
        ran(policy.chat([user("x"), assistant("y"), tool("z")]))


TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {}}}]
CALL = '<tool_call>\n{"name": "find", "arguments": {"word": "sun"}}\n</tool_call>'


def test_calls_of_tools_are_known_again_in_the_form_of_clients():
    engine = Engine(CALL, "done", "without tools")
    policy, transcript = talk(engine)
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"word":"sun"}'}}
    messages = [user("x"), {"role": "assistant", "content": None, "tool_calls": [call]}, tool("yellow")]

    async def run_episode():
        await policy.chat(messages[:1], tools=TOOLS)
        await policy.chat(messages, tools=TOOLS)
        one = len(transcript.sequences())
        await policy.chat(messages)
        return one, len(transcript.sequences())

    assert ran(run_episode()) == (1, 2), "with other tools it is another conversation"
    assert engine.shown[1] == whole(QWEN_TOKENIZER, [user("x"), assistant(CALL), tool("yellow")], tools=TOOLS)


def test_a_reply_knows_its_prompt_and_its_log_probabilities():
    engine = Engine("one", "two")
    policy, _ = talk(engine)

    async def run_episode():
        first = await policy.chat([user("x")])
        await policy.chat([user("x"), assistant("one"), user("y")])
        return first

    first = ran(run_episode())
    assert first.prompt_ids == engine.asked[0]
    assert first.logprobs == (-0.5,) * 4
