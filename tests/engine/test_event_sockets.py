"""The engine's side of several clients: each is told its own, and one that cannot be told keeps nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq

from penstock.config.errors import RequestError
from penstock.core.policies.pace import Pace
from penstock.core.request import EngineOutput
from penstock.engine import messages, request_names
from penstock.engine.event_sockets import Clients, EventSocket

PACE = Pace(0.1, 0.01, 0.02, rows=8, budget=512)


@dataclass
class Line:
    """Where clients listen."""

    context: zmq.Context[zmq.Socket[bytes]]
    folder: Path
    clients: Clients
    sockets: dict[str, zmq.Socket[bytes]]

    def listen(self, client: str) -> str:
        """Where a client listens from now on."""
        socket = self.sockets[client] = self.context.socket(zmq.PULL)
        socket.set(zmq.RCVTIMEO, 30_000)
        socket.bind(endpoint := f"ipc://{self.folder / (client or 'first')}")
        return endpoint

    def told(self, client: str) -> messages.Event:
        """The next event of a client, which is there or comes."""
        return messages.decode_event(self.sockets[client].recv())


@pytest.fixture
def line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    found = Line(context, tmp_path_factory.mktemp("s"), None, {})  # type: ignore[arg-type]
    first = EventSocket(context, found.listen(""))
    found.clients = Clients(context, first)
    yield found
    found.clients.close()
    first.close()
    for socket in found.sockets.values():
        socket.close(0)
    context.term()


def out(client: str, name: str) -> EngineOutput:
    return EngineOutput(request_names.named(client, name), 0, (1,))


def test_each_is_told_its_own(line: Line) -> None:
    for client in ("1.1", "2.1"):
        line.clients.attach(client, line.listen(client))
    assert "1.1" in line.clients and "3.1" not in line.clients
    line.clients.outputs([out("1.1", "a"), out("", "a"), out("2.1", "a"), out("1.1", "b"), out("3.1", "a")])
    assert line.told("") == messages.Outputs([out("", "a")])
    assert line.told("1.1") == messages.Outputs([out("1.1", "a"), out("1.1", "b")])
    assert line.told("2.1") == messages.Outputs([out("2.1", "a")])
    line.clients.refused(request_names.named("2.1", "c"), RequestError("no"))
    told = line.told("2.1")
    assert isinstance(told, messages.Refused) and request_names.unnamed(told.request_id) == "c"
    line.clients.paced(PACE)
    assert [line.told(client) for client in ("", "1.1", "2.1")] == [messages.Paced(PACE)] * 3


def test_who_has_gone_is_not_there_even_if_its_coming_is_told_later(line: Line) -> None:
    line.clients.attach("1.1", line.listen("1.1"))
    line.clients.detach("1.1")
    line.clients.detach("2.1")
    line.clients.attach("1.1", "ipc:///nowhere")
    line.clients.attach("2.1", line.listen("2.1"))
    assert "1.1" not in line.clients and "2.1" not in line.clients
    line.clients.outputs([out("2.1", "a"), out("", "b")])
    assert line.told("") == messages.Outputs([out("", "b")])
    line.clients.detach("")  # the first stays
    line.clients.outputs([out("", "c")])
    assert line.told("") == messages.Outputs([out("", "c")])


def test_one_that_no_socket_can_be_had_for_is_not_there(line: Line, caplog: pytest.LogCaptureFixture) -> None:
    line.clients.attach("1.1", f"ipc:///{'x' * 200}")
    assert "1.1" not in line.clients
    assert "a client cannot be attached" in caplog.text
    assert line.told("") == messages.Unattached("1.1")
    line.clients.attach("2.1", line.listen("2.1"))
    line.clients.outputs([out("1.1", "a"), out("2.1", "a")])
    assert line.told("2.1") == messages.Outputs([out("2.1", "a")])


@pytest.mark.parametrize("name", ["a", "\x01a", "\x01", "a/b"])
@pytest.mark.parametrize("client", ["", "1.1", "63.999"])
def test_names_come_back(client: str, name: str) -> None:
    named = request_names.named(client, name)
    assert request_names.client_of(named) == client
    assert request_names.unnamed(named) == name
