"""A world: the apps on one state, behind a single entry point through which only JSON values pass."""

from __future__ import annotations

from collections.abc import Mapping

from roost.app_world.apps.api_docs import ApiDocs
from roost.app_world.apps.app import App
from roost.app_world.apps.calendar import Calendar
from roost.app_world.apps.contacts import Contacts
from roost.app_world.apps.files import Files
from roost.app_world.apps.notes import Notes
from roost.app_world.apps.payments import Payments
from roost.app_world.apps.supervisor import Supervisor
from roost.app_world.apps.todo import Todo
from roost.app_world.generation import generated_state
from roost.app_world.state import ApiError, Json, Snapshot, State, copied, unknown

APPS: Mapping[str, type[App]] = {
    app.name: app for app in (ApiDocs, Supervisor, Notes, Todo, Contacts, Calendar, Payments, Files)
}


class World:
    """The world of one episode.

    >>> world = World.from_seed(7)
    >>> world.call("notes", "create", {"title": "milk"})["title"]
    'milk'
    >>> world.call("supervisor", "complete_task", {"answer": 3}), world.is_completed, world.answer
    ({'status': 'success'}, True, 3)
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._apps = {name: app(state, APPS) for name, app in APPS.items()}

    @classmethod
    def from_seed(cls, seed: int) -> World:
        """Generate a world from a seed."""
        return cls(generated_state(seed))

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot) -> World:
        """Restore a world from a snapshot."""
        return cls(State.restored(snapshot))

    def call(self, app: str, api: str, kwargs: Mapping[str, Json]) -> Json:
        """Call an API. Raise ApiError, and change nothing, if it is refused."""
        if not isinstance(app, str) or app not in APPS:
            raise unknown("app", app, APPS)
        apis = APPS[app].apis
        if not isinstance(api, str) or api not in apis:
            raise unknown(f"API of {app}", api, apis)
        if self.is_completed:
            raise ApiError("the task is completed; nothing more can be done")
        if not isinstance(kwargs, Mapping):
            raise ApiError(f"arguments must be a mapping, not {type(kwargs).__name__}")
        arguments = apis[api].bind(kwargs)
        return copied(apis[api].function(self._apps[app], **arguments))

    @property
    def is_completed(self) -> bool:
        """Return True if the agent has completed its task."""
        return self._state.completion is not None

    @property
    def answer(self) -> Json:
        """The agent's answer, or None."""
        return self._state.completion.answer if self._state.completion else None

    @property
    def status(self) -> str | None:
        """Final status of the task: success or fail; None before completion."""
        return self._state.completion.status if self._state.completion else None

    def snapshot(self) -> Snapshot:
        """The whole state as a JSON value."""
        return self._state.snapshot()
