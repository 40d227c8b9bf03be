import pytest

from roost.engines.protocol import ContextFull
from roost.rollout.agents.scenario import AgentScenario
from roost.rollout.agents.templated import Templates, Turn
from roost.rollout.environments.environment import Observation
from roost.rollout.episode import Task, Transcript
from roost.rollout.episode_runner import checked_reward
from tests.rollout.agents.talk import QWEN_TOKENIZER, Engine
from tests.rollout.script import ran

TAG = "Lake"
TASK = Task("lake 3", {"seed": 3}, TAG)  # __O_ P___ ___G ___O
TRAJECTORY = "Turn {turn_idx}, {actions_left} left, at most {max_response_length}:\n{observation}\n"
STEP = "{env_instruction} [{history}] {step_count} {history_length} {current_step}: {current_observation}"
WAY = ["<answer>Right</answer>", "<answer>Down</answer>", "<answer>Right</answer>", "<answer>Right</answer>"]


def run_episode(*says, game=None, max_sequence_length=None, **templates):
    """The reward, and the sequences as texts."""
    templates = {"agent_template": TRAJECTORY, "agent_system_template": "You play.", **templates}
    scenario = AgentScenario(
        QWEN_TOKENIZER,
        {"_target_": "roost.rollout.environments.text_games.GameTasks", "train": {TAG: 1}},
        {"_target_": "roost.rollout.agents.templated.TemplatedAgent", "tags": {TAG: templates}},
        {
            "_target_": "roost.rollout.environments.text_games.TextGames",
            "games": {
                TAG: {"env_type": "frozen_lake", "is_slippery": False, "env_instruction": "Walk.", **(game or {})}
            },
        },
        max_sequence_length=max_sequence_length,
        keeps_reasoning=True,
    )

    async def playing():
        engine = Engine(*says)
        transcript = Transcript(engine.sample)
        score = await scenario.run_episode(TASK, transcript)
        return checked_reward(score, transcript.turns), transcript

    score, transcript = ran(playing())
    return score, [QWEN_TOKENIZER.decode(each.token_ids) for each in transcript.sequences()], transcript


def test_a_trajectory_is_one_sequence_whose_first_turn_has_the_instruction():
    score, texts, transcript = run_episode(*WAY, max_steps=6, max_tokens_per_step=40)
    assert len(texts) == 1
    reported = texts[0].split("<|im_start|>")
    assert reported[1] == "system\nYou play.<|im_end|>\n"
    assert reported[2].startswith("user\nWalk.\nSymbols of the map:")
    assert reported[2].endswith("Turn 1, 6 left, at most 40:\n__O_\nP___\n___G\n___O\n<|im_end|>\n")
    assert reported[3] == "assistant\n<answer>Right</answer><|im_end|>\n"
    assert reported[4] == "user\nTurn 2, 5 left, at most 40:\n__O_\n_P__\n___G\n___O\n<|im_end|>\n"
    assert transcript.turns == 4
    assert (score.reward, score.turn_rewards) == (1.0, (0.0, 0.0, 0.0, 1.0))
    assert score.parts == {"success": 1.0, "valid_actions": 1.0, "effective_actions": 1.0}


def test_the_limit_of_steps_ends_an_episode():
    score, _, transcript = run_episode(*WAY, max_steps=2, game={"format_penalty": -0.1})
    assert (transcript.turns, score.reward, score.parts["success"]) == (2, 0.0, 0.0)


def test_steps_are_sequences_of_their_own_with_the_last_turns_as_text():
    score, texts, _ = run_episode(
        "Right", *WAY, agent_template=STEP, history="step", history_length=3, game={"format_penalty": -0.1}
    )
    assert len(texts) == 5
    assert all(text.startswith("<|im_start|>system\nYou play.<|im_end|>\n<|im_start|>user\nWalk.") for text in texts)
    assert "[] 0 0 1: __O_\nP___\n___G\n___O<|im_end|>" in texts[0]
    assert "[(step: 1, observation: __O_\nP___\n___G\n___O, action: Right (this action is not valid" in texts[1]
    assert "reward: -0.1)] 1 1 2: " in texts[1]
    assert "(step: 3, " in texts[3]
    assert "(step: 1, " not in texts[3], "of the last three turns, this one included"
    assert score.turn_rewards == (-0.1, 0.0, 0.0, 0.0, 1.0)
    states = score.turn_states
    assert len(states) == 5 and states[0] == states[1] and len(set(states)) == 4, "an invalid action moves nothing"


def test_a_history_of_observations_only():
    templates = Templates(STEP, history="step_concat", history_length=2)
    turns = [Turn("a", "Left", 0.0, True), Turn("b", "Left", 0.0, True)]
    (message,) = templates.messages("Walk.", turns, Observation("c"))
    assert message["content"] == "Walk. [b] 2 1 3: c"


def test_a_sequence_that_is_full_ends_the_episode_as_it_is():
    first = len(run_episode(WAY[0], max_steps=1)[2].token_ids)
    score, _, transcript = run_episode(*WAY, max_sequence_length=first + 5)
    assert transcript.turns == 2, "the second turn found no room"
    assert transcript.sequences()[0].parts[-1].finish == "length"
    assert (score.reward, score.parts["success"]) == (0.0, 0.0)


def test_a_turn_gets_what_a_sequence_has_left():
    async def playing():
        limits = []

        async def sample(token_ids, turn, max_tokens):
            limits.append(max_tokens)
            return await Engine("ab").sample(token_ids, turn, max_tokens)

        transcript = Transcript(sample)
        transcript.max_length = 10
        transcript.give([1] * 4)
        await transcript.take()
        other = transcript.branch()
        other.give([1] * 3)
        await other.take(5)
        await other.take(5)
        other.give([1] * 10)
        with pytest.raises(ContextFull, match="no room in a sequence of 10"):
            await other.take()
        return limits, len(transcript.token_ids) - 4

    limits, made = ran(playing())
    assert limits == [6, 5, min(5, 7 - made)]


def test_a_task_without_templates_is_told():
    with pytest.raises(ValueError, match="no templates for the tag 'Lake'; there are Boxes"):
        from roost.rollout.agents.templated import TemplatedAgent

        TemplatedAgent(TASK, {"Boxes": {"agent_template": ""}})
