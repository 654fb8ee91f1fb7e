"""What is asked of an engine's cache: a prefix that is to stay for a time, or a question that computes nothing."""

from __future__ import annotations

from typing import Final, NamedTuple

MOST_PIN_SECONDS: Final = 30 * 24 * 3600.0


class Pin(NamedTuple):
    """A prompt's whole blocks stay so many seconds once they are computed.

    Attributes:
        name: by which its owner names it.
        seconds: how long, from then on.
    """

    name: str
    seconds: float


class Ask(NamedTuple):
    """A question, or an order that needs no computing.

    Attributes:
        kind: "match" (what of the prompt would be found), "pins" (the owner's), or "unpin".
        name: of the pin that is to end.
    """

    kind: str
    name: str = ""
