"""What is told of a request for others to act on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What is told of a request for others to act on; the engine carries it untouched.

    Attributes:
        tenant: who pays for it.
        service_class: what was promised to it.
        deadline: when its answer is of no more use, seconds since the epoch; None for never.
        trace_id: the trace it belongs to.
    """

    tenant: str = ""
    service_class: str = ""
    deadline: float | None = None
    trace_id: str = ""


NO_FACTS: Final = RequestFacts()
