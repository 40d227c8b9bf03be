"""The app for events."""

from __future__ import annotations

from roost.app_world import records
from roost.app_world.apps.app import (
    PAGE_LIMIT,
    App,
    check_date,
    check_email,
    check_moment,
    check_range,
    check_room,
    check_text,
    has_text,
    page_of,
)
from roost.app_world.state import ApiError, Record

LONGEST_MINUTES = 7 * 24 * 60


class Calendar(App):
    """Plan events, and who comes to them."""

    name = "calendar"

    def create(
        self, *, title: str, start: str, minutes: int = 60, location: str = "", attendees: list[str] | None = None
    ) -> Record:
        """Add an event.

        title: what it is
        start: when it begins, as YYYY-MM-DDTHH:MM
        minutes: how long it takes
        location: where it is
        attendees: emails of those who are invited
        Returns: the event, with its event_id
        """
        invited = list(dict.fromkeys(attendees or []))
        _check(title, start, minutes)
        for email in invited:
            check_email("attendees", email)
        return self._state.add("events", records.event(title, start, minutes, location, invited))

    def show(self, *, event_id: int) -> Record:
        """Show one event.

        event_id: which one
        Returns: event_id, title, start, minutes, location and attendees (emails)
        """
        return self._state.find("events", event_id)

    def search(
        self,
        *,
        query: str = "",
        from_date: str | None = None,
        to_date: str | None = None,
        page_index: int = 0,
        page_limit: int = PAGE_LIMIT,
    ) -> list[Record]:
        """Find events, page by page, the earliest first.

        query: text that the title or the location contains; all events if empty
        from_date: the first day on which they begin, as YYYY-MM-DD
        to_date: the last day on which they begin, as YYYY-MM-DD
        page_index: which page, from 0
        page_limit: how many are on a page, 20 at most
        Returns: a list of events; an empty one after the last page
        """
        for name, day in (("from_date", from_date), ("to_date", to_date)):
            if day is not None:
                check_date(name, day)
        rows = [row for row in self._state.rows("events") if has_text(query, row["title"], row["location"])]
        rows = [row for row in rows if from_date is None or row["start"][:10] >= from_date]
        rows = [row for row in rows if to_date is None or row["start"][:10] <= to_date]
        return page_of(sorted(rows, key=lambda row: (row["start"], row["event_id"])), page_index, page_limit)

    def update(
        self,
        *,
        event_id: int,
        title: str | None = None,
        start: str | None = None,
        minutes: int | None = None,
        location: str | None = None,
    ) -> Record:
        """Update an event; omitted fields keep their values.

        event_id: which one
        title: its new title
        start: when it begins now, as YYYY-MM-DDTHH:MM
        minutes: how long it takes now
        location: where it is now
        Returns: the event as it is now
        """
        event = self._state.find("events", event_id)
        _check(title, start, minutes)
        given = {"title": title, "start": start, "minutes": minutes, "location": location}
        event.update({name: value for name, value in given.items() if value is not None})
        return event

    def delete(self, *, event_id: int) -> Record:
        """Delete an event.

        event_id: which one
        Returns: the event that is gone
        """
        return self._state.remove("events", event_id)

    def add_attendee(self, *, event_id: int, email: str) -> Record:
        """Invite somebody to an event.

        event_id: which one
        email: email of the attendee to add
        Returns: the event as it is now
        """
        event = self._state.find("events", event_id)
        check_email("email", email)
        if email in event["attendees"]:
            raise ApiError(f"{email} is invited to event {event_id} already")
        check_room("attendees", event["attendees"])
        event["attendees"].append(email)
        return event

    def remove_attendee(self, *, event_id: int, email: str) -> Record:
        """Take somebody off an event.

        event_id: which one
        email: email of the attendee to remove
        Returns: the event as it is now
        """
        event = self._state.find("events", event_id)
        if email not in event["attendees"]:
            raise ApiError(f"{email[:60]!r} is not invited to event {event_id}")
        event["attendees"].remove(email)
        return event


def _check(title: str | None, start: str | None, minutes: int | None) -> None:
    if title is not None:
        check_text("title", title)
    if start is not None:
        check_moment("start", start)
    if minutes is not None:
        check_range("minutes", minutes, 1, LONGEST_MINUTES)
