"""Rows in the place of tokens, in whole engines: the model's own rows give the bits of the tokens they are of."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from penstock.config.errors import ConfigError
from penstock.config.given_rows import NO_TOKEN, PIECE, GivenRows, places
from penstock.config.media import MediaSpan
from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.protocol import NewSequence
from penstock.core.request import EngineRequest
from penstock.engine.build import build_engine
from penstock.engine.loop import Engine
from penstock.kernels.cpu import native
from penstock.runtime.row_settings import tokens_read
from tests.engine.test_equality import Answer, Watch, finish
from tests.models import tiny

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=12, logprobs=3, ignore_eos=True)
Table = torch.Tensor


def engine_of(model: str | Path, **more: Any) -> Engine:
    given: dict[str, Any] = {"threads": 1, "kv_blocks": 200, "max_num_seqs": 8, "pack_cache": "off", **more}
    return build_engine(EngineOptions(model=str(model), enable_prompt_embeds=True, **given))[0]


@pytest.fixture(scope="module")
def folder(shared_data: Path) -> Path:
    return shared_data / "models" / "penstock-concierge"


@pytest.fixture(scope="module")
def table(folder: Path) -> Table:
    return load_file(folder / "model.safetensors")["model.embed_tokens.weight"]


@pytest.fixture(scope="module")
def tokens(table: Table) -> tuple[int, ...]:
    return tuple(np.random.default_rng(5).integers(10, len(table), 3 * PIECE + 5).tolist())


def rows_of(values: Table) -> GivenRows:
    plain = values.contiguous()
    data = plain.view(torch.int16) if plain.dtype is torch.bfloat16 else plain
    return GivenRows(str(plain.dtype).removeprefix("torch."), plain.shape[1], data.numpy().tobytes())


def ask(name: str, tokens: tuple[int, ...], how: SamplingParams = SAMPLED) -> EngineRequest:
    return EngineRequest(name, tokens, how, seed=11)


def given(request: EngineRequest, table: Table, first: int, end: int) -> EngineRequest:
    """The same request with rows in the place of these tokens, whose ids are others'."""
    ids = list(request.prompt_ids)
    rows = rows_of(table[ids[first:end]])
    ids[first:end] = [NO_TOKEN] * (end - first)
    spans = tuple(MediaSpan(*place) for place in places(ids, (rows,)))
    return replace(request, prompt_ids=tuple(max(token, 0) for token in ids), media=spans)


@pytest.mark.parametrize(("chunk", "depth"), [(512, 0), (PIECE + 3, 1)])
def test_rows_of_the_models_own_table_give_the_bits_of_its_tokens(
    folder: Path, table: Table, tokens: tuple[int, ...], chunk: int, depth: int
) -> None:
    engine = engine_of(folder, max_chunk_tokens=chunk, depth=depth)
    engine.add(ask("it", tokens))
    truth = finish(engine)["it"]
    whole, middle = (0, len(tokens)), (7, 7 + PIECE + 9)
    for (first, end), hit, preemptions, others in product((whole, middle), (False, True), (0, 2), (0, 3)):
        it = given(ask("it", tokens), table, first, end)
        engine.scheduler.cache.clear()
        if hit:
            engine.add(replace(it, request_id="warm", sampling=replace(SAMPLED, max_tokens=1)))
            finish(engine)
        before = engine.stats()
        engine.add(it)
        for number in range(others):  # tokens, the same rows, and others of the same placeholders
            other = ask(f"other{number}", tokens[: 20 + number])
            engine.add([other, given(other, table, 0, 20), given(other, -table, 0, 20)][number])
        watch = Watch(engine, preemptions)
        assert finish(engine, watch)["it"] == truth, (first, end, hit, preemptions, others)
        stats = engine.stats()
        assert watch.forced == preemptions == stats.preemptions - before.preemptions
        if hit and not others:  # all but the piece with the last row, which is computed as a whole
            found = len(tokens) - 1 if end < len(tokens) else len(tokens) // PIECE * PIECE
            assert stats.prefix_hits - before.prefix_hits == found
    engine.add(ask("last", tokens))
    finish(engine)
    assert len(engine.runner.media) == 0  # type: ignore[attr-defined]  # what ended before is forgotten
    engine.close()


def test_steps_that_run_layer_by_layer_take_them_too(folder: Path, table: Table, tokens: tuple[int, ...]) -> None:
    engine = engine_of(folder, dtype="bfloat16")
    engine.add(ask("tokens", tokens))
    truth = finish(engine)["tokens"]
    engine.add(given(ask("rows", tokens), table, 0, len(tokens)))
    assert finish(engine)["rows"] == truth
    engine.close()


def test_rows_of_other_types_are_what_they_say(folder: Path, table: Table, tokens: tuple[int, ...]) -> None:
    """Found again by type and content alone: never as tokens, and never as other rows."""
    engine = engine_of(folder)
    found: list[Answer] = []
    for values in (table, table.float(), table.half(), table * 1.25):
        engine.add(given(ask("it", tokens), values, 0, len(tokens)))
        found.append(finish(engine)["it"])
    assert engine.stats().prefix_hits == 0
    assert found[0] == found[1] != found[3]  # float16 may have rounded
    engine.add(ask("it", (0,) * len(tokens)))
    assert finish(engine)["it"] not in found
    engine.close()


def test_what_looks_back_sees_the_tokens_alone(folder: Path, table: Table, tokens: tuple[int, ...]) -> None:
    """Penalties of a prompt count no token for a row; those of an answer are as ever."""
    engine = engine_of(folder)
    plain = replace(SAMPLED, temperature=0.0)
    penalised = replace(plain, repetition_penalty=1.8, presence_penalty=0.3)
    answers = {}
    for name, how in (("plain", plain), ("penalised", penalised)):
        engine.add(given(ask(name, tokens[:40], how), table, 20, 40))
        answers[name] = finish(engine)[name]
    assert answers["plain"] != answers["penalised"]
    engine.close()
    new = NewSequence(0, "it", 0, (5, 0, 0, 6), (), 0, (), SAMPLED, media=(MediaSpan("d", 1, 2, rows_of(table[:2])),))
    assert tokens_read(new) == (5, 6)
    assert tokens_read(replace(new, media=(MediaSpan("picture", 1, 2),))) == (5, 0, 0, 6)


@pytest.mark.parametrize("family", ["gpt2", "granite", "gemma2", "gemma3", "opt"])
def test_rows_are_what_transformers_calls_input_embeddings(tmp_path: Path, family: str) -> None:
    """With scales, projections and learned positions around the table: rows of its embedding are the tokens' bits."""
    model = tiny.save(family, tmp_path)
    ids = tuple(tiny.prompt(21))
    with torch.inference_mode():
        values = model.get_input_embeddings()(torch.tensor(ids))  # type: ignore[operator]
    engine = engine_of(tmp_path, dtype="float32")
    engine.add(ask("tokens", ids))
    truth = finish(engine)["tokens"]
    engine.add(given(ask("rows", ids), _by_token(values, ids), 0, len(ids)))
    assert finish(engine)["rows"] == truth
    engine.close()


def _by_token(values: torch.Tensor, ids: tuple[int, ...]) -> Table:
    table = torch.zeros(max(ids) + 1, values.shape[1])
    table[list(ids)] = values
    return table


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_batched_tokens": 8}, "Raise --max-num-batched-tokens"),
        ({"max_chunk_tokens": 8}, "Raise --max-num-batched-tokens"),
    ],
)
def test_steps_that_hold_no_piece_are_refused(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_of(folder, **options)


def test_models_that_need_tokens_are_refused(tmp_path: Path) -> None:
    tiny.save("gemma3n", tmp_path)
    with pytest.raises(ConfigError, match=r"--enable-prompt-embeds is not possible.*look its tokens up"):
        engine_of(tmp_path)


def test_rows_are_whole_rows() -> None:
    with pytest.raises(ValueError, match="15 bytes are no rows of 4 values of float32"):
        GivenRows("float32", 4, b"\0" * 15)
    with pytest.raises(ValueError, match="rows of int8"):
        GivenRows("int8", 4, b"\0" * 16)
    with pytest.raises(ValueError, match="no rows"):
        GivenRows("float16", 4, b"")
