"""Steps of single tokens, filled and run by one native call each, against the batch that is built for any step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from penstock.config.sampling import SamplingParams
from penstock.core.protocol import NewSequence, ScheduledTokens, last_sample
from penstock.kernels.cpu import native
from penstock.kernels.cpu.step_program import DecodeProgram
from penstock.models.registry import Model
from penstock.runtime.batch_builder import BatchBuilder, BatchTraits
from penstock.runtime.executor import Executor, make_executor
from tests.models import tiny
from tests.models.harness import BLOCK_SIZE, ROWS, Harness, load

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")
CPU = torch.device("cpu")
WIDTH = 8  # blocks a row
LENGTHS = {3: 5, 5: 9, 4: 6}  # of the prompts, by slot
ORDERS = ((3, 5, 4), (4, 5), (3,), (5, 3), (4, 5, 3), (3, 4, 5), (5,))  # slots that follow each other, and others
Spans = tuple[ScheduledTokens, ...]


class Rows:
    """A model's executor and builder, and three rows of scattered blocks whose prompts it has computed."""

    def __init__(self, model: Model, fast: bool = False) -> None:
        harness = Harness(model, seed=1)
        self.groups = len(harness.groups)
        self.executor: Executor = make_executor(model, harness.caches, 48, ROWS, fast)
        self.builder = BatchBuilder(
            self.groups, ROWS, WIDTH, BLOCK_SIZE, CPU, BatchTraits(mask=model.mask, axes=model.position_axes)
        )
        self._free = [list(free) for free in harness.free]
        self.lengths = dict(LENGTHS)
        for slot, length in LENGTHS.items():
            blocks = self._blocks(-(-length // BLOCK_SIZE))
            self.builder.add_row(NewSequence(slot, f"r{slot}", 0, (1,), (), 0, blocks, SamplingParams()))
        spans = [
            ScheduledTokens(slot, 0, tuple(tiny.prompt(length, slot)), length, 0, True, ((),) * self.groups)
            for slot, length in LENGTHS.items()
        ]
        self.general(tuple(spans))

    def _blocks(self, count: int) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(free.pop() for _ in range(count)) for free in self._free)

    def spans(self, order: Sequence[int]) -> Spans:
        """One token of each of these slots, with a new block where one begins."""
        made = []
        for slot in order:
            start = self.lengths[slot]
            self.lengths[slot] += 1
            added = self._blocks(int(start % BLOCK_SIZE == 0))
            made.append(ScheduledTokens(slot, start, (7 + start,), slot % 2, 0, True, added))
        return tuple(made)

    def general(self, spans: Spans) -> npt.NDArray[np.float32]:
        """Logits by the batch of any step."""
        ends = np.cumsum([len(span.tokens) for span in spans]) - 1
        with torch.inference_mode():
            self.executor.forward(self.builder.build(spans, ends.tolist()))
            return torch.as_tensor(self.executor.logits()).clone().numpy()


def decoding(rows: Rows) -> DecodeProgram:
    found = rows.executor.decoding(rows.builder)
    assert found is not None
    return found


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_familys_decode_steps_have_the_bits_of_built_batches(family: str, tmp_path: Path) -> None:
    tiny.save(family, tmp_path)
    model = load(tmp_path)
    rows, others = Rows(model), Rows(model)
    if not rows.builder.plain:
        assert rows.executor.decoding(rows.builder) is None
        return
    program = decoding(rows)
    for order in ORDERS:
        assert program.fill(rows.spans(order))
        assert np.array_equal(program.run(), others.general(others.spans(order)))
    for ours, theirs in zip(rows.builder.tables, others.builder.tables, strict=True):
        assert np.array_equal(ours, theirs)
    assert [used.tolist() for used in rows.builder.used] == [used.tolist() for used in others.builder.used]


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    tiny.save("qwen3", tmp_path)
    return Rows(load(tmp_path))


def test_kinds_of_tokens_are_told_at_level_fast(tmp_path: Path) -> None:
    tiny.save("qwen3", tmp_path)
    was = native.isa()
    try:
        if "amx_emulated" not in native.usable_isas():
            pytest.skip("no instruction set of two ways can be used here")
        native.select_isa("amx_emulated")
        model = load(tmp_path)
        rows, others = Rows(model, fast=True), Rows(model, fast=True)
        program = decoding(rows)
        for order in ORDERS:
            assert program.fill(rows.spans(order))
            assert np.array_equal(program.run(), others.general(others.spans(order)))
    finally:
        native.select_isa(was)


def test_other_steps_are_left_to_the_builder(rows: Rows) -> None:
    program, nothing = decoding(rows), ((),)
    known = ScheduledTokens(3, 5, (1,), 0, 0, True, nothing)
    for other in (
        ScheduledTokens(5, 9, (1, 2), 0, 0, True, nothing),
        ScheduledTokens(5, 9, (1,), 1, 0, False, nothing),
        ScheduledTokens(5, 9, (last_sample(5),), 0, 0, True, nothing),
    ):
        before = [used.tolist() for used in rows.builder.used]
        assert not program.fill((known._replace(new_blocks=((9,),)), other))
        assert [used.tolist() for used in rows.builder.used] == before
    assert not program.fill(())
    assert not program.fill((known,) * (ROWS + 1))
    assert program.fill((known,))


def test_what_no_table_holds_is_refused(rows: Rows) -> None:
    program, nothing = decoding(rows), ((),)
    with pytest.raises(IndexError, match="slot 8 is none of 8"):
        program.fill((ScheduledTokens(ROWS, 5, (1,), 0, 0, True, nothing),))
    with pytest.raises(IndexError, match="slot 3 has no block for position 8"):
        program.fill((ScheduledTokens(3, 8, (1,), 0, 0, True, nothing),))
    with pytest.raises(IndexError, match="outside of its table"):
        program.fill((ScheduledTokens(3, WIDTH * BLOCK_SIZE, (1,), 0, 0, True, nothing),))
    with pytest.raises(IndexError, match="the table of slot 3 is full"):
        program.fill((ScheduledTokens(3, 5, (1,), 0, 0, True, (tuple(range(1, WIDTH)),)),))
    with pytest.raises(TypeError, match="scheduled tokens are tuples"):
        program.fill(((3, 5, (1,)),))


def test_native_code_reads_the_fields_where_they_are() -> None:
    names = native.library().scheduled_fields
    assert names == ScheduledTokens._fields[: len(names)]
