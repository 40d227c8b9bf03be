"""The fields of records, for apps that create them and for tasks that expect them."""

from __future__ import annotations

from collections.abc import Sequence

from roost.app_world.state import Record


def note(title: str, today: str, content: str = "", tags: Sequence[str] = ()) -> Record:
    return {"title": title, "content": content, "tags": list(tags), "created_on": today}


def task(title: str, list_name: str = "inbox", due: str | None = None, priority: int = 2) -> Record:
    return {"title": title, "list_name": list_name, "due": due, "priority": priority, "is_done": False}


def contact(
    name: str, email: str, phone: str = "", relation: str = "friend", city: str = "", birthday: str | None = None
) -> Record:
    return {"name": name, "email": email, "phone": phone, "relation": relation, "city": city, "birthday": birthday}


def event(title: str, start: str, minutes: int = 60, location: str = "", attendees: Sequence[str] = ()) -> Record:
    return {"title": title, "start": start, "minutes": minutes, "location": location, "attendees": list(attendees)}


def transaction(kind: str, email: str, amount: int, note: str, date: str) -> Record:
    return {"kind": kind, "email": email, "amount": amount, "note": note, "date": date}


def request(direction: str, email: str, amount: int, note: str, status: str = "pending") -> Record:
    return {"direction": direction, "email": email, "amount": amount, "note": note, "status": status}


def file(path: str, today: str, content: str = "") -> Record:
    return {"path": path, "content": content, "modified_on": today}
