"""Ranks that share a product, columns or a table give the bits of one process, whatever becomes of one of them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.kernels import onednn, reference
from penstock.kernels.canonical import Affine, Canonical
from penstock.kernels.cpu import native, ops, packing, shared
from penstock.kernels.cpu.journal import Arrays, Names, NotKeptError
from penstock.kernels.cpu.packed import Packed
from penstock.kernels.cpu.rank_group import RankGroup, make_memory
from penstock.kernels.cpu.recording import Handle, Recording
from penstock.kernels.reference import experts as reference_experts
from penstock.kernels.reference import shared as reference_shared
from tests.kernels.test_segments import FORMS, columns

pytestmark = pytest.mark.skipif(
    not native.available() or not hasattr(os, "memfd_create"), reason="the native library or memfd_create is missing"
)
DEADLINE_S = 60.0
SMALL = 1 << 20  # bytes of a slot: as few as there may be, so that long inputs go over in many chunks


@contextmanager
def group_of(count: int) -> Iterator[list[RankGroup]]:
    """The ranks of a new group, which is stopped at the end."""
    descriptor = make_memory(count, SMALL)
    try:
        groups = [RankGroup(descriptor, rank) for rank in range(count)]
    finally:
        os.close(descriptor)
    yield groups
    groups[0].stop()


def together(groups: list[RankGroup], compute: Callable[[RankGroup], Any]) -> list[Any]:
    """What every rank gives, each in a thread of its own: a result, or the error it raised."""
    given: list[Any] = [None] * len(groups)

    def run(group: RankGroup) -> None:
        try:
            given[group.rank] = compute(group)
        except Exception as error:
            given[group.rank] = error

    threads = [threading.Thread(target=run, args=(group,), daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    return given


class Part:
    """A rank's part of a matrix: a run of its segments, perhaps none."""

    def __init__(self, matrix: Canonical, ends: list[int], first: int, end: int) -> None:
        edges = [0, *ends]
        self.inputs = slice(edges[first], edges[end])
        self.place = (first, len(ends))
        self.weight: Packed | None = None
        if end > first:
            packed = packing.pack(columns(matrix, edges[first], edges[end]))
            packed.cut([stop - edges[first] for stop in ends[first:end]])
            self.weight = Packed((packed,))


def dealt(matrix: Canonical, ends: list[int], cuts: list[int]) -> list[Part]:
    return [Part(matrix, ends, first, end) for first, end in pairwise(cuts)]


def recorded(tape: Recording, result: Handle, most: int) -> Callable[[int], Tensor]:
    """Runs a recorded program for so many tokens."""
    tape.finish(result, most, most)

    def run(tokens: int, ids: Any = None) -> Tensor:
        numbers = np.zeros(tokens, np.int64) if ids is None else ids
        row = np.array([0, tokens], np.int32)
        tape.run(numbers, numbers, row, row[1:], row[1:], [], np.arange(tokens))
        return tape.result(tokens).clone()

    return run


def runs(segments: int) -> list[list[int]]:
    """Segments dealt to 1, 2, 3 and 4 ranks, of which one has most, and one none."""
    return [[0, segments], [0, segments // 2, segments], [0, 1, 2, segments], [0, 0, 1, segments, segments]]


def segmented(form: str) -> tuple[Canonical, Any, list[int]]:
    matrix = FORMS[form]
    packed = packing.pack(matrix, segment=1)
    ends = list(packed.segments)
    if isinstance(matrix, Affine) and matrix.group > packed.segment_unit:
        packed.cut(ends := [end for end in ends if end % matrix.group == 0])
    return matrix, packed, ends


SHARED_FORMS = ["q4_k", "q6_k", "q8_0", "iq2_xxs", "bf16 None", "f32 None", "f8_e4m3 None", "nf4 64"]
GROUPED = [name for name, matrix in FORMS.items() if isinstance(matrix, Affine) and matrix.order is None][:2]


@pytest.mark.parametrize("form", [*SHARED_FORMS, *GROUPED])
def test_ranks_give_the_bits_of_one_process(product_isa: str, form: str) -> None:
    matrix, packed, ends = segmented(form)
    assert len(ends) > 1
    generator = torch.Generator().manual_seed(4)
    for cut in runs(len(ends)):
        parts = dealt(matrix, ends, cut)
        with group_of(len(parts)) as groups:
            for tokens in (1, 3, 40, 700):
                x = torch.randn(tokens, matrix.shape[1], generator=generator)
                bias = torch.randn(matrix.shape[0], generator=generator)
                residual = torch.randn(tokens, matrix.shape[0], generator=generator)
                for given in ((None, None), (bias, residual)):

                    def compute(group: RankGroup, x: Tensor = x, given: Any = given, parts: Any = parts) -> Tensor:
                        part = parts[group.rank]
                        own, width = x[:, part.inputs].contiguous(), matrix.shape[0]
                        return shared.shared_linear(own, part.weight, group, part.place, given[0], given[1], width)

                    whole = ops.linear(x, Packed((packed,)), *given)
                    for result in together(groups, compute):
                        assert torch.equal(result, whole), (cut, tokens)


def test_level_fast_multiplies_prompts_otherwise(product_isa: str) -> None:
    """Rows of two kinds: sets of rows that are not neighbours, as instruction sets with matrix units have them."""
    matrix, packed, ends = segmented("q4_k")
    parts, tokens = dealt(matrix, ends, [0, 1, len(ends)]), 300
    x = torch.randn(tokens, matrix.shape[1], generator=torch.Generator().manual_seed(1))

    def run(tape: Recording, result: Any) -> Tensor:
        tape.finish(result, tokens, tokens)
        starts = np.array([0, 100, 101, 150, tokens], np.int32)
        prompts = np.array([80, 0, 20, 0], np.int32)
        ids = np.zeros(tokens, np.int64)
        tape.run(ids, ids, starts, starts[1:], prompts, [], np.arange(1))
        return tape.result(tokens).clone()

    def compute(group: RankGroup) -> Tensor:
        tape, part = Recording(fast=True), parts[group.rank]
        own = tape.input(x[:, part.inputs].contiguous())
        return run(tape, shared.shared_linear(own, part.weight, group, part.place))

    alone = Recording(fast=True)
    whole = run(alone, ops.linear(alone.input(x), Packed((packed,))))
    with group_of(2) as groups:
        assert all(torch.equal(result, whole) for result in together(groups, compute))


VOCABULARY, HIDDEN = 600, 256


class Model:
    """A table, two products and a head, whole or in parts."""

    def __init__(self, ranks: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.table = torch.randn(VOCABULARY, HIDDEN, generator=generator)
        self.weight = torch.randn(HIDDEN, HIDDEN, generator=generator) / 16
        self.head = torch.randn(VOCABULARY, HIDDEN, generator=generator)
        self.rows = [VOCABULARY * rank // ranks for rank in range(ranks + 1)]
        self.segments = [4 * rank // ranks for rank in range(ranks + 1)]

    def alone(self, numbers: Any) -> Any:
        x = ops.embedding(numbers, ops.pack_table([self.table]), 0.5)
        for _ in range(2):
            x = ops.linear(x, ops.pack_linear([self.weight], 64), None, x)
        return ops.linear(x, ops.pack_linear([self.head]))

    def ranked(self, numbers: Any, group: RankGroup) -> Any:
        first, end = self.rows[group.rank : group.rank + 2]
        begin, stop = self.segments[group.rank : group.rank + 2]
        x = shared.shared_embedding(numbers, ops.pack_table([self.table[first:end].contiguous()]), 0.5, first, group)
        own = slice(64 * begin, 64 * stop)
        for _ in range(2):
            half = ops.linear(x, ops.pack_linear([torch.eye(HIDDEN)[own].contiguous()])) if stop > begin else x
            weight = ops.pack_linear([self.weight[:, own].contiguous()], 64) if stop > begin else None
            x = shared.shared_linear(half, weight, group, (begin, 4), None, x, HIDDEN)
        logits = ops.linear(x, ops.pack_linear([self.head[first:end].contiguous()]))
        return shared.gather_columns(logits, [b - a for a, b in pairwise(self.rows)], group)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_a_recorded_model_over_ranks_gives_the_bits_of_one(ranks: int) -> None:
    """Hundreds of steps one after the other, in which now this rank is late and now that."""
    model, most, choice = Model(ranks), 900, random.Random(6)
    steps = [choice.choice([1, 1, 1, 2, 5, 17]) for _ in range(300)] + [most, 1, most]
    ids = [np.array([choice.randrange(VOCABULARY) for _ in range(tokens)], np.int64) for tokens in steps]
    alone = Recording()
    run = recorded(alone, model.alone(alone.token_ids), most)
    expected = [run(len(numbers), numbers) for numbers in ids]

    def compute(group: RankGroup) -> list[int]:
        tape, late = Recording(), random.Random(group.rank)
        run = recorded(tape, model.ranked(tape.token_ids, group), most)
        wrong = []
        for place, numbers in enumerate(ids):
            if late.random() < 0.05:
                threading.Event().wait(late.random() * 0.02)
            if not torch.equal(run(len(numbers), numbers), expected[place]):
                wrong.append(place)
        return wrong

    with group_of(ranks) as groups:
        assert together(groups, compute) == [[]] * ranks


@pytest.mark.parametrize("gated", [True, False])
def test_experts_of_several_ranks_give_the_bits_of_one_process(product_isa: str, gated: bool) -> None:
    generator = torch.Generator().manual_seed(8)
    count, hidden, inner, top_k = 7, 1024, 96, 4  # a chunk has 64 tokens
    wide = 2 * inner if gated else inner
    gate_up = torch.randn(count, wide, hidden, generator=generator) / 32
    down = torch.randn(count, hidden, inner, generator=generator)
    gate_up_bias = torch.randn(count, wide, generator=generator)
    down_bias = torch.randn(count, hidden, generator=generator)

    def packed(first: int, end: int) -> tuple[Any, ...]:
        of = slice(first, end)
        up = [part.flatten(0, 1).contiguous() for part in gate_up[of].split(inner, dim=1)]
        downs = [down[of].flatten(0, 1).contiguous()]
        weights = ops.pack_experts(up, end - first), ops.pack_experts(downs, end - first, segment=1)
        return *weights, gate_up_bias[of].contiguous(), down_bias[of].contiguous()

    for tokens in (1, 5, 150):
        x, residual = (torch.randn(tokens, hidden, generator=generator) for _ in range(2))
        weights = torch.rand(tokens, top_k, generator=generator)
        ids = torch.stack([torch.randperm(count, generator=generator)[:top_k] for _ in range(tokens)])
        given = packed(0, count)
        routed = x, weights, ids, given[0], given[1], "silu"
        whole = ops.grouped_experts(*routed, given[2], given[3], residual=residual, gated=gated)
        for cuts in ([0, 7], [0, 3, 7], [0, 1, 6, 7]):

            def compute(group: RankGroup, cuts: Any = cuts, routed: Any = routed, residual: Any = residual) -> Tensor:
                first, end = cuts[group.rank : group.rank + 2]
                own = packed(first, end)
                placed = *routed[:3], own[0], own[1], "silu", group, first
                return shared.shared_experts(*placed, own[2], own[3], residual=residual, gated=gated)

            with group_of(len(cuts) - 1) as groups:
                assert all(torch.equal(result, whole) for result in together(groups, compute)), (tokens, cuts)


def test_experts_that_are_not_in_order_are_told() -> None:
    experts = ops.pack_experts([torch.randn(2 * 8, 16)] * 2, 2), ops.pack_experts([torch.randn(2 * 16, 8)], 2)
    x, weights, ids = torch.randn(3, 16), torch.ones(3, 1), torch.tensor([[0], [3], [1]])

    def compute(group: RankGroup) -> Tensor:
        return shared.shared_experts(x, weights, ids, *experts, "silu", group, 3 * group.rank)

    with group_of(2) as groups:
        assert all(isinstance(error, RuntimeError) for error in together(groups, compute))
    wide = ops.pack_experts([torch.zeros(1, 1 << 17)] * 2, 1), ops.pack_experts([torch.zeros(1 << 17, 1)], 1)
    many = torch.zeros(1, 1 << 17), torch.ones(1, 4), torch.zeros(1, 4, dtype=torch.int64)
    with group_of(2) as groups, pytest.raises(ValueError, match="larger slots"):
        shared.shared_experts(*many, *wide, "silu", groups[0], 0)


def test_columns_of_different_widths_and_none() -> None:
    widths, tokens = [3000, 0, 70001], 7  # more than a slot's worth
    x = torch.randn(tokens, sum(widths))
    edges = [0, *np.cumsum(widths).tolist()]

    def compute(group: RankGroup) -> Tensor:
        own = x[:, edges[group.rank] : edges[group.rank + 1]].contiguous()
        return shared.gather_columns(own, widths, group)

    with group_of(3) as groups:
        assert all(torch.equal(result, x) for result in together(groups, compute))


def test_a_rank_without_rows_of_the_table() -> None:
    table, ids = torch.randn(40, 24), torch.randint(0, 40, (20000,))

    def compute(group: RankGroup) -> Tensor:
        own = ops.pack_table([table]) if group.rank else None
        return shared.shared_embedding(ids, own, 1.0, 0, group, 24)

    with group_of(2) as groups:
        assert all(torch.equal(result, table[ids]) for result in together(groups, compute))


def test_what_is_wrong_is_refused() -> None:
    weight = ops.pack_linear([torch.randn(8, 256)], 64)
    x = torch.randn(2, 256)
    with group_of(2) as (group, _):
        for place in ((1, 4), (0, 9), (-1, 4)):
            with pytest.raises(ValueError, match="run of up to 8"):
                shared.shared_linear(x, weight, group, place)
        with pytest.raises(ValueError, match="width"):
            shared.shared_linear(x, None, group, (0, 4))
        with pytest.raises(ValueError, match="not of 2"):
            shared.shared_linear(x, Packed(weight.parts * 2), group, (0, 4))
        with pytest.raises(ValueError, match="has 256 columns, not 3"):
            shared.gather_columns(x, [3, 4], group)
        with pytest.raises(ValueError, match="3 widths"):
            shared.gather_columns(x, [256, 4, 4], group)
        assert not group.stopped


def test_memory_and_ranks_that_cannot_be() -> None:
    for count, slot in ((0, SMALL), (65, SMALL), (2, SMALL - 4096), (2, SMALL + 1)):
        with pytest.raises(ValueError, match=r"ranks, not|has to have"):
            make_memory(count, slot)
    descriptor = make_memory(2, SMALL)
    with pytest.raises(ValueError, match="no rank 2 in a group of 2"):
        RankGroup(descriptor, 2)
    first = RankGroup(descriptor, 0)
    with pytest.raises(ValueError, match="rank 0 of this group is taken"):
        RankGroup(descriptor, 0)
    del first
    again, watcher = RankGroup(descriptor, 0), RankGroup(descriptor, -1)
    assert (again.rank, again.count, watcher.rank, watcher.stopped) == (0, 2, -1, False)
    with pytest.raises(ValueError, match="only watches"):
        watcher.barrier()
    with pytest.raises(ValueError, match="only watches"):
        shared.gather_columns(torch.zeros(1, 1), [1, 1], watcher)
    watcher.stop()
    assert again.stopped
    os.truncate(descriptor, 4096)
    with pytest.raises(ValueError, match="no memory of a group"):
        RankGroup(descriptor, 1)
    os.close(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        RankGroup(descriptor, 1)


def test_stop_ends_who_waits_and_who_comes_later() -> None:
    waiting = threading.Event()

    def compute(group: RankGroup) -> None:
        if group.rank == 0:
            waiting.set()
            shared.gather_columns(torch.zeros(1, 2), [2, 2], group)
        else:
            waiting.wait(DEADLINE_S)
            group.stop()
            group.all_gather(np.zeros(3))

    with group_of(2) as groups:
        for error in together(groups, compute):
            assert isinstance(error, RuntimeError) and "stopped" in str(error)
        for later in (groups[0].barrier, lambda: shared.gather_columns(torch.zeros(1, 2), [2, 2], groups[1])):
            with pytest.raises(RuntimeError, match="stopped"):
                later()


def test_a_rank_whose_step_fails_stops_the_others() -> None:
    model = Model(2)

    def compute(group: RankGroup) -> None:
        tape = Recording()
        run = recorded(tape, model.ranked(tape.token_ids, group), 4 if group.rank else 9)
        run(9)

    with group_of(2) as groups:
        waited, failed = together(groups, compute)
    assert isinstance(failed, ValueError) and "9 tokens" in str(failed)
    assert isinstance(waited, RuntimeError)


def test_ranks_that_do_different_things_are_told() -> None:
    def compute(group: RankGroup) -> Any:
        return shared.gather_columns(torch.zeros(1 + group.rank, 2), [2, 2], group)

    with group_of(2) as groups:
        errors = together(groups, compute)
    assert all(isinstance(error, RuntimeError) for error in errors)
    assert any("something else" in str(error) for error in errors)


def test_segments_that_nobody_has_are_told() -> None:
    weight = ops.pack_linear([torch.randn(8, 128)], 64)

    def compute(group: RankGroup) -> Any:
        return shared.shared_linear(torch.zeros(1, 128), weight, group, (3 * group.rank, 5))

    with group_of(2) as groups:
        assert all(isinstance(error, RuntimeError) for error in together(groups, compute))


def test_recordings_with_a_group_are_not_kept() -> None:
    tape = Recording(kept=True)
    with group_of(1) as (group,):
        shared.gather_columns(tape.input(torch.zeros(1, 2)), [2], group)
        assert tape.journal is not None
        with pytest.raises(NotKeptError, match="gather_columns is given a RankGroup"):
            tape.journal.written(Names({}, {}), Arrays())


OTHER = """
import sys
import numpy as np
from penstock.kernels.cpu.rank_group import RankGroup

group = RankGroup(int(sys.argv[1]), 1)
print("joined", flush=True)
try:
    while True:
        (given, _) = group.all_gather(np.zeros(300000))
        group.all_gather(2 * given)
except RuntimeError as error:
    print(error)
"""


@contextmanager
def other_process() -> Iterator[tuple[RankGroup, subprocess.Popen[str]]]:
    """Rank 0 here, and rank 1 in another process, which doubles what it is given."""
    descriptor = make_memory(2, SMALL)
    command = [sys.executable, "-c", OTHER, str(descriptor)]
    with subprocess.Popen(command, pass_fds=(descriptor,), stdout=subprocess.PIPE, text=True) as process:
        group = RankGroup(descriptor, 0)
        os.close(descriptor)
        try:
            assert process.stdout is not None and process.stdout.readline() == "joined\n"
            yield group, process
        finally:
            group.stop()
            process.kill()


def doubled(group: RankGroup, value: float) -> bool:
    group.all_gather(np.full(300000, value))
    return bool((group.all_gather(np.zeros(300000))[1] == 2 * value).all())


def test_a_rank_in_another_process_that_is_held_for_a_while() -> None:
    with other_process() as (group, process):
        assert doubled(group, 1.0)
        process.send_signal(signal.SIGSTOP)
        timer = threading.Timer(0.3, lambda: process.send_signal(signal.SIGCONT))
        timer.start()
        assert all(doubled(group, value) for value in (2.0, 3.0, 4.0))
        assert not timer.is_alive()  # it has waited
        group.stop()
        assert (
            process.communicate(timeout=DEADLINE_S)[0] == "another rank has ended, or the group of ranks was stopped.\n"
        )


def test_a_rank_in_another_process_that_is_killed() -> None:
    with other_process() as (group, process):
        assert doubled(group, 1.0)
        process.kill()
        process.wait(DEADLINE_S)
        threading.Timer(0.1, group.stop).start()
        with pytest.raises(RuntimeError, match="has ended"):
            doubled(group, 2.0)


class Threads:
    """A group as the reference takes one: any that gathers tensors."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._gate = threading.Barrier(count, timeout=DEADLINE_S)
        self._given: list[Any] = [None] * count

    def rank(self, rank: int) -> Any:
        outer = self

        class Member:
            count = outer.count

            def __init__(self) -> None:
                self.rank = rank

            def all_gather(self, tensor: Tensor) -> list[Tensor]:
                outer._given[rank] = tensor.clone()
                outer._gate.wait()
                found = list(outer._given)
                outer._gate.wait()
                return found

        return Member()


@pytest.mark.parametrize(("kind", "packed"), [("threads", False), ("native", False), ("native", True)])
def test_the_reference_over_ranks(kind: str, packed: bool) -> None:
    """Any group will do; and products may be oneDNN's."""
    ranks, tokens, generator = 3, 6, torch.Generator().manual_seed(7)
    weight, table = torch.randn(20, 96, generator=generator), torch.randn(50, 16, generator=generator)
    x, residual = torch.randn(tokens, 96, generator=generator), torch.randn(tokens, 20, generator=generator)
    bias, ids = torch.randn(20, generator=generator), torch.randint(0, 50, (tokens,), generator=generator)
    inputs, rows, widths = [0, 64, 96, 96], [0, 10, 10, 50], [7, 0, 13]
    gate_up, down = (torch.randn(ranks, *shape, generator=generator) for shape in ((16, 96), (96, 8)))
    routed = x, torch.rand(tokens, 2, generator=generator), torch.tensor([[0, 1], [2, 1], [2, 0]] * 2)

    given = {item.op: item.function for item in onednn.implementations()}
    if not packed:
        names = ("pack_linear", "pack_experts", "shared_linear", "shared_experts")
        given = {item.op: item.function for item in reference.implementations(names)}

    def compute(group: Any) -> tuple[Tensor, ...]:
        first, end = inputs[group.rank : group.rank + 2]
        own = given["pack_linear"]([weight[:, first:end].contiguous()]) if end > first else None
        begin, stop = rows[group.rank : group.rank + 2]
        lookup = table[begin:stop] if stop > begin else None
        column = sum(widths[: group.rank])
        part = residual[:, column : column + widths[group.rank]]
        experts = [given["pack_experts"]([part[group.rank]], 1) for part in (gate_up, down)]
        return (
            given["shared_linear"](x[:, first:end], own, group, (0, 2), bias, residual, 20),
            reference_shared.shared_embedding(ids, lookup, 3.0, begin, group, 16),
            reference_shared.gather_columns(part, widths, group),
            given["shared_experts"](*routed, *experts, "silu", group, group.rank),
        )

    mixed = reference_experts.grouped_experts(*routed, gate_up, down, "silu")
    expected = (x @ weight.T + bias + residual, 3.0 * table[ids], residual, mixed)
    if kind == "native":
        with group_of(ranks) as groups:
            results = together(groups, compute)
    else:
        threads = Threads(ranks)
        results = together([threads.rank(rank) for rank in range(ranks)], compute)
    for result in results:
        for given, wanted in zip(result, expected, strict=True):
            torch.testing.assert_close(given, wanted)
