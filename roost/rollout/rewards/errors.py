"""What goes wrong when an answer is scored."""

from __future__ import annotations


class RewardFailed(RuntimeError):
    """An answer could not be scored. It is worth neither nothing nor anything: its episode counts as failed."""
