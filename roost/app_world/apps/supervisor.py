"""The app of the supervisor: on whose behalf the agent works, and how it says that it is done."""

from __future__ import annotations

from datetime import date

from roost.app_world.apps.app import App, check_one_of
from roost.app_world.state import Completion, Json, Record


class Supervisor(App):
    """Ask who the supervisor is, and say that the task is done."""

    name = "supervisor"

    def show_profile(self) -> Record:
        """Show who the supervisor is.

        Returns: name, email, phone and city
        """
        return self._state.profile

    def show_today(self) -> Record:
        """Show today's date.

        Returns: date, as YYYY-MM-DD, and weekday
        """
        return {"date": self._state.today, "weekday": date.fromisoformat(self._state.today).strftime("%A")}

    def show_account_passwords(self) -> list[Record]:
        """Show the supervisor's passwords.

        Returns: a list of app_name, email and password
        """
        email = self._state.profile["email"]
        accounts = self._state.accounts.items()
        return [{"app_name": app, "email": email, "password": account["password"]} for app, account in accounts]

    def complete_task(self, *, answer: Json = None, status: str = "success") -> Record:
        """Say that the task is done; nothing can be done afterwards.

        answer: the answer, where the task asks for one
        status: success, or fail where it cannot be done
        Returns: the status
        """
        check_one_of("status", status, ("success", "fail"))
        self._state.completion = Completion(status, answer)
        return {"status": status}
