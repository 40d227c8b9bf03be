"""The FrozenLake example: its config is a task, and the model's tokens are what the game needs."""

import runpy
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer

from roost.config.compose import load
from roost.config.findings import Findings
from roost.config.notations.notation import read_job
from roost.engines.protocol import Finish
from roost.rollout.environments.text_games import TextGames
from roost.rollout.episode import Split, Transcript
from roost.trainer.targets import load_scenario
from tests.rollout.script import completion, ran

EXAMPLE = Path(__file__).parents[2] / "examples/frozen_lake"


def test_the_model_plays_what_the_config_says(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["make_model.py", str(tmp_path)])
    runpy.run_path(str(EXAMPLE / "make_model.py"), run_name="__main__")
    findings = Findings()
    job = read_job(load(EXAMPLE / "roll.yaml", (), findings), findings, trains=True)
    assert not findings.warnings
    assert not findings.has_errors
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).vocab_size == len(tokenizer)
    scenario, words = load_scenario(job.training.task, str(tmp_path)), ["Up", "G", "Left", "Down"]

    async def sample(token_ids, turn, max_tokens):
        assert tokenizer.unk_token_id not in token_ids
        assert max_tokens == 1
        return completion(tokenizer(words[turn]).input_ids, finish=Finish.LENGTH)

    async def playing():
        transcript = Transcript(sample)
        score = await scenario.run_episode(scenario.task(Split.TRAIN, 0), transcript)
        return score, transcript

    score, transcript = ran(playing())
    assert all(len(each.token_ids) == 12 for each in transcript.sequences()), "nine cells, two newlines and a word"
    assert score.parts["valid_actions"] == (transcript.turns - (transcript.turns > 1)) / transcript.turns
    assert TextGames(job.training.task["environment"]["games"]).new_game("SmallLake").instruction
