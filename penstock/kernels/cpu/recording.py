"""Native programs: ops called with handles are recorded and replayed later, ops called with tensors run at once."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from penstock.kernels.cpu import native
from penstock.kernels.cpu.journal import Journal
from penstock.kernels.cpu.step_program import Memory, StepProgram

NONE = -1  # the value that stands for an absent input
TOKENS, LOGIT_ROWS = "tokens", "logit_rows"


class NotRecordableError(Exception):
    """A model did something with an activation that is not an op; the message says what."""


class Handle:
    """An activation of a recorded program: [rows, width], of which only ops may be called.

    Attributes:
        tape: the recording it belongs to.
        index: of the value in the native program.
        width: elements of a row.
        extent: "tokens" or "logit_rows": what its rows are.
        group: for a step's block table or slots, the cache group.
        lookup: for a step's numbers a token, which: "token_ids", "positions" or "token_types".
        offset, stride: of a part of an activation, its first column and the elements of a whole row.
    """

    __slots__ = ("extent", "group", "index", "lookup", "offset", "stride", "tape", "width")

    dtype = torch.float32

    def __init__(self, tape: Recording, index: int, width: int, extent: str = TOKENS, group: int = 0) -> None:
        self.tape = tape
        self.index = index
        self.width = width
        self.extent = extent
        self.group = group
        self.offset, self.stride = 0, width
        self.lookup = "token_ids"

    def part(self, offset: int, width: int) -> Handle:
        """Some columns, as a handle that only ops which take parts take."""
        part = Handle(self.tape, self.index, width, self.extent)
        part.offset, part.stride = self.offset + offset, self.stride
        return part

    def __getattr__(self, name: str) -> NoReturn:
        raise NotRecordableError(f"the model uses {name} of an activation, which is no op")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise NotRecordableError(f"the model calls torch's {getattr(function, '__name__', function)} on an activation")


def _refuse(name: str) -> Any:
    def operator(self: Handle, *_: Any) -> NoReturn:
        raise NotRecordableError(f"the model uses the operator {name} on an activation, which is no op")

    return operator


_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_OPERATORS = (
    *(prefix + name for prefix in ("", "r", "i") for name in _ARITHMETIC),
    *("neg", "pos", "abs", "invert", "getitem", "setitem", "contains", "lt", "le", "gt", "ge", "eq", "ne"),
    *("bool", "len", "iter", "int", "float", "index"),  # their result would be recorded as that of every step
)
for _name in _OPERATORS:
    setattr(Handle, f"__{_name}__", _refuse(_name))


class Recording(StepProgram):
    """A program being recorded, then replayed. Ops append to `program`; `refs` keeps alive what it points to.

    Attributes:
        journal: what was appended, for a later start; None where nobody keeps it.
    """

    def __init__(self, fast: bool = False, *, kept: bool = False) -> None:
        """`fast` as in StepProgram; `kept`: a journal is made."""
        if (reason := native.unavailable_reason()) is not None:
            raise NotRecordableError(reason)
        super().__init__(native.library().Program(), fast)
        self.journal = Journal(self.program) if kept else None
        self.program = self.journal or self.program
        self.refs: list[Any] = []
        self.plans: dict[Any, int] = {}
        self._result: Handle | None = None
        # Handles that stand where a batch has tensors, typed so; that of positions stands for all their axes.
        self.token_ids: Any = Handle(self, NONE, 1)
        self.positions: Any = (self._numbers("positions"),)
        self.token_types: Any = self._numbers("token_types")
        self.unreadable: Any = self.token_ids
        self.logit_index: Any = Handle(self, NONE, 1, LOGIT_ROWS)

    def block_table(self, group: int) -> Any:
        """Stands for the block table, or the slots, of a cache group."""
        return Handle(self, NONE, 1, group=group)

    slot = block_table

    def _numbers(self, lookup: str) -> Handle:
        handle = Handle(self, NONE, 1)
        handle.lookup = lookup
        return handle

    def index(self, value: Any) -> int:
        """The program's value for a handle of this tape, a float32 tensor that lives on, or None."""
        if value is None:
            return NONE
        if isinstance(value, Handle):
            if value.tape is not self:
                raise NotRecordableError("an activation of another program is used")
            if value.stride != value.width:
                raise NotRecordableError("a part of an activation is given to an op that takes whole ones")
            return value.index
        return self.constant(value)

    def part(self, value: Any) -> Any:
        """The program's columns for a handle, a tensor [T, width] that may be a part of one, or None."""
        if value is None:
            return self._part(NONE, 0, 0)
        if isinstance(value, Handle):
            if value.tape is not self:
                raise NotRecordableError("an activation of another program is used")
            return self._part(value.index, value.offset, value.stride)
        if value.stride(1) != 1:
            raise NotRecordableError("a tensor whose columns do not lie side by side is given to an op")
        return self._part(self._memory(value), 0, value.stride(0))

    def vector(self, tensor: Tensor) -> Any:
        """The program's columns for one row [width] that stands for all."""
        return self._part(self.constant(tensor), 0, 0)

    def buffers(self, layout: Any, key: Tensor, value: Tensor) -> Any:
        """A cache's memory, laid out so, as ops take it."""
        keys = self.constant(key)
        values = self.constant(value)
        made = native.library().KvBuffers(layout, keys, values)
        if self.journal is not None:
            self.journal.note(made, {"buffers": [layout, keys, values]})
        return made

    def _part(self, value: int, offset: int, stride: int) -> Any:
        made = native.library().Part(value, offset, stride)
        if self.journal is not None:
            self.journal.note(made, {"part": [value, offset, stride]})
        return made

    def _memory(self, tensor: Tensor) -> int:
        """The value that stands for a tensor's memory."""
        self.refs.append(tensor)
        if self.journal is not None:
            self.journal.note_memory(tensor)
        return int(self.program.constant(tensor.data_ptr()))

    def constant(self, tensor: Tensor) -> int:
        if not tensor.is_contiguous():
            raise NotRecordableError("a tensor that is not contiguous is given to an op")
        return self._memory(tensor)

    def new(self, width: int, extent: str = TOKENS, dtype: torch.dtype = torch.float32) -> Any:
        """An activation [rows of the extent, width]."""
        return Handle(self, self.program.activation(width * dtype.itemsize, extent), width, extent)

    def done(self, *results: Any) -> Any:
        """What the op returns for these new activations."""
        return results[0] if len(results) == 1 else results

    def result_of(self, other: Recording, result: Any) -> Any:
        """A finished program's result as an input of this one."""
        self.refs.append(other)
        value = other.index(result)
        place = other.program.address(value)
        if self.journal is not None:
            self.journal.note_place(place, {"value": value})
        return Handle(self, int(self.program.constant(place)), result.width)

    def finish(self, result: Any, max_tokens: int, max_logit_rows: int) -> None:
        """Ends the recording: `result` stays readable after a run."""
        self.program.keep(result.index)
        if self.journal is not None:
            self.program = self.journal.program
        self.program.finish(max_tokens, max_logit_rows)
        self._result = result

    @property
    def result_place(self) -> tuple[int, int]:
        """The result's value, and its width."""
        assert self._result is not None
        return self._result.index, self._result.width

    def run_rows(self, rows: Memory, adapter_slot: Memory | None = None, adapter_scale: Memory | None = None) -> Tensor:
        """Replays a program over rows [L] int64 and returns its result, [L, width], valid until the next run."""
        self.run_on(rows, adapter_slot, adapter_scale)
        return self.result(len(rows))

    def result(self, rows: int) -> Tensor:
        """The last run's result, [rows, width], valid until the next run."""
        assert self._result is not None
        return self.read(self._result, rows)

    def keep(self, value: Handle) -> None:
        """Before the recording ends: `value` stays readable after a run."""
        self.program.keep(self.index(value))

    def read(self, value: Handle, rows: int) -> Tensor:
        """A value that was kept, [rows, width], valid until the next run."""
        return torch.from_numpy(self.floats(value.index, rows, value.width))

    def input(self, memory: Tensor) -> Any:
        """An activation [tokens, width] that is put into `memory` before a run."""
        return Handle(self, self.constant(memory), memory.shape[1])


class Eager(Recording):
    """A program of one op over tensors, run as soon as the op is done."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.step = self._step

    def new(self, width: int, extent: str = TOKENS, dtype: torch.dtype = torch.float32) -> Any:
        return torch.empty(self.rows, width, dtype=dtype)

    def done(self, *results: Any) -> Any:
        self.program.finish(self.rows, self.rows)
        self.program.run(self._step)
        return super().done(*results)


def tape_of(x: Any) -> Recording:
    """The recording of a handle, or a new program for a tensor [rows, …]."""
    if isinstance(x, Handle):
        return x.tape
    tape = Eager(x.shape[0])
    tape.step.set(x.shape[0], 0, 0, 0, 0, 0)
    tape.step.set_logits(x.shape[0], 0)
    return tape


def width_of(x: Any) -> int:
    """Elements of a row."""
    return x.width if isinstance(x, Handle) else int(x.shape[-1])


def extent_of(x: Any) -> str:
    """What the rows are; a tensor's count as tokens."""
    return x.extent if isinstance(x, Handle) else TOKENS
