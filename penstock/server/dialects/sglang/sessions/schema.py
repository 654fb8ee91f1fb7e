"""Bodies of SGLang's sessions."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from penstock.config import limits
from penstock.server.shapes import Exact, Loose, Name

Offset = Annotated[int, Field(ge=-limits.MAX_TOKENS, le=limits.MAX_TOKENS)]
MAX_CAPACITY = 1 << 30
MAX_TIMEOUT_S = 30 * 24 * 3600.0


class OpenSessionBody(Loose):
    """POST /open_session. `streaming` changes nothing: each request may stream."""

    capacity_of_str_len: Annotated[int, Field(ge=1, le=MAX_CAPACITY)]
    session_id: Name | None = None
    streaming: bool | None = None
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = None


class CloseSessionBody(Loose):
    """POST /close_session."""

    session_id: Name


class SessionParams(Exact):
    """Which session a request belongs to, and which of its requests this one goes on from."""

    id: Name | None = None
    rid: Name | None = None
    offset: Offset | None = None
    replace: bool | None = None
    drop_previous_output: bool | None = None


SESSION_BODIES = (OpenSessionBody, CloseSessionBody)
