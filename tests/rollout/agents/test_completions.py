"""Texts that the policy goes on with: what it made stays the very tokens that it made."""

import pytest

from roost.rollout.agents.recording import TextPolicy
from tests.rollout.agents.talk import QWEN_TOKENIZER, Engine, ids, talk
from tests.rollout.script import ran

EOS = QWEN_TOKENIZER.eos_token_id
A_THEN_B = (*ids("a"), *ids("b"))  # not the token of `ab`


def asked(says, *prompts):
    """Prompts of an engine, one after another, and the number of sequences."""
    engine = Engine(*says)
    policy, transcript = talk(engine)
    texts = TextPolicy(policy)

    async def run_episode():
        for prompt in prompts:
            await texts.complete(prompt)

    ran(run_episode())
    return engine.asked, len(transcript.sequences())


@pytest.mark.parametrize(
    ("first", "prompt", "shown", "sequences"),
    [
        pytest.param(
            (*A_THEN_B, EOS),
            "Say:ab<|im_end|>more",
            (*ids("Say:"), *A_THEN_B, EOS, *ids("more")),
            1,
            id="after its end",
        ),
        pytest.param(
            (*A_THEN_B, EOS), "Say:abmore", (*ids("Say:"), *A_THEN_B, *ids("more")), 2, id="as if it had not ended"
        ),
        pytest.param(A_THEN_B, "Say:ab", (*ids("Say:"), *A_THEN_B), 1, id="after it was cut"),
        pytest.param((EOS,), "Say:", ids("Say:"), 2, id="again, as it said nothing"),
        pytest.param((*A_THEN_B, EOS), "Say:", ids("Say:"), 2, id="again"),
        pytest.param((*A_THEN_B, EOS), "Other:", ids("Other:"), 2, id="another"),
        pytest.param(
            (*A_THEN_B, EOS),
            [*ids("Say:"), *A_THEN_B, EOS, 5],
            (*ids("Say:"), *A_THEN_B, EOS, 5),
            1,
            id="by tokens",
        ),
    ],
)
def test_the_policy_is_shown_what_was_asked_in_its_own_tokens(first, prompt, shown, sequences):
    assert asked([first, "end"], "Say:", prompt) == ([ids("Say:"), tuple(shown)], sequences)


def test_a_turn_that_failed_may_be_asked_for_again():
    async def lost():
        raise ConnectionError("lost")

    engine = Engine((*A_THEN_B, EOS), lost, "end")
    policy, transcript = talk(engine)
    texts = TextPolicy(policy)

    async def run_episode():
        await texts.complete("Say:")
        with pytest.raises(ConnectionError):
            await texts.complete("Say:ab<|im_end|>more")
        await texts.complete("Say:ab<|im_end|>more")

    ran(run_episode())
    assert engine.asked[1] == engine.asked[2] == (*ids("Say:"), *A_THEN_B, EOS, *ids("more"))
    assert len(transcript.sequences()) == 1
