"""Native programs: ops called with handles are recorded and replayed later, ops called with tensors run at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from penstock.kernels.cpu import native

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


class Recording:
    """A program being recorded, then replayed. Ops append to `program`; `refs` keeps alive what it points to.

    With `fast` runs go by level fast: tokens by their kind, logit rows all as generated ones.
    """

    def __init__(self, fast: bool = False) -> None:
        if (reason := native.unavailable_reason()) is not None:
            raise NotRecordableError(reason)
        self.fast = fast
        self.program = native.library().Program()
        self.refs: list[Any] = []
        self.plans: dict[Any, int] = {}
        self._step = native.library().StepInputs()
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
        make = native.library().Part
        if value is None:
            return make(NONE, 0, 0)
        if isinstance(value, Handle):
            if value.tape is not self:
                raise NotRecordableError("an activation of another program is used")
            return make(value.index, value.offset, value.stride)
        if value.stride(1) != 1:
            raise NotRecordableError("a tensor whose columns do not lie side by side is given to an op")
        self.refs.append(value)
        return make(int(self.program.constant(value.data_ptr())), 0, value.stride(0))

    def vector(self, tensor: Tensor) -> Any:
        """The program's columns for one row [width] that stands for all."""
        return native.library().Part(self.constant(tensor), 0, 0)

    def constant(self, tensor: Tensor) -> int:
        if not tensor.is_contiguous():
            raise NotRecordableError("a tensor that is not contiguous is given to an op")
        self.refs.append(tensor)
        return int(self.program.constant(tensor.data_ptr()))

    def new(self, width: int, extent: str = TOKENS, dtype: torch.dtype = torch.float32) -> Any:
        """An activation [rows of the extent, width]."""
        return Handle(self, self.program.activation(width * dtype.itemsize, extent), width, extent)

    def done(self, *results: Any) -> Any:
        """What the op returns for these new activations."""
        return results[0] if len(results) == 1 else results

    def result_of(self, other: Recording, result: Any) -> Any:
        """A finished program's result as an input of this one."""
        self.refs.append(other)
        address = other.program.address(other.index(result))
        return Handle(self, int(self.program.constant(address)), result.width)

    def finish(self, result: Any, max_tokens: int, max_logit_rows: int) -> None:
        """Ends the recording: `result` stays readable after a run."""
        self.program.keep(result.index)
        self.program.finish(max_tokens, max_logit_rows)
        self._result = result

    @property
    def num_ops(self) -> int:
        return int(self.program.num_ops)

    @property
    def arena_bytes(self) -> int:
        return int(self.program.arena_bytes)

    def run(
        self,
        token_ids: Tensor,
        positions: Tensor,
        query_start: Tensor,
        context_len: Tensor,
        prompt_tokens: Tensor,
        groups: Sequence[tuple[Tensor, Tensor, Tensor | None]],
        logit_rows: Tensor,
        state_slot: Tensor | None = None,
        adapter_slot: Tensor | None = None,
        adapter_scale: Tensor | None = None,
        masks: Tensor | None = None,
        spans: Tensor | None = None,
        token_types: Tensor | None = None,
        injected: tuple[Tensor, Tensor] | None = None,
        state_after: Tensor | None = None,
    ) -> None:
        """Replays it for a step; arguments as in a `Batch`, those of a group as in GroupTables, masks by number."""
        step = self._step
        pointers = (tensor.data_ptr() for tensor in (token_ids, positions, query_start, context_len))
        step.set(len(token_ids), len(context_len), *pointers)
        step.set_logits(len(logit_rows), logit_rows.data_ptr())
        step.set_masks(address(masks), address(spans))
        step.set_types(address(token_types))
        rows, values = (None, None) if injected is None else injected
        step.set_injected(0 if rows is None else len(rows), address(rows), address(values))
        for group, (table, slot, lengths) in enumerate(groups):
            step.set_group(group, table.data_ptr(), table.shape[1], slot.data_ptr(), address(lengths))
        step.set_states(address(state_slot), address(state_after))
        count = 0 if adapter_slot is None else adapter_slot.shape[1]
        step.set_adapters(address(adapter_slot), address(adapter_scale), count)
        if self.fast:
            step.set_kinds(prompt_tokens.data_ptr())
        self.program.run(step)

    def run_rows(self, rows: Tensor) -> Tensor:
        """Replays a program over rows [L] int64 and returns its result, [L, width], valid until the next run."""
        self._step.set_logits(len(rows), rows.data_ptr())
        if self.fast:
            self._step.set_all_generated()
        self.program.run(self._step)
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
        return torch.from_numpy(self.program.floats(value.index, rows, value.width))

    def input(self, memory: Tensor) -> Any:
        """An activation [tokens, width] that is put into `memory` before a run."""
        return Handle(self, self.constant(memory), memory.shape[1])


def address(tensor: Tensor | None) -> int:
    """Where a tensor lies; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


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
