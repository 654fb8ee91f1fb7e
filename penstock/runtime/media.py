"""Media beside plans: arrays that the runner is given by digest, and what encoders make of them in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.core.protocol import EncoderWork, NewSequence, ScheduledTokens, StepPlan
from penstock.kernels.copies import upload
from penstock.layers.batch import Injection, LayerCache

PLACES = (
    "places"  # the array of a medium that no encoder needs: [P, length], its placeholders' positions from the first on
)
Arrays = Mapping[str, npt.NDArray[np.generic]]
Numbers = npt.NDArray[np.int64]


class MediaEncoder(Protocol):
    """Makes of a medium what stands in the place of its placeholders."""

    def __call__(self, arrays: Arrays) -> Tensor:
        """[levels, length, hidden_size] on the model's device, as in `layers.batch.Injection`."""


class CrossEncoder(Protocol):
    """Makes of a medium what a cross group's layers attend to."""

    def __call__(self, arrays: Arrays, slot: Tensor, caches: Sequence[LayerCache]) -> None:
        """Writes the entries to the group's caches, at the flat cache slots [length] int64."""


@dataclass(frozen=True, slots=True)
class Encoders:
    """The encoders of a model; None for one that it does not have."""

    media: MediaEncoder | None = None
    cross: CrossEncoder | None = None


@dataclass(slots=True)
class _Medium:
    arrays: Arrays
    users: int = 1


@dataclass(frozen=True, slots=True)
class Encoded:
    """What the encoders made for a step.

    Attributes:
        injection: for the batch; None where nothing is injected.
        failed: slots whose media could not be encoded, and why.
    """

    injection: Injection | None
    failed: Mapping[int, str]


NOTHING_ENCODED = Encoded(None, MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class MediaShape:
    """What a model takes of media: levels of hidden states for placeholders, axes of positions."""

    levels: int
    axes: int


class MediaStore:
    """The media of one engine, by the digest of their content. The null form has no encoders, and no plan names any."""

    def __init__(
        self,
        encoders: Encoders,
        shape: MediaShape,
        block_size: int,
        caches: Sequence[LayerCache],
        device: torch.device,
    ) -> None:
        self._encoders = encoders
        self._shape = shape
        self._block_size = block_size
        self._caches = caches
        self._device = device
        self._media: dict[str, _Medium] = {}
        self._broken: dict[tuple[int, tuple[int, ...]], str] = {}  # entries that could not be made, by group and blocks

    def put_media(self, digest: str, arrays: Arrays) -> None:
        """Keeps a medium until `release_media` was called as often as this. It has to be here before plans name it."""
        found = self._media.get(digest)
        if found is None:
            self._media[digest] = _Medium(arrays)
        else:
            found.users += 1

    def release_media(self, digest: str) -> None:
        """One user less; what nobody uses is forgotten, and what was never there may be released."""
        found = self._media.get(digest)
        if found is not None:
            found.users -= 1
            if not found.users:
                del self._media[digest]

    def __len__(self) -> int:
        return len(self._media)

    @property
    def broken(self) -> bool:
        """Whether there are entries that could not be made."""
        return bool(self._broken)

    def places(self, new: NewSequence) -> Numbers | None:
        """Positions [P, tokens of the prompt] of a sequence; None where they count tokens.

        Text counts on, on all axes alike, from one behind the largest position of the medium before it.
        """
        axes = self._shape.axes
        own = {span.start: self._media[span.digest].arrays for span in new.media if span.digest in self._media}
        if axes == 1 or not any(PLACES in arrays for arrays in own.values()):
            return None
        parts: list[Numbers] = []
        done = ahead = 0
        for span in sorted(new.media, key=lambda span: span.start):
            parts.append(_counting(axes, span.start - done, ahead + done))
            base = ahead + span.start
            offsets = own.get(span.start, {}).get(PLACES)
            part = _counting(axes, span.length, base) if offsets is None else base + offsets.astype(np.int64)
            if part.shape != (axes, span.length):
                raise ValueError(f"a medium of {span.length} placeholders has positions of shape {part.shape}")
            parts.append(part)
            done = span.end
            ahead = int(part.max()) + 1 - done
        parts.append(_counting(axes, len(new.prompt_ids) - done, ahead + done))
        return np.concatenate(parts, axis=1)

    def encode(self, plan: StepPlan) -> Encoded:
        """Runs a step's encoder work. What fails, fails for the slots that would see it alone."""
        begins = _begins(plan.scheduled)
        outputs: dict[str, Tensor] = {}
        rows: list[Numbers] = []
        values: list[Tensor] = []
        failed: dict[int, str] = {}
        for work in plan.encoder_work:
            try:
                if work.group is not None:
                    self._broken.pop((work.group, work.blocks), None)
                    self._cross(work, work.group)
                    continue
                if work.digest not in outputs:
                    outputs[work.digest] = self._embeddings(work)
                rows.append(np.arange(work.length) + begins[work.slot] + work.start)
                values.append(outputs[work.digest])
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                failed[work.slot] = f"the medium {work.digest} could not be encoded: {error}"
                if work.group is not None:
                    self._broken[work.group, work.blocks] = failed[work.slot]
        if self._broken:
            failed |= self._that_share(plan.new_sequences)
        if not rows:
            return Encoded(None, failed)
        return Encoded(Injection(upload(np.concatenate(rows), self._device), torch.cat(values, dim=1)), failed)

    def _that_share(self, sequences: Sequence[NewSequence]) -> dict[int, str]:
        """Sequences that would attend to entries which could not be made."""
        named = {(new.slot, key): self._broken.get(key) for new in sequences for key in enumerate(new.blocks)}
        return {slot: error for (slot, _), error in named.items() if error is not None}

    def _arrays(self, digest: str) -> Arrays:
        found = self._media.get(digest)
        if found is None:
            raise LookupError("it was not given to the engine, or was released; send the request again with it.")
        return found.arrays

    def _embeddings(self, work: EncoderWork) -> Tensor:
        if self._encoders.media is None:
            raise LookupError("the model has no encoder for it.")
        found = self._encoders.media(self._arrays(work.digest))
        if found.dim() != 3 or found.shape[:2] != (self._shape.levels, work.length):
            raise ValueError(
                f"its encoder gives {tuple(found.shape)}; {work.length} placeholders take {self._shape.levels} each."
            )
        return found

    def _cross(self, work: EncoderWork, group: int) -> None:
        if self._encoders.cross is None:
            raise LookupError("the model has no encoder whose output it attends to.")
        place = np.arange(work.length)
        blocks = np.array(work.blocks, np.int64)
        slot = blocks[place // self._block_size] * self._block_size + place % self._block_size
        caches = [cache for cache in self._caches if cache.group == group]
        self._encoders.cross(self._arrays(work.digest), upload(slot, self._device), caches)


def _begins(spans: Sequence[ScheduledTokens]) -> dict[int, int]:
    """By slot, where in the step its token 0 would lie."""
    begins: dict[int, int] = {}
    total = 0
    for span in spans:
        begins[span.slot] = total - span.start
        total += len(span.tokens)
    return begins


def _counting(axes: int, count: int, first: int) -> Numbers:
    """Positions first, first + 1 … on all axes alike."""
    return np.tile(np.arange(first, first + count, dtype=np.int64), (axes, 1))
