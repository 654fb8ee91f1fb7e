"""What ops append to a program while a step is recorded, kept so that a later start appends the same without layers.

A call is its name, its arguments and what it returned: the numbers of values, which are the same again. Arguments that
are no plain values are written as objects of one field, which says what they are:

    {"matrix": [weight, number]}  a packed matrix        {"part": [value, offset, stride]}  columns of a value
    {"layout": layer}             of a layer's cache     {"buffers": [layer, key, value]}   the same with its memory

A constant's memory is a place: of a cache ("key" or "value" of a layer, or a recurrent "state"), a value of the program
before, or an array that is kept with the calls. No torch here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.kernels.cpu import native
from penstock.kernels.cpu.step_program import address

Bytes = npt.NDArray[np.uint8]
Call = list[Any]
ALIGNMENT = 64  # of constants, as of torch's memory


class NotKeptError(Exception):
    """A recording holds something that another process cannot have again; the message is a clause that says what."""


class JournalError(Exception):
    """A journal cannot be replayed; the message is a clause that says why."""


class Journal:
    """Stands for a native program while it is recorded."""

    def __init__(self, program: Any) -> None:
        self.program = program
        self._calls: list[tuple[str, tuple[Any, ...], Any]] = []
        self._memory: dict[int, Any] = {}  # by address: what lies there
        self._objects: dict[int, tuple[object, Any]] = {}  # by id: native objects, and how they are written

    def __getattr__(self, name: str) -> Any:
        append = getattr(self.program, name)
        if not callable(append):
            return append

        def noted(*arguments: Any) -> Any:
            result = append(*arguments)
            self._calls.append((name, arguments, result))
            return result

        return noted

    def note(self, made: object, written: Any) -> None:
        """A native object that calls get is written so."""
        self._objects[id(made)] = made, written

    def note_memory(self, memory: Any) -> None:
        """The memory of a constant."""
        place = address(memory)
        before = self._memory.get(place)
        if before is None or before.nbytes < memory.nbytes:  # a view may be of a part
            self._memory[place] = memory

    def note_place(self, place: int, written: Any) -> None:
        """An address that is a constant, and how it is written."""
        self._memory[place] = written

    def written(self, names: Names, arrays: Arrays) -> list[Call]:
        """The calls in plain values.

        Raises:
            NotKeptError: one has an argument that cannot be written.
        """
        return [self._call(name, arguments, result, names, arrays) for name, arguments, result in self._calls]

    def _call(self, name: str, arguments: tuple[Any, ...], result: Any, names: Names, arrays: Arrays) -> Call:
        if name == "constant":
            return [name, [self._place(arguments[0], names, arrays)], result]
        return [name, [self._argument(name, argument, names) for argument in arguments], result]

    def _place(self, place: int, names: Names, arrays: Arrays) -> Any:
        if place in names.places:
            return names.places[place]
        memory = self._memory[place]
        return memory if isinstance(memory, dict) else {"array": arrays.add(place, memory.nbytes)}

    def _argument(self, name: str, argument: Any, names: Names) -> Any:
        if argument is None or type(argument) in (bool, int, float, str):
            return argument
        if isinstance(argument, (list, tuple)):
            return [self._argument(name, part, names) for part in argument]
        written = names.objects.get(id(argument))
        if written is None and id(argument) in self._objects:
            written = self._objects[id(argument)][1]
        if written is None:
            raise NotKeptError(f"its op {name} is given a {type(argument).__name__}")
        if "buffers" in written:
            layout, *values = written["buffers"]
            return {"buffers": [names.objects[id(layout)]["layout"], *values]}
        return written


@dataclass(frozen=True, slots=True)
class Names:
    """How an engine's objects are written.

    Attributes:
        objects: by id: packed matrices, and the layouts of caches.
        places: by address: the memory of caches.
    """

    objects: Mapping[int, Any]
    places: Mapping[int, Any]


@dataclass(slots=True)
class Arrays:
    """Constants that are kept with a journal, one behind the other in `data`."""

    places: list[tuple[int, int]] = field(default_factory=list)
    data: bytearray = field(default_factory=bytearray)
    _seen: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, place: int, nbytes: int) -> int:
        """Copies what lies at an address; its number."""
        if (place, nbytes) not in self._seen:
            self.data += bytes(-len(self.data) % ALIGNMENT)
            self._seen[place, nbytes] = len(self.places)
            self.places.append((len(self.data), nbytes))
            self.data += ctypes.string_at(place, nbytes)
        return self._seen[place, nbytes]


@dataclass(frozen=True, slots=True)
class Places:
    """What a journal names, as it is in this process.

    Attributes:
        matrices: of a weight, by name.
        layouts: of the layers' caches.
        memory: the address of a cache's memory: of (layer, "key" or "value"), or (layer, number of a state).
        arrays: addresses of the constants, by number.
        before: the address of a value of the program before.
    """

    matrices: Callable[[str], Sequence[Any]]
    layouts: Sequence[Any]
    memory: Callable[[int, str | int], int]
    arrays: Sequence[int]
    before: Callable[[int], int]


def replayed(calls: Sequence[Call], places: Places) -> Any:
    """A native program to which a journal's calls have been appended; it is not finished.

    Raises:
        JournalError: the calls are no journal's, or this library takes them otherwise.
    """
    program = native.library().Program()
    try:
        for name, arguments, result in calls:
            given = [_place(arguments[0], places)] if name == "constant" else [_given(one, places) for one in arguments]
            if getattr(program, name)(*given) != result:
                raise JournalError(f"{name} gives another value than it gave")
    except (AttributeError, TypeError, ValueError, LookupError) as error:
        raise JournalError(f"a call cannot be made again ({error})") from error
    return program


def _place(written: Any, places: Places) -> int:
    if "array" in written:
        return places.arrays[int(written["array"])]
    if "value" in written:
        return places.before(int(written["value"]))
    layer, which = written["cache"]
    return int(places.memory(layer, which))


def _given(written: Any, places: Places) -> Any:
    if isinstance(written, list):
        return [_given(part, places) for part in written]
    if not isinstance(written, dict):
        return written
    if "matrix" in written:
        weight, number = written["matrix"]
        return places.matrices(weight)[number]
    if "part" in written:
        return native.library().Part(*written["part"])
    if "layout" in written:
        return places.layouts[written["layout"]]
    layer, (keys, values) = written["buffers"][0], written["buffers"][1:]
    return native.library().KvBuffers(places.layouts[layer], keys, values)
