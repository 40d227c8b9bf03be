import sys

import pytest

from roost.config.findings import Findings, Where
from roost.rollout.check_target import AGENT, SCENARIO, check_target

HERE = "tests.rollout.agents.programs"
WORLD = "tests.rollout.agents.world"
REACT = "roost.rollout.agents.react.ReactCoder"


def found(config, part=AGENT):
    findings = Findings()
    where = Where("job.yaml", 3, 5, ("train", "task"))
    is_right = check_target(config, where, part, findings)
    assert is_right == (not findings.found)
    return [(each.where.path[2:], each.what, each.why, each.fix) for each in findings.found]


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"_target_": REACT}, id="react"),
        pytest.param({"_target_": REACT, "max_tokens": 5, "_recursive_": False}, id="with keys"),
        pytest.param({"_target_": f"{HERE}.Guesser", "hint": "x"}, id="a class of one's own"),
        pytest.param({"_target_": f"{HERE}.Coder", "style": "x"}, id="the AppWorld contract"),
        pytest.param({"_target_": f"{HERE}.Anything", "whatever": 1}, id="takes any key"),
        pytest.param(
            {"_target_": "roost.rollout.agents.openai_agent.OpenAIAgent", "run": f"{HERE}.run_episode"}, id="a program"
        ),
    ],
)
def test_nothing_is_wrong(config):
    assert found(config) == []


MISSING = "write _target_: roost.rollout.agents.react.ReactCoder, or a class of your own"
PLACE = "name a class in a file of this folder, or of one in PYTHONPATH, as module.Name"
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
            (("_target_",), "no such is not found", "it is not a dotted path", PLACE),
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
            (
                ("_target_",),
                f"{HERE}.NoAgent is not an agent",
                "it has no run_episode and it has no next_code_block",
                CONTRACT,
            ),
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
            (("llm",), "llm cannot be set", "Roost passes it to every agent", "leave it out"),
            id="what is given anyway",
        ),
        pytest.param(
            {"_target_": f"{HERE}.NoTask"},
            (
                ("_target_",),
                f"{HERE}.NoTask does not take task",
                "Roost passes it to every agent",
                "add task to its parameters",
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
    [(path, _, described, _)] = found({"_target_": "broken_agent.Agent"})
    assert path == ("_target_",)
    assert why in described


def test_several_mistakes_are_told_at_once():
    whats = [what for _, what, _, _ in found({"_target_": f"{HERE}.Guesser", "hnt": "x", "trys": 3})]
    assert [what.split()[0] for what in whats] == ["hint", "hnt", "trys"]


PROGRAM = "roost.rollout.agents.openai_agent.OpenAIAgent"
GIVEN = "Roost passes it to every program"


@pytest.mark.parametrize(
    ("keys", "finding"),
    [
        pytest.param(
            {"run": f"{HERE}.run_epsode"},
            (("run",), f"{HERE}.run_epsode is not found", f"{HERE} has no run_epsode", "did you mean run_episode?"),
            id="not there",
        ),
        pytest.param(
            {"run": ["run_episode"]},
            (("run",), "names no function", "it is ['run_episode']", "write run: my_module.my_function"),
            id="no name",
        ),
        pytest.param(
            {"run": f"{HERE}.__name__"},
            (("run",), f"{HERE}.__name__ is not a function", f"it is '{HERE}'", "name a function"),
            id="no function",
        ),
        pytest.param(
            {"run": f"{HERE}.run_episode", "arguments": ["x"]},
            (("arguments",), "is not a mapping of arguments", "it is ['x']", "write them as name: value"),
            id="arguments are a list",
        ),
        pytest.param(
            {"run": f"{HERE}.run_episode", "arguments": {"perfix": "x"}},
            (
                ("arguments", "perfix"),
                f"perfix is not a key of {HERE}.run_episode",
                "it takes prefix",
                "did you mean prefix?",
            ),
            id="an argument misspelt",
        ),
        pytest.param(
            {"run": f"{HERE}.run_episode", "arguments": {"model": "x"}},
            (("arguments", "model"), "model cannot be set", GIVEN, "leave it out"),
            id="an argument that is given",
        ),
        pytest.param(
            {"run": f"{HERE}.needy"},
            (("arguments",), "prefix is missing", f"{HERE}.needy has no default for it", "add prefix: ..."),
            id="an argument is missing",
        ),
        pytest.param(
            {"run": f"{HERE}.worldless"},
            (("run",), f"{HERE}.worldless does not take environment", GIVEN, "add environment to its parameters"),
            id="does not take the environment",
        ),
    ],
)
def test_programs_of_agents_are_looked_at_too(keys, finding):
    assert found({"_target_": PROGRAM, **keys}) == [finding]


SCENARIO_TARGET = "roost.rollout.agents.scenario.AgentScenario"
RUNNER = "roost.app_world.serving.runner.AppWorldScenarioRunner"
RIGHT = {
    "_target_": SCENARIO_TARGET,
    "tasks": {"_target_": f"{WORLD}.Tasks"},
    "environment": {"_target_": f"{WORLD}.Worlds"},
    "agent": {"_target_": REACT},
}
TASKS_EXAMPLE = "roost.app_world.serving.tasks.AppWorldTasks"


@pytest.mark.parametrize(
    ("changed", "finding"),
    [
        pytest.param({}, (), id="all is right"),
        pytest.param(
            {"_target_": "roost.rollout.arithmetic.Arithmtic", "tasks": 3},
            (
                ("_target_",),
                "roost.rollout.arithmetic.Arithmtic is not found",
                "roost.rollout.arithmetic has no Arithmtic",
                "did you mean Arithmetic?",
            ),
            id="the scenario's class",
        ),
        pytest.param(
            {"max_turn": 3},
            (
                ("max_turn",),
                f"max_turn is not a key of {SCENARIO_TARGET}",
                "it takes tasks, agent, environment, max_turns, keeps_reasoning, template, max_sequence_length, "
                "tool_parser, reasoning_parser, max_response_length, chat_template",
                "did you mean max_turns?",
            ),
            id="the scenario's key",
        ),
        pytest.param(
            {"tasks": {"_target_": f"{WORLD}.Taks"}},
            (
                ("tasks", "_target_"),
                f"{WORLD}.Taks is not found",
                f"{WORLD} has no Taks",
                "did you mean Tasks?",
            ),
            id="the class of the tasks",
        ),
        pytest.param(
            {"tasks": "math"},
            (
                ("tasks",),
                "is not a source of tasks",
                "it is 'math'",
                f"write _target_: {TASKS_EXAMPLE} under it, or a class of your own",
            ),
            id="tasks by a word",
        ),
        pytest.param(
            {"tasks": {"_target_": f"{WORLD}.Worlds"}},
            (
                ("tasks", "_target_"),
                f"{WORLD}.Worlds is not a source of tasks",
                "it has no size, task",
                "see roost.rollout.agents.scenario.TaskSource",
            ),
            id="no source of tasks",
        ),
        pytest.param(
            {"environment": {"_target_": f"{WORLD}.Worlds", "meke": 3}},
            (
                ("environment", "meke"),
                f"meke is not a key of {WORLD}.Worlds",
                "it takes make",
                "did you mean make?",
            ),
            id="the environment's key",
        ),
        pytest.param(
            {"environment": {"_target_": f"{WORLD}.Noting"}},
            (
                ("environment", "_target_"),
                f"{WORLD}.Noting is not a class of environments",
                "it has no open",
                "see roost.rollout.environments.environment.Environments",
            ),
            id="an environment instead of a class of them",
        ),
        pytest.param(
            {"agent": {"_target_": REACT, "max_token": 3}},
            (
                ("agent", "max_token"),
                f"max_token is not a key of {REACT}",
                "it takes system_prompt, worked_example, reminder, shown_characters, max_tokens",
                "did you mean max_tokens?",
            ),
            id="the agent's key",
        ),
    ],
)
def test_everything_that_a_scenario_names(changed, finding):
    assert found(RIGHT | changed, SCENARIO) == ([finding] if finding else [])


@pytest.mark.parametrize(
    ("config", "finding"),
    [
        pytest.param({"agent": {"_target_": REACT}}, (), id="all is right"),
        pytest.param(
            {"agent": {"_target_": REACT, "reminder": "", "remindr": ""}},
            (("appworld_config", "agent", "remindr"), "did you mean reminder?"),
            id="the agent's key",
        ),
        pytest.param(
            {"agent": {"_target_": REACT}, "max_interaction": 3},
            (("appworld_config", "max_interaction"), "did you mean max_interactions?"),
            id="another key",
        ),
        pytest.param(
            {},
            (("appworld_config",), "mount one: appworld@rl.scenario_runner.appworld_config: default"),
            id="no agent",
        ),
    ],
)
def test_ml_loop_s_runner(config, finding):
    described = found({"_target_": RUNNER, "appworld_config": config}, SCENARIO)
    assert [(path, fix) for path, _, _, fix in described] == ([finding] if finding else [])


def test_a_finding_is_where_its_key_stands():
    positions = {
        ("train", "task"): ("job.yaml", 3, 5),
        ("train", "task", "agent"): ("agent/mine.yaml", 1, 1),
        ("train", "task", "agent", "max_token"): ("agent/mine.yaml", 7, 1),
    }
    findings = Findings()
    where = Where("job.yaml", 3, 5, ("train", "task"), positions)
    wrong = RIGHT | {"agent": {"_target_": REACT, "max_token": 3}, "max_turn": 3}
    check_target(wrong, where, SCENARIO, findings)
    assert [str(each.where) for each in findings.found] == [
        "agent/mine.yaml:7:1 train.task.agent.max_token",
        "job.yaml:3:5 train.task.max_turn",
    ]


@pytest.mark.parametrize(
    ("text", "target", "why", "fix"),
    [
        pytest.param(
            "__all__ = ['Patient']\ndef __getattr__(name): raise AttributeError(name)",
            "promising.Patent",
            "promising has no Patent",
            "did you mean Patient?",
            id="in __all__",
        ),
        pytest.param(
            "def __dir__(): return ['Patient']\ndef __getattr__(name): raise AttributeError(name)",
            "promising.Patent",
            "promising has no Patent",
            "did you mean Patient?",
            id="in __dir__",
        ),
        pytest.param(
            "def __getattr__(name): raise ImportError('needs more')",
            "promising.Patient",
            "importing promising.Patient raises ImportError: needs more",
            PLACE,
            id="cannot be imported after all",
        ),
        pytest.param(
            "raise SystemExit(2)", "promising.Patient", "importing promising raises SystemExit: 2", PLACE, id="exits"
        ),
    ],
)
def test_names_that_a_module_only_promises(text, target, why, fix, tmp_path, monkeypatch):
    (tmp_path / "promising.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "promising", raising=False)
    assert found({"_target_": target}) == [(("_target_",), f"{target} is not found", why, fix)]
