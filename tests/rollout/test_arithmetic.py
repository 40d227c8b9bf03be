from types import SimpleNamespace

import pytest

from roost.rollout.arithmetic import CHARACTERS, END, SIZES, Arithmetic
from roost.rollout.episode import Split, Transcript
from tests.rollout.script import completion, ran

EOS = SIZES["eos_token_id"]


class Characters:
    """A tokenizer with the ids that the written model has."""

    eos_token_id = EOS

    def __call__(self, text, add_special_tokens):
        return SimpleNamespace(input_ids=[CHARACTERS.index(character) for character in text])

    def decode(self, ids, skip_special_tokens):
        return "".join((*CHARACTERS, END)[index] for index in ids if index != EOS)


def test_all_sums_are_there_once():
    scenario = Arithmetic(Characters(), largest=9)
    names = [scenario.task(Split.TRAIN, index).name for index in range(scenario.size(Split.TRAIN))]
    assert len(set(names)) == len(names) == 100
    assert (names[0], names[37], names[99]) == ("0+0=", "3+7=", "9+9=")
    assert all(eval(name[:-1]) == int(scenario.task(Split.TRAIN, at).data["answer"]) for at, name in enumerate(names))


@pytest.mark.parametrize(
    ("reported", "reward", "shown"),
    [
        pytest.param("16.", 1.0, "16", id="right"),
        pytest.param("17.", 2 / 3, "17", id="one digit wrong"),
        pytest.param("1.", 1 / 3, "1", id="ended too early"),
        pytest.param("160", 2 / 3, "160", id="did not end"),
        pytest.param(".", 0.0, "", id="said nothing"),
        pytest.param("", 0.0, "", id="no token"),
        pytest.param("=71", 0.0, "=71", id="all wrong"),
    ],
)
def test_answers_are_scored_character_by_character(reported, reward, shown):
    asked = []

    async def sample(token_ids, turn, max_tokens):
        asked.append((token_ids, max_tokens))
        return completion([EOS if character == "." else CHARACTERS.index(character) for character in reported])

    scenario = Arithmetic(Characters(), largest=9)
    score = ran(scenario.run_episode(scenario.task(Split.TRAIN, 79), Transcript(sample)))
    assert (score.reward, score.shown) == (pytest.approx(reward), shown)
    assert asked == [(tuple(CHARACTERS.index(character) for character in "7+9="), 3)]
