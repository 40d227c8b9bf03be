"""The app for notes."""

from __future__ import annotations

from roost.app_world import records
from roost.app_world.apps.app import PAGE_LIMIT, App, check_room, check_text, has_text, page_of
from roost.app_world.state import ApiError, Record


class Notes(App):
    """Write notes, find them again, and tag them."""

    name = "notes"

    def create(self, *, title: str, content: str = "", tags: list[str] | None = None) -> Record:
        """Write a new note.

        title: what it is called
        content: its text
        tags: words to file it under
        Returns: the note, with its note_id
        """
        check_text("title", title)
        return self._state.add("notes", records.note(title, self._state.today, content, _once(tags or [])))

    def show(self, *, note_id: int) -> Record:
        """Show one note.

        note_id: which one
        Returns: note_id, title, content, tags and created_on
        """
        return self._state.find("notes", note_id)

    def search(
        self, *, query: str = "", tag: str | None = None, page_index: int = 0, page_limit: int = PAGE_LIMIT
    ) -> list[Record]:
        """Find notes by their text or a tag, page by page.

        query: text that the title or the content contains; all notes if empty
        tag: a tag that they have
        page_index: which page, from 0
        page_limit: how many are on a page, 20 at most
        Returns: a list of notes; an empty one after the last page
        """
        rows = [row for row in self._state.rows("notes") if has_text(query, row["title"], row["content"])]
        return page_of([row for row in rows if tag is None or tag in row["tags"]], page_index, page_limit)

    def update(self, *, note_id: int, title: str | None = None, content: str | None = None) -> Record:
        """Update a note's title or content; omitted fields keep their values.

        note_id: which one
        title: its new title
        content: its new text
        Returns: the note as it is now
        """
        note = self._state.find("notes", note_id)
        if title is not None:
            check_text("title", title)
            note["title"] = title
        if content is not None:
            note["content"] = content
        return note

    def delete(self, *, note_id: int) -> Record:
        """Delete a note.

        note_id: which one
        Returns: the note that is gone
        """
        return self._state.remove("notes", note_id)

    def add_tag(self, *, note_id: int, tag: str) -> Record:
        """Give a note a tag.

        note_id: which one
        tag: the tag
        Returns: the note as it is now
        """
        check_text("tag", tag)
        note = self._state.find("notes", note_id)
        check_room("tags", note["tags"])
        note["tags"] = _once([*note["tags"], tag])
        return note

    def remove_tag(self, *, note_id: int, tag: str) -> Record:
        """Take a tag from a note.

        note_id: which one
        tag: the tag
        Returns: the note as it is now
        """
        note = self._state.find("notes", note_id)
        if tag not in note["tags"]:
            raise ApiError(f"note {note_id} has no tag {tag[:40]!r}; it has: {', '.join(note['tags']) or 'none'}")
        note["tags"].remove(tag)
        return note

    def show_tags(self) -> list[str]:
        """Show all tags that notes have.

        Returns: a list of tags, sorted
        """
        return sorted({tag for row in self._state.rows("notes") for tag in row["tags"]})


def _once(tags: list[str]) -> list[str]:
    return list(dict.fromkeys(tags))
