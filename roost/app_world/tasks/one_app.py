"""Tasks of difficulty 1 and 2 in one app: one or two calls, or a loop over records."""

from __future__ import annotations

from roost.app_world import records, words
from roost.app_world.generation import day_from, person
from roost.app_world.tasks.task import DONE, LOGIN, Draft, Plan, all_pages, code, quoted

OCCASIONS = ("Eye test", "Flat viewing", "Parents' evening", "Wine tasting", "Haircut", "Chess club", "Fire drill")
NEW_TITLES = ("Old plans", "Read again", "Weekend", "From the workshop", "For later", "Do not forget")
NEW_TAGS = ("urgent", "travel", "archive", "family", "school")


def finish_task(draft: Draft) -> Plan:
    task = draft.record("tasks")
    task["is_done"] = False
    after = draft.state.copy()
    after.find("tasks", task["task_id"])["is_done"] = True
    instruction = draft.phrase(
        'I have done "{title}". Mark that task as done.', 'Tick off "{title}" on my todo list.', title=task["title"]
    )
    find = f"task = apis.todo.search(query={quoted(task['title'])})[0]"
    return Plan(instruction, code(find, 'apis.todo.complete(task_id=task["task_id"])', DONE), after)


def tell_phone(draft: Draft) -> Plan:
    someone = draft.record("contacts")
    instruction = draft.phrase(
        "What is the phone number of {name}?", "I want to call {name}. Which number do I dial?", name=someone["name"]
    )
    find = f"person = apis.contacts.search(query={quoted(someone['name'])})[0]"
    solution = code(find, 'apis.supervisor.complete_task(answer=person["phone"])')
    return Plan(instruction, solution, answer=someone["phone"])


def add_contact(draft: Draft) -> Plan:
    used = {row["name"].split()[0] for row in draft.state.rows("contacts")}
    first = draft.pick([name for name in words.FIRST_NAMES if name not in used])
    result = person(draft.random, first, draft.pick(words.LAST_NAMES))
    new = {name: result[name] for name in ("name", "email", "phone", "relation")}
    after = draft.state.copy()
    after.add("contacts", records.contact(**new))
    instruction = draft.phrase(
        "Add {name} to my contacts as {relation}, with the email {email} and the phone number {phone}.",
        "I met {name} ({email}, {phone}). Save that in my contacts, with the relation {relation}.",
        **new,
    )
    given = ", ".join(f"{name}={quoted(value)}" for name, value in new.items())
    return Plan(instruction, code(f"apis.contacts.create({given})", DONE), after)


def book_event(draft: Draft) -> Plan:
    day, hour = (
        day_from(draft.state, draft.number(1, 40)),
        f"{draft.number(8, 19):02d}:{draft.pick(('00', '15', '30'))}",
    )
    title, place, minutes = draft.pick(OCCASIONS), draft.pick(words.PLACES), draft.pick((20, 40, 75, 120))
    after = draft.state.copy()
    after.add("events", records.event(title, f"{day}T{hour}", minutes, place))
    instruction = draft.phrase(
        'Put "{title}" into my calendar: {day} at {hour}, for {minutes} minutes, location "{place}".',
        'I have "{title}" on {day} at {hour}. It takes {minutes} minutes, location "{place}". Add it to my calendar.',
        title=title, day=day, hour=hour, minutes=minutes, place=place,
    )  # fmt: skip
    given = f'title="{title}", start="{day}T{hour}", minutes={minutes}, location="{place}"'
    return Plan(instruction, code(f"apis.calendar.create({given})", DONE), after)


def rename_note(draft: Draft) -> Plan:
    note, title = draft.record("notes"), draft.pick(NEW_TITLES)
    after = draft.state.copy()
    after.find("notes", note["note_id"])["title"] = title
    instruction = draft.phrase(
        'Rename my note "{old}" to "{new}".', 'My note "{old}" is to be called "{new}".', old=note["title"], new=title
    )
    find = f"note = apis.notes.search(query={quoted(note['title'])})[0]"
    return Plan(instruction, code(find, f'apis.notes.update(note_id=note["note_id"], title="{title}")', DONE), after)


def tell_balance(draft: Draft) -> Plan:
    (wallet,) = draft.state.rows("wallets")
    instruction = draft.phrase(
        "How many dollars are in my payments account?", "What is the balance of my payments account, in dollars?"
    )
    show = "balance = apis.payments.show_balance(access_token=token)"
    solution = code(LOGIN, show, 'apis.supervisor.complete_task(answer=balance["balance"])')
    return Plan(instruction, solution, answer=wallet["balance"])


def cancel_event(draft: Draft) -> Plan:
    event = draft.record("events")
    after = draft.state.copy()
    after.remove("events", event["event_id"])
    instruction = draft.phrase(
        '"{title}" does not take place. Delete it from my calendar.',
        'Remove the event "{title}" from my calendar.',
        title=event["title"],
    )
    find = f"event = apis.calendar.search(query={quoted(event['title'])})[0]"
    return Plan(instruction, code(find, 'apis.calendar.delete(event_id=event["event_id"])', DONE), after)


def move_file(draft: Draft) -> Plan:
    file = draft.record("files")
    path, new_path = file["path"], f"/sorted/{draft.pick(words.CITIES).lower()}.txt"
    after = draft.state.copy()
    after.add("files", {**after.remove("files", path), "path": new_path})
    instruction = draft.phrase("Move the file {old} to {new}.", "Rename {old} to {new}.", old=path, new=new_path)
    return Plan(instruction, code(f'apis.files.move(path="{path}", new_path="{new_path}")', DONE), after)


def tag_note(draft: Draft) -> Plan:
    note, tag = draft.record("notes"), draft.pick(NEW_TAGS)
    after = draft.state.copy()
    after.find("notes", note["note_id"])["tags"].append(tag)
    instruction = draft.phrase(
        'Tag my note "{title}" with "{tag}".', 'Give the note "{title}" the tag "{tag}".', title=note["title"], tag=tag
    )
    find = f"note = apis.notes.search(query={quoted(note['title'])})[0]"
    return Plan(instruction, code(find, f'apis.notes.add_tag(note_id=note["note_id"], tag="{tag}")', DONE), after)


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
    find = all_pages("tasks", f'apis.todo.search(list_name="{list_name}", is_done=False')
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
    find = all_pages("notes", f'apis.notes.search(tag="{tag}"')
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
    rows_of = all_pages(
        "rows", 'apis.payments.search_transactions(access_token=token, kind="sent", email=person["email"]'
    )
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
    return Plan(instruction, code(today_code, all_pages("tasks", "apis.todo.search(is_done=False"), act, DONE), after)


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
    find = all_pages("events", f'apis.calendar.search(from_date="{day}", to_date="{day}"')
    act = code("for event in events:", '    apis.calendar.delete(event_id=event["event_id"])')
    return Plan(instruction, code(find, act, DONE), after)
