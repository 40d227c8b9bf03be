"""The `apis` object of an agent's code: attribute access becomes a call, which another process answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from roost.app_world.state import ApiError, Json

Call = Callable[[str, str, Mapping[str, Json]], Json]  # app, API and arguments, as `World.call` takes them


class Apis:
    """All apps.

    >>> apis = Apis(lambda app, api, kwargs: f"{app}.{api} {dict(kwargs)}")
    >>> apis.notes.create(title="milk")
    "notes.create {'title': 'milk'}"
    """

    def __init__(self, call: Call) -> None:
        self._call = call

    def __getattr__(self, app: str) -> AppApis:
        _refuse_private(app)
        return AppApis(self._call, app)


class AppApis:
    """The APIs of one app. Unknown names fail only when called."""

    def __init__(self, call: Call, app: str) -> None:
        self._call = call
        self._app = app

    def __getattr__(self, api: str) -> Callable[..., Json]:
        _refuse_private(api)

        def call(*args: object, **kwargs: Json) -> Json:
            if args:
                raise ApiError(f"{self._app}.{api} takes its parameters by name, as in {api}(name=value)")
            return self._call(self._app, api, kwargs)

        return call


def _refuse_private(name: str) -> None:
    """Raise for private names, which Python looks up when it copies or prints an object."""
    if name.startswith("_"):
        raise AttributeError(name)
