import inspect
import json
from pathlib import Path

import pytest

from roost.app_world.tasks.task_set import KINDS
from roost.app_world.world import APPS, World
from tests.grid import grid

PAGE = Path(__file__).parents[2] / "docs" / "app-world.md"
APIS = [pytest.param(api, id=f"{api.app}.{api.name}") for app in APPS.values() for api in app.apis.values()]


@pytest.fixture
def docs():
    world = World.from_seed(1)
    return lambda api, **kwargs: world.call("api_docs", api, kwargs)


@grid("api", APIS)
def test_every_api_is_documented_as_it_is(docs, api):
    doc = docs("show_api_doc", app_name=api.app, api_name=api.name)
    assert json.loads(json.dumps(doc)) == doc
    assert doc["description"].endswith(".") and doc["returns"]
    signature = inspect.signature(api.function).parameters
    taken = {name: parameter for name, parameter in signature.items() if name != "self"}
    assert [described["name"] for described in doc["parameters"]] == list(taken)
    for described in doc["parameters"]:
        parameter = taken[described["name"]]
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert described["type"] and described["description"], f"{described['name']} is not described"
        assert described["required"] == (parameter.default is inspect.Parameter.empty)
        assert described["required"] or described["default"] == parameter.default
    described = {line.split(": ")[0] for line in inspect.getdoc(api.function).partition("\n\n")[2].splitlines()}
    assert described == {*taken, "Returns"}, "the docstring describes what is there, and nothing else"


def test_a_doc(docs):
    assert docs("show_api_doc", app_name="files", api_name="write") == {
        "app_name": "files",
        "api_name": "write",
        "description": "Write a file.",
        "parameters": [
            {"name": "path", "type": "string", "required": True, "description": "its full path"},
            {"name": "content", "type": "string", "required": True, "description": "its text"},
            {
                "name": "overwrite",
                "type": "boolean",
                "required": False,
                "default": False,
                "description": "whether a file that is there already is replaced",
            },
        ],
        "returns": "the file",
    }


def test_apps_and_their_apis_are_listed(docs):
    apps = docs("show_app_descriptions")
    assert [app["app_name"] for app in apps] == list(APPS)
    for app in apps:
        assert app["description"]
        listed = [api["api_name"] for api in docs("show_api_descriptions", app_name=app["app_name"])]
        assert listed == list(APPS[app["app_name"]].apis)
        if app["app_name"] not in ("api_docs", "supervisor"):
            assert 5 <= len(listed) <= 10


def test_docs_are_searched(docs):
    found = docs("search_api_docs", query="invite")
    assert [(api["app_name"], api["api_name"]) for api in found] == [("calendar", "add_attendee")]


def test_the_page_names_every_app_api_and_kind():
    page = PAGE.read_text()
    for app in APPS.values():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{app.name}` |")]
        assert row.split("|")[2].replace("`", "").strip().split(", ") == list(app.apis)
    for difficulty, kinds in KINDS.items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| {difficulty} |")]
        described = [name.strip().strip("`") for name in (row.split("|")[3] + "," + row.split("|")[4]).split(",")]
        assert sorted(described) == sorted(kind.name for kind in kinds)
