"""Where requests are told when they have ended: the log, traces, and the last of them at /requests."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from starlette.datastructures import Headers

from penstock.config.logs import FIELDS
from penstock.server.account import RequestAccount

if TYPE_CHECKING:
    from penstock.server.traces import RequestTraces

KEPT: Final = 200
"""Requests of models that are remembered after they have ended."""
_log = logging.getLogger("penstock.requests")


class RequestReports:
    """Tells of requests; those for models it remembers for a while."""

    def __init__(self, *, log: bool = False, traces: RequestTraces | None = None) -> None:
        """`log`: a line for each request but those that only look (GET and HEAD below 400)."""
        self._logged, self._traces = log, traces
        self._running: dict[int, RequestAccount] = {}
        self._ended: deque[RequestAccount] = deque(maxlen=KEPT)

    def begin(self, account: RequestAccount) -> None:
        """A request has come."""
        if account.operation is not None:
            self._running[id(account)] = account

    def end(self, account: RequestAccount, headers: Headers) -> None:
        """It has been answered; `headers` are those it came with."""
        if account.operation is not None:
            self._running.pop(id(account), None)
            self._ended.append(account)
            if self._traces is not None:
                self._traces.tell(account, headers)
        if self._logged and (account.method not in ("GET", "HEAD") or account.status >= 400):
            _log.info("%s", account.line(), extra={FIELDS: account.told()})

    def recent(self, owner: str | None) -> list[dict[str, Any]]:
        """The last requests for models and those that run, the oldest first; of one owner, or with None of all."""
        return [
            account.told()
            for account in sorted((*self._ended, *self._running.values()), key=lambda account: account.began)
            if owner is None or account.owner == owner
        ]

    def close(self) -> None:
        """Sends what has not been sent yet; waits a few seconds at most."""
        if self._traces is not None:
            self._traces.close()
