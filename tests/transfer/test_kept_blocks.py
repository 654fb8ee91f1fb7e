"""Folders of copies as people look at them: what is told is what is there, whatever the files are."""

from __future__ import annotations

import json
import os
import random
import stat
import zlib
from pathlib import Path
from typing import Any

import pytest

from penstock.config.errors import ConfigError
from penstock.core.kv.node import Namespace
from penstock.core.policies.bounded_tier import Entry
from penstock.transfer.disk import DiskStore
from penstock.transfer.folder import read_about
from penstock.transfer.index import read_entries
from penstock.transfer.kept_blocks import Chain, KeptBlocks, chains, is_ours, kept_blocks, kept_in, remove, verify
from penstock.transfer.places import place_bytes

SIZES = (100, 5000)
PLACES = (range(1, 9), range(9, 17))
ROW = sum(map(place_bytes, SIZES))
NAME = f"a_model-{'0' * 8}-{'a' * 16}"


def digest(*tokens: int) -> bytes:
    return bytes(tokens).ljust(16, b"\xee")


def entry(*tokens: int, group: int = 0) -> Entry:
    """The second of two tokens' block of a prompt."""
    before = tokens[:-2]
    return Entry(group, digest(*tokens), digest(*before) if before else b"", Namespace("salt", "owner"), tokens[-2:])


def opened(base: Path, name: str = NAME) -> DiskStore:
    return DiskStore(base / name, SIZES, PLACES, model="a/model", block_size=2)


def filled(base: Path, name: str = NAME) -> DiskStore:
    """Two prefixes of 6 and 4 tokens, which share 2, in two groups; and one that nothing leads to."""
    store = opened(base, name)
    prefixes = [(1, 2), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6), (1, 2, 7, 8)]
    copies = [entry(*tokens, group=group) for group in (0, 1) for tokens in prefixes] + [entry(9, 9, 9, 9)]
    for place, one in zip((1, 2, 3, 4, 9, 10, 11, 12, 5), copies, strict=True):
        store.describe(place, one)
        store.write(place, one, (random.Random(place).randbytes(SIZES[one.group]),))
    return store


def only(base: Path) -> KeptBlocks:
    (kept,) = kept_blocks(base)
    return kept


def test_a_folder_tells_what_it_has(tmp_path: Path) -> None:
    store = filled(tmp_path)
    kept = only(tmp_path)
    assert (kept.name, kept.model, kept.in_use) == (NAME, "a/model", True)
    assert (kept.blocks, kept.tokens, kept.damaged_lines) == (9, 10, 0)
    assert kept.bytes >= 5 * place_bytes(100) + 4 * place_bytes(5000)
    assert kept.about is not None and (kept.about.sizes, kept.about.places) == (SIZES, PLACES)
    assert chains(kept) == ([Chain(6, 6), Chain(4, 4)], 1)
    store.close()
    assert not only(tmp_path).in_use


def test_looking_changes_nothing(tmp_path: Path) -> None:
    filled(tmp_path).close()
    folder = tmp_path / NAME

    def state() -> dict[str, tuple[bytes, int, int]]:
        files = (*folder.iterdir(), folder)
        return {f.name: (f.read_bytes() if f.is_file() else b"", f.stat().st_mtime_ns, f.stat().st_ino) for f in files}

    before = state()
    verify(only(tmp_path))
    chains(kept_in(folder))
    assert state() == before
    assert stat.S_IMODE((folder / "about.json").stat().st_mode) == 0o600


def test_an_engine_finds_what_was_looked_at(tmp_path: Path) -> None:
    """And while somebody lists folders, it may start."""
    filled(tmp_path).close()
    entries, damaged = read_entries(tmp_path / NAME / "index")
    store = opened(tmp_path)
    assert dict(store.found()) == entries and not damaged
    store.close()


def test_every_block_is_read(tmp_path: Path) -> None:
    filled(tmp_path).close()
    kept = only(tmp_path)
    told: list[tuple[int, int]] = []
    verdict = verify(kept, lambda done, total: told.append((done, total)))
    assert (verdict.whole, verdict.wrong, verdict.first) == (9, 0, "")
    assert told == [(done, 9) for done in range(1, 10)]
    blocks = kept.folder / "blocks"
    data = bytearray(blocks.read_bytes())
    data[2 * ROW + 80] ^= 1  # the third place
    blocks.write_bytes(data)
    verdict = verify(kept)
    assert (verdict.whole, verdict.damaged, verdict.unreadable) == (8, 1, 0)
    assert verdict.first == "place 3: it is damaged"
    os.truncate(blocks, 2 * ROW + 10)
    assert (verify(kept).whole, verify(kept).damaged) == (4, 5)
    os.truncate(blocks, 10)
    assert (verify(kept).whole, verify(kept).damaged) == (0, 9)
    blocks.unlink()
    assert (verify(kept).damaged, verify(kept).first) == (9, "the file of blocks is gone")


def test_what_the_disk_refuses_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path).close()
    whole = os.preadv

    def broken(handle: int, views: Any, start: int) -> int:
        if start == ROW:
            raise OSError(5, "Input/output error")
        return whole(handle, views, start)

    monkeypatch.setattr(os, "preadv", broken)
    verdict = verify(only(tmp_path))
    assert (verdict.whole, verdict.damaged, verdict.unreadable) == (8, 0, 1)
    assert verdict.first == "place 2: Input/output error"


def test_what_an_engine_has_stays(tmp_path: Path) -> None:
    store = filled(tmp_path)
    for act in (verify, remove):
        with pytest.raises(ConfigError, match="in use by a running engine"):
            act(only(tmp_path))
    store.close()
    remove(only(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_what_others_put_there_stays(tmp_path: Path) -> None:
    filled(tmp_path).close()
    (tmp_path / NAME / "letter").write_text("dear")
    with pytest.raises(ConfigError, match="its folder stays, it also has letter"):
        remove(only(tmp_path))
    assert [file.name for file in (tmp_path / NAME).iterdir()] == ["letter"]


def test_other_folders_are_not_ours(tmp_path: Path) -> None:
    assert kept_blocks(tmp_path / "none") == []
    filled(tmp_path).close()
    for name in ("photos", "a-b", f"m-{'g' * 8}-{'a' * 16}", f"m-{'a' * 8}-{'a' * 15}", f"m-{'a' * 8}-{'b' * 16}"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index").touch()
    (tmp_path / f"l-{'a' * 8}-{'b' * 16}").symlink_to(tmp_path / NAME)
    (tmp_path / "photos" / "lock").touch()
    assert only(tmp_path).name == NAME
    (tmp_path / f"m-{'a' * 8}-{'b' * 16}" / "lock").symlink_to(tmp_path / NAME / "lock")
    assert not is_ours(tmp_path / f"m-{'a' * 8}-{'b' * 16}")


def told(**others: Any) -> bytes:
    whole = {"model": "m", "block_size": 2, "sizes": [100, 5000], "places": [[1, 8, 2], [2, 8, 2]], "opened": 1.0}
    return json.dumps(whole | others).encode()


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"null", b"\xff", b"{" * 60_000, b"[" * 60_000, told(model=3), told(block_size="2"), told(sizes=[]),
     told(sizes=[-1, 5]), told(sizes=[True, 5]), told(sizes=[1 << 60, 5]), told(places=[[1, 8, 1]]),
     told(places=[1, 2]), told(places=[[1, 8], [9, 8]]), told(places=[[1, 1.5, 1], [9, 8, 1]]), told(sizes="ab"),
     told(places=[[1, 8, 0], [9, 8, 1]]), told(places=[[1, 1 << 50, 1]] * 2), told(opened="now"),
     told(model="m" * (1 << 17)), told(sizes=[1] * 300, places=[[1, 1, 1]] * 300)],
)  # fmt: skip
def test_a_damaged_note_tells_nothing(text: bytes, tmp_path: Path) -> None:
    filled(tmp_path).close()
    assert read_about(tmp_path / NAME) is not None
    (tmp_path / NAME / "about.json").write_bytes(text)
    kept = only(tmp_path)
    assert kept.about is None and (kept.model, kept.blocks) == ("a_model", 9)
    with pytest.raises(ConfigError, match="does not tell how large its blocks are"):
        verify(kept)


def test_a_note_that_lies_asks_for_no_memory(tmp_path: Path) -> None:
    filled(tmp_path).close()
    (tmp_path / NAME / "about.json").write_bytes(told(sizes=[1 << 40, 1 << 40], places=[[1, 1 << 20, 1], [9, 1, 1]]))
    assert verify(only(tmp_path)).damaged == 9


def test_an_index_in_a_circle_ends(tmp_path: Path) -> None:
    filled(tmp_path).close()
    lines = []
    for place, (name, parent) in enumerate([("aa", "bb"), ("bb", "aa"), ("cc", "cc"), ("dd", "")]):
        text = json.dumps([place, 0, name * 16, parent * 16, "", None, [1, 2]]).encode()
        lines.append(b"%08x " % zlib.crc32(text) + text + b"\n")
    (tmp_path / NAME / "index").write_bytes(b"".join(lines) + b"half a li")
    kept = only(tmp_path)
    assert (kept.blocks, kept.tokens, kept.damaged_lines) == (4, 8, 1)
    assert chains(kept) == ([Chain(2, 1)], 3)


def test_a_long_prefix_is_followed_without_recursion(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / NAME, (8,), (range(1, 5001),))
    for place in range(1, 5001):
        parent = b"" if place == 1 else (place - 1).to_bytes(16, "big")
        one = Entry(0, place.to_bytes(16, "big"), parent, Namespace("", None), (1, 2))
        store.describe(place, one)
        store.write(place, one, (b"x" * 8,))
    store.close()
    assert chains(kept_in(tmp_path / NAME)) == ([Chain(10_000, 5000)], 0)


def test_a_folder_that_goes_meanwhile_is_left_out(tmp_path: Path) -> None:
    assert kept_in(tmp_path / NAME) is None
