"""Values of shell variables: text, parts of which may not be known before the script runs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from roost.config.yaml_events import Position

MAX_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Unknown:
    """A part of a value that only a run of the script would tell."""

    text: str  # as the script has it
    reason: str
    position: Position
    variable: str = ""  # that the caller can set instead
    is_unset: bool = False  # a variable without a value, which bash takes for empty
    is_list: bool = False  # it may stand for any number of words

    @property
    def shown(self) -> str:
        text = " ".join(self.text.split())
        return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


@dataclass(frozen=True, slots=True)
class Value:
    """Text and unknown parts, and the place of the word that it comes from."""

    parts: tuple[str | Unknown, ...] = ()
    position: Position = field(default=(None, None, None), compare=False)
    dropped: Unknown | None = field(default=None, compare=False)  # a variable after it that is not set, and so no word

    @property
    def known(self) -> str | None:
        """The text, if all of it is known."""
        texts = [part for part in self.parts if isinstance(part, str)]
        return "".join(texts) if len(texts) == len(self.parts) else None

    @property
    def tested(self) -> str | None:
        """The text as a condition sees it: a variable that is not set is empty."""
        return Value(tuple(part for part in self.parts if isinstance(part, str) or not part.is_unset)).known

    @property
    def unknown(self) -> Unknown | None:
        """The first part that is not known."""
        return next((part for part in self.parts if isinstance(part, Unknown)), None)

    @property
    def shown(self) -> str:
        """The text with the unknown parts as the script has them."""
        return "".join(part if isinstance(part, str) else part.shown for part in self.parts)

    @property
    def prefix(self) -> str:
        """The text before the first unknown part."""
        found = ""
        for part in self.parts:
            if isinstance(part, Unknown):
                break
            found += part
        return found

    def after(self, length: int) -> Value:
        """The value without its first characters, which must be known."""
        parts: list[str | Unknown] = []
        for part in self.parts:
            if isinstance(part, str) and length:
                part, length = part[length:], max(0, length - len(part))
                if not part:
                    continue
            parts.append(part)
        return replace(self, parts=tuple(parts))


def text_value(text: str, position: Position = (None, None, None)) -> Value:
    return Value((text,) if text else (), position)


def of_unknown(unknown: Unknown) -> Value:
    return Value((unknown,), unknown.position)


def elements(name: str, position: Position) -> Value:
    """Elements of an array after one was set whose index is not known."""
    return of_unknown(Unknown(f"${{{name}[@]}}", "the index of an element is not known", position, name, is_list=True))
