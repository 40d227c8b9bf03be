"""Check with one request whether a name exists on the Hugging Face hub; its libraries would retry for a minute."""

from __future__ import annotations

import contextlib
import http.client
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from http import HTTPStatus

ENDPOINT = "https://huggingface.co"
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
ANSWER_LIMIT = 10.0  # seconds
ABSENT = (HTTPStatus.UNAUTHORIZED, HTTPStatus.NOT_FOUND)  # the hub answers 401 for what an anonymous user may not see
TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
TRUE = ("1", "ON", "YES", "TRUE")


class Answer(StrEnum):
    """The hub's answer for the name of a model or a data set."""

    THERE = "there"
    ABSENT = "absent"
    REFUSED = "refused"  # the token was refused, which fails for public models too
    UNREACHABLE = "unreachable"


def check_on_hub(model: str, say: Callable[[str], None]) -> str | None:
    """Describe why a hub name cannot be loaded; None if it can, from the hub or the local cache.

    Without a network the cached copy is used, and libraries are set to offline mode: they would retry for a minute.
    """
    is_cached = _is_cached(model)
    if is_offline(os.environ):
        return None if is_cached else f"is not a folder here and not in the hub's cache, and {OFFLINE[0]} is set"
    answer, reason = ask_hub(model, os.environ.get("HF_ENDPOINT") or ENDPOINT)
    problem = {Answer.UNREACHABLE: "cannot be reached", Answer.REFUSED: "refuses the token"}.get(answer)
    if problem is not None and is_cached:
        say(f"the Hugging Face hub {problem} ({reason}); using the cached copy of {model}")
        _go_offline()
        return None
    if problem is not None:
        return f"is not a folder here, and the Hugging Face hub {problem}: {reason}"
    if answer is Answer.ABSENT and not is_cached:
        return "is neither a folder here nor a model on the Hugging Face hub"
    return None


def check_data_set(name: str) -> tuple[Answer, str]:
    """Return the hub's answer for a data set, and the reason if it is unreachable or refuses."""
    if is_offline(os.environ):
        return Answer.UNREACHABLE, f"{OFFLINE[0]} is set"
    return ask_hub(name, os.environ.get("HF_ENDPOINT") or ENDPOINT, "datasets")


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Context that loads data sets from the cache only; without it the library retries for half a minute."""
    from datasets import config
    from huggingface_hub import constants

    places = [vars(config), vars(constants)]
    before, variable = [place[OFFLINE[0]] for place in places], os.environ.get(OFFLINE[0])
    _go_offline()
    try:
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place[OFFLINE[0]] = value
        os.environ.pop(OFFLINE[0])
        os.environ.update({} if variable is None else {OFFLINE[0]: variable})


def ask_hub(name: str, endpoint: str, kind: str = "models") -> tuple[Answer, str]:
    """Ask the hub once whether a model or data set exists; also return the reason if it is unreachable or refuses."""
    from huggingface_hub import get_token

    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        url = f"{endpoint.rstrip('/')}/api/{kind}/{name}"
        urllib.request.urlopen(
            urllib.request.Request(url, headers=headers, method="HEAD"), timeout=ANSWER_LIMIT
        ).close()
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == HTTPStatus.UNAUTHORIZED and token:
            return Answer.REFUSED, f"{_token_place()} is expired or wrong; renew it with `hf auth login`, or remove it"
        return (Answer.ABSENT if error.code in ABSENT else Answer.THERE), ""  # the download will report other errors
    except (OSError, http.client.HTTPException) as error:
        return Answer.UNREACHABLE, str(getattr(error, "reason", None) or error or type(error).__name__)
    except ValueError as error:  # HF_ENDPOINT without https://
        return Answer.UNREACHABLE, str(error)
    return Answer.THERE, ""


def _token_place() -> str:
    from huggingface_hub import constants

    return next((name for name in TOKENS if os.environ.get(name)), f"the token in {constants.HF_TOKEN_PATH}")


def is_offline(environ: Mapping[str, str]) -> bool:
    return any(environ.get(name, "").upper() in TRUE for name in OFFLINE)


def _is_cached(model: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(model, "config.json"), str)


def _go_offline() -> None:
    """Set offline mode in this process and its children. The library reads the variable on first import."""
    os.environ[OFFLINE[0]] = "1"
    for name in ("huggingface_hub.constants", "datasets.config"):
        if name in sys.modules:
            vars(sys.modules[name])["HF_HUB_OFFLINE"] = True
