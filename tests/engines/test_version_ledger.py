"""Version of a request, by the updates between its start and its answer."""

import pytest

from roost.engines.protocol import InFlight, NotOffered, VersionSpan
from roost.engines.version_ledger import VersionLedger

STEPS = {
    "drop": lambda ledger: ledger.paused(InFlight.DROP),
    "drain": lambda ledger: ledger.paused(InFlight.DRAIN),
    "hold": lambda ledger: ledger.paused(InFlight.HOLD),
    "move": lambda ledger: ledger.moved_to(1),
    "stay": lambda ledger: ledger.moved_to(0),
    "go on": VersionLedger.resumed,
}
LIVES = [
    ((), (), 0),
    ((), ("hold", "go on"), 0),
    ((), ("hold", "stay", "go on"), 0),
    ((), ("drain", "move"), 0),  # the answer of one that had been finished
    ((), ("drop", "move"), 0),
    ((), ("drain", "move", "go on"), 1),  # sent too late to be begun before the pause
    ((), ("drop", "move", "go on"), 1),
    ((), ("drop", "hold", "move", "go on"), 1),
    (("hold",), ("move", "go on"), 1),
    (("drain",), ("move", "go on"), 1),
    (("drain", "move"), ("go on",), 1),
    ((), ("hold", "move", "go on"), None),
    ((), ("move",), None),
    (("hold",), ("go on", "hold", "move"), None),
    ((), ("drain", "go on", "move"), None),
]


@pytest.mark.parametrize(
    ("before", "after", "version"), LIVES, ids=[", ".join([*before, "SENT", *after]) for before, after, _ in LIVES]
)
def test_the_version_of_a_request(before, after, version):
    ledger = VersionLedger()
    for step in before:
        STEPS[step](ledger)
    with ledger.request() as ticket:
        for step in after:
            STEPS[step](ledger)
        if version is None:
            with pytest.raises(NotOffered, match="changed to version 1 during this request"):
                ledger.spans(ticket, 4)
        else:
            assert ledger.spans(ticket, 4) == (VersionSpan(version, 0, 4),)
