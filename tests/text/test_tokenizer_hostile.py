"""Hostile tokenizer.json files are refused in one sentence, before the library panics or aborts on them.

A panic's output goes past Python to the process's standard error, so each file is read by a process of its own.
"""

from __future__ import annotations

import base64
import json
import os
import random
import struct
import subprocess
import sys
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models

from penstock.config.errors import CheckpointError
from penstock.text.tokenizer import Tokenizer
from penstock.text.tokenizer_check import check_charsmap

READ = """
import sys
from pathlib import Path
from penstock.config.errors import CheckpointError
from penstock.text.tokenizer import Tokenizer
for folder in sorted(Path(sys.argv[1]).iterdir()):
    try:
        made = Tokenizer.from_folder(folder)
        made.encode("hello ab xyz é 12")
        made.encode_pair("a", "b")
        made.decode(range(9))
        print(folder.name, "usable")
    except CheckpointError as error:
        print(folder.name, "refused", str(error).replace("\\n", " "))
"""
CHARSMAPS = {
    "empty": b"",
    "no table": bytes(4),
    "cut": struct.pack("<I", 4096) + bytes(8),
    "outside at once": struct.pack("<I", 4) + b"\xff\xff\xff\xffab\0",
    "outside later": struct.pack("<I", 1024) + struct.pack("<256I", *([0xFFFFFC61] * 256)) + b"ab\0",
    "no text": struct.pack("<I", 1024) + struct.pack("<256I", *(0x100 | i for i in range(256))) + b"\xff\xff",
}


def document(**parts: Any) -> dict[str, Any]:
    backend = tokenizers.Tokenizer(models.BPE({"h": 0, "##e": 1, "h##e": 2, "he": 3}, []))
    made: dict[str, Any] = json.loads(backend.to_str())
    return {**made, **parts}


def bpe(merges: Any, prefix: str, **more: Any) -> dict[str, Any]:
    return {"vocab": {"h": 0, "é": 1, "he": 2}, "merges": merges, "continuing_subword_prefix": prefix, **more}


def template(piece: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "TemplateProcessing", "single": [piece], "pair": [piece], "special_tokens": {}}


HOSTILE = {
    **{
        f"charsmap {name}": document(
            normalizer={"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}
        )
        for name, data in CHARSMAPS.items()
    },
    "charsmap in a sequence": document(
        normalizer={
            "type": "Sequence",
            "normalizers": [{"type": "Precompiled", "precompiled_charsmap": "BAAAAP////9hYg=="}],
        }
    ),
    "charsmap of another type": document(normalizer={"type": "Precompiled", "precompiled_charsmap": {}}),
    "no charsmap": document(normalizer={"type": "Precompiled"}),
    "charsmap no base64": document(normalizer={"type": "Precompiled", "precompiled_charsmap": "*"}),
    "merge shorter than its prefix": document(model=bpe([["h", "e"]], "####", type="BPE")),
    "merge cut inside a character": document(model=bpe([["h", "é"]], "x", type="BPE")),  # aborts the process
    "merge as text": document(model=bpe(["h e"], "####", type="BPE")),
    "merge of a model without a type": document(model=bpe([["h", "é"]], "x")),
    "pieces of no length": document(pre_tokenizer={"type": "FixedLength", "length": 0}),
    "unknown special token": document(post_processor=template({"SpecialToken": {"id": "zz", "type_id": 0}})),
    "second of one text": document(post_processor=template({"Sequence": {"id": "B", "type_id": 0}})),
}


def read_all(folder: Path, files: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """What a process makes of each file, and all that it prints on standard error."""
    for name, text in files.items():
        (folder / name).mkdir()
        (folder / name / "tokenizer.json").write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", READ, str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "RUST_BACKTRACE": "1"},
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line]
    told = {name: next((line for line in lines if line.startswith(f"{name} ")), "") for name in files}
    return told, done.stderr


def test_hostile_files_are_refused_in_a_sentence_without_noise(tmp_path: Path) -> None:
    files = {name: json.dumps(hostile) for name, hostile in HOSTILE.items()}
    twice = json.dumps(document(normalizer={"type": "Lowercase"})).replace(
        '"normalizer"', '"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}, "normalizer"', 1
    )
    files |= {"twice": twice, "deep": "[" * 100_000, "cut": twice[:200], "no object": "[]"}
    told, noise = read_all(tmp_path, files)
    assert noise == ""
    for name, line in told.items():
        assert line.startswith(f"{name} refused ") and "is no usable tokenizer: " in line, (name, line)
        assert line.endswith("Get another copy of the file.") and "panic" not in line.lower(), line


def test_random_damage_makes_no_noise(tmp_path: Path) -> None:
    """Of 300 files with one or two odd values each, none makes the library panic."""
    rng = random.Random(7)
    seeds = [
        *HOSTILE.values(),
        *(
            json.loads(tokenizers.Tokenizer(model).to_str())
            for model in (
                models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0),
                models.WordPiece({"[UNK]": 0, "a": 1}),
                models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"),
            )
        ),
    ]
    odd: list[Any] = [None, -1, 0, 2**32, 1e308, "", "##", [], {}, True, [["h", "e"]], {"Regex": "("}]
    files = {}
    for number in range(300):
        damaged = deepcopy(rng.choice(seeds))
        for _ in range(rng.randint(1, 2)):
            part = damaged
            while isinstance(part, dict) and part:
                name = rng.choice(list(part))
                if isinstance(part[name], dict) and rng.random() < 0.7:
                    part = part[name]
                    continue
                part[name] = deepcopy(rng.choice(odd))
                break
        files[f"n{number:03}"] = json.dumps(damaged)
    told, noise = read_all(tmp_path, files)
    assert noise == "" and all(told.values())


@pytest.mark.parametrize("name", CHARSMAPS)
def test_character_maps_that_lead_nowhere(name: str) -> None:
    with pytest.raises(ValueError, match="character map"):
        check_charsmap(CHARSMAPS[name])


def test_a_vocabulary_may_name_a_token_twice(tmp_path: Path) -> None:
    text = json.dumps(document()).replace('"h": 0', '"h": 9, "h": 0')
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    assert Tokenizer.from_folder(tmp_path).token_to_id("h") == 0


def test_prefixes_that_merges_go_on_with_are_taken(tmp_path: Path) -> None:
    model = {
        "type": "BPE",
        "vocab": {"h": 0, "##e": 1, "he": 2},
        "merges": [["h", "##e"]],
        "continuing_subword_prefix": "##",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(document(model=model)), encoding="utf-8")
    assert Tokenizer.from_folder(tmp_path).encode("he") == [2]
    model["merges"] = [["h", "e"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(document(model=model)), encoding="utf-8")
    with pytest.raises(CheckpointError, match="does not go on with continuing_subword_prefix"):
        Tokenizer.from_folder(tmp_path)
