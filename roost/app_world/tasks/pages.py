"""Tasks of difficulty 2 that go through all pages of a search, and act on what fits."""

from __future__ import annotations

from roost.app_world import records, words
from roost.app_world.generation import day_from
from roost.app_world.tasks.draft import DONE, LOGIN, Draft, Plan, code, every, quoted

CHORES = (
    "Mow the lawn", "Prune the roses", "Sweep the path", "Plant tulips", "Fill the feeder", "Mend the fence",
    "Rake the leaves", "Paint the gate", "Empty the barrel", "Stack the wood",
)  # fmt: skip
LISTS = ("garden", "cabin", "move", "festival")
TAGS = ("old", "draft", "trip", "course")
GATHERINGS = ("Kick-off", "Interview", "Retrospective", "Demo", "Handover", "Site call", "Hiring round")


def finish_list(draft: Draft) -> Plan:
    list_name = draft.pick(LISTS)
    for title in draft.random.sample(CHORES, draft.number(6, 9)):
        draft.state.add("tasks", records.task(title, list_name))
    draft.state.rows("tasks")[-1]["is_done"] = True
    after = draft.state.copy()
    for task in after.rows("tasks"):
        task["is_done"] |= task["list_name"] == list_name
    instruction = draft.phrase(
        'Everything on my todo list "{name}" is done. Mark all of its tasks as done.',
        'Mark every open task on the list "{name}" as done.',
        name=list_name,
    )
    find = every("tasks", f'apis.todo.search(list_name="{list_name}", is_done=False')
    act = code("for task in tasks:", '    apis.todo.complete(task_id=task["task_id"])')
    return Plan(instruction, code(find, act, DONE), after)


def delete_tagged(draft: Draft) -> Plan:
    tag = draft.pick(TAGS)
    for name in draft.random.sample(words.CITIES, draft.number(5, 8)):
        draft.state.add(
            "notes", records.note(f"About {name}", draft.state.today, tags=[tag, draft.pick(words.NOTE_TAGS)])
        )
    draft.state.add("notes", records.note(f"Why I keep {tag} things", draft.state.today))
    after = draft.state.copy()
    for note in after.rows("notes"):
        if tag in note["tags"]:
            after.remove("notes", note["note_id"])
    instruction = draft.phrase(
        'Delete all my notes with the tag "{tag}".', 'I no longer need the notes tagged "{tag}". Delete them.', tag=tag
    )
    find = every("notes", f'apis.notes.search(tag="{tag}"')
    act = code("for note in notes:", '    apis.notes.delete(note_id=note["note_id"])')
    return Plan(instruction, code(find, act, DONE), after)


def total_sent(draft: Draft) -> Plan:
    (someone,) = draft.people(1)
    email = someone["email"]
    for _ in range(draft.number(4, 8)):
        day, amount = day_from(draft.state, -draft.number(1, 50)), draft.number(11, 180)
        draft.state.add(
            "transactions", records.transaction("sent", email, amount, draft.pick(words.PAYMENT_NOTES), day)
        )
    rows = draft.state.rows("transactions")
    total = sum(row["amount"] for row in rows if (row["kind"], row["email"]) == ("sent", email))
    instruction = draft.phrase(
        "How many dollars have I sent to {name} in total?",
        "Add up everything that I ever sent to {name}. How many dollars is it?",
        name=someone["name"],
    )
    find = f"person = apis.contacts.search(query={quoted(someone['name'])})[0]"
    rows_of = every("rows", 'apis.payments.search_transactions(access_token=token, kind="sent", email=person["email"]')
    answer = 'apis.supervisor.complete_task(answer=sum(row["amount"] for row in rows))'
    return Plan(instruction, code(find, LOGIN, rows_of, answer), answer=total)


def raise_overdue(draft: Draft) -> Plan:
    today = draft.state.today
    for title in draft.random.sample(CHORES, draft.number(3, 5)):
        due = day_from(draft.state, -draft.number(1, 20))
        draft.state.add("tasks", records.task(title, draft.pick(words.TASK_LISTS), due, draft.number(2, 3)))
    after = draft.state.copy()
    for task in after.rows("tasks"):
        if not task["is_done"] and task["due"] and task["due"] < today:
            task["priority"] = 1
    instruction = draft.phrase(
        "Give all open tasks that were due before today the priority 1.",
        "Some of my open tasks should have been done before today. Set the priority of each of them to 1.",
    )
    today_code = 'today = apis.supervisor.show_today()["date"]'
    act = code(
        "for task in tasks:",
        '    if task["due"] and task["due"] < today:',
        '        apis.todo.update(task_id=task["task_id"], priority=1)',
    )
    return Plan(instruction, code(today_code, every("tasks", "apis.todo.search(is_done=False"), act, DONE), after)


def cancel_day(draft: Draft) -> Plan:
    ahead = draft.number(3, 15)
    day = day_from(draft.state, ahead)
    for title in draft.random.sample(GATHERINGS, draft.number(4, 6)):
        draft.state.add("events", records.event(title, f"{day}T{draft.number(8, 17):02d}:00", 30, "Online"))
    draft.state.add("events", records.event("Checkup", f"{day_from(draft.state, ahead + 1)}T09:00"))
    after = draft.state.copy()
    for event in after.rows("events"):
        if event["start"].startswith(day):
            after.remove("events", event["event_id"])
    instruction = draft.phrase(
        "I take {day} off. Delete all events of that day from my calendar.",
        "Clear my calendar on {day}: delete every event that begins on that day.",
        day=day,
    )
    find = every("events", f'apis.calendar.search(from_date="{day}", to_date="{day}"')
    act = code("for event in events:", '    apis.calendar.delete(event_id=event["event_id"])')
    return Plan(instruction, code(find, act, DONE), after)
