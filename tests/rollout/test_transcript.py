import asyncio
from dataclasses import replace

import numpy as np
import pytest

from roost.engines.protocol import Completion, ContextFull, Finish, SamplingMasks, VersionSpan
from roost.rollout.episode import NOT_GENERATED, Transcript
from tests.rollout.script import completion, ran


def drawing(*completions):
    """Draws these one after the other, and notes what was asked."""
    left, asked = list(completions), []

    async def sample(token_ids, turn, max_tokens):
        asked.append((token_ids, turn, max_tokens))
        return left.pop(0)

    return sample, asked


def test_turns_observations_and_versions_are_kept_token_by_token():
    first = Completion((11, 12, 13), (-0.1, -0.2, -0.3), Finish.STOP, (VersionSpan(4, 0, 1), VersionSpan(5, 1, 3)))
    sample, asked = drawing(first, completion((21,), version=5, finish=Finish.LENGTH))

    async def run_episode():
        transcript = Transcript(sample)
        transcript.give([1, 2])
        assert await transcript.take() == (11, 12, 13)
        assert transcript.finish is Finish.STOP
        transcript.give([3])
        assert await transcript.take(max_tokens=1) == (21,)
        return transcript

    transcript = ran(run_episode())
    tokens = transcript.tokens()
    assert tokens.token_ids.tolist() == [1, 2, 11, 12, 13, 3, 21] == list(transcript.token_ids)
    assert tokens.turns.tolist() == [NOT_GENERATED, NOT_GENERATED, 0, 0, 0, NOT_GENERATED, 1]
    assert tokens.versions.tolist() == [NOT_GENERATED, NOT_GENERATED, 4, 5, 5, NOT_GENERATED, 5]
    assert tokens.logprobs.tolist() == pytest.approx([0, 0, -0.1, -0.2, -0.3, 0, -0.5])
    assert tokens.completion_versions.tolist() == [4, 5, 5, 5]
    assert transcript.finish is Finish.LENGTH
    # The second turn is asked for with the very ids of the first, which nobody has tokenised again.
    assert asked == [((1, 2), 0, None), ((1, 2, 11, 12, 13, 3), 1, 1)]


def test_experts_of_several_turns_are_those_that_tokens_were_computed_with():
    first = np.arange(1, 5, dtype=np.uint8).reshape(4, 1, 1)  # of two prompt tokens and two of three generated
    second = np.arange(11, 18, dtype=np.uint8).reshape(7, 1, 1)  # of all before the last: computed once more
    turns = (
        replace(completion((11, 12, 13)), routed_experts=first),
        replace(completion((21, 22)), routed_experts=second),
        replace(completion((23,)), routed_experts=second),
    )
    sample, _ = drawing(*turns)

    async def run_episode():
        transcript = Transcript(sample)
        transcript.give([1, 2])
        await transcript.take()
        transcript.give([3])
        start = len(transcript.token_ids)
        await transcript.take()
        transcript.take_back(start)
        await transcript.take()
        transcript.give([4])
        return transcript

    tokens = ran(run_episode()).tokens()
    assert tokens.token_ids.tolist() == [1, 2, 11, 12, 13, 3, 23, 4]
    assert tokens.routed_experts.flatten().tolist() == [1, 2, 3, 4, 15, 16, 17, 255]


def test_sampling_masks_are_kept_token_by_token():
    turn = replace(completion((11, 12, 13)), sampling_mask=SamplingMasks.of([(11, 4), (), (13, 8, 9)]))
    sample, _ = drawing(turn, completion((21, 22)))

    async def run_episode():
        transcript = Transcript(sample)
        transcript.give([1, 2])
        await transcript.take()
        start = len(transcript.token_ids)
        await transcript.take()
        transcript.take_back(start)
        return transcript

    transcript = ran(run_episode())
    tokens = transcript.tokens()
    assert (tokens.mask_sizes.tolist(), tokens.mask_ids.tolist()) == ([0, 0, 2, 0, 3], [11, 4, 13, 8, 9])
    transcript.leave_out(2, 2)
    assert transcript.tokens().mask_sizes.tolist() == [0, 0, 0, 0, 3]
    assert transcript.branch().tokens().mask_ids is None  # nothing was requested for it


def test_a_turn_for_which_there_is_no_room_ends_for_its_length():
    async def sample(token_ids, turn, max_tokens):
        if turn:
            raise ContextFull("the context length is 3")
        return completion((5,))

    async def run_episode():
        transcript = Transcript(sample)
        transcript.give([1])
        await transcript.take()
        transcript.give([2])
        with pytest.raises(ContextFull):
            await transcript.take()
        return transcript

    transcript = ran(run_episode())
    assert transcript.finish is Finish.LENGTH
    assert transcript.token_ids == (1, 5, 2)


def test_a_turn_without_tokens_is_a_turn():
    sample, asked = drawing(completion(()), completion((5,)))

    async def run_episode():
        transcript = Transcript(sample)
        transcript.give([1])
        assert await transcript.take() == ()
        await transcript.take()
        return transcript.tokens()

    assert ran(run_episode()).turns.tolist() == [NOT_GENERATED, 1]
    assert [turn for _, turn, _ in asked] == [0, 1]


@pytest.mark.parametrize(
    "versions",
    [
        pytest.param((), id="none"),
        pytest.param((VersionSpan(0, 0, 1),), id="too few"),
        pytest.param((VersionSpan(0, 0, 3),), id="too many"),
    ],
)
def test_tokens_whose_version_is_not_told_are_refused(versions):
    sample, _ = drawing(Completion((8, 9), (0.0, 0.0), Finish.STOP, versions))
    transcript = Transcript(sample)
    transcript.give([1])
    with pytest.raises(ValueError, match="do not cover 2 tokens"):
        ran(transcript.take())


def test_a_policy_that_was_shown_nothing_has_no_turn():
    with pytest.raises(ValueError, match=r"give\(\) a prompt"):
        ran(Transcript(drawing()[0]).take())


def test_an_episode_that_is_over_draws_nothing_more():
    sample, asked = drawing(completion((8,)))
    transcript = Transcript(sample)
    transcript.give([1])
    transcript.close()
    with pytest.raises(asyncio.CancelledError, match="is over"):
        ran(transcript.take())
    assert not asked


@pytest.mark.parametrize("meanwhile", ["give", "take"])
def test_a_turn_that_the_engine_saw_otherwise_is_refused(meanwhile):
    async def run_episode():
        gate = asyncio.Event()

        async def sample(token_ids, turn, max_tokens):
            await gate.wait()
            return completion((8,))

        transcript = Transcript(sample)
        transcript.give([1])
        turn = asyncio.create_task(transcript.take())
        await asyncio.sleep(0)
        other = asyncio.create_task(transcript.take()) if meanwhile == "take" else transcript.give([2])
        await asyncio.sleep(0)
        gate.set()
        return await asyncio.gather(turn, *([other] if other else []), return_exceptions=True)

    refused = [one for one in ran(run_episode()) if isinstance(one, RuntimeError)]
    assert [str(one) for one in refused] == ["tokens were added during a turn; wait for one turn before the next"]


def test_branches_are_sequences_of_one_episode_whose_turns_are_numbered_through():
    sample, asked = drawing(completion((11,)), completion((21,)), completion((12,)))

    async def run_episode():
        transcript = Transcript(sample)
        transcript.give([1])
        await transcript.take()
        other = transcript.branch()
        other.give([2])
        await other.take()
        other.branch().give([3])
        await transcript.take()
        return transcript

    transcript = ran(run_episode())
    assert [tokens.token_ids.tolist() for tokens in transcript.sequences()] == [[1, 11, 12], [2, 21]]
    assert [tokens.turns.tolist() for tokens in transcript.sequences()] == [[NOT_GENERATED, 0, 2], [NOT_GENERATED, 1]]
    assert asked == [((1,), 0, None), ((2,), 1, None), ((1, 11), 2, None)]
    assert transcript.turns == 3


def test_an_episode_in_which_the_policy_made_nothing_has_the_sequence_it_was_shown():
    transcript = Transcript(drawing()[0])
    transcript.branch().give([2])
    transcript.give([1])
    assert [tokens.token_ids.tolist() for tokens in transcript.sequences()] == [[1]]


def test_no_branch_of_an_episode_that_is_over_draws():
    async def run_episode():
        transcript = Transcript(drawing(completion((11,)))[0])
        other = transcript.branch()
        other.give([2])
        transcript.close()
        await other.take()

    with pytest.raises(asyncio.CancelledError, match="over"):
        ran(run_episode())


def test_room_for_the_response_is_shared_by_the_sequences_of_an_episode():
    sample, asked = drawing(completion((5, 6, 7, 8)), completion((9,)))

    async def run_episode():
        transcript = Transcript(sample)
        transcript.max_response = 10
        transcript.give([1, 2])
        await transcript.take()
        other = transcript.branch()
        other.give([1, 2, 5, 6, 7, 8])
        await other.take()

    ran(run_episode())
    assert [limit for _, _, limit in asked] == [10, 6]
