"""What the routes of one server share."""

from __future__ import annotations

from dataclasses import dataclass

from roost.net.errors import Refused
from roost.torch_engine.engine import TorchEngine
from roost.torch_engine.in_flight import InFlightRequests
from roost.torch_engine.text_codec import TextCodec


class ModelNames:
    """The names a request may ask for: the model's, and those of the adapters that are loaded."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.adapters: dict[str, str] = {}  # the folder of each

    def adapter(self, asked: str | None) -> str | None:
        """The adapter that a request asks for, or None for the model as it is."""
        if not asked or asked == self.model:
            return None
        if asked in self.adapters:
            return asked
        served = ", ".join((self.model, *self.adapters))
        raise Refused(f"The model `{asked}` does not exist; served here: {served}", 404, "model")


@dataclass(frozen=True, slots=True)
class Served:
    """An engine behind a server."""

    engine: TorchEngine
    codec: TextCodec
    names: ModelNames
    in_flight: InFlightRequests
    folder: str
    created: int  # seconds since 1970
