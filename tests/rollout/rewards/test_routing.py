import pytest

from roost.rollout.rewards.config import SCENARIO, Route, Routing

MATH = Route("exact", frozenset({"math"}), 2.0)
CODE = Route("tests", frozenset({"code", "script"}))
STYLE = Route("style", weight=-0.5)
SCORES = {"exact": 1.0, "tests": 3.0, "style": 4.0}


@pytest.mark.parametrize(
    ("routing", "tag", "names", "total"),
    [
        pytest.param(Routing(), "math", [], 9.0, id="no rewards"),
        pytest.param(Routing((MATH, CODE)), "math", ["exact"], 2.0, id="one of two"),
        pytest.param(Routing((MATH, CODE)), "script", ["tests"], 3.0, id="any of its tags"),
        pytest.param(Routing((MATH, CODE)), "chat", [], 9.0, id="nobody takes it"),
        pytest.param(Routing((MATH, CODE)), "", [], 9.0, id="no tag"),
        pytest.param(Routing((MATH, CODE)), "Math", [], 9.0, id="tags are exact"),
        pytest.param(Routing((MATH, STYLE)), "math", ["exact", "style"], 0.0, id="two are added up"),
        pytest.param(Routing((STYLE,)), "", ["style"], -2.0, id="no tags take all"),
        pytest.param(Routing((MATH,), Route(SCENARIO, weight=0.1)), "math", ["exact"], 2.9, id="with the scenario's"),
        pytest.param(
            Routing((MATH,), Route(SCENARIO, weight=0.1)), "chat", [], 9.0, id="the scenario's alone is whole"
        ),
        pytest.param(
            Routing((MATH,), Route(SCENARIO, frozenset({"code"}))),
            "math",
            ["exact"],
            2.0,
            id="the scenario's of others",
        ),
        pytest.param(Routing((Route("exact", weight=0.0),)), "math", ["exact"], 0.0, id="a weight of 0"),
    ],
)
def test_routes(routing, tag, names, total):
    assert [route.name for route in routing.of(tag)] == names
    assert routing.total(tag, 9.0, SCORES) == pytest.approx(total)
