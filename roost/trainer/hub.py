"""Looking up a model's name on the Hugging Face hub: one request without retries, before anything starts."""

from __future__ import annotations

import http.client
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from enum import StrEnum
from http import HTTPStatus

ENDPOINT = "https://huggingface.co"
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
LOOK_LIMIT = 10.0  # seconds for the hub to answer
ABSENT = (HTTPStatus.UNAUTHORIZED, HTTPStatus.NOT_FOUND)  # the hub answers 401 for what an anonymous user may not see
TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
TRUE = ("1", "ON", "YES", "TRUE")


class Answer(StrEnum):
    """What the hub says of a name."""

    THERE = "there"
    ABSENT = "absent"
    REFUSED = "refused"  # the token: for any name, also a public one
    UNREACHABLE = "unreachable"


def check_on_hub(model: str, say: Callable[[str], None]) -> str | None:
    """What is wrong with a hub name, in words; None where it can be loaded, from the hub or from the local cache.

    Without a network the cached copy is used, and libraries are told not to try the hub: they would retry for a minute.
    """
    is_cached = _is_cached(model)
    if is_offline(os.environ):
        return None if is_cached else f"is no folder here and not in the hub's cache, and {OFFLINE[0]} is set"
    answer, reason = ask_hub(model, os.environ.get("HF_ENDPOINT") or ENDPOINT)
    problem = {Answer.UNREACHABLE: "cannot be reached", Answer.REFUSED: "refuses the token"}.get(answer)
    if problem is not None and is_cached:
        say(f"the Hugging Face hub {problem} ({reason}); using the cached copy of {model}")
        _go_offline()
        return None
    if problem is not None:
        return f"is no folder here, and the Hugging Face hub {problem}: {reason}"
    if answer is Answer.ABSENT and not is_cached:
        return "is neither a folder here nor a model on the Hugging Face hub"
    return None


def ask_hub(model: str, endpoint: str) -> tuple[Answer, str]:
    """Ask once whether a model is there; where the hub cannot be reached or refuses the token, also why."""
    from huggingface_hub import get_token

    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        url = f"{endpoint.rstrip('/')}/api/models/{model}"
        urllib.request.urlopen(urllib.request.Request(url, headers=headers, method="HEAD"), timeout=LOOK_LIMIT).close()
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == HTTPStatus.UNAUTHORIZED and token:
            return Answer.REFUSED, f"{_token_place()} is expired or wrong; renew it with `hf auth login`, or remove it"
        return (Answer.ABSENT if error.code in ABSENT else Answer.THERE), ""  # other errors are for the download
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
    """For this process and those it starts. The library reads the variable when it is first imported."""
    os.environ[OFFLINE[0]] = "1"
    constants = sys.modules.get("huggingface_hub.constants")
    if constants is not None:
        vars(constants)["HF_HUB_OFFLINE"] = True
