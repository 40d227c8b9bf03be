import sys

import pytest

from roost.rollout.agents.check import check_agent
from roost.spec.errors import Findings, Where

HERE = "tests.rollout.agents.programs"
REACT = "roost.rollout.agents.react.ReactCoder"


def found(config):
    findings = Findings()
    check_agent(config, Where("job.yaml", 3, 5, ("train", "task", "agent")), findings)
    return [(each.where.path[3:], each.what, each.why, each.fix) for each in findings.found]


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"_target_": REACT}, id="react"),
        pytest.param({"_target_": REACT, "max_tokens": 5, "_recursive_": False}, id="with keys"),
        pytest.param({"_target_": f"{HERE}.Guesser", "hint": "x"}, id="a class of one's own"),
        pytest.param({"_target_": f"{HERE}.Coder", "style": "x"}, id="the AppWorld contract"),
        pytest.param({"_target_": f"{HERE}.Anything", "whatever": 1}, id="takes any key"),
        pytest.param(
            {"_target_": "roost.rollout.agents.openai_agent.OpenAIAgent", "run": f"{HERE}.play"}, id="a program"
        ),
    ],
)
def test_nothing_is_wrong(config):
    assert found(config) == []


MISSING = "write _target_: roost.rollout.agents.react.ReactCoder, or a class of your own"
PLACE = "name a class in a file of this folder, or of one in PYTHONPATH, as module.Class"
CONTRACT = "see roost.rollout.agents.agent.Agent, and roost.rollout.agents.appworld_agent.AppworldAgent"


@pytest.mark.parametrize(
    ("config", "finding"),
    [
        pytest.param({}, ((), "the agent has no class", "", MISSING), id="no target"),
        pytest.param(
            {"_taget_": REACT}, ((), "the agent has no class", "there is _taget_", MISSING), id="target misspelt"
        ),
        pytest.param({"_target_": 3}, ((), "the agent has no class", "_target_ is 3", MISSING), id="a number"),
        pytest.param(
            {"_target_": "no such"},
            (("_target_",), "no such is not found", "it is no dotted path", PLACE),
            id="no path",
        ),
        pytest.param(
            {"_target_": "nowhere_at_all.Agent"},
            (("_target_",), "nowhere_at_all.Agent is not found", "there is no module nowhere_at_all", PLACE),
            id="no such module",
        ),
        pytest.param(
            {"_target_": "roost.rollout.agents.raect.ReactCoder"},
            (
                ("_target_",),
                "roost.rollout.agents.raect.ReactCoder is not found",
                "roost.rollout.agents has no raect",
                "did you mean react?",
            ),
            id="module misspelt",
        ),
        pytest.param(
            {"_target_": f"{HERE}.Geusser"},
            (("_target_",), f"{HERE}.Geusser is not found", f"{HERE} has no Geusser", "did you mean Guesser?"),
            id="class misspelt",
        ),
        pytest.param(
            {"_target_": f"{HERE}.NoAgent"},
            (("_target_",), f"{HERE}.NoAgent is no agent", "it has neither play nor next_code_block", CONTRACT),
            id="no agent",
        ),
        pytest.param(
            {"_target_": f"{HERE}.Guesser"},
            ((), "hint is missing", f"{HERE}.Guesser has no default for it", "add hint: ..."),
            id="a key is missing",
        ),
        pytest.param(
            {"_target_": f"{HERE}.Guesser", "hint": "x", "trie": 3},
            (("trie",), f"trie is not a key of {HERE}.Guesser", "it takes hint, tries", "did you mean tries?"),
            id="an unknown key",
        ),
        pytest.param(
            {"_target_": f"{HERE}.Silent", "loudness": 3},
            (("loudness",), f"loudness is not a key of {HERE}.Silent", "it takes no keys", "leave it out"),
            id="no keys at all",
        ),
        pytest.param(
            {"_target_": f"{HERE}.Coder", "style": "x", "llm": "gpt"},
            (("llm",), "llm cannot be set", "each episode's agent is made with its own", "leave it out"),
            id="what is given anyway",
        ),
        pytest.param(
            {"_target_": f"{HERE}.NoTask"},
            (
                ("_target_",),
                f"{HERE}.NoTask does not take task",
                "every agent is made with it",
                "add task to the parameters of its constructor",
            ),
            id="does not take a task",
        ),
    ],
)
def test_what_is_wrong(config, finding):
    assert found(config) == [finding]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        pytest.param("import not_there_either", "imports not_there_either, which is not installed", id="needs another"),
        pytest.param("1 / 0", "raises ZeroDivisionError: division by zero", id="raises"),
        pytest.param("a b", "raises SyntaxError", id="is no Python"),
    ],
)
def test_modules_that_cannot_be_imported(text, why, tmp_path, monkeypatch):
    (tmp_path / "broken_agent.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_agent", raising=False)
    [(path, _, told, _)] = found({"_target_": "broken_agent.Agent"})
    assert path == ("_target_",)
    assert why in told


def test_several_mistakes_are_told_at_once():
    whats = [what for _, what, _, _ in found({"_target_": f"{HERE}.Guesser", "hnt": "x", "trys": 3})]
    assert [what.split()[0] for what in whats] == ["hint", "hnt", "trys"]
