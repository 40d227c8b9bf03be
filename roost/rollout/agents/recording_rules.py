"""What a request to the recording endpoint may ask for beside messages and a length: what is done, and what is refused.

Nothing that shapes what the policy says is passed over in silence: it is followed, refused, or, where it is only about
how tokens are drawn, which is the run's own matter, told once in the log of the process.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from roost.net.errors import Refused

logger = logging.getLogger(__name__)

# For each key the values that ask for nothing, and what to do instead of others.
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "stop": (((), [], ""), "a turn ends where the policy ends it; cut the text yourself"),
    "response_format": (({"type": "text"},), "the policy is not held to a form; ask for it in a message"),
    "functions": (([],), "write them as tools"),
    "function_call": (("none", "auto"), "write tools and tool_choice"),
    "logit_bias": (({},), "tokens are drawn from the policy as it is"),
    "top_logprobs": ((0,), "only the tokens that were made have log-probabilities; ask for logprobs alone"),
    "modalities": ((["text"],), "there is only text"),
    "audio": ((), "there is only text"),
    "best_of": ((1,), "ask again for another sample"),
    "suffix": (("",), "there is nothing after what the policy says"),
    "reasoning_effort": ((), "set it for all episodes, in the scenario's `template`"),
    "chat_template": ((), "the model's own template is used"),
    "chat_template_kwargs": (({},), "set them for all episodes, in the scenario's `template`"),
    "continue_final_message": ((False,), "the policy's turn begins where the messages end"),
    "add_generation_prompt": ((True,), "the policy's turn begins where the messages end"),
    "guided_json": ((), "the policy is not held to a form; ask for it in a message"),
    "guided_regex": ((), "the policy is not held to a form; ask for it in a message"),
    "structured_outputs": ((), "the policy is not held to a form; ask for it in a message"),
}
# About who asks and how the answer is kept; nothing of it is for the policy.
OF_NO_MATTER = frozenset(
    {
        "metadata",
        "model",
        "prediction",
        "prompt_cache_key",
        "return_token_ids",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)


class RequestRules:
    """Looks at what requests have beside the keys that are read."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def check(self, more: Mapping[str, Any]) -> None:
        """Refused for what cannot be done; what the run decides is told once.

        >>> RequestRules().check({"stop": None, "response_format": {"type": "text"}, "user": "me"})
        >>> RequestRules().check({"functions": [{"name": "find"}]})
        Traceback (most recent call last):
            ...
        roost.net.errors.Refused: functions is not offered: write them as tools
        """
        asked = {key: value for key, value in more.items() if value is not None}
        for key, value in asked.items():
            idle, instead = REFUSED.get(key, ((value,), ""))
            if value not in idle:
                raise Refused(f"{key} is not offered: {instead}", 400, key)
        others = asked.keys() - REFUSED.keys() - OF_NO_MATTER - self._told
        if others:
            self._told |= others
            logger.warning(
                "a program asks for %s; how tokens are drawn is set for the whole run, and this is not followed",
                ", ".join(sorted(others)),
            )
