"""The app for things to do."""

from __future__ import annotations

from roost.app_world import records
from roost.app_world.apps.app import PAGE_LIMIT, App, check_date, check_range, check_text, has_text, page_of
from roost.app_world.state import ApiError, Record


class Todo(App):
    """Keep lists of tasks with due dates and priorities."""

    name = "todo"

    def create(self, *, title: str, list_name: str = "inbox", due: str | None = None, priority: int = 2) -> Record:
        """Add a task.

        title: what is to be done
        list_name: the list it belongs to
        due: the date it is due, as YYYY-MM-DD
        priority: 1 (high), 2 (normal) or 3 (low)
        Returns: the task, with its task_id
        """
        _check(title, list_name, due, priority)
        return self._state.add("tasks", records.task(title, list_name, due, priority))

    def show(self, *, task_id: int) -> Record:
        """Show one task.

        task_id: which one
        Returns: task_id, title, list_name, due, priority and is_done
        """
        return self._state.find("tasks", task_id)

    def search(
        self,
        *,
        query: str = "",
        list_name: str | None = None,
        is_done: bool | None = None,
        page_index: int = 0,
        page_limit: int = PAGE_LIMIT,
    ) -> list[Record]:
        """Find tasks, page by page.

        query: text that the title contains; all tasks if empty
        list_name: the list they are on
        is_done: whether they are done; both kinds if null
        page_index: which page, from 0
        page_limit: how many are on a page, 20 at most
        Returns: a list of tasks; an empty one after the last page
        """
        rows = [row for row in self._state.rows("tasks") if has_text(query, row["title"])]
        rows = [row for row in rows if list_name is None or row["list_name"] == list_name]
        return page_of([row for row in rows if is_done is None or row["is_done"] == is_done], page_index, page_limit)

    def update(
        self,
        *,
        task_id: int,
        title: str | None = None,
        list_name: str | None = None,
        due: str | None = None,
        priority: int | None = None,
    ) -> Record:
        """Update a task; omitted fields keep their values.

        task_id: which one
        title: its new title
        list_name: the list it goes to
        due: the new date it is due, as YYYY-MM-DD
        priority: 1 (high), 2 (normal) or 3 (low)
        Returns: the task as it is now
        """
        task = self._state.find("tasks", task_id)
        _check(title, list_name, due, priority)
        given = {"title": title, "list_name": list_name, "due": due, "priority": priority}
        task.update({name: value for name, value in given.items() if value is not None})
        return task

    def complete(self, *, task_id: int) -> Record:
        """Mark a task as done.

        task_id: which one
        Returns: the task as it is now
        """
        return self._mark(task_id, is_done=True)

    def reopen(self, *, task_id: int) -> Record:
        """Mark a task as not done.

        task_id: which one
        Returns: the task as it is now
        """
        return self._mark(task_id, is_done=False)

    def delete(self, *, task_id: int) -> Record:
        """Delete a task.

        task_id: which one
        Returns: the task that is gone
        """
        return self._state.remove("tasks", task_id)

    def show_lists(self) -> list[str]:
        """Show the names of all lists.

        Returns: a list of names, sorted
        """
        return sorted({row["list_name"] for row in self._state.rows("tasks")})

    def _mark(self, task_id: int, is_done: bool) -> Record:
        task = self._state.find("tasks", task_id)
        if task["is_done"] == is_done:
            raise ApiError(f"task {task_id} is {'done' if is_done else 'open'} already")
        task["is_done"] = is_done
        return task


def _check(title: str | None, list_name: str | None, due: str | None, priority: int | None) -> None:
    if title is not None:
        check_text("title", title)
    if list_name is not None:
        check_text("list_name", list_name)
    if due is not None:
        check_date("due", due)
    if priority is not None:
        check_range("priority", priority, 1, 3)
