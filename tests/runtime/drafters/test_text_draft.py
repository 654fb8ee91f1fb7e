"""Drafts of a model with another vocabulary, told through text: answers are those without, characters stay whole."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.config.errors import ConfigError
from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.request import EngineRequest
from penstock.engine.build import build_engine
from penstock.engine.loop import Engine
from penstock.engine.text_pipeline import TextPipeline
from penstock.text.retold import Retold, behind, bytes_of, whole
from penstock.text.tokenizer import Tokenizer
from tests.engine.test_drafts import check, run

MODEL = "penstock-concierge"
TEXTS = (
    "A room for two, please: near the station.\n",
    "na\u00efve caf\u00e9 \u2013 \u4f60\u597d \U0001f600\U0001f44d\U0001f3fd!",
    "<|im_end|>\n<|im_start|>user\n  spaces   and\ttabs",
    "1234567890 once upon a time",
)


@pytest.fixture(scope="module")
def models(shared_data: Path) -> Path:
    return shared_data / "models"


@pytest.fixture(scope="module", params=[MODEL, "stories260K/hf"])
def tokenizer(request: pytest.FixtureRequest, models: Path) -> Tokenizer:
    return Tokenizer.from_folder(models / request.param)


def test_characters_are_whole() -> None:
    data = TEXTS[1].encode()
    for end in range(len(data) + 1):
        count = whole(data[:end])
        assert data[:count].decode() == data[:end].decode(errors="ignore")
        assert end - count < 4
    assert whole(b"\xff\x80\x80\x80\x80") == 5  # what is no character at all is not waited for


def test_text_is_told_piece_by_piece(tokenizer: Tokenizer) -> None:
    """Wherever pieces end; all bytes are there, and nothing but them."""
    dice = random.Random(4)
    for text in TEXTS * 5:
        data, begin = (text * 3).encode(), 0
        told = Retold(tokenizer, 1 << 16)
        while begin < len(data):
            end = begin + dice.randrange(1, 12)
            told.add(data[begin:end])
            begin = end
            ids = told.ids(1 << 16)
            assert (ids is None) == (whole(data[:end]) < len(data[:end]))
            if ids is not None:
                ids = ids[1:] if ids[:1] == [tokenizer.bos_id] else ids
                assert bytes_of(tokenizer, ids).removeprefix(b" ") == data[:end].removeprefix(b" ")


def test_text_goes_on_behind_tokens(tokenizer: Tokenizer) -> None:
    dice = random.Random(5)
    exact = 0
    for text in TEXTS * 10:
        cut = dice.randrange(len(text))
        before = tokenizer.encode(text[:cut], add_special_tokens=False)
        found = behind(tokenizer, before, text[cut:])
        assert bytes_of(tokenizer, found) in (b"", text[cut:].encode())
        exact += bool(found)
    assert exact > 25


def test_a_text_is_bounded(models: Path) -> None:
    tokenizer = Tokenizer.from_folder(models / MODEL)
    told = Retold(tokenizer, 1000)
    told.add(b"word " * 10_000)
    assert len(told.ids(1 << 16) or []) <= 1000
    for _ in range(300):
        told.add(b" and some more")
        assert len(told.ids(64) or []) <= 64


def made(target: str | Path, draft: str | Path | None, **more: Any) -> Engine:
    options: dict[str, Any] = {
        "dtype": "float32", "threads": 1, "max_num_seqs": 4, "max_model_len": 400, "block_size": 8, "kv_blocks": 200,
        **more,
    }  # fmt: skip
    said = None if draft is None else {"model": str(draft), "adaptive": False, "num_speculative_tokens": 4}
    return build_engine(EngineOptions(str(target), speculative_config=said and json.dumps(said), **options))[0]


def asked(text: TextPipeline, speculate: int) -> list[EngineRequest]:
    found = []
    for number, kind in enumerate(({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "n": 2})):
        for turn, said in enumerate(("Hello, I need a hotel", "Once upon a time there was", TEXTS[1])):
            prompt = text.tokenizer.encode(f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n")
            params = SamplingParams(max_tokens=24, **kind)
            name = f"{number}.{turn}"
            found.append(EngineRequest(name, tuple(prompt), params, text.eos_ids, seed=turn, speculate=speculate))
    return found


@pytest.mark.parametrize(("target", "draft"), [(MODEL, "stories260K/hf"), ("stories260K/hf", MODEL)])
def test_answers_are_those_without(models: Path, target: str, draft: str) -> None:
    """Chunks, little memory, preemption, cancelled requests, more sequences than lanes."""
    text = TextPipeline.load(str(models / target))
    plain = made(models / target, None)
    truth = run(plain, *asked(text, 0))
    plain.close()
    engine = made(models / target, models / draft, max_chunk_tokens=24, max_num_seqs=6, kv_blocks=60)
    for turn in range(2):
        again = [replace(one, request_id=f"{one.request_id}#{turn}") for one in asked(text, 4)]
        check(run(engine, *again, dice=random.Random(turn) if turn else None), truth)
    stats = engine.stats()
    engine.close()
    assert stats.drafter_failures == 0
    assert stats.drafted_tokens > stats.accepted_tokens > 0


def renumbered(source: Path, folder: Path) -> Path:
    """The same model with its tokens in another order."""
    shutil.copytree(source, folder, copy_function=shutil.copyfile)
    folder.chmod(0o755)
    vocabulary = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    words, added = vocabulary["model"]["vocab"], {one["id"] for one in vocabulary["added_tokens"]}
    moved = [number for number in words.values() if number not in added]
    places = dict(zip(moved, moved[1:] + moved[:1], strict=True))
    vocabulary["model"]["vocab"] = {word: places.get(number, number) for word, number in words.items()}
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            rows = tensors[name].clone()
            rows[torch.tensor([*places.values()])] = tensors[name][torch.tensor([*places])]
            tensors[name] = rows
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_the_same_model_with_other_numbers_drafts_as_well(models: Path, tmp_path: Path) -> None:
    """Of what its twin with the target's numbers has accepted, next to nothing is lost on the way through text."""
    text = TextPipeline.load(str(models / MODEL))
    accepted = []
    for draft in (models / f"{MODEL}-draft", renumbered(models / f"{MODEL}-draft", tmp_path / "other")):
        engine = made(models / MODEL, draft)
        answers = run(engine, *asked(text, 4)[:2])
        stats = engine.stats()
        engine.close()
        accepted.append((stats.accepted_tokens, answers))
    assert accepted[0][1] == accepted[1][1]
    assert accepted[1][0] >= 0.9 * accepted[0][0] > 10


def test_a_model_without_a_tokenizer_is_refused(models: Path, tmp_path: Path) -> None:
    folder = renumbered(models / f"{MODEL}-draft", tmp_path / "other")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer, and .* has one of 4096 tokens"):
        made(models / MODEL, folder)


def test_its_lanes_are_planned(models: Path) -> None:
    """They are no part of the target's blocks."""
    rows = []
    for draft in (None, models / "stories260K/hf"):
        said = draft and json.dumps({"model": str(draft)})
        options = EngineOptions(str(models / MODEL), max_model_len=400, kv_blocks=50, speculative_config=said)
        engine, info = build_engine(options)
        engine.close()
        rows.append({row.name: row.value for row in info.memory})
    assert "draft model" in rows[1]
    assert rows[0]["KV cache"] == rows[1]["KV cache"]
