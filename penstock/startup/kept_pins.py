"""Pins that outlive their process: a file beside the copies on disk, from which they are asked for again at a start."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.config.cache_asks import MOST_PIN_SECONDS, Pin
from penstock.config.errors import RequestError
from penstock.config.sampling import SamplingParams
from penstock.core.policies.pins import MOST_PINS, Pins
from penstock.core.request import EngineRequest
from penstock.transfer.folder import FRESH_PINS, PINS
from penstock.transfer.sealing import PLAIN, Sealing

log = logging.getLogger(__name__)
_MOST_BYTES: Final = 64 << 20  # of which those of this process write half: what was there before is written beside
_AROUND: Final = 4096  # bytes at most that a pin has besides its tokens
_SEALED: Final = b"pins"
_ONE: Final = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True, slots=True)
class KeptPin:
    """A pin as it lies on disk: a line of JSON.

    Attributes:
        name, owner, salt: whose it is.
        tokens: of its prompt.
        until: when it ends, seconds since 1970.
    """

    name: str
    owner: str
    salt: str
    tokens: list[int]
    until: float

    def line(self, tokens: str) -> bytes:
        """Itself in a line, with these tokens in JSON instead of its own."""
        given = {"name": self.name, "owner": self.owner, "salt": self.salt, "until": self.until}
        return f'{json.dumps(given)[:-1]}, "tokens": {tokens}}}\n'.encode()

    @classmethod
    def of(cls, line: bytes) -> KeptPin:
        """Raises ValueError or RecursionError for a line that is none."""
        match json.loads(line):
            case {"name": str(), "owner": str(), "salt": str(), "tokens": [_, *_] as tokens, "until": float()} as kept:
                if len(kept) == 5 and all(type(token) is int and token >= 0 for token in tokens):
                    return cls(**kept)
        raise ValueError("a line of it is no pin")


class KeptPins:
    """Writes pins down whenever one comes or goes; while nothing is asked for, pins again what was written before.

    Prompts with adapters or media are left out: what these are is not known at a start.
    """

    def __init__(
        self, folder: Path, pins: Pins, add: Callable[[EngineRequest], bool], sealing: Sealing = PLAIN
    ) -> None:
        self._folder = folder
        self._sealing = sealing
        self._pins = pins
        self._add = add
        self._again = self._read()
        self._encoded: dict[str, str] = {}  # tokens, by request, which are written again with each other pin
        pins.changed = self._write

    def __call__(self) -> bool:
        """Asks for the next pin of before; False if there was none."""
        while self._again:
            kept = self._again.pop(0)
            left = min(kept.until - time.time(), MOST_PIN_SECONDS)
            if left <= 0:
                continue
            request = EngineRequest(
                f"\0pin {len(self._again)}", tuple(kept.tokens), _ONE, cache_salt=kept.salt, owner=kept.owner,
                counted=False, pin=Pin(kept.name, left),
            )  # fmt: skip
            try:
                self._add(request)
                return True
            except RequestError as error:  # of a larger pool, or a longer context
                log.warning("a prefix that was pinned before is not any more: %s", error)
                self._write()
        return False

    def _read(self) -> list[KeptPin]:
        try:
            handle = os.open(self._folder / PINS, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(handle, "rb") as file:
                data = file.read(_MOST_BYTES + 1)
            if len(data) > _MOST_BYTES:
                raise ValueError(f"it has more than {_MOST_BYTES} bytes")
            return [KeptPin.of(line) for line in bytes(self._sealing.unseal(data, _SEALED)).splitlines()[:MOST_PINS]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, RecursionError) as error:
            log.warning("what was pinned before is not known: %s in %s cannot be read (%s)", PINS, self._folder, error)
            return []

    def _write(self) -> None:
        """Whatever happens meanwhile, the file is whole; a disk that refuses leaves the one of before."""
        lines: list[bytes] = []
        now = time.time()
        room = _MOST_BYTES // 2
        encoded, self._encoded = self._encoded, {}
        for request, left in self._pins.all():
            if request.pin is None or request.adapters or request.media or request.encoder:
                continue
            tokens = encoded.get(request.request_id) or json.dumps(request.prompt_ids)
            self._encoded[request.request_id] = tokens
            room -= len(tokens) + _AROUND
            if room >= 0:
                kept = KeptPin(request.pin.name, request.owner, request.cache_salt, [], now + left)
                lines.append(kept.line(tokens))
        lines += (kept.line(json.dumps(kept.tokens)) for kept in self._again)
        fresh = self._folder / FRESH_PINS
        with suppress(OSError):
            handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.writelines(self._sealing.seal([b"".join(lines)], _SEALED))
            os.replace(fresh, self._folder / PINS)
