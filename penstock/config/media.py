"""What a request has besides text: places, lengths and digests."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.given_rows import GivenRows


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Placeholders of one medium in a prompt. They are computed in one step and shared as a whole or not at all.

    Attributes:
        digest: of the medium's content; the prefix tree knows the placeholders by it.
        start, length: absolute positions of the placeholders.
        rows: what stands in their place, where that comes with the request; None where an encoder makes it.
    """

    digest: str
    start: int
    length: int
    rows: GivenRows | None = None

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """What an encoder apart from the decoder reads, whose output the decoder attends to.

    Attributes:
        digest: of its content.
        length: entries of the encoder's output.
    """

    digest: str
    length: int
