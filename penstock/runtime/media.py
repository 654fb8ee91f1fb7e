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

from penstock.config.media import MediaSpan
from penstock.core.protocol import EncoderWork, NewSequence, ScheduledTokens, StepPlan
from penstock.kernels.copies import upload
from penstock.layers.batch import Injection, LayerCache

PLACES = (
    "places"  # the array of a medium that no encoder needs: [P, length], its placeholders' positions from the first on
)
ROWS = "rows"  # the array of a medium that is rows of the embedding's: [length, width] float32
Arrays = Mapping[str, npt.NDArray[np.generic]]
Numbers = npt.NDArray[np.int64]
MOST_PLACE = (1 << 31) - 1  # as an offset of a medium's positions: sums of many stay far from 2^63


class MediaError(ValueError):
    """A medium is wrong, or not there; what is said of it is for the request that has it."""


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
    """The encoders of a model; None for one that it does not have.

    Attributes:
        media, cross: as they are called.
        rows: brings rows that came with a request to where its placeholders' would be.
    """

    media: MediaEncoder | None = None
    cross: CrossEncoder | None = None
    rows: MediaEncoder | None = None


@dataclass(slots=True)
class _Medium:
    arrays: Arrays
    users: int = 1  # those who put it, and slots whose sequences have it


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
    """What a model takes of media.

    Attributes:
        levels: of hidden states for each placeholder.
        axes: of positions.
        hidden_size, dtype: of hidden states, between layers.
    """

    levels: int
    axes: int
    hidden_size: int
    dtype: torch.dtype


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
        self._held: dict[int, tuple[str, ...]] = {}  # by slot, the media of its sequence
        # Entries that could not be made, by group and blocks: the slot they were made for, and why.
        self._broken: dict[tuple[int, tuple[int, ...]], tuple[int, str]] = {}

    def put_media(self, digest: str, arrays: Arrays) -> None:
        """Keeps a medium until `release_media` was called as often as this. It has to be here before plans name it.

        Raises:
            MediaError: it has positions that no prompt could have.
        """
        found = self._media.get(digest)
        if found is None:
            if PLACES in arrays:
                self._check_places(digest, arrays[PLACES])
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
        """Whether there are entries that could not be made, of slots that were not released yet."""
        return bool(self._broken)

    def add_row(self, new: NewSequence) -> Numbers | None:
        """A sequence takes a slot, and keeps its media until `release_row`; its positions, as `places` gives them.

        Raises:
            MediaError: as `places`; nothing is kept then.
        """
        if not new.media:
            return None
        self._held[new.slot] = tuple(span.digest for span in new.media if self._hold(span))
        try:
            return self.places(new)
        except MediaError:
            self.release_row(new.slot)
            raise

    def _hold(self, span: MediaSpan) -> bool:
        """One user more of a medium, if it is here or comes with its request; whether there is."""
        if span.rows is not None:
            self.put_media(span.digest, {ROWS: span.rows.floats()})
        elif span.digest in self._media:
            self._media[span.digest].users += 1
        return span.digest in self._media

    def release_row(self, slot: int) -> None:
        """A slot is free again; releasing a free slot does nothing.

        Whoever shares entries with it came before: nobody finds what could not be made once that is known.
        """
        for digest in self._held.pop(slot, ()):
            self.release_media(digest)
        for key in [key for key, (owner, _) in self._broken.items() if owner == slot]:
            del self._broken[key]

    def places(self, new: NewSequence) -> Numbers | None:
        """Positions [P, tokens of the prompt] of a sequence; None where they count tokens.

        Text counts on, on all axes alike, from one behind the largest position of the medium before it.

        Raises:
            MediaError: a medium that the sequence needs is not here, or its positions are those of another length.
        """
        axes = self._shape.axes
        spans = sorted(new.media, key=lambda span: span.start)
        # Once the placeholders are computed, only their positions are asked for again.
        needed = (span.digest for span in spans if axes > 1 or span.end > new.computed)
        own = {digest: self._arrays(digest) for digest in needed}
        if axes == 1 or not any(PLACES in arrays for arrays in own.values()):
            return None
        parts: list[Numbers] = []
        done = ahead = 0
        for span in spans:
            parts.append(_counting(axes, span.start - done, ahead + done))
            base = ahead + span.start
            offsets = own[span.digest].get(PLACES)
            part = _counting(axes, span.length, base) if offsets is None else base + offsets.astype(np.int64)
            if part.shape[1] != span.length:
                raise MediaError(
                    f"the medium {span.digest} has positions of {part.shape[1]} placeholders, but stands for "
                    f"{span.length} tokens of the prompt; give as many of one as of the other."
                )
            parts.append(part)
            done = span.end
            ahead = int(part.max()) + 1 - done
        parts.append(_counting(axes, len(new.prompt_ids) - done, ahead + done))
        return np.concatenate(parts, axis=1)

    def _check_places(self, digest: str, places: npt.NDArray[np.generic]) -> None:
        axes = self._shape.axes
        allowed = f"allowed are integers ({axes}, placeholders) from 0 to {MOST_PLACE}."
        if places.ndim != 2 or len(places) != axes or not np.issubdtype(places.dtype, np.integer):
            raise MediaError(f"the medium {digest} has positions of {places.dtype} {places.shape}; {allowed}")
        if places.size and (int(places.min()) < 0 or int(places.max()) > MOST_PLACE):
            raise MediaError(f"the medium {digest} has positions from {places.min()} to {places.max()}; {allowed}")

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
                self._check_output(outputs[work.digest], work)
                rows.append(np.arange(work.length) + begins[work.slot] + work.start)
                values.append(outputs[work.digest])
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                missing = isinstance(error, MediaError)
                failed[work.slot] = str(error) if missing else f"the medium {work.digest} could not be encoded: {error}"
                if work.group is not None:
                    self._broken[work.group, work.blocks] = work.slot, failed[work.slot]
        if self._broken:
            failed |= self._that_share(plan.new_sequences)
        if not rows:
            return Encoded(None, failed)
        return Encoded(Injection(upload(np.concatenate(rows), self._device), torch.cat(values, dim=1)), failed)

    def _that_share(self, sequences: Sequence[NewSequence]) -> dict[int, str]:
        """Sequences that would attend to entries which could not be made."""
        named = {(new.slot, key): self._broken.get(key) for new in sequences for key in enumerate(new.blocks)}
        return {slot: found[1] for (slot, _), found in named.items() if found is not None}

    def _arrays(self, digest: str) -> Arrays:
        found = self._media.get(digest)
        if found is None:
            raise MediaError(
                f"the medium {digest} was not given to the engine, or was released; send the request again with it."
            )
        return found.arrays

    def _embeddings(self, work: EncoderWork) -> Tensor:
        arrays = self._arrays(work.digest)
        encoder = self._encoders.rows if ROWS in arrays else self._encoders.media
        if encoder is None:
            raise LookupError("the model has no encoder for it.")
        return encoder(arrays)

    def _check_output(self, found: Tensor, work: EncoderWork) -> None:
        """What native code takes at its word: sizes, type and place. Encoders that give other ones are wrong."""
        shape = self._shape
        wanted = shape.levels, work.length, shape.hidden_size
        if found.shape != wanted or found.dtype != shape.dtype or found.device.type != self._device.type:
            raise ValueError(
                f"its encoder gives {_described(found.dtype, tuple(found.shape), found.device)}; "
                f"allowed is {_described(shape.dtype, wanted, self._device)}."
            )

    def _cross(self, work: EncoderWork, group: int) -> None:
        if self._encoders.cross is None:
            raise LookupError("the model has no encoder whose output it attends to.")
        place = np.arange(work.length)
        blocks = np.array(work.blocks, np.int64)
        slot = blocks[place // self._block_size] * self._block_size + place % self._block_size
        caches = [cache for cache in self._caches if cache.group == group]
        self._encoders.cross(self._arrays(work.digest), upload(slot, self._device), caches)


def _described(dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> str:
    return f"{str(dtype).removeprefix('torch.')} {shape} on {device.type}"


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
