"""Where requests are told when they have ended: the log, traces, and the last of them at /requests."""

from __future__ import annotations

import logging
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from starlette.datastructures import Headers

from penstock.config.logs import FIELDS
from penstock.server.account import RequestAccount

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.server.traces import RequestTraces

KEPT: Final = 200
"""Requests of models that are remembered of each owner after they have ended, and told at a time."""
_NONE: Final[Mapping[str, str]] = Headers()
_log = logging.getLogger("penstock.requests")


def newest(lists: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The last requests of several lists, the oldest first."""
    if len(lists) == 1:
        return lists[0]
    found = [account for told in lists for account in told]
    return sorted(found, key=lambda account: float(account["began"]))[-KEPT:]


class RequestReports:
    """Tells of requests; those for models whose key was known it remembers for a while."""

    def __init__(self, *, log: bool = False, traces: RequestTraces | None = None) -> None:
        """`log`: a line for each request but those that only look (GET and HEAD below 400)."""
        self._logged, self._traces = log, traces
        self._running: dict[int, RequestAccount] = {}
        self._ended: dict[str, deque[RequestAccount]] = {}  # by owner, of whom there are as many as keys

    def begin(self, account: RequestAccount) -> None:
        """A request of somebody known has come."""
        if account.operation is not None:
            self._running[id(account)] = account

    def end(self, account: RequestAccount, headers: Mapping[str, str] = _NONE) -> None:
        """It has been answered; `headers` are those it came with."""
        if self._running.pop(id(account), None) is not None:
            if self._traces is not None:
                self._traces.tell(account, headers)
            account.sampling = None  # which may hold long lists
            self._ended.setdefault(account.owner, deque(maxlen=KEPT)).append(account)
        if self._logged and (account.method not in ("GET", "HEAD") or account.status >= 400):
            _log.info("%s", account.line(), extra={FIELDS: account.told()})

    def recent(self, owner: str | None) -> list[dict[str, Any]]:
        """The last requests for models and those that run, the oldest first; of one owner, or with None of all."""
        ended = self._ended.values() if owner is None else [self._ended.get(owner, ())]
        found = [account for accounts in ended for account in accounts]
        found += [account for account in self._running.values() if owner is None or account.owner == owner]
        found.sort(key=lambda account: account.began, reverse=True)
        return [account.told() for account in islice(found, KEPT)][::-1]

    def close(self) -> None:
        """Sends what has not been sent yet; waits a few seconds at most."""
        if self._traces is not None:
            self._traces.close()
