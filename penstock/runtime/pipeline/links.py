"""Links between threads of one process, and to several or to nobody."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from threading import Condition

from penstock.runtime.pipeline.steps import Link, Message


class QueueLink:
    """A queue. Messages are handed over as they are: a sender keeps nothing of them."""

    def __init__(self, room: int) -> None:
        """`room`: messages on their way, from which on a sender waits."""
        self._room = room
        self._messages: deque[Message] = deque()
        self._closed = False
        self._ended = False
        self._changed = Condition()

    def send(self, message: Message) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._messages) < self._room)
            if not self._closed:
                self._messages.append(message)
                self._changed.notify_all()

    def receive(self) -> Message | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._ended or bool(self._messages))
            if self._closed or not self._messages:
                return None
            message = self._messages.popleft()
            self._changed.notify_all()
            return message

    def end(self) -> None:
        """Nothing more is sent; what is on its way still arrives."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._messages.clear()
            self._changed.notify_all()


class Tee:
    """Sends to several links; nothing comes from it."""

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = tuple(links)

    def send(self, message: Message) -> None:
        for link in self._links:
            link.send(message)

    def receive(self) -> Message | None:
        return None

    def close(self) -> None:
        for link in self._links:
            link.close()


class Unheard:
    """What is sent here is dropped."""

    def send(self, message: Message) -> None:
        pass

    def receive(self) -> Message | None:
        return None

    def close(self) -> None:
        pass
