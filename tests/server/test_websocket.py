"""What a client's frames become before they are parsed."""

from __future__ import annotations

import random

import pytest
from websockets.frames import Frame, Opcode
from websockets.protocol import OPEN
from websockets.server import ServerProtocol

from penstock.server import websocket
from penstock.server.websocket import Cutter


def _messages(data: bytes) -> list[tuple[Opcode, bytes]]:
    """The messages and control frames that a parser finds."""
    conn = ServerProtocol(max_size=None)
    conn.state = OPEN
    conn.parser = conn.parse()
    next(conn.parser)
    conn.receive_data(data)
    assert conn.parser_exc is None
    found: list[tuple[Opcode, bytes]] = []
    kind, parts = Opcode.TEXT, b""
    for event in conn.events_received():
        assert isinstance(event, Frame)
        if event.opcode in (Opcode.PING, Opcode.PONG):
            found.append((event.opcode, bytes(event.data)))
            continue
        kind, parts = (kind, parts + event.data) if event.opcode is Opcode.CONT else (event.opcode, bytes(event.data))
        if event.fin:
            found.append((kind, parts))
    return found


def _sent(draw: random.Random) -> bytes:
    """Frames of messages of all lengths, in one part or several, with pings between."""
    sent = b""
    for _ in range(4):
        parts = draw.randrange(1, 4)
        for part in range(parts):
            opcode = draw.choice([Opcode.TEXT, Opcode.BINARY]) if part == 0 else Opcode.CONT
            data = draw.randbytes(draw.choice([0, 1, 63, 64, 65, 125, 126, 127, 128, 640, 641, 70_000]))
            sent += Frame(opcode, data, fin=part == parts - 1).serialize(mask=True)
            if draw.random() < 0.3:
                sent += Frame(Opcode.PING, draw.randbytes(5)).serialize(mask=True)
    return sent


@pytest.mark.parametrize("seed", range(20))
def test_long_frames_are_cut_and_say_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "_PIECE", 64)
    draw = random.Random(seed)
    sent = _sent(draw)
    cutter, told, at = Cutter(10**6), b"", 0
    while at < len(sent):
        step = draw.choice([1, 3, 64, 200, 10_000])
        told += cutter.cut(sent[at : at + step])
        at += step
    assert len(told) > len(sent)
    assert _messages(told) == _messages(sent)


def test_a_frame_that_is_too_long_is_handed_on_with_its_head() -> None:
    head = Frame(Opcode.TEXT, b"x" * 1001).serialize(mask=True)[:8]
    assert Cutter(1000).cut(head) == head


def test_no_more_than_a_piece_is_kept_back() -> None:
    frame = Frame(Opcode.TEXT, b"x" * 2**20).serialize(mask=True)
    cutter, told = Cutter(2**21), 0
    for at in range(0, len(frame) - 1, 1000):
        told += len(cutter.cut(frame[at : min(at + 1000, len(frame) - 1)]))
        assert at + 1000 - told < 64 * 2**10 + 1000
