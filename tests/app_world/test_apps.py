import math

import pytest

from roost.app_world import records
from roost.app_world.proxy import Apis
from roost.app_world.state import ApiError, State
from roost.app_world.world import World

OWN = "me@example.com"


@pytest.fixture
def state():
    state = State(
        today="2026-03-02",
        profile={"name": "Me", "email": OWN, "phone": "1", "city": "Riga"},
        accounts={"payments": {"password": "secret", "access_token": "t"}},
    )
    for number in range(1, 8):
        state.add("notes", records.note(f"note {number}", "2026-01-01", tags=["odd"] if number % 2 else []))
        state.add("tasks", records.task(f"task {number}"))
    state.add("contacts", records.contact("Ada Berg", "ada@example.com", city="Riga"))
    state.add("events", records.event("Late", "2026-03-05T18:00"))
    state.add("events", records.event("Early", "2026-03-04T08:00", attendees=["ada@example.com"]))
    state.add("wallets", {"email": OWN, "balance": 100})
    state.add("transactions", records.transaction("sent", "ada@example.com", 20, "tea", "2026-02-01"))
    state.add("requests", records.request("incoming", "ada@example.com", 30, "cake"))
    state.add("requests", records.request("incoming", "ada@example.com", 300, "car"))
    state.add("requests", records.request("outgoing", "ada@example.com", 5, "tea"))
    state.add("files", records.file("/docs/a.txt", "2026-01-01", "one"))
    return state


@pytest.fixture
def apis(state):
    return Apis(World(state).call)


def refused(call, **kwargs):
    with pytest.raises(ApiError) as caught:
        call(**kwargs)
    return str(caught.value)


def test_notes(apis):
    made = apis.notes.create(title="milk", tags=["a", "b", "a"])
    assert made == {"note_id": 8, "title": "milk", "content": "", "tags": ["a", "b"], "created_on": "2026-03-02"}
    assert apis.notes.update(note_id=8, content="2 l")["content"] == "2 l"
    assert apis.notes.remove_tag(note_id=8, tag="a")["tags"] == ["b"]
    assert apis.notes.add_tag(note_id=8, tag="b")["tags"] == ["b"]
    assert apis.notes.show_tags() == ["b", "odd"]
    assert [note["note_id"] for note in apis.notes.search(query="MILK")] == [8]
    assert apis.notes.delete(note_id=8)["title"] == "milk"
    assert refused(apis.notes.show, note_id=8) == "there is nothing in notes with note_id 8"


@pytest.mark.parametrize(
    ("kwargs", "numbers"),
    [
        pytest.param({}, [1, 2, 3, 4, 5], id="first page"),
        pytest.param({"page_index": 1}, [6, 7], id="last page"),
        pytest.param({"page_index": 2}, [], id="after the last"),
        pytest.param({"page_limit": 20}, [1, 2, 3, 4, 5, 6, 7], id="a large page"),
        pytest.param({"tag": "odd", "page_limit": 2, "page_index": 1}, [5, 7], id="filtered first"),
        pytest.param({"page_index": 1.0}, [6, 7], id="a whole number as a float"),
    ],
)
def test_pages(apis, kwargs, numbers):
    assert [note["note_id"] for note in apis.notes.search(**kwargs)] == numbers


def test_todo(apis):
    made = apis.todo.create(title="x", list_name="home", due="2026-03-09", priority=1)
    assert apis.todo.update(task_id=made["task_id"], title="y")["due"] == "2026-03-09"
    assert apis.todo.complete(task_id=made["task_id"])["is_done"]
    assert refused(apis.todo.complete, task_id=made["task_id"]) == "task 8 is done already"
    assert [task["title"] for task in apis.todo.search(is_done=True)] == ["y"]
    assert not apis.todo.reopen(task_id=made["task_id"])["is_done"]
    assert apis.todo.show_lists() == ["home", "inbox"]
    assert [task["title"] for task in apis.todo.search(list_name="home")] == ["y"]


def test_contacts(apis):
    assert apis.contacts.search(query="riga")[0]["name"] == "Ada Berg"
    assert apis.contacts.update(contact_id=1, email="ada@example.com", phone="2")["phone"] == "2"
    assert "already" in refused(apis.contacts.create, name="Ada", email="ada@example.com")
    assert apis.contacts.create(name="Bo", email="bo@example.com", relation="family")["contact_id"] == 2
    assert apis.contacts.show_relations() == ["family", "friend"]
    apis.contacts.delete(contact_id=1)
    assert [row["name"] for row in apis.contacts.search()] == ["Bo"]


def test_calendar(apis):
    assert [event["title"] for event in apis.calendar.search()] == ["Early", "Late"]
    assert [event["title"] for event in apis.calendar.search(from_date="2026-03-05", to_date="2026-03-05")] == ["Late"]
    assert apis.calendar.update(event_id=1, start="2026-03-03T07:00")["minutes"] == 60
    assert apis.calendar.search()[0]["title"] == "Late"
    assert "already" in refused(apis.calendar.add_attendee, event_id=2, email="ada@example.com")
    assert apis.calendar.remove_attendee(event_id=2, email="ada@example.com")["attendees"] == []
    assert "is not invited" in refused(apis.calendar.remove_attendee, event_id=2, email="ada@example.com")


def test_payments_need_a_login(apis):
    assert "wrong email or password" in refused(apis.payments.login, email=OWN, password="x")
    assert "payments.login gives one" in refused(apis.payments.show_balance, access_token="x")
    (account,) = apis.supervisor.show_account_passwords()
    assert account == {"app_name": "payments", "email": OWN, "password": "secret"}
    assert apis.payments.login(email=OWN, password=account["password"]) == {"access_token": "t"}


def test_payments(apis):
    sent = apis.payments.send(access_token="t", email="bo@example.com", amount=10, note="hat")
    assert (sent["kind"], sent["amount"], sent["date"]) == ("sent", 10, "2026-03-02")
    assert apis.payments.pay_request(access_token="t", request_id=1)["note"] == "cake"
    assert apis.payments.show_balance(access_token="t") == {"balance": 60}
    assert (
        refused(apis.payments.pay_request, access_token="t", request_id=2)
        == "the balance is 60, which is less than 300"
    )
    assert apis.payments.decline_request(access_token="t", request_id=2)["status"] == "declined"
    assert "not for you to pay" in refused(apis.payments.decline_request, access_token="t", request_id=3)
    assert apis.payments.request(access_token="t", email="bo@example.com", amount=7)["direction"] == "outgoing"
    pending = apis.payments.search_requests(access_token="t", status="pending")
    assert [request["request_id"] for request in pending] == [3, 4]
    rows = apis.payments.search_transactions(access_token="t", email="ada@example.com", to_date="2026-02-28")
    assert [row["note"] for row in rows] == ["tea"]


def test_files(apis):
    assert "overwrite=True replaces it" in refused(apis.files.write, path="/docs/a.txt", content="two")
    assert apis.files.append(path="/docs/a.txt", content="\ntwo")["modified_on"] == "2026-03-02"
    assert apis.files.move(path="/docs/a.txt", new_path="/b/c.txt")["content"] == "one\ntwo"
    assert apis.files.write(path="/b/c.txt", content="", overwrite=True)["content"] == ""
    apis.files.write(path="/bc.txt", content="x")
    assert apis.files.show_folder(folder="/b") == ["/b/c.txt"]
    assert apis.files.search(query="bc")[0]["content"] == "x"
    assert refused(apis.files.read, path="/b/d.txt") == "there is no file called '/b/d.txt'; did you mean '/b/c.txt'?"
    apis.files.delete(path="/b/c.txt")
    assert apis.files.show_folder() == ["/bc.txt"]


def test_supervisor(state):
    world = World(state)
    apis = Apis(world.call)
    assert apis.supervisor.show_profile()["email"] == OWN
    assert apis.supervisor.show_today() == {"date": "2026-03-02", "weekday": "Monday"}
    assert (world.is_completed, world.answer, world.status) == (False, None, None)
    apis.supervisor.complete_task(answer={"a": (1, 2)}, status="fail")
    assert (world.is_completed, world.answer, world.status) == (True, {"a": [1, 2]}, "fail")
    assert refused(apis.notes.create, title="x") == "the task is completed; nothing more can be done"


class Thing:
    pass


@pytest.mark.parametrize(
    ("app", "api", "kwargs", "message"),
    [
        pytest.param("note", "create", {}, "there is no app called 'note'; did you mean 'notes'?", id="app"),
        pytest.param("zzz", "create", {}, "there are: api_docs, calendar", id="no app is near"),
        pytest.param("notes", "creat", {}, "no API of notes called 'creat'; did you mean 'create'?", id="API"),
        pytest.param("notes", "_state", {}, "there is no API of notes called '_state'", id="private name"),
        pytest.param("notes", "__init__", {}, "there is no API of notes", id="what every object has"),
        pytest.param("notes", "create", {"titel": "x"}, "did you mean 'title'?", id="parameter"),
        pytest.param("notes", "create", {"self": 1}, "no parameter of notes.create called 'self'", id="self"),
        pytest.param("notes", "create", {}, "notes.create needs title", id="missing"),
        pytest.param("notes", "create", {"title": 3}, "title must be a value of type string, not int 3", id="type"),
        pytest.param(
            "notes", "create", {"title": None}, "title must be a value of type string, not NoneType", id="null"
        ),
        pytest.param("notes", "create", {"title": " "}, "title must not be empty", id="empty"),
        pytest.param("notes", "create", {"title": "x" * 20_001}, "title has 20001 characters", id="long"),
        pytest.param("notes", "create", {"title": "x", "tags": [1]}, "type list of strings or null", id="list"),
        pytest.param(
            "notes", "create", {"title": "x", "tags": "ab"}, "type list of strings or null", id="text as list"
        ),
        pytest.param("notes", "show", {"note_id": True}, "type integer, not bool True", id="bool as number"),
        pytest.param("notes", "show", {"note_id": 1.5}, "type integer, not float 1.5", id="part of a number"),
        pytest.param("notes", "show", {"note_id": math.inf}, "type integer, not float inf", id="infinite"),
        pytest.param("notes", "show", {"note_id": 10**13}, "note_id must be between", id="huge"),
        pytest.param("notes", "create", {"title": 10**5000}, "of type string, not int", id="a number beyond printing"),
        pytest.param("notes", "create", {"title": "x", "tags": ["a"] * 101}, "tags has 101 items", id="many items"),
        pytest.param("supervisor", "complete_task", {"answer": 10**5000}, "must be a JSON value", id="endless answer"),
        pytest.param("contacts", "create", {"name": "x", "email": "a@" + "." * 9999 + " "}, "email must", id="dots"),
        pytest.param(
            "files", "write", {"path": "/" + "a" * 200, "content": ""}, "path has 201 characters", id="long path"
        ),
        pytest.param("notes", "search", {"page_limit": 21}, "page_limit must be from 1 to 20, not 21", id="page limit"),
        pytest.param("notes", "search", {"page_index": -1}, "page_index must be 0 or more", id="page index"),
        pytest.param("todo", "create", {"title": "x", "due": "2026-02-30"}, "due must be a date", id="no such day"),
        pytest.param("todo", "create", {"title": "x", "due": "20260302"}, "due must be a date", id="short date"),
        pytest.param("todo", "create", {"title": "x", "priority": 4}, "from 1 to 3, not 4", id="priority"),
        pytest.param("calendar", "create", {"title": "x", "start": "2026-03-02"}, "a date and time", id="no time"),
        pytest.param(
            "calendar", "create", {"title": "x", "start": "2026-03-02T25:00"}, "start must be", id="no such hour"
        ),
        pytest.param("contacts", "create", {"name": "x", "email": "x"}, "email must be an address", id="email"),
        pytest.param("files", "write", {"path": "a/b", "content": ""}, "path must be a full path", id="relative path"),
        pytest.param(
            "files", "write", {"path": "/a/../b", "content": ""}, "path must be a full path", id="path upwards"
        ),
        pytest.param("files", "write", {"path": "/a/", "content": ""}, "path must be a full path", id="folder"),
        pytest.param(
            "supervisor", "complete_task", {"answer": Thing()}, "must be a JSON value, not Thing", id="object"
        ),
        pytest.param("supervisor", "complete_task", {"answer": math.nan}, "must be a JSON value", id="not a number"),
        pytest.param("supervisor", "complete_task", {"status": "ok"}, "one of success, fail, not 'ok'", id="status"),
        pytest.param("api_docs", "show_api_doc", {"app_name": "todo", "api_name": "crate"}, "'create'", id="doc of"),
        pytest.param(["notes"], "create", {}, "there is no app called", id="app that is no text"),
        pytest.param("notes", ["create"], {}, "there is no API of notes called", id="API that is no text"),
        pytest.param("notes", "create", ["title"], "arguments must be a mapping, not list", id="arguments"),
    ],
)
def test_what_is_refused(state, app, api, kwargs, message):
    world = World(state)
    before = world.snapshot()
    with pytest.raises(ApiError) as caught:
        world.call(app, api, kwargs)
    assert message in str(caught.value)
    assert world.snapshot() == before


@pytest.mark.parametrize(
    ("amount", "message"),
    [
        pytest.param(0, "amount must be 1 or more, not 0", id="nothing"),
        pytest.param(-5, "amount must be 1 or more", id="less than nothing"),
        pytest.param(101, "the balance is 100, which is less than 101", id="more than there is"),
    ],
)
def test_amounts(apis, amount, message):
    assert message in refused(apis.payments.send, access_token="t", email="bo@example.com", amount=amount)
    assert "own address" in refused(apis.payments.send, access_token="t", email=OWN, amount=1)
    assert apis.payments.show_balance(access_token="t") == {"balance": 100}


def test_an_answer_is_not_nested_without_end():
    nested = []
    nested.append(nested)
    assert "nested too deeply" in refused(Apis(World.from_seed(1).call).supervisor.complete_task, answer=nested)


def test_lists_inside_records_do_not_grow_without_end(apis):
    apis.notes.update(note_id=2, title="full")
    for number in range(100):
        apis.notes.add_tag(note_id=2, tag=str(number))
    assert refused(apis.notes.add_tag, note_id=2, tag="x") == "there are 100 tags already; 100 are allowed"


def test_parameters_are_given_by_name(apis):
    with pytest.raises(ApiError, match=r"notes.create takes its parameters by name, as in create\(name=value\)"):
        apis.notes.create("milk")


def test_the_proxy_has_no_private_names(apis):
    with pytest.raises(AttributeError):
        apis.__wrapped__  # noqa: B018
    with pytest.raises(AttributeError):
        apis.notes._repr_html_  # noqa: B018
