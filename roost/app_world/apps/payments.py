"""The app for money. Its APIs need the access token that `login` returns."""

from __future__ import annotations

from roost.app_world import records
from roost.app_world.apps.app import PAGE_LIMIT, App, check_date, check_email, check_one_of, page_of
from roost.app_world.state import ApiError, Record

KINDS = ("sent", "received")
DIRECTIONS = ("incoming", "outgoing")
STATUSES = ("pending", "paid", "declined")


class Payments(App):
    """Send money, ask for it, and see what was paid. Amounts are whole dollars."""

    name = "payments"

    def login(self, *, email: str, password: str) -> Record:
        """Log in.

        email: the supervisor's own address
        password: the password of this app
        Returns: access_token, which the other APIs need
        """
        account = self._state.accounts[self.name]
        if (email, password) != (self._state.profile["email"], account["password"]):
            raise ApiError("wrong email or password; the supervisor app shows both")
        return {"access_token": account["access_token"]}

    def show_balance(self, *, access_token: str) -> Record:
        """Show how much money there is.

        access_token: from login
        Returns: balance
        """
        return {"balance": self._wallet(access_token)["balance"]}

    def send(self, *, access_token: str, email: str, amount: int, note: str = "") -> Record:
        """Send money to somebody.

        access_token: from login
        email: email of the recipient
        amount: how much, in whole dollars
        note: what it is for
        Returns: the transaction, with its transaction_id
        """
        wallet = self._wallet(access_token)
        self._check_other(email)
        return self._pay(wallet, email, amount, note)

    def request(self, *, access_token: str, email: str, amount: int, note: str = "") -> Record:
        """Ask somebody for money.

        access_token: from login
        email: email of the payer
        amount: how much, in whole dollars
        note: what it is for
        Returns: the request, with its request_id
        """
        self._wallet(access_token)
        self._check_other(email)
        _check_amount(amount)
        return self._state.add("requests", records.request("outgoing", email, amount, note))

    def search_transactions(
        self,
        *,
        access_token: str,
        kind: str | None = None,
        email: str | None = None,
        from_date: str | None = None,
        to_date: str | None = None,
        page_index: int = 0,
        page_limit: int = PAGE_LIMIT,
    ) -> list[Record]:
        """Find payments of the past, page by page.

        access_token: from login
        kind: sent or received; both if null
        email: the address of the other side
        from_date: the first day, as YYYY-MM-DD
        to_date: the last day, as YYYY-MM-DD
        page_index: which page, from 0
        page_limit: how many are on a page, 20 at most
        Returns: a list of transactions (transaction_id, kind, email, amount, note, date); empty after the last page
        """
        self._wallet(access_token)
        if kind is not None:
            check_one_of("kind", kind, KINDS)
        for name, day in (("from_date", from_date), ("to_date", to_date)):
            if day is not None:
                check_date(name, day)
        rows = [row for row in self._state.rows("transactions") if kind is None or row["kind"] == kind]
        rows = [row for row in rows if email is None or row["email"] == email]
        rows = [row for row in rows if (from_date or "") <= row["date"] and (not to_date or row["date"] <= to_date)]
        return page_of(rows, page_index, page_limit)

    def search_requests(
        self,
        *,
        access_token: str,
        direction: str | None = None,
        status: str | None = None,
        page_index: int = 0,
        page_limit: int = PAGE_LIMIT,
    ) -> list[Record]:
        """Find requests for money, page by page.

        access_token: from login
        direction: incoming (others ask the supervisor) or outgoing; both if null
        status: pending, paid or declined; all if null
        page_index: which page, from 0
        page_limit: how many are on a page, 20 at most
        Returns: a list of requests (request_id, direction, email, amount, note, status); empty after the last page
        """
        self._wallet(access_token)
        if direction is not None:
            check_one_of("direction", direction, DIRECTIONS)
        if status is not None:
            check_one_of("status", status, STATUSES)
        rows = [row for row in self._state.rows("requests") if direction is None or row["direction"] == direction]
        return page_of([row for row in rows if status is None or row["status"] == status], page_index, page_limit)

    def pay_request(self, *, access_token: str, request_id: int) -> Record:
        """Pay what somebody asks for.

        access_token: from login
        request_id: which incoming request
        Returns: the transaction, with its transaction_id
        """
        wallet = self._wallet(access_token)
        request = self._pending(request_id)
        paid = self._pay(wallet, request["email"], request["amount"], request["note"])
        request["status"] = "paid"
        return paid

    def decline_request(self, *, access_token: str, request_id: int) -> Record:
        """Refuse what somebody asks for.

        access_token: from login
        request_id: which incoming request
        Returns: the request as it is now
        """
        self._wallet(access_token)
        request = self._pending(request_id)
        request["status"] = "declined"
        return request

    def _wallet(self, access_token: str) -> Record:
        if access_token != self._state.accounts[self.name]["access_token"]:
            raise ApiError("the access token is not valid; payments.login gives one")
        return self._state.find("wallets", self._state.profile["email"])

    def _check_other(self, email: str) -> None:
        check_email("email", email)
        if email == self._state.profile["email"]:
            raise ApiError("this is the supervisor's own address; give that of somebody else")

    def _pending(self, request_id: int) -> Record:
        request = self._state.find("requests", request_id)
        if (request["direction"], request["status"]) != ("incoming", "pending"):
            raise ApiError(
                f"request {request_id} is {request['direction']} and {request['status']}, not for you to pay"
            )
        return request

    def _pay(self, wallet: Record, email: str, amount: int, note: str) -> Record:
        _check_amount(amount)
        if amount > wallet["balance"]:
            raise ApiError(f"the balance is {wallet['balance']}, which is less than {amount}")
        paid = self._state.add("transactions", records.transaction("sent", email, amount, note, self._state.today))
        wallet["balance"] -= amount
        return paid


def _check_amount(amount: int) -> None:
    if amount < 1:
        raise ApiError(f"amount must be 1 or more, not {amount}")
