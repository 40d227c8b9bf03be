from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from roost.config.data import Teacher
from roost.config.train import (
    AdvantageEstimator,
    AdvantageLevel,
    AdvantageSettings,
    KlEstimator,
    RewardScope,
    Whitening,
)
from roost.learner.sample import predicted
from roost.rollout.episode import NOT_GENERATED, Episode, EpisodeReward, Task, Tokens
from roost.trainer.batch import (
    batch_of,
    continuations,
    mean_kl,
    minibatches,
    staleness_of,
    taught_by,
    unmasked,
    with_advantages,
    with_scores,
    with_teachers,
    with_values,
)
from roost.trainer.metrics import mask_metrics
from tests.trainer.example_groups import example_episode, example_group

SPREAD = (2.8 / 4) ** 0.5 + 1e-6  # of the five rewards below


def advantage_of(sample):
    """The one number that all its tokens have."""
    assert len(set(sample.advantages.tolist())) == 1
    return float(sample.advantages[0])


def test_every_finished_episode_is_a_sample_with_what_the_engine_said():
    batch = batch_of([example_group(4, [1.0, 0.0], versions=(0, 0)), example_group(9, [0.5])])
    assert (batch.rewards, batch.groups) == ((1.0, 0.0, 0.5), (4, 4, 9))
    assert [sample.token_ids.tolist() for sample in batch.samples] == [[1, 2, 500, 501], [1, 2, 510, 511], [1, 2, 1000]]
    assert batch.samples[0].turns.tolist() == [-1, -1, 0, 0]
    assert batch.samples[0].logprobs.tolist() == [0, 0, -1, -2]


OLDER, POLICY = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.1, 0.2, 0.3, 0.4])  # of four tokens; the reference is even


@pytest.mark.parametrize(
    ("version", "weights"),
    [pytest.param(3, OLDER, id="fresh"), pytest.param(4, POLICY, id="stale"), pytest.param(None, OLDER, id="unknown")],
)
def test_the_kl_of_the_penalty_is_that_of_the_policy(version, weights):
    """Ten samples of one token each, as often as the older policy of version 3 samples it."""
    drawn = np.repeat(np.arange(4), [4, 3, 2, 1])
    scored = batch_of([example_group(0, [0.0] * 10, versions=(3,))])
    older, policy, reference = (
        [np.full(3, np.log(each[token]), np.float32) for token in drawn] for each in (OLDER, POLICY, [0.25] * 4)
    )
    engine = [replace(sample, logprobs=each) for sample, each in zip(scored.samples, older, strict=True)]
    batch = with_scores(replace(scored, samples=tuple(engine)), old=policy, reference=reference)
    found = mean_kl(batch, AdvantageSettings(kl_penalty_coef=0.1), version)
    assert found == pytest.approx(np.sum(weights * np.log(POLICY / 0.25)), abs=1e-6)
    assert (found > 0) == (weights is POLICY), "without weights it is no KL"


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        pytest.param(AdvantageEstimator.LEAVE_ONE_OUT, [1.0, -1.0, 1.5, 0.0, -1.5], id="leave one out"),
        pytest.param(AdvantageEstimator.GROUP_MEAN, [0.5, -0.5, 1.0, 0.0, -1.0], id="group mean"),
        pytest.param(AdvantageEstimator.GRPO, [0.5**0.5, -(0.5**0.5), 1.0, 0.0, -1.0], id="grpo"),
        pytest.param(AdvantageEstimator.REINFORCE_BASELINE, [0.5, -0.5, 1.0, 0.0, -1.0], id="baseline, not whitened"),
        pytest.param(AdvantageEstimator.REWARD, [1.0, 0.0, 2.0, 1.0, 0.0], id="reward"),
        pytest.param(AdvantageEstimator.REINFORCE, [x / SPREAD for x in (0.2, -0.8, 1.2, 0.2, -0.8)], id="reinforce++"),
    ],
)
def test_each_estimator_reaches_the_samples(estimator, expected):
    batch = batch_of([example_group(0, [1.0, 0.0]), example_group(1, [2.0, 1.0, 0.0])])
    selected, chosen, alone = with_advantages(batch, AdvantageSettings(estimator))
    assert [advantage_of(sample) for sample in selected.samples] == pytest.approx(expected, abs=2e-6)
    assert (len(chosen.kept), chosen.dropped, alone) == (5, 0, 0)
    assert (selected.rewards, selected.groups) == (batch.rewards, batch.groups)


@pytest.mark.parametrize(
    ("settings", "alone"),
    [
        ({"advantage_estimator": AdvantageEstimator.LEAVE_ONE_OUT}, 1),
        ({"advantage_estimator": AdvantageEstimator.GRPO}, 1),
        ({"advantage_estimator": AdvantageEstimator.GROUP_MEAN}, 1),
        ({"advantage_estimator": AdvantageEstimator.REWARD, "reward_baseline": RewardScope.GROUP}, 1),
        ({"advantage_estimator": AdvantageEstimator.REWARD}, 0),
        ({"advantage_estimator": AdvantageEstimator.REINFORCE}, 0),
    ],
)
def test_an_episode_that_is_alone_is_counted_where_groups_are_compared(settings, alone):
    batch = batch_of([example_group(0, [1.0, 0.0]), example_group(1, [2.0])])
    selected, _, counted = with_advantages(batch, AdvantageSettings(**settings))
    assert counted == alone
    assert (advantage_of(selected.samples[2]) == 0.0) == bool(alone)


def test_whitening_counts_every_token_that_the_policy_made():
    groups = [example_group(0, [1.0], versions=(0,)), example_group(1, [0.0], versions=(0, 0, 0))]
    # a token of 1 and three of 0: mean 1/4, squares 3/4
    settings = AdvantageSettings(AdvantageEstimator.REWARD, whiten_advantages=Whitening.TOKENS)
    selected, _, _ = with_advantages(batch_of(groups), settings)
    assert [advantage_of(sample) for sample in selected.samples] == pytest.approx([1.5, -0.5])
    biased = replace(settings, whiten_advantages=Whitening.TOKENS_BIASED, advantage_clip=1.5)
    selected, _, _ = with_advantages(batch_of(groups), biased)
    assert [advantage_of(sample) for sample in selected.samples] == pytest.approx([1.5, -(1 / 3**0.5)], abs=1e-4)
    plain, _, _ = with_advantages(batch_of(groups), replace(settings, whiten_advantages=Whitening.NONE))
    assert [advantage_of(sample) for sample in plain.samples] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        pytest.param({"min_abs_advantage": 0.9}, [0, 1, 2, 4], id="what is too near to zero"),
        pytest.param({"positive_advantages_only": True}, [0, 2], id="what is not positive"),
        pytest.param({"min_abs_advantage": 1.2, "positive_advantages_only": True}, [2], id="both"),
        pytest.param({"min_abs_advantage": 99.0}, [], id="everything"),
    ],
)
def test_what_is_left_out(settings, kept):
    batch = batch_of([example_group(0, [1.0, 0.0]), example_group(1, [2.0, 1.0, 0.0])])
    selected, chosen, _ = with_advantages(batch, AdvantageSettings(**settings))
    assert [sample.token_ids.tolist() for sample in selected.samples] == [
        batch.samples[index].token_ids.tolist() for index in kept
    ]
    assert selected.rewards == tuple(batch.rewards[index] for index in kept)
    assert selected.groups == tuple(batch.groups[index] for index in kept)
    assert len(chosen.kept) + chosen.dropped == len(batch)


def test_samples_that_are_alone_are_told():
    batch = batch_of([example_group(0, [1.0]), example_group(1, [1.0, 0.0])])
    assert with_advantages(batch, AdvantageSettings())[2] == 1
    assert with_advantages(batch, AdvantageSettings(AdvantageEstimator.REINFORCE))[2] == 0


def test_a_critic_s_values_become_advantages_and_returns():
    batch = batch_of([example_group(0, [1.0, 0.0], versions=(0, 0))])
    values = [np.array([9, 9, 0.5, 0.75], np.float32), np.array([9, 9, 0.5, 0.25], np.float32)]
    settings = AdvantageSettings(
        AdvantageEstimator.GAE, whiten_advantages=Whitening.TOKENS_BIASED, gamma=1.0, gae_lambda=0.0
    )
    selected, _, _ = with_advantages(with_values(batch, values), settings)
    raw = np.array([0.25, 0.25, -0.25, -0.25])  # each value less the one after it, and the outcome less the last
    white = (raw - raw.mean()) / (raw.std() + 1e-5)
    found = [sample.advantages.tolist() for sample in selected.samples]
    assert found == [pytest.approx([0, 0, *white[:2]]), pytest.approx([0, 0, *white[2:]])]
    as_it_is = replace(settings, whiten_advantages=Whitening.NONE, advantage_clip=0.125)
    selected, _, _ = with_advantages(with_values(batch, values), as_it_is)
    assert [sample.advantages.tolist() for sample in selected.samples] == [[0, 0, 0.125, 0.125], [0, 0, -0.125, -0.125]]
    assert [sample.returns.tolist() for sample in selected.samples] == [[0, 0, 0.75, 1.0], [0, 0, 0.25, 0.0]]
    assert selected.samples[0].values is values[0]


def test_gae_without_values_says_what_is_missing():
    with pytest.raises(ValueError, match="give the job a critic"):
        with_advantages(batch_of([example_group(0, [1.0])]), AdvantageSettings(AdvantageEstimator.GAE))


def test_a_sample_in_which_the_policy_made_nothing_is_no_trouble():
    batch = batch_of([example_group(0, [1.0, 0.0], versions=())])
    for estimator in set(AdvantageEstimator) - {AdvantageEstimator.GAE}:
        assert len(with_advantages(batch, AdvantageSettings(estimator))[0]) == 2
    scored = with_values(batch, [np.zeros(2, np.float32)] * 2)
    assert len(with_advantages(scored, AdvantageSettings(AdvantageEstimator.GAE))[0]) == 2


def test_scores_go_to_the_samples_they_are_of():
    batch = batch_of([example_group(0, [1.0, 0.0])])
    old, reference = [[np.full(3, value, np.float32) for value in pair] for pair in ((1, 2), (3, 4))]
    scored = with_scores(batch, old, reference)
    assert [sample.old_logprobs[0] for sample in scored.samples] == [1, 2]
    assert [sample.reference_logprobs[0] for sample in scored.samples] == [3, 4]
    assert scored.samples[0].values is None
    assert with_scores(batch).samples == batch.samples


@given(st.integers(0, 40), st.integers(1, 12), st.integers(0, 2**40))
def test_minibatches_have_every_sample_once_and_are_even(size, count, seed):
    batch = batch_of([example_group(0, [float(index) for index in range(size)])])
    parts = minibatches(batch, count, seed)
    found = [id(sample) for part in parts for sample in part]
    assert sorted(found) == sorted(id(sample) for sample in batch.samples)
    assert len(parts) == max(1, min(count, size))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    again = minibatches(batch, count, seed)
    assert [[id(sample) for sample in part] for part in again] == [[id(sample) for sample in part] for part in parts]


def test_samples_keep_their_order_if_they_are_not_shuffled():
    batch = batch_of([example_group(0, [1.0, 0.0, 1.0, 0.0])])
    parts = minibatches(batch, 2, 5, shuffles=False)
    assert [sample for part in parts for sample in part] == list(batch.samples)
    assert [len(part) for part in parts] == [2, 2]


def test_another_seed_makes_other_minibatches():
    batch = batch_of([example_group(0, [0.0] * 16)])
    made = {tuple(id(sample) for part in minibatches(batch, 4, seed) for sample in part) for seed in range(5)}
    assert len(made) == 5


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        pytest.param([(5, 5)], [0, 0], id="the learner's own"),
        pytest.param([(3, 4), (5,)], [2, 1, 0], id="token by token"),
        pytest.param([()], [], id="nothing was made"),
        pytest.param([], [], id="no episode"),
    ],
)
def test_lags_are_those_of_tokens(versions, expected):
    group = example_group(0, [])
    episodes = tuple(example_episode(0.0, each) for each in versions)
    groups = [type(group)(0, group.task, 3, episodes)]
    assert staleness_of(groups, version=5).tolist() == expected


def with_sequences(episode, count, score=None):
    """The same episode with as many sequences, whose turns follow one another."""
    parts = tuple(replace(episode.sequences[0], turns=_turn(episode.sequences[0].turns, part)) for part in range(count))
    return replace(episode, sequences=parts, score=score or episode.score)


def _turn(turns, number):
    return np.where(turns == NOT_GENERATED, NOT_GENERATED, number)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # answers of 2, 3 and 4 tokens of at most 4: with a buffer of 2 the penalties are 0, 1/2 and 1
        pytest.param({}, [1.0, 0.5, 0.0], id="reward"),
        pytest.param({"overlong_penalty": 0.5}, [1.0, 0.75, 0.5], id="less"),
        pytest.param({"overlong_buffer_tokens": 0}, [1.0, 1.0, 1.0], id="no shaping"),
        pytest.param({"step_gamma": 0.5}, [1.0, 0.5, 0.0], id="of steps"),
    ],
)
def test_overlong_answers_lose_reward(settings, expected):
    episodes = tuple(example_episode(1.0, (0,) * count) for count in (2, 3, 4))
    group = replace(example_group(0, []), episodes=episodes)
    shaping = {"overlong_buffer_tokens": 2, "max_new_tokens": 4, **settings}
    selected, _, _ = with_advantages(batch_of([group]), AdvantageSettings(AdvantageEstimator.REWARD, **shaping))
    assert [advantage_of(sample) for sample in selected.samples] == expected


@pytest.mark.parametrize(("scope", "steps"), [("group", [1.0, -1.0, 2.0, -2.0]), ("batch", [-0.5, -2.5, 3.5, -0.5])])
def test_steps_in_one_state_are_compared_within_their_group(scope, steps):
    groups = [example_group(0, [2.0, 0.0]), example_group(1, [6.0, 2.0])]
    batch = batch_of(
        [
            replace(
                group,
                episodes=tuple(
                    replace(one, score=replace(one.score, turn_rewards=(one.score.reward,), turn_states=("room",)))
                    for one in group.episodes
                ),
            )
            for group in groups
        ]
    )
    settings = AdvantageSettings(
        AdvantageEstimator.GIGPO,
        advantage_level=AdvantageLevel.SAMPLE,
        step_gamma=0.95,
        episode_reward_weight=0.0,
        state_normalization="mean",
        state_scope=scope,
    )
    selected, _, _ = with_advantages(batch, settings)
    assert [advantage_of(sample) for sample in selected.samples] == steps


def test_lengths_count_before_samples_are_cut():
    episodes = tuple(example_episode(0.0, (0,) * count) for count in (2, 3, 4))
    group = replace(example_group(0, []), episodes=episodes)
    cut = batch_of([group], longest=4)
    assert [len(sample) for sample in cut.samples] == [4, 4, 4]
    shaping = AdvantageSettings(AdvantageEstimator.REWARD, overlong_buffer_tokens=2, max_new_tokens=4)
    selected, _, _ = with_advantages(cut, shaping)
    assert [advantage_of(sample) for sample in selected.samples] == [0.0, -0.5, -1.0]
    assert unmasked(cut, AdvantageSettings(max_error_tokens=4)).tolist() == [True, True, False]


def test_routed_experts_are_cut_with_their_samples():
    episode = example_episode(0.0, (0,) * 3)
    experts = np.arange(10, dtype=np.uint8).reshape(5, 1, 2)
    tokens = replace(episode.sequences[0], routed_experts=experts)
    group = replace(example_group(0, []), episodes=(replace(episode, sequences=(tokens,)),))
    for longest in (4, None):
        (sample,) = batch_of([group], longest=longest).samples
        np.testing.assert_array_equal(sample.routed_experts, experts[:longest])


def test_sampling_masks_are_cut_with_their_samples():
    episode = example_episode(0.0, (0,) * 3)
    sizes, ids = np.array([0, 0, 2, 1, 3], np.int32), np.array([7, 8, 9, 4, 5, 6], np.int32)
    tokens = replace(episode.sequences[0], mask_sizes=sizes, mask_ids=ids)
    group = replace(example_group(0, []), episodes=(replace(episode, sequences=(tokens,)),))
    for longest, kept in ((4, 3), (None, 6)):
        (sample,) = batch_of([group], longest=longest).samples
        assert (sample.mask_sizes.tolist(), sample.mask_ids.tolist()) == (sizes[:longest].tolist(), ids[:kept].tolist())
    assert mask_metrics([sample]) == {"sampling_mask/missing": 0.0, "sampling_mask/size": 2.0}
    empty = replace(sample, mask_sizes=np.array([0, 0, 0, 1, 0], np.int32), mask_ids=ids[:1])
    assert mask_metrics([empty]) == pytest.approx({"sampling_mask/missing": 2 / 3, "sampling_mask/size": 1.0})


def test_an_episode_of_several_sequences_is_compared_once_and_all_of_them_learn():
    group = example_group(0, [1.0, 0.0])
    group = replace(group, episodes=(with_sequences(group.episodes[0], 3), group.episodes[1]))
    selected, chosen, alone = with_advantages(batch_of([group]), AdvantageSettings())
    assert [advantage_of(sample) for sample in selected.samples] == [1.0, 1.0, 1.0, -1.0]
    assert (len(chosen.kept), alone) == (4, 0)


def test_a_critic_looks_along_an_episode_through_all_its_sequences():
    group = example_group(0, [3.0])
    episode = with_sequences(group.episodes[0], 2, EpisodeReward(3.0, turn_rewards=(1.0, 2.0)))
    batch = batch_of([replace(group, episodes=(replace(episode, sequences=episode.sequences[::-1]),))])
    values = [np.array([9, 9, 0.5], np.float32), np.array([9, 9, 0.25], np.float32)]  # of the second turn, the first
    settings = AdvantageSettings(
        AdvantageEstimator.GAE, whiten_advantages=Whitening.TOKENS_BIASED, gamma=1.0, gae_lambda=1.0
    )
    selected, _, _ = with_advantages(with_values(batch, values), settings)
    assert [sample.returns.tolist() for sample in selected.samples] == [[0, 0, 2.0], [0, 0, 3.0]]
    raw = np.array([2.0 - 0.5, 3.0 - 0.25])
    white = (raw - raw.mean()) / (raw.std() + 1e-5)
    assert [sample.advantages[2] for sample in selected.samples] == pytest.approx(white.tolist())


def said_of(sample):
    """A critic that expects something else before every token, whatever comes after it."""
    before = np.concatenate([[0], np.cumsum(sample.token_ids * (1 + np.arange(len(sample))))[:-1]])
    return np.where(predicted(sample), np.sin(before), 0).astype(np.float32)


def stepping(rewards, is_truncated, first):
    """An episode of steps, each a sequence of its own with one number shown and one token made."""
    steps = [
        Tokens(
            np.array([first + at, 7]),
            np.array([NOT_GENERATED, at]),
            np.zeros(2, np.float32),
            np.array([NOT_GENERATED, 0]),
        )
        for at in range(len(rewards))
    ]
    stopped_in = np.array([first + len(rewards)]) if is_truncated else None
    return Episode(
        tuple(steps),
        EpisodeReward(sum(rewards), turn_rewards=tuple(rewards), is_truncated=is_truncated),
        1.0,
        1,
        stopped_in,
    )


PLAYED = st.lists(st.tuples(st.lists(st.floats(-3, 3), min_size=1, max_size=4), st.booleans()), min_size=1, max_size=5)


@given(PLAYED, st.floats(0, 1), st.floats(0, 1))
def test_only_what_a_limit_cut_off_goes_on_with_the_value_of_where_it_stopped(played, discount, gae_lambda):
    episodes = tuple(
        stepping(rewards, is_truncated, 10 * index) for index, (rewards, is_truncated) in enumerate(played)
    )
    batch = batch_of([replace(example_group(0, []), episodes=episodes)])
    valued = with_values(batch, [said_of(sample) for sample in [*batch.samples, *continuations(batch)]])
    chosen = AdvantageSettings(AdvantageEstimator.GAE, gamma=discount, gae_lambda=gae_lambda)
    found = [sample.returns[1] for sample in with_advantages(valued, chosen)[0].samples]

    expected = []
    for index, (rewards, is_truncated) in enumerate(played):
        values = [float(np.float32(np.sin(10 * index + at))) for at in range(len(rewards) + 1)]
        values[-1] *= is_truncated
        for at in range(len(rewards)):
            later = range(at, len(rewards))
            surprises = [rewards[step] + discount * values[step + 1] - values[step] for step in later]
            weights = [(discount * gae_lambda) ** (step - at) for step in later]
            expected.append(values[at] + sum(map(float.__mul__, weights, surprises)))
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("estimator", sorted(set(AdvantageEstimator) - {AdvantageEstimator.GAE}))
def test_without_a_critic_an_episode_is_worth_what_it_got_however_it_ended(estimator):
    def advantages(is_truncated):
        episodes = (stepping([1.0, 2.0], is_truncated, 0), stepping([1.0], False, 10), stepping([0.5], False, 20))
        batch = batch_of([replace(example_group(0, []), episodes=episodes)])
        return [advantage_of(sample) for sample in with_advantages(batch, AdvantageSettings(estimator))[0].samples]

    assert advantages(True) == advantages(False)


def taught(estimator, *teachers, tags=("", ""), **settings):
    """Advantages of the generated tokens: log-probs of the policy are -1 and -2, of the teachers -0.5 and -4."""
    groups = [example_group(0, [1.0, 0.0], versions=(0, 0))]
    batch = batch_of(groups)
    batch = replace(
        batch, sources=tuple(replace(each, task_tag=tag) for each, tag in zip(batch.sources, tags, strict=True))
    )
    reported = [np.array([0, 0, -0.5, -4], np.float32)] * 2
    scores = {one: [reported[0] for tag in tags if not one.tags or tag in one.tags] for one in teachers}
    selected, _, _ = with_advantages(with_teachers(batch, scores), AdvantageSettings(estimator, **settings))
    return [sample.advantages[2:].tolist() for sample in selected.samples]


def test_a_teacher_alone_gives_each_token_the_difference_of_log_probs():
    assert taught(AdvantageEstimator.TEACHER, Teacher()) == [[0.5, -2.0]] * 2
    assert taught(AdvantageEstimator.TEACHER, Teacher(coef=0.5)) == [[0.25, -1.0]] * 2
    assert taught(AdvantageEstimator.TEACHER, Teacher(), gamma=0.5) == [[0.5, -2.0]] * 2, "it is not discounted"
    assert taught(AdvantageEstimator.TEACHER, Teacher(estimator=KlEstimator.ABS)) == [[-0.5, -2.0]] * 2


def test_a_teacher_adds_to_the_advantage_of_the_reward():
    assert taught(AdvantageEstimator.LEAVE_ONE_OUT, Teacher(coef=0.5)) == [[1.25, 0.0], [-0.75, -2.0]]
    assert taught(AdvantageEstimator.LEAVE_ONE_OUT, Teacher(coef=0.5), advantage_clip=1.0) == [[1, 0], [-0.75, -1]]


def test_teachers_teach_the_tasks_of_their_tags():
    two = Teacher("teacher.math", tags=("math",)), Teacher("teacher.all", coef=2.0)
    assert taught(AdvantageEstimator.TEACHER, *two, tags=("math", "code")) == [[1.5, -6.0], [1.0, -4.0]]


def test_teachers_find_rows_by_their_own_tags_and_not_by_their_domains():
    group = example_group(0, [0.0], versions=(0,))
    row = replace(group, task=Task("a", {"row_tag": "aime"}, "math_rule"))
    assert taught_by(batch_of([row]), Teacher(tags=("aime",))) == [0]
    assert taught_by(batch_of([row]), Teacher(tags=("math_rule",))) == []


def test_a_teacher_is_compared_with_the_learners_own_log_probs():
    batch = with_scores(batch_of([example_group(0, [0.0, 0.0], versions=(0, 0))]), [np.full(4, -3, np.float32)] * 2)
    scored = with_teachers(batch, {Teacher(): [np.full(4, -1, np.float32)] * 2})
    assert scored.samples[0].teacher_penalty.tolist() == [0, 0, -2, -2]
    assert scored.teacher_kl["teacher"].tolist() == [-2] * 4
