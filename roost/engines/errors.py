"""What can go wrong with an engine, apart by what the caller can do about it."""

from __future__ import annotations


class EngineError(RuntimeError):
    """An engine could not do what was asked."""

    status = 500  # of the HTTP response


class EngineRefused(EngineError):
    """The request itself is wrong (a token out of the vocabulary, a prompt too long): the same one fails everywhere."""


class ContextFull(EngineRefused):
    """The prompt leaves no room for a completion: what was made before it is all that there will be."""


class EngineLost(EngineError):
    """The engine is dead, hung or unreachable: another one, or the same one after a restart, can do it."""

    status = 503


class EnginesBehind(EngineLost):
    """Engines run, but none can get the current weights before the next update: a new launch from a checkpoint can."""


class NotOffered(EngineError):
    """This engine has no such ability: the message says which, and what to do instead."""


class UpdateFailed(EngineError):
    """New weights did not take; the message says which version the engine is on now."""


class WeightsRefused(UpdateFailed):
    """An engine looked at what was announced and refused it, as it would by any other way; it has its old weights."""
