"""uvicorn's httptools protocol, so that no client leaves unseen and none is taken to have been idle in a pause."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from penstock.server.patience import PatientTimer

_READ_BEHIND = 64  # requests that wait for the one being answered, for which the connection is still read


class WatchingProtocol(HttpToolsProtocol):
    """One connection.

    uvicorn tells only the newest request of a connection that its client has gone, and stops reading, so that it would
    not notice, once another request waits behind the one being answered. Here the one being answered is told too.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._answered: RequestResponseCycle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if 0 < len(self.pipeline) <= _READ_BEHIND:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            idle = PatientTimer(self.loop, self.timeout_keep_alive, self.timeout_keep_alive_handler)
            self.timeout_keep_alive_task = idle  # type: ignore[assignment]  # uvicorn only cancels it

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)
