"""Media in whole steps: encoded once, put in the place of their placeholders, at positions of their own axes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.config.media import EncoderInput, MediaSpan
from penstock.config.sampling import SamplingParams
from penstock.core.protocol import NewSequence
from penstock.kernels.cpu import native
from penstock.layers.batch import Batch
from penstock.layers.decoder import DecoderModel
from penstock.runtime.media import PLACES, Encoders, MediaStore
from tests.models import tiny
from tests.models.harness import Harness
from tests.runtime.media_model import (
    BLOCK,
    CPU,
    DIM,
    HEADS,
    KV_HEADS,
    SHAPE,
    VOCAB,
    TinyEncoders,
    ask,
    build,
    finish,
    grid,
    make_engine,
    medium,
    projected,
    states_of,
)

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")
PICTURE = MediaSpan("picture", 4, 12)
SECOND = MediaSpan("second", 19, 5)
PROMPT = [token % VOCAB for token in tiny.prompt(30)]


@pytest.fixture(scope="module")
def model() -> DecoderModel:
    return build(("self", "self", "self"))


def given(media: MediaStore) -> None:
    media.put_media("picture", medium(1, 12, grid(3, 4)))
    media.put_media("second", medium(2, 5))


def slow_way(model: DecoderModel, tokens: list[int]) -> Tensor:
    """Log-probabilities after each token, layer by layer in one step, media put in by hand."""
    encoders = TinyEncoders(model)
    spans = [(PICTURE, encoders.embeddings(medium(1, 12))), (SECOND, encoders.embeddings(medium(2, 5)))]
    places = list(range(4))
    places_of = [places, list(places), list(places)]  # four words, the picture, three words, the second, words
    for axis, offsets in enumerate(grid(3, 4)):
        places_of[axis] += [4 + int(offset) for offset in offsets]
        behind = 4 + 3 + 1  # the picture's largest offset is 3
        places_of[axis] += range(behind, behind + len(tokens) - PICTURE.end)

    def put(hidden: Tensor, level: int) -> Tensor:
        for span, values in spans:
            part = hidden[span.start : span.end]
            part.copy_(part + values[level] if level else values[level])
        return hidden

    class Embedded:
        def __call__(self, batch: Batch) -> Tensor:
            return put(embedding(batch), 0)

    class Added:
        def __init__(self, block: Any, level: int) -> None:
            self.block, self.attention, self.level = block, block.attention, level

        def __call__(self, hidden: Tensor, step: Any) -> Tensor:
            return put(self.block(hidden, step), self.level)

    embedding, blocks = model.embedding, model.blocks
    harness = Harness(model)
    batch = harness.next_batch({"row": tokens})
    batch = replace(batch, positions=torch.tensor(places_of))
    try:
        model.embedding = Embedded()  # type: ignore[assignment]
        model.blocks = (Added(blocks[0], 1), Added(blocks[1], 2), *blocks[2:])
        with torch.inference_mode():
            return model.logits(model.forward(batch, harness.caches), torch.arange(len(tokens)))
    finally:
        model.embedding, model.blocks = embedding, blocks


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize(("chunk", "depth"), [(64, 0), (13, 0), (13, 1)])
def test_media_stand_in_the_place_of_their_placeholders(
    model: DecoderModel, recorded: bool, chunk: int, depth: int
) -> None:
    setup = make_engine(model, recorded=recorded, chunk=chunk, depth=depth)
    given(setup.media)
    setup.engine.add(ask("text", PROMPT))
    setup.engine.add(ask("media", PROMPT, PICTURE, SECOND))
    setup.engine.add(ask("short", PROMPT[:7]))
    answers, errors = finish(setup.engine)
    assert errors == {} and sorted(setup.encoders.encoded) == [5, 12]
    tokens = [entry.token for entry in answers["media"]]
    logits = slow_way(model, PROMPT + tokens[:-1])[len(PROMPT) - 1 :]
    expected = torch.log_softmax(logits.double(), dim=-1)
    for entry, row in zip(answers["media"], expected, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-9)
        assert entry.top[0][0] == int(row.argmax())
    alone = make_engine(model, recorded=recorded)
    alone.engine.add(ask("text", PROMPT))
    assert finish(alone.engine)[0]["text"] == answers["text"] != answers["media"]


def test_what_is_shared_is_not_encoded_again(model: DecoderModel) -> None:
    setup = make_engine(model)
    given(setup.media)
    found = []
    for name in ("first", "again"):
        setup.engine.add(ask(name, PROMPT, PICTURE, SECOND))
        found.append(finish(setup.engine)[0][name])
    assert found[0] == found[1] and len(setup.encoders.encoded) == 2
    setup.engine.add(ask("other words", [*PROMPT[:17], *[3] * 13], PICTURE, SECOND))
    finish(setup.engine)
    assert sorted(setup.encoders.encoded) == [5, 5, 12]


def test_two_who_bring_the_same_medium_in_one_step_have_it_encoded_once(model: DecoderModel) -> None:
    setup = make_engine(model)
    given(setup.media)
    setup.engine.add(ask("a", PROMPT[:20], PICTURE))
    setup.engine.add(ask("b", [1, *PROMPT[1:20]], PICTURE))
    answers, _ = finish(setup.engine)
    assert setup.encoders.encoded == [12] and answers["a"] != answers["b"]


@pytest.mark.parametrize("fault", ["missing", "broken", "released", "other shape"])
def test_a_medium_that_cannot_be_encoded_fails_its_own_request_alone(model: DecoderModel, fault: str) -> None:
    plain = make_engine(model)
    plain.engine.add(ask("text", PROMPT))
    setup = make_engine(model)
    if fault != "missing":
        given(setup.media)
    if fault == "released":
        setup.media.release_media("picture")
    if fault == "other shape":
        setup.media.release_media("picture")
        setup.media.put_media("picture", medium(1, 11, grid(3, 4)))
    setup.encoders.broken = fault == "broken"
    setup.engine.add(ask("media", PROMPT, PICTURE))
    setup.engine.add(ask("text", PROMPT))
    answers, errors = finish(setup.engine)
    assert answers["text"] == finish(plain.engine)[0]["text"]
    assert list(errors) == ["media"]
    reasons = {
        "broken": "could not be encoded: it is no picture",
        "other shape": "could not be encoded: its encoder gives float32 \\(3, 11, 32\\) on cpu; allowed is float32",
    }
    reason = reasons.get(fault, "was not given to the engine, or was released")
    assert re.match(f"the medium picture {reason}", errors["media"])
    setup.encoders.broken = False
    setup.media.put_media("picture", medium(1, 12, grid(3, 4)))
    if fault != "other shape":
        setup.engine.add(ask("again", PROMPT, PICTURE))
        assert finish(setup.engine)[1] == {}, "what failed is not found in the cache"


@pytest.mark.parametrize(
    ("bend", "found"),
    [
        (lambda found: found[:2], r"float32 \(2, 12, 32\)"),
        (lambda found: found[:, :11], r"float32 \(3, 11, 32\)"),
        (lambda found: found[..., :31], r"float32 \(3, 12, 31\)"),
        (lambda found: found[0], r"float32 \(12, 32\)"),
        (lambda found: found.bfloat16(), r"bfloat16 \(3, 12, 32\)"),
        (lambda found: found.long(), r"int64 \(3, 12, 32\)"),
        (lambda found: found.to("meta"), r"float32 \(3, 12, 32\) on meta"),
    ],
)
@pytest.mark.parametrize("recorded", [True, False])
def test_what_an_encoder_may_give(
    model: DecoderModel, recorded: bool, bend: Callable[[Tensor], Tensor], found: str
) -> None:
    """All else would be read beyond its end, or as other numbers, by those who put it in the place of tokens."""
    plain, setup = make_engine(model), make_engine(model, recorded=recorded)
    setup.encoders.bend = lambda made: bend(made) if made.shape[1] == 12 else made
    for engine in (plain, setup):
        given(engine.media)
        engine.engine.add(ask("other", PROMPT, SECOND))
    setup.engine.add(ask("media", PROMPT, PICTURE))
    answers, errors = finish(setup.engine)
    assert answers["other"] == finish(plain.engine)[0]["other"]
    assert list(errors) == ["media"]
    assert re.search(rf"gives {found}.*; allowed is float32 \(3, 12, 32\) on cpu", errors["media"]), errors


@pytest.mark.parametrize("recorded", [True, False])
def test_what_an_encoder_gives_may_lie_anyhow(model: DecoderModel, recorded: bool) -> None:
    found = []
    for bend in (lambda made: made, lambda made: made.permute(2, 1, 0).contiguous().permute(2, 1, 0)):
        setup = make_engine(model, recorded=recorded)
        setup.encoders.bend = bend
        given(setup.media)
        setup.engine.add(ask("media", PROMPT, PICTURE))
        answers, errors = finish(setup.engine)
        assert not errors
        found.append(answers)
    assert found[0] == found[1]


def test_a_medium_of_another_length_for_another_request_fails_that_one(model: DecoderModel) -> None:
    """In the step in which the first has it encoded."""
    setup, plain = make_engine(model), make_engine(model)
    for engine in (plain, setup):
        engine.media.put_media("plain", medium(1, 12))
        engine.engine.add(ask("right", PROMPT, MediaSpan("plain", 4, 12)))
    setup.engine.add(ask("wrong", [1, *PROMPT[1:]], MediaSpan("plain", 4, 11)))
    answers, errors = finish(setup.engine)
    assert answers["right"] == finish(plain.engine)[0]["right"]
    assert list(errors) == ["wrong"] and "allowed is float32 (3, 11, 32)" in errors["wrong"]


@pytest.mark.parametrize(
    ("places", "found"),
    [
        (np.zeros((2, 12), np.int64), r"int64 \(2, 12\)"),
        (np.zeros(12, np.int64), r"int64 \(12,\)"),
        (np.zeros((3, 12)), r"float64 \(3, 12\)"),
        (np.full((3, 12), -1), "from -1 to -1"),
        (np.full((3, 12), 1 << 31), "from 2147483648 to 2147483648"),
        (np.full((3, 12), 2**64 - 1, np.uint64), "to 18446744073709551615"),
    ],
)
def test_positions_are_checked_when_a_medium_is_given(places: np.ndarray[Any, Any], found: str) -> None:
    store = MediaStore(Encoders(), SHAPE, BLOCK, (), CPU)
    with pytest.raises(ValueError, match=rf"the medium x has positions .*{found}; allowed"):
        store.put_media("x", {PLACES: places})
    assert len(store) == 0
    store.put_media("x", {PLACES: np.zeros((3, 0), np.int32)})


@pytest.mark.parametrize(("chunk", "depth"), [(64, 0), (13, 0), (13, 1)])
def test_positions_of_other_placeholders_fail_their_own_request(model: DecoderModel, chunk: int, depth: int) -> None:
    plain, setup = make_engine(model), make_engine(model, chunk=chunk, depth=depth)
    plain.engine.add(ask("text", PROMPT))
    setup.media.put_media("picture", medium(1, 12, grid(2, 3)))
    setup.engine.add(ask("before", PROMPT[:9]))
    setup.engine.add(ask("media", PROMPT, PICTURE))
    setup.engine.add(ask("text", PROMPT))
    answers, errors = finish(setup.engine)
    assert list(errors) == ["media"] and len(answers["before"]) == 6
    assert "the medium picture has positions of 6 placeholders, but stands for 12" in errors["media"]
    assert answers["text"] == finish(plain.engine)[0]["text"]
    setup.engine.add(ask("again", PROMPT))
    assert finish(setup.engine)[0]["again"] == answers["text"]


def test_media_stay_while_a_sequence_has_them(model: DecoderModel) -> None:
    """Given back by those who brought them between two chunks of the prompt, before the picture is encoded."""
    found = []
    for kept in (True, False):
        setup = make_engine(model, chunk=13)
        given(setup.media)
        setup.engine.add(ask("media", PROMPT, PICTURE, SECOND))
        setup.engine.step()
        assert not setup.encoders.encoded
        if not kept:
            setup.media.release_media("picture")
            setup.media.release_media("second")
            assert len(setup.media) == 2
        answers, errors = finish(setup.engine)
        assert not errors
        found.append(answers)
        setup.engine.add(ask("text", PROMPT))
        finish(setup.engine)  # whose plans tell that the slot is free
        assert len(setup.media) == (2 if kept else 0)
    assert found[0] == found[1]


def test_a_sequence_that_comes_back_without_its_media_fails(model: DecoderModel) -> None:
    """Where it would count on with other positions."""
    setup = make_engine(model)
    given(setup.media)
    setup.engine.add(ask("media", PROMPT, PICTURE, tokens=9))
    setup.engine.add(ask("text", PROMPT))
    setup.engine.step()
    setup.engine.scheduler.preempt("media")
    setup.media.release_media("picture")
    setup.engine.add(ask("later", PROMPT[:9]))
    answers, errors = finish(setup.engine)
    assert list(errors) == ["media"] and "the medium picture was not given to the engine" in errors["media"]
    assert len(answers["text"]) == 6


def test_media_are_kept_as_often_as_they_were_put() -> None:
    store = MediaStore(Encoders(), SHAPE, 4, (), CPU)
    store.put_media("x", {})
    store.put_media("x", {})
    store.release_media("x")
    assert len(store) == 1
    for _ in range(2):
        store.release_media("x")
    assert len(store) == 0


def test_positions_of_media_and_of_the_text_behind_them() -> None:
    store = MediaStore(Encoders(), SHAPE, 4, (), CPU)
    store.put_media("picture", medium(1, 6, grid(2, 3)))
    store.put_media("plain", medium(1, 2))

    def new(*spans: MediaSpan) -> NewSequence:
        return NewSequence(0, "r", 0, tuple(range(14)), (), 0, ((),), SamplingParams(), media=spans)

    assert store.places(new()) is None
    assert store.places(new(MediaSpan("plain", 1, 2))) is None, "tokens are counted"
    found = store.places(new(MediaSpan("picture", 2, 6), MediaSpan("plain", 10, 2)))
    assert found is not None and found.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 8, 9, 10],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8, 9, 10],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 9, 10],
    ]


def attended(query: Tensor, states: Tensor) -> Tensor:
    """Plain cross attention, [T, HEADS · DIM]: zeros where there is nothing to attend to."""
    if not len(states):
        return torch.zeros(len(query), HEADS * DIM)
    key, value = (
        part.view(-1, KV_HEADS, DIM).repeat_interleave(HEADS // KV_HEADS, dim=1) for part in projected(states)
    )
    scores = torch.einsum("thd,shd->ths", query.view(-1, HEADS, DIM), key) * DIM**-0.5
    return torch.einsum("ths,shd->thd", scores.softmax(dim=-1), value).flatten(1)


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("recorded", [True, False])
def test_rows_attend_to_entries_of_lengths_of_their_own(recorded: bool, reference: bool) -> None:
    if recorded and reference:
        pytest.skip("the reference is not recorded")
    model = build(reference=reference)
    lengths = {"long": 20, "short": 2, "none": 0, "middle": 9}

    def run(*names: str) -> tuple[dict[str, Any], list[int]]:
        setup = make_engine(model, recorded=recorded, chunk=13)
        for name in names:
            setup.media.put_media(name, medium(lengths[name], lengths[name]))
            encoder = EncoderInput(name, lengths[name]) if lengths[name] else None
            setup.engine.add(ask(name, PROMPT[: 9 + lengths[name]], encoder=encoder))
        answers, errors = finish(setup.engine)
        assert errors == {}
        return answers, setup.encoders.encoded

    together, encoded = run(*lengths)
    assert sorted(encoded) == [2, 9, 20]
    for name, length in lengths.items():
        alone, _ = run(name)
        tokens = PROMPT[: 9 + length] + [entry.token for entry in together[name]]
        if reference:
            assert [entry.token for entry in alone[name]] == [entry.token for entry in together[name]]
        else:
            assert alone[name] == together[name]
        row = slow_cross(model, tokens[:-1], states_of(length, length))[8 + length :]
        for entry, logits in zip(together[name], torch.log_softmax(row.double(), dim=-1), strict=True):
            assert entry.logprob == pytest.approx(float(logits[entry.token]), abs=1e-5)


def slow_cross(model: DecoderModel, tokens: list[int], states: Tensor) -> Tensor:
    """Logits of a text whose middle layer attends in plain arithmetic."""
    middle = model.blocks[1].attention
    harness = Harness(model)
    kernels, attend = model.kernels, middle._attend  # type: ignore[attr-defined]
    assert kernels.paged_attention is not None
    middle._attend = lambda query, *rest: attended(query.float(), states)  # type: ignore[attr-defined]
    try:
        with torch.inference_mode():
            return harness.step({"row": tokens})["row"]
    finally:
        middle._attend = attend  # type: ignore[attr-defined]


@pytest.mark.parametrize(("chunk", "depth"), [(64, 0), (13, 0), (64, 1), (13, 1)])
def test_who_shares_entries_that_could_not_be_made_fails_too(chunk: int, depth: int) -> None:
    """And nobody else, and nobody later."""
    model = build()
    setup = make_engine(model, chunk=chunk, depth=depth)
    encoder = EncoderInput("speech", 9)
    setup.encoders.broken = True
    setup.media.put_media("speech", medium(3, 9))
    for name in ("one", "two"):
        setup.engine.add(ask(name, [ord(name[0]) % VOCAB, *PROMPT], encoder=encoder))
    setup.engine.add(ask("text", PROMPT))
    answers, errors = finish(setup.engine)
    assert sorted(errors) == ["one", "two"] and len(answers["text"]) == 6
    setup.encoders.broken = False
    setup.engine.add(ask("three", PROMPT, encoder=encoder))
    answers, errors = finish(setup.engine)
    assert errors == {} and len(answers["three"]) == 6
    assert not setup.media.broken, "what could not be made is forgotten with the slots of those who failed"
    whole = make_engine(model)
    whole.media.put_media("speech", medium(3, 9))
    whole.engine.add(ask("three", PROMPT, encoder=encoder))
    assert finish(whole.engine)[0] == answers
