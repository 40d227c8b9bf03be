"""The model's tokenizer, loaded in the driver and again in the processes of agents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from roost.rollout.located import NotLocated, located

LIBRARY = "transformers"


def load_tokenizer(model: str, class_name: str = "") -> Any:
    """The tokenizer of a model; by its class where that is known.

    To find the class, `AutoTokenizer` imports torch where it is installed, which an agent's process has no other use
    for: it costs 270 MB and several seconds in each. Classes of other packages are found by it all the same, as they
    may be registered with it, or come with the model.
    """
    if class_name.partition(".")[0] == LIBRARY:
        try:
            return located(class_name).from_pretrained(model)
        except (NotLocated, OSError, ValueError, TypeError, AttributeError):  # another release than the driver's
            pass
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def decoder(tokenizer: Any) -> Callable[[Sequence[int], bool], str]:
    """Turns tokens into text for people, with or without special tokens; a tokenizer that fails shows the numbers."""

    def decode(token_ids: Sequence[int], has_special: bool) -> str:
        ids = [int(one) for one in token_ids]
        try:
            text = tokenizer.decode(ids, skip_special_tokens=not has_special, clean_up_tokenization_spaces=False)
        except Exception as error:  # of a tokenizer that comes with a model; samples are no reason to lose a run
            return f"[{type(error).__name__} while decoding {ids}]"
        return str(text)

    return decode


def class_name_of(tokenizer: Any) -> str:
    """The dotted path of its class.

    >>> class_name_of(ValueError())
    'builtins.ValueError'
    """
    return f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}"
