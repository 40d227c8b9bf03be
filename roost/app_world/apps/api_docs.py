"""The app that explains the others."""

from __future__ import annotations

import inspect

from roost.app_world.apps.app import App, has_text
from roost.app_world.state import Record, unknown


class ApiDocs(App):
    """Read which apps and APIs there are, and how an API is called."""

    name = "api_docs"

    def show_app_descriptions(self) -> list[Record]:
        """Show all apps.

        Returns: a list of app_name and description
        """
        return [{"app_name": name, "description": inspect.getdoc(app)} for name, app in self._apps.items()]

    def show_api_descriptions(self, *, app_name: str) -> list[Record]:
        """Show the APIs of an app.

        app_name: which app
        Returns: a list of api_name and description
        """
        apis = self._app(app_name).apis.values()
        return [{"api_name": api.name, "description": api.description} for api in apis]

    def show_api_doc(self, *, app_name: str, api_name: str) -> Record:
        """Show how an API is called.

        app_name: which app
        api_name: which of its APIs
        Returns: app_name, api_name, description, parameters and returns
        """
        apis = self._app(app_name).apis
        if api_name not in apis:
            raise unknown(f"API of {app_name}", api_name, apis)
        return apis[api_name].doc()

    def search_api_docs(self, *, query: str) -> list[Record]:
        """Find APIs by a word of their name or description.

        query: the word
        Returns: a list of app_name, api_name and description
        """
        apis = [api for app in self._apps.values() for api in app.apis.values()]
        found = [api for api in apis if has_text(query, api.name, api.description)]
        return [{"app_name": api.app, "api_name": api.name, "description": api.description} for api in found]

    def _app(self, name: str) -> type[App]:
        if name not in self._apps:
            raise unknown("app", name, self._apps)
        return self._apps[name]
