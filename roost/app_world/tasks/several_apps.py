"""Tasks of difficulty 2 and 3 that carry something from one app to another."""

from __future__ import annotations

from datetime import date, datetime, timedelta

from roost.app_world import records, words
from roost.app_world.generation import day_from
from roost.app_world.tasks.task import DONE, LOGIN, Draft, Plan, all_pages, code, pay, quoted

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
        all_pages("people", f'apis.contacts.search(query="{city}"'),
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
        all_pages("events", f'apis.calendar.search(from_date="{day}", to_date="{day}"'),
        "for event in events:",
        f'    apis.todo.create(title="Prepare " + event["title"], due="{eve}")',
        DONE,
    )
    return Plan(instruction, solution, after)


SUBJECTS = ("Sync", "Pairing", "Mentoring", "Check-in", "Workshop", "Walk", "Review of the plan", "Rehearsal")
STATIONS = ("Harbour tour", "Old town walk", "Hotel check-in", "Meeting at the office", "Market visit", "Castle tour")
ERRANDS = ("Change money", "Reserve a table", "Print the tickets", "Buy a guide book", "Ask for the keys")
GOODS = ("screws", "nails", "hinges", "bolts", "washers", "hooks", "brackets", "clamps")


def meeting_time(draft: Draft) -> Plan:
    (someone,) = draft.people(1)
    first, last = day_from(draft.state, 1), day_from(draft.state, draft.number(5, 9))
    other = draft.record("contacts")["email"]
    for index, subject in enumerate(draft.random.sample(SUBJECTS, draft.number(6, 8))):
        day = day_from(draft.state, draft.number(0, 12)) if index else first
        attendees = [other] if index % 3 == 2 else [someone["email"]]
        start, minutes = f"{day}T{draft.number(8, 18):02d}:15", draft.number(17, 95)
        draft.state.add("events", records.event(subject, start, minutes, draft.pick(words.PLACES), attendees))
    total = sum(
        row["minutes"]
        for row in draft.state.rows("events")
        if first <= row["start"][:10] <= last and someone["email"] in row["attendees"]
    )
    title = f"Minutes with {someone['name']}"
    after = draft.state.copy()
    after.add("notes", records.note(title, after.today, str(total)))
    instruction = draft.phrase(
        "How many minutes in total are the events from {first} to {last}, both days included, that {name} attends? "
        'Write just the number into a new note "{title}", and answer with it.',
        "Add up the minutes of all events that {name} attends from {first} to {last} (both included). Answer with the "
        'sum, and keep it as the content of a new note titled "{title}".',
        first=first,
        last=last,
        name=someone["name"],
        title=title,
    )
    solution = code(
        f"email = apis.contacts.search(query={quoted(someone['name'])})[0]['email']",
        all_pages("events", f'apis.calendar.search(from_date="{first}", to_date="{last}"'),
        'total = sum(event["minutes"] for event in events if email in event["attendees"])',
        f"apis.notes.create(title={quoted(title)}, content=str(total))",
        "apis.supervisor.complete_task(answer=total)",
    )
    return Plan(instruction, solution, after, answer=total)


def postpone_trip(draft: Draft) -> Plan:
    city, days, ahead = draft.pick(words.CITIES), draft.number(2, 20), draft.number(3, 25)
    for title in draft.random.sample(STATIONS, draft.number(3, 6)):
        start = f"{day_from(draft.state, ahead + draft.number(0, 3))}T{draft.number(8, 20):02d}:00"
        draft.state.add("events", records.event(title, start, 90, city))
    for title in draft.random.sample(ERRANDS, 4):
        due = draft.pick((None, day_from(draft.state, ahead - 1), day_from(draft.state, ahead - 2)))
        draft.state.add("tasks", records.task(title, f"trip to {city}", due))
    draft.state.rows("tasks")[-1]["is_done"] = True
    after = draft.state.copy()
    for event in after.rows("events"):
        if event["location"] == city:
            moved = datetime.fromisoformat(event["start"]) + timedelta(days=days)
            event["start"] = moved.isoformat(timespec="minutes")
    for task in after.rows("tasks"):
        if task["list_name"] == f"trip to {city}" and task["due"] and not task["is_done"]:
            task["due"] = (date.fromisoformat(task["due"]) + timedelta(days=days)).isoformat()
    instruction = draft.phrase(
        "My trip to {city} begins {days} days later than planned. Move all events with the location {city}, and the "
        'due dates of open tasks on the list "trip to {city}" that have one, by {days} days.',
        "Postpone my trip to {city} by {days} days: every event whose location is {city}, and every open task with a "
        'due date on the list "trip to {city}", is to be that much later.',
        city=city,
        days=days,
    )
    solution = code(
        "from datetime import date, datetime, timedelta",
        f"later = timedelta(days={days})",
        all_pages("events", f'apis.calendar.search(query="{city}"'),
        "for event in events:",
        '    start = (datetime.fromisoformat(event["start"]) + later).isoformat(timespec="minutes")',
        '    apis.calendar.update(event_id=event["event_id"], start=start)',
        all_pages("tasks", f'apis.todo.search(list_name="trip to {city}", is_done=False'),
        "for task in tasks:",
        '    if task["due"]:',
        '        due = (date.fromisoformat(task["due"]) + later).isoformat()',
        '        apis.todo.update(task_id=task["task_id"], due=due)',
        DONE,
    )
    return Plan(instruction, solution, after)


def birthday_gifts(draft: Draft) -> Plan:
    relation, month, before = draft.pick(words.RELATIONS), draft.number(1, 12), draft.number(2, 9)
    year = date.fromisoformat(draft.state.today).year + 1
    for someone in draft.people(draft.number(2, 4)):
        someone["relation"] = relation
        someone["birthday"] = f"{draft.number(1955, 2004)}-{month:02d}-{draft.number(1, 28):02d}"
    after = draft.state.copy()
    for contact in after.rows("contacts"):
        born = date.fromisoformat(contact["birthday"])
        if contact["relation"] == relation and born.month == month:
            due = born.replace(year=year) - timedelta(days=before)
            title = f"Gift for {contact['name']}, {year - born.year}"
            after.add("tasks", records.task(title, "gifts", due.isoformat()))
    instruction = draft.phrase(
        'For each of my contacts with the relation {relation} whose birthday is in month {month}, add a task "Gift for '
        '<name>, <age that they reach in {year}>" to the list "gifts", due {before} days before that birthday.',
        "Which contacts with the relation {relation} have their birthday in month {month}? Put a task for each on the "
        'list "gifts": "Gift for <name>, <the age they turn in {year}>", due {before} days before their birthday in '
        "{year}.",
        relation=relation,
        month=month,
        year=year,
        before=before,
    )
    solution = code(
        "from datetime import date, timedelta",
        all_pages("people", f'apis.contacts.search(relation="{relation}"'),
        "for person in people:",
        '    born = date.fromisoformat(person["birthday"])',
        f"    if born.month == {month}:",
        f"        due = (born.replace(year={year}) - timedelta(days={before})).isoformat()",
        f'        title = "Gift for " + person["name"] + ", " + str({year} - born.year)',
        '        apis.todo.create(title=title, list_name="gifts", due=due)',
        DONE,
    )
    return Plan(instruction, solution, after)


def stock_up(draft: Draft) -> Plan:
    goods = draft.random.sample(GOODS, 6)
    needed = {good: draft.number(10, 90) for good in goods}
    short = goods[: draft.number(2, 4)]
    held = {
        good: needed[good] - draft.number(1, 9) if good in short else needed[good] + draft.number(0, 9)
        for good in goods
    }
    path = "/workshop/stock.csv"
    stock = "\n".join(["item,count", *(f"{good},{held[good]}" for good in draft.shuffled(goods))])
    draft.state.add("files", records.file(path, draft.state.today, stock))
    minimum = "\n".join(f"{good}: {needed[good]}" for good in draft.shuffled(goods))
    draft.state.add("notes", records.note("Needed in the workshop", draft.state.today, minimum))
    after = draft.state.copy()
    for good in short:
        after.add("tasks", records.task(f"Buy {needed[good] - held[good]} {good}", "workshop"))
    instruction = draft.phrase(
        'The file {path} says how many of each item we have, and my note "Needed in the workshop" how many we need. '
        'For each item of which we have too few, add a task "Buy <missing number> <item>" to the list "workshop".',
        'Compare {path} with my note "Needed in the workshop". Where less is there than needed, put "Buy <how many are '
        'missing> <item>" on the todo list "workshop".',
        path=path,
    )
    solution = code(
        f'rows = apis.files.read(path="{path}")["content"].splitlines()[1:]',
        'held = dict(row.split(",") for row in rows)',
        'note = apis.notes.search(query="Needed in the workshop")[0]',
        'for line in note["content"].splitlines():',
        '    item, needed = line.split(": ")',
        "    missing = int(needed) - int(held[item])",
        "    if missing > 0:",
        '        apis.todo.create(title=f"Buy {missing} {item}", list_name="workshop")',
        DONE,
    )
    return Plan(instruction, solution, after)


def week_report(draft: Draft) -> Plan:
    today, last, since = draft.state.today, day_from(draft.state, 6), day_from(draft.state, -draft.number(7, 25))
    path = f"/reports/{today}.txt"
    tasks, events, payments = (draft.state.rows(table) for table in ("tasks", "events", "transactions"))
    open_tasks = sum(not task["is_done"] for task in tasks)
    minutes = sum(event["minutes"] for event in events if today <= event["start"][:10] <= last)
    sent = sum(row["amount"] for row in payments if row["kind"] == "sent" and row["date"] >= since)
    after = draft.state.copy()
    after.add("files", records.file(path, today, f"open tasks: {open_tasks}\nminutes: {minutes}\nsent: {sent}"))
    instruction = draft.phrase(
        'Write the file {path} with three lines: "open tasks: <how many tasks are open>", "minutes: <sum of the '
        'minutes of all events from {today} to {last}>" and "sent: <dollars that I sent since {since}>". First '
        "and last days are included.",
        'I need a report in {path}. Its lines are "open tasks: <number>", "minutes: <total of the events that begin '
        'from {today} to {last}, both included>" and "sent: <total of what I sent since {since}, included>".',
        path=path,
        today=today,
        last=last,
        since=since,
    )
    solution = code(
        all_pages("tasks", "apis.todo.search(is_done=False"),
        all_pages("events", f'apis.calendar.search(from_date="{today}", to_date="{last}"'),
        LOGIN,
        all_pages("rows", f'apis.payments.search_transactions(access_token=token, kind="sent", from_date="{since}"'),
        'minutes = sum(event["minutes"] for event in events)',
        'sent = sum(row["amount"] for row in rows)',
        'content = f"open tasks: {len(tasks)}\\nminutes: {minutes}\\nsent: {sent}"',
        f'apis.files.write(path="{path}", content=content)',
        DONE,
    )
    return Plan(instruction, solution, after)
