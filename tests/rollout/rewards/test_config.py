import asyncio

import pytest

from roost.config.findings import ConfigError, Findings, Where
from roost.rollout.episode import Task
from roost.rollout.rewards.config import Function, Route, check_answers, make_reward, make_rewards
from roost.rollout.rewards.math_answer import ExactAnswer
from roost.rollout.rewards.reward import Answer

OWN = "tests.rollout.rewards.own_rewards"
JUDGE = "roost.rollout.rewards.judge.Judge"
EXACT = "roost.rollout.rewards.math_answer.ExactAnswer"
HERE = Where("job.yaml", 7, 3, ("train", "rewards"))


def made(config, elsewhere=()):
    findings = Findings()
    return make_rewards(config, HERE, findings, elsewhere), [str(finding) for finding in findings.found]


def test_rewards_of_all_kinds():
    rewards, found = made(
        {
            "exact": {"_target_": EXACT, "tags": "math", "weight": 2, "find": "boxed"},
            "length": {"_target_": f"{OWN}.Length", "tags": ["math", "chat"], "least": 3},
            "short": {"_target_": f"{OWN}.short", "most": 5},
            "short_async": {"_target_": f"{OWN}.short_async"},
            "anything": {"_target_": f"{OWN}.Anything", "tags": "none", "whatever": {"a": "${b}"}},
            "scenario": {"weight": 0.5, "tags": ["math"]},
        }
    )
    assert found == []
    assert rewards.routing.routes == (
        Route("exact", frozenset({"math"}), 2.0),
        Route("length", frozenset({"math", "chat"})),
        Route("short"),
        Route("short_async"),
        Route("anything", frozenset({"none"})),
    )
    assert rewards.routing.own == Route("scenario", frozenset({"math"}), 0.5)
    assert isinstance(rewards.local["exact"], ExactAnswer)
    assert isinstance(rewards.local["short"], Function)
    assert rewards.local["anything"].keys == {"whatever": {"a": "${b}"}}
    answers = {
        name: asyncio.run(rewards.local[name].score(Answer(Task("t"), "sixsix"))) for name in ("length", "short")
    }
    assert answers == {"length": 1.0, "short": 0.0}


def test_a_reward_may_be_called_scenario():
    rewards, found = made({"scenario": {"_target_": f"{OWN}.Length"}})
    assert found == []
    assert rewards.routing.own is None
    assert list(rewards.local) == ["scenario"]


def test_rewards_elsewhere_are_not_made_here():
    keys = {"_target_": f"{OWN}.Refuses", "most": 2}
    rewards, found = made({"far": keys}, elsewhere=["far"])
    assert found == []
    assert rewards.local == {}
    assert rewards.elsewhere == {"far": keys}
    assert made({"far": {**keys, "mots": 2}}, elsewhere=["far"])[1] != []
    assert "far: has neither base_url nor engine" in made({"far": {"_target_": JUDGE, "model": "m"}}, ["far"])[1][0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        pytest.param([], "train.rewards: is not a mapping of rewards\n  why: it is []", id="a list"),
        pytest.param({"a": EXACT}, "train.rewards.a: is not a reward\n  why: it is 'roost", id="a word"),
        pytest.param({"a": {}}, "train.rewards.a._target_: names no class or function", id="no target"),
        pytest.param({"a": {"_target_": 5}}, "a._target_: names no class or function\n  why: it is 5", id="a number"),
        pytest.param({"a": {"_target_": "no_such.Thing"}}, "a._target_: no_such.Thing cannot be found", id="no module"),
        pytest.param({"a": {"_target_": f"{OWN}.Nope"}}, f"{OWN}.Nope cannot be found", id="no class"),
        pytest.param(
            {"a": {"_target_": f"{OWN}.NOTHING"}}, "NOTHING is not a reward\n  why: it is 7", id="no callable"
        ),
        pytest.param({"a": {"_target_": "..."}}, "a._target_: ... cannot be found", id="dots"),
        pytest.param(
            {"a": {"_target_": f"{OWN}.NotAsync"}},
            "NotAsync is not a reward\n  why: it has no asynchronous score",
            id="not asynchronous",
        ),
        pytest.param(
            {"a": {"_target_": f"{OWN}.NeverCloses"}},
            "why: it has no asynchronous close\n  fix: write async def close(self): pass",
            id="no close",
        ),
        pytest.param({"a": {"_target_": "collections.Counter"}}, "Counter is not a reward", id="another class"),
        pytest.param(
            {"a": {"_target_": EXACT, "finds": "text"}},
            f"a.finds: is not a key of {EXACT}\n  why: it has answer, find, marker",
            id="unknown key",
        ),
        pytest.param({"a": {"_target_": EXACT, "finds": "text"}}, "fix: did you mean find?", id="did you mean"),
        pytest.param({"a": {"_target_": EXACT, "wieght": 2}}, "fix: did you mean weight?", id="did you mean weight"),
        pytest.param(
            {"a": {"_target_": f"{OWN}.short", "mots": 2}},
            "why: it has most\n  fix: did you mean most?",
            id="of a function",
        ),
        pytest.param({"a": {"_target_": f"{OWN}.needs_more"}}, "why: it needs rubric", id="a function that needs more"),
        pytest.param(
            {"a": {"_target_": JUDGE, "base_url": "http://127.0.0.1:9/v1"}},
            "Judge cannot be called with these keys\n  why: missing a required argument: 'model'",
            id="a class that needs more",
        ),
        pytest.param(
            {"a": {"_target_": JUDGE, "model": "m", "engine": {"kind": "vlm"}}},
            "a.engine.kind: names no engine\n  why: it is 'vlm'\n  fix: did you mean vllm?",
            id="a class that knows more of its keys",
        ),
        pytest.param(
            {"a": {"_target_": f"{OWN}.Refuses"}},
            "from these keys\n  why: OSError: no file 1",
            id="a constructor raises",
        ),
        pytest.param({"a": {"_target_": EXACT, "find": "box"}}, "why: ValueError: find is 'box'", id="a wrong value"),
        pytest.param({"a": {"_target_": EXACT, "tags": 5}}, "a.tags: are not tags\n  why: they are 5", id="tags"),
        pytest.param({"a": {"_target_": EXACT, "tags": ["x", None]}}, "a.tags: are not tags", id="null among tags"),
        pytest.param({"a": {"_target_": EXACT, "tags": ""}}, "a.tags: are not tags", id="an empty tag"),
        pytest.param({"a": {"_target_": EXACT, "tags": []}}, "a.tags: is an empty list", id="no tags"),
        pytest.param(
            {"a": {"_target_": EXACT, "weight": "1"}}, "a.weight: is not a weight\n  why: it is '1'", id="weight"
        ),
        pytest.param({"a": {"_target_": EXACT, "weight": True}}, "a.weight: is not a weight", id="true as weight"),
        pytest.param(
            {"a": {"_target_": EXACT, "weight": float("nan")}}, "a.weight: is not a weight", id="nan as weight"
        ),
        pytest.param({"scenario": {"wieght": 1}}, "scenario.wieght: is not a key here", id="the scenario's"),
    ],
)
def test_findings(config, message):
    _, found = made(config)
    assert len(found) == 1
    assert message in found[0]
    assert found[0].startswith("error RST-A0") and ": job.yaml:7:3 train.rewards" in found[0]


def test_one_reward():
    assert isinstance(make_reward("a", {"_target_": EXACT, "tags": ["x"], "weight": 2}), ExactAnswer)
    with pytest.raises(ConfigError, match=r"rewards\.a\.finds"):
        make_reward("a", {"_target_": EXACT, "finds": 2})


def answers_found(config, *rows):
    """Findings about the data of tasks; a row's `tag` is its task's."""
    rewards, findings = made(config, elsewhere=config)[0], Findings()
    tasks = [(f"row {number}", Task("", row, row.get("tag", ""))) for number, row in enumerate(rows)]
    check_answers(config, rewards.routing, tasks, HERE, findings)
    return [f"{each.code} {each.what}; {each.fix}" for each in findings.found]


ROLL = "roost.rollout.rewards.math_answer.RollMath"
SEARCH = "roost.rollout.rewards.rules.SearchAnswer"
ROLL_CODE = "roost.rollout.rewards.code_tests.RollCode"
CODE = "roost.rollout.rewards.code_tests.CodeTests"


@pytest.mark.parametrize(
    ("keys", "rows", "described"),
    [
        pytest.param({"_target_": EXACT}, [{"answer": 4}, {"answer": ["a", 2.5]}], "", id="text and numbers"),
        pytest.param(
            {"_target_": EXACT},
            [{"answer": 4}, {"answer": {"value": 4}}, {"answer": {"value": 5}}],
            "RST-T089 row 1: answer is {'value': 4}",
            id="mapping",
        ),
        pytest.param({"_target_": SEARCH}, [{"answer": {"target": ["a"]}}], "", id="mapping that a reward reads"),
        pytest.param({"_target_": SEARCH}, [{"answer": {"a": 1}}], "RST-T089 row 0", id="another mapping"),
        pytest.param(
            {"_target_": EXACT},
            [{"answers": 4}, {"answers": 5}],
            "RST-T090 row 0 has no answer, which reward one reads; name the column of the answers: train.data",
            id="no answers",
        ),
        pytest.param({"_target_": EXACT, "answer": "solution"}, [{"solution": 4}], "", id="another column"),
        pytest.param(
            {"_target_": EXACT},
            [{"answer": 5}, {"answer": None}, {}],
            "RST-T091 2 rows without answer, which reward one reads, such as row 1",
            id="some rows have none",
        ),
        pytest.param(
            {"_target_": ROLL},
            [{"answer": 4}],
            "RST-T090 row 0 has no ground_truth, which reward one reads; name the column of the answers: train.data",
            id="default column",
        ),
        pytest.param({"_target_": CODE}, [{"answer": 4}], "RST-T090 row 0 has no tests", id="tests"),
        pytest.param({"_target_": EXACT, "tags": "math"}, [{"tag": "chat"}], "", id="tasks of other rewards"),
        pytest.param({"_target_": f"{OWN}.short"}, [{}], "", id="a function"),
        pytest.param({"_target_": f"{JUDGE[:-5]}CompletionJudge"}, [{}], "", id="a subclass that passes keys on"),
        pytest.param({"_target_": ROLL_CODE}, [{}], "RST-T090 row 0 has no test_cases", id="a column of its own"),
    ],
)
def test_data_that_rewards_cannot_read(keys, rows, described):
    found = answers_found({"one": keys}, *rows)
    assert len(found) == bool(described) and all(each.startswith(described) for each in found)
