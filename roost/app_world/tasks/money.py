"""Tasks of difficulty 3 about money: several apps, sums and conditions."""

from __future__ import annotations

from collections import Counter

from roost.app_world import records, words
from roost.app_world.generation import day_from
from roost.app_world.tasks.task import DONE, LOGIN, Draft, Plan, all_pages, code, pay

PARTIES = ("Dinner at the harbour", "Boat trip", "Karaoke night", "Cooking evening", "Museum day")
POSTS = ("food", "drinks", "tickets", "transport")
CATEGORIES = ("cinema", "sweets", "flowers", "games", "concerts")


def split_bill(draft: Draft) -> Plan:
    title, guests = draft.pick(PARTIES), draft.people(draft.number(2, 5))
    share, posts = draft.number(12, 60), draft.random.sample(POSTS, 3)
    total = share * (len(guests) + 1)
    first, second = draft.number(1, total // 3), draft.number(1, total // 3)
    bill = "\n".join(
        f"{post}: {cost}" for post, cost in zip(posts, (first, second, total - first - second), strict=True)
    )
    path, day = f"/bills/{title.split()[0].lower()}.txt", day_from(draft.state, -draft.number(1, 6))
    draft.state.add("files", records.file(path, draft.state.today, bill))
    emails = [guest["email"] for guest in guests]
    draft.state.add("events", records.event(title, f"{day}T19:00", 180, "Town hall", emails))
    after = draft.state.copy()
    for email in emails:
        after.add("requests", records.request("outgoing", email, share, title))
    instruction = draft.phrase(
        'I paid for "{title}"; the costs are in {path}. Split them equally between me and the attendees of that event '
        'in my calendar, and request from each attendee their share, with the note "{title}".',
        'The bill of "{title}" is in the file {path}. Everybody who attended the event, and I myself, pay the same '
        'part of the total. Request it from each of the attendees, with "{title}" as the note.',
        title=title,
        path=path,
    )
    solution = code(
        f'lines = apis.files.read(path="{path}")["content"].splitlines()',
        'total = sum(int(line.split(": ")[1]) for line in lines)',
        f'guests = apis.calendar.search(query="{title}")[0]["attendees"]',
        LOGIN,
        "for email in guests:",
        "    share = total // (len(guests) + 1)",
        f'    apis.payments.request(access_token=token, email=email, amount=share, note="{title}")',
        DONE,
    )
    return Plan(instruction, solution, after)


def settle_requests(draft: Draft) -> Plan:
    relation, limit = draft.pick(words.RELATIONS), draft.number(30, 70)
    _add_requests(draft, relation, limit)
    relations = {row["email"]: row["relation"] for row in draft.state.rows("contacts")}
    after = draft.state.copy()
    for request in after.rows("requests"):
        if (request["direction"], request["status"]) != ("incoming", "pending"):
            continue
        is_paid = relations[request["email"]] == relation and request["amount"] <= limit
        request["status"] = "paid" if is_paid else "declined"
        if is_paid:
            pay(after, request["email"], request["amount"], request["note"])
    instruction = draft.phrase(
        "Go through the pending requests for money that I got. Pay those of at most ${limit} from contacts with the "
        "relation {relation}, and decline all others.",
        "Pay every pending request to me that comes from a contact with the relation {relation} and is for ${limit} or "
        "less. Decline every other pending request to me.",
        limit=limit,
        relation=relation,
    )
    solution = code(
        all_pages("people", "apis.contacts.search("),
        'relations = dict((person["email"], person["relation"]) for person in people)',
        LOGIN,
        all_pages(
            "requests", 'apis.payments.search_requests(access_token=token, direction="incoming", status="pending"'
        ),
        "for request in requests:",
        f'    is_paid = relations[request["email"]] == "{relation}" and request["amount"] <= {limit}',
        "    act = apis.payments.pay_request if is_paid else apis.payments.decline_request",
        '    act(access_token=token, request_id=request["request_id"])',
        DONE,
    )
    return Plan(instruction, solution, after)


def _add_requests(draft: Draft, relation: str, limit: int) -> None:
    """Add pending requests: the first is to be paid, the second declined."""
    others = [one for one in words.RELATIONS if one != relation]
    for index, someone in enumerate(draft.people(draft.number(6, 8))):
        someone["relation"] = draft.pick(others) if index % 2 else relation
        amount = draft.number(5, limit if index < 2 else 2 * limit)
        request = records.request("incoming", someone["email"], amount, draft.pick(words.PAYMENT_NOTES))
        draft.state.add("requests", request)


def watch_budget(draft: Draft) -> Plan:
    since, categories = day_from(draft.state, -30), draft.random.sample(CATEGORIES, 4)
    spent = {category: _spend(draft, category, since) for category in categories}
    above = {category: draft.number(1, 5) for category in categories[: draft.number(1, 3)]}
    limits = [f"{one}: {spent[one] - above.get(one, -draft.number(0, 9))}" for one in draft.shuffled(categories)]
    draft.state.add("notes", records.note("My budget", since, "\n".join(limits)))
    after = draft.state.copy()
    for category, dollars in above.items():
        after.add("tasks", records.task(f"Spend {dollars} less on {category}", "money"))
    instruction = draft.phrase(
        'My note "My budget" says for some categories how many dollars I may spend. The category of a payment is its '
        "note. For each category on which I sent more than that since {since} (that day included), add a task "
        '"Spend <dollars above the limit> less on <category>" to the list "money".',
        'Compare what I sent since {since}, that day included, with the limits in my note "My budget"; payments have '
        'their category as note. Where I am above a limit, add the task "Spend <difference> less on <category>" to the '
        'todo list "money".',
        since=since,
    )
    solution = code(
        'lines = apis.notes.search(query="My budget")[0]["content"].splitlines()',
        LOGIN,
        all_pages("rows", f'apis.payments.search_transactions(access_token=token, kind="sent", from_date="{since}"'),
        "for line in lines:",
        '    category, limit = line.split(": ")',
        '    above = sum(row["amount"] for row in rows if row["note"] == category) - int(limit)',
        "    if above > 0:",
        '        apis.todo.create(title=f"Spend {above} less on {category}", list_name="money")',
        DONE,
    )
    return Plan(instruction, solution, after)


def _spend(draft: Draft, category: str, since: str) -> int:
    """Add payments of a category, one on the day `since`; return the sum of those since then."""
    days = [since, *(day_from(draft.state, -draft.number(0, 45)) for _ in range(draft.number(1, 3)))]
    rows = [
        records.transaction("sent", draft.record("contacts")["email"], draft.number(10, 90), category, day)
        for day in days
    ]
    for row in draft.shuffled(rows):
        draft.state.add("transactions", row)
    return sum(row["amount"] for row in rows if row["date"] >= since)


def reimburse(draft: Draft) -> Plan:
    people, path = draft.people(draft.number(2, 4)), f"/expenses/{draft.pick(words.CITIES).lower()}.csv"
    rows = [(someone["name"], draft.number(5, 80)) for someone in people for _ in range(draft.number(1, 3))]
    rows = draft.shuffled(rows)
    content = "\n".join(["name,amount", *(f"{name},{amount}" for name, amount in rows)])
    draft.state.add("files", records.file(path, draft.state.today, content))
    note = draft.pick(words.PAYMENT_NOTES)
    after = draft.state.copy()
    for someone in people:
        pay(after, someone["email"], sum(amount for name, amount in rows if name == someone["name"]), note)
    instruction = draft.phrase(
        "The file {path} lists what people paid for me. Send each of them the sum of their amounts in one payment, "
        'with the note "{note}".',
        "Pay back the people in {path}: everybody gets the total of their lines in a single payment with the note "
        '"{note}".',
        path=path,
        note=note,
    )
    solution = code(
        "totals = dict()",
        f'for line in apis.files.read(path="{path}")["content"].splitlines()[1:]:',
        '    name, amount = line.split(",")',
        "    totals[name] = totals.get(name, 0) + int(amount)",
        LOGIN,
        "for name, total in totals.items():",
        '    email = apis.contacts.search(query=name)[0]["email"]',
        f'    apis.payments.send(access_token=token, email=email, amount=total, note="{note}")',
        DONE,
    )
    return Plan(instruction, solution, after)


def thank_most(draft: Draft) -> Plan:
    relation, since = draft.pick(words.RELATIONS), day_from(draft.state, -draft.number(20, 40))
    best, second = draft.people(2)
    best["relation"] = second["relation"] = relation
    names = {row["email"]: row["name"] for row in draft.state.rows("contacts") if row["relation"] == relation}
    received: Counter[str] = Counter()
    for row in draft.state.rows("transactions"):
        if row["kind"] == "received" and row["date"] >= since and row["email"] in names:
            received[row["email"]] += row["amount"]
    lead = max(received.values(), default=0) - received[best["email"]] + draft.number(5, 40)
    for amount in (lead // 2, lead - lead // 2):
        draft.state.add(
            "transactions", records.transaction("received", best["email"], amount, "gift", draft.state.today)
        )
    early, large = day_from(draft.state, -50), lead + draft.number(100, 200)
    draft.state.add("transactions", records.transaction("received", second["email"], large, "gift", early))
    after = draft.state.copy()
    after.add("tasks", records.task(f"Thank {best['name']}", priority=1))
    instruction = draft.phrase(
        "Who of my contacts with the relation {relation} has sent me the most money in total since {since}, that day "
        'included? Answer with the name, and add a task "Thank <name>" with priority 1 to my inbox.',
        "Add up what each contact with the relation {relation} paid me since {since} (included). Tell me the name of "
        'who paid the most, and put "Thank <name>" with priority 1 on my inbox list.',
        relation=relation,
        since=since,
    )
    solution = code(
        all_pages("people", f'apis.contacts.search(relation="{relation}"'),
        LOGIN,
        all_pages(
            "rows", f'apis.payments.search_transactions(access_token=token, kind="received", from_date="{since}"'
        ),
        "totals = dict()",
        "for row in rows:",
        '    totals[row["email"]] = totals.get(row["email"], 0) + row["amount"]',
        'name = max(people, key=lambda person: totals.get(person["email"], 0))["name"]',
        'apis.todo.create(title="Thank " + name, priority=1)',
        "apis.supervisor.complete_task(answer=name)",
    )
    return Plan(instruction, solution, after, answer=best["name"])
