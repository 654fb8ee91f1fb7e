"""Experts of a rank that change places: their bytes come beside what is there, part by part, and are put all at once.

An expert is pieces of as many bytes in every rank: matrices, which lie where the packed weight says, and biases, rows
of a tensor. What comes lies in spare memory, of which a rank has one expert's for all layers of one shape. Once it is
whole, a matrix is read there, and where it was read before is spare.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.config.errors import ConfigError
from penstock.kernels.cpu.packed import Packed, zero_pages
from penstock.kernels.cpu.step_program import address
from penstock.layers.moe import SparseMoe
from penstock.parallel.experts import ExpertTable, Move
from penstock.runtime.ranks import messages

if TYPE_CHECKING:
    from penstock.layers.decoder import DecoderModel


class PlacedExperts:
    """One layer's experts of this rank.

    Attributes:
        table: who has which.
        pieces: bytes of each of an expert's.
    """

    def __init__(self, layer: SparseMoe, table: ExpertTable) -> None:
        weights = layer.gate_up.value, layer.down.value
        if not all(isinstance(weight, Packed) for weight in weights):
            raise ConfigError("--enable-eplb needs the native library, whose packed experts change places.")
        biases = (layer.gate_up_bias, layer.down_bias)
        self.table = table
        self._matrices: list[Any] = [matrix for weight in weights for matrix in weight.parts]
        self._biases: list[Any] = [bias.value for bias in biases if bias is not None]
        sizes = [matrix.expert_bytes for matrix in self._matrices] + [bias[0].nbytes for bias in self._biases]
        self.pieces = tuple(map(int, sizes))

    def layout(self) -> npt.NDArray[np.uint8]:
        """A digest of how the bytes of experts are read: of all that a matrix says but of single ones."""
        facts = [repr((tuple(bias.shape), str(bias.dtype))).encode() for bias in self._biases]
        for matrix in self._matrices:
            behind = matrix.data[matrix.experts * matrix.expert_bytes :]  # the order of inputs, and widths of codes
            facts += [matrix.header, behind.tobytes()]
        return np.frombuffer(hashlib.sha256(b"".join(facts)).digest(), np.uint8)

    def at(self, piece: int, place: int) -> int:
        """The address of a place's piece."""
        if piece < len(self._matrices):
            return int(self._matrices[piece].expert_address(place))
        return address(self._biases[piece - len(self._matrices)][place])

    def put(self, piece: int, place: int, came: int) -> int | None:
        """Has a place hold the piece at an address; the address of memory that is spare now, if there is such."""
        before = self.at(piece, place)
        if piece < len(self._matrices):
            matrix = self._matrices[piece]
            matrix.put_expert(place, came)
            return before if matrix.writable else None  # a file that is mapped
        ctypes.memmove(before, came, self.pieces[piece])
        return came


class ExpertShelf:
    """All of a rank's experts that may change places.

    Attributes:
        layers: those whose experts may, in order; all ranks have the same.
    """

    def __init__(self, model: DecoderModel, group: Any) -> None:
        """Of a loaded model; all ranks of the group do this together.

        Raises:
            ConfigError: experts are not packed.
            RuntimeError: the group was stopped.
        """
        self._group = group
        sparse = (layer for layer in model.walk() if isinstance(layer, SparseMoe))
        layers = [PlacedExperts(layer, layer.places) for layer in sparse if layer.places is not None]
        alike = [len({digest.tobytes() for digest in group.all_gather(layer.layout())}) == 1 for layer in layers]
        self.layers = [layer for layer, same in zip(layers, alike, strict=True) if same]
        self._coming: dict[int, int] = {}  # piece: where what comes of it lies
        self._spare: defaultdict[int, list[int]] = defaultdict(list)  # bytes: addresses
        self._keeps: list[npt.NDArray[np.uint8]] = []

    def obey(self, command: messages.PassExperts | messages.PutExperts) -> None:
        """Does what all ranks do now, between two steps."""
        moves = tuple(Move(*move) for move in command.moves)
        if isinstance(command, messages.PassExperts):
            self._pass(command, moves)
        else:
            self._put(self.layers[command.layer], moves)

    def _pass(self, command: messages.PassExperts, moves: tuple[Move, ...]) -> None:
        layer = self.layers[command.layer]
        piece, begin = command.piece, command.begin
        own = out = source = 0
        for move in moves:
            if move.from_rank == self._group.rank:
                own = layer.at(piece, move.from_place) + begin
            if move.to_rank == self._group.rank:
                if not begin:
                    self._coming[piece] = self._spare_memory(layer.pieces[piece])
                out, source = self._coming[piece] + begin, move.from_rank
        self._group.pass_on(own, command.end - begin, source, out)

    def _put(self, layer: PlacedExperts, moves: tuple[Move, ...]) -> None:
        for move in moves:
            if move.to_rank == self._group.rank:
                for piece, came in self._coming.items():
                    spare = layer.put(piece, move.to_place, came)
                    if spare is not None:
                        self._spare[layer.pieces[piece]].append(spare)
        self._coming.clear()
        layer.table.apply(moves)

    def _spare_memory(self, size: int) -> int:
        if self._spare[size]:
            return self._spare[size].pop()
        self._keeps.append(zero_pages(1, size))
        return address(self._keeps[-1])
