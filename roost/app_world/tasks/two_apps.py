"""Tasks of difficulty 2 that take something from one app to another."""

from __future__ import annotations

from roost.app_world import records, words
from roost.app_world.generation import day_from
from roost.app_world.tasks.draft import DONE, LOGIN, Draft, Plan, code, every, pay, quoted

ITEMS = (
    "socks", "torch", "map", "charger", "towel", "raincoat", "tent", "sunscreen", "passport", "hat", "camera", "rope",
)  # fmt: skip
LOOSE_FILES = ("minutes", "speech", "recipe", "address", "rules")
NOTE_NAMES = ("Kept from files", "Moved here", "Copy of a file", "Worth keeping")


def invite_person(draft: Draft) -> Plan:
    event, (someone,) = draft.record("events"), draft.people(1)
    email = someone["email"]
    event["attendees"] = [other for other in event["attendees"] if other != email]
    after = draft.state.copy()
    after.find("events", event["event_id"])["attendees"].append(email)
    instruction = draft.phrase(
        'Invite {name} to the event "{title}" in my calendar.',
        '{name} would like to come to "{title}". Add the email to the attendees of that event.',
        name=someone["name"],
        title=event["title"],
    )
    solution = code(
        f"person = apis.contacts.search(query={quoted(someone['name'])})[0]",
        f"event = apis.calendar.search(query={quoted(event['title'])})[0]",
        'apis.calendar.add_attendee(event_id=event["event_id"], email=person["email"])',
        DONE,
    )
    return Plan(instruction, solution, after)


def pay_person(draft: Draft) -> Plan:
    (someone,) = draft.people(1)
    amount, note = draft.number(5, 250), draft.pick(words.PAYMENT_NOTES)
    after = draft.state.copy()
    pay(after, someone["email"], amount, note)
    instruction = draft.phrase(
        'Send ${amount} to {name}, with the note "{note}".',
        'I owe {name} ${amount}. Send it, and write "{note}" as the note.',
        amount=amount,
        name=someone["name"],
        note=note,
    )
    find = f"person = apis.contacts.search(query={quoted(someone['name'])})[0]"
    send = f'apis.payments.send(access_token=token, email=person["email"], amount={amount}, note="{note}")'
    return Plan(instruction, code(find, LOGIN, send, DONE), after)


def note_to_tasks(draft: Draft) -> Plan:
    city, items = draft.pick(words.CITIES), draft.random.sample(ITEMS, draft.number(3, 6))
    title, list_name = f"Packing for {city}", city.lower()
    draft.state.add("notes", records.note(title, draft.state.today, "\n".join(items)))
    after = draft.state.copy()
    for item in items:
        after.add("tasks", records.task(f"Pack {item}", list_name))
    instruction = draft.phrase(
        'My note "{title}" has one thing in each line. For each, add a task "Pack <thing>" to the list "{name}".',
        'For every line of my note "{title}", put a task titled "Pack <line>" on my todo list "{name}".',
        title=title,
        name=list_name,
    )
    solution = code(
        f'note = apis.notes.search(query="{title}")[0]',
        'for item in note["content"].splitlines():',
        f'    apis.todo.create(title="Pack " + item, list_name="{list_name}")',
        DONE,
    )
    return Plan(instruction, solution, after)


def file_to_note(draft: Draft) -> Plan:
    path, title = f"/inbox/{draft.pick(LOOSE_FILES)}.txt", draft.pick(NOTE_NAMES)
    content = " ".join(draft.random.sample(words.SENTENCES, 3))
    draft.state.add("files", records.file(path, draft.state.today, content))
    after = draft.state.copy()
    after.remove("files", path)
    after.add("notes", records.note(title, after.today, content))
    instruction = draft.phrase(
        'Turn the file {path} into a note titled "{title}" with the same content, and delete the file.',
        'Write what {path} says into a new note called "{title}". Delete the file afterwards.',
        path=path,
        title=title,
    )
    solution = code(
        f'content = apis.files.read(path="{path}")["content"]',
        f'apis.notes.create(title="{title}", content=content)',
        f'apis.files.delete(path="{path}")',
        DONE,
    )
    return Plan(instruction, solution, after)


def list_city(draft: Draft) -> Plan:
    city = draft.pick(words.CITIES)
    for someone in draft.people(draft.number(3, 7)):
        someone["city"] = city
    path = f"/lists/{city.lower()}.txt"
    emails = sorted(row["email"] for row in draft.state.rows("contacts") if row["city"] == city)
    after = draft.state.copy()
    after.add("files", records.file(path, after.today, "\n".join(emails)))
    instruction = draft.phrase(
        "Write the emails of all my contacts who live in {city} to the file {path}, one a line, in alphabetical order.",
        "I need a file {path} with the emails of all contacts in {city}: one in each line, sorted alphabetically.",
        city=city,
        path=path,
    )
    solution = code(
        every("people", f'apis.contacts.search(query="{city}"'),
        f'emails = sorted(person["email"] for person in people if person["city"] == "{city}")',
        f'apis.files.write(path="{path}", content="\\n".join(emails))',
        DONE,
    )
    return Plan(instruction, solution, after)


def prepare_day(draft: Draft) -> Plan:
    ahead = draft.number(1, 10)
    day, eve = day_from(draft.state, ahead), day_from(draft.state, ahead - 1)
    for item in draft.random.sample(ITEMS, draft.number(2, 6)):
        draft.state.add("events", records.event(f"Talk on the {item}", f"{day}T{draft.number(8, 18):02d}:30", 45))
    after = draft.state.copy()
    for event in after.rows("events"):
        if event["start"].startswith(day):
            after.add("tasks", records.task(f"Prepare {event['title']}", due=eve))
    instruction = draft.phrase(
        'For every event in my calendar on {day}, add a task "Prepare <title of the event>" to my inbox, due on {eve}.',
        'Add a task "Prepare <title>" for each event that begins on {day}. The tasks are due on {eve}.',
        day=day,
        eve=eve,
    )
    solution = code(
        every("events", f'apis.calendar.search(from_date="{day}", to_date="{day}"'),
        "for event in events:",
        f'    apis.todo.create(title="Prepare " + event["title"], due="{eve}")',
        DONE,
    )
    return Plan(instruction, solution, after)
