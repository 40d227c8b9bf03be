"""The app for people."""

from __future__ import annotations

from roost.app_world import records
from roost.app_world.apps.app import PAGE_LIMIT, App, check_date, check_email, check_text, has_text, page_of
from roost.app_world.state import ApiError, Record


class Contacts(App):
    """Keep the addresses, numbers and birthdays of people."""

    name = "contacts"

    def create(
        self,
        *,
        name: str,
        email: str,
        phone: str = "",
        relation: str = "friend",
        city: str = "",
        birthday: str | None = None,
    ) -> Record:
        """Add a person.

        name: first and last name
        email: the address
        phone: the number
        relation: what the person is to the supervisor, such as friend, family or coworker
        city: where the person lives
        birthday: the date of birth, as YYYY-MM-DD
        Returns: the contact, with its contact_id
        """
        self._check(name, email, birthday)
        return self._state.add("contacts", records.contact(name, email, phone, relation, city, birthday))

    def show(self, *, contact_id: int) -> Record:
        """Show one person.

        contact_id: which one
        Returns: contact_id, name, email, phone, relation, city and birthday
        """
        return self._state.find("contacts", contact_id)

    def search(
        self, *, query: str = "", relation: str | None = None, page_index: int = 0, page_limit: int = PAGE_LIMIT
    ) -> list[Record]:
        """Find people, page by page.

        query: text that the name, the email or the city contains; everybody if empty
        relation: what they are to the supervisor
        page_index: which page, from 0
        page_limit: how many are on a page, 20 at most
        Returns: a list of contacts; an empty one after the last page
        """
        rows = [row for row in self._state.rows("contacts") if has_text(query, row["name"], row["email"], row["city"])]
        return page_of([row for row in rows if relation is None or row["relation"] == relation], page_index, page_limit)

    def update(
        self,
        *,
        contact_id: int,
        name: str | None = None,
        email: str | None = None,
        phone: str | None = None,
        relation: str | None = None,
        city: str | None = None,
        birthday: str | None = None,
    ) -> Record:
        """Update a person; omitted fields keep their values.

        contact_id: which one
        name: the new name
        email: the new address
        phone: the new number
        relation: the new relation
        city: the new city
        birthday: the date of birth, as YYYY-MM-DD
        Returns: the contact as it is now
        """
        contact = self._state.find("contacts", contact_id)
        self._check(name, None if email == contact["email"] else email, birthday)
        given = {"name": name, "email": email, "phone": phone, "relation": relation, "city": city, "birthday": birthday}
        contact.update({field: value for field, value in given.items() if value is not None})
        return contact

    def delete(self, *, contact_id: int) -> Record:
        """Delete a person.

        contact_id: which one
        Returns: the contact that is gone
        """
        return self._state.remove("contacts", contact_id)

    def show_relations(self) -> list[str]:
        """Show which relations there are.

        Returns: a list of relations, sorted
        """
        return sorted({row["relation"] for row in self._state.rows("contacts")})

    def _check(self, name: str | None, email: str | None, birthday: str | None) -> None:
        if name is not None:
            check_text("name", name)
        if email is not None:
            check_email("email", email)
            if any(row["email"] == email for row in self._state.rows("contacts")):
                raise ApiError(f"there is a contact with the email {email!r} already")
        if birthday is not None:
            check_date("birthday", birthday)
