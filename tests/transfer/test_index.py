"""The journal of what lies where: whatever its bytes are, what is read is what was written, or less."""

from __future__ import annotations

import errno
import os
import random
import zlib
from pathlib import Path

import pytest

from penstock.core.kv.node import Namespace
from penstock.core.policies.bounded_tier import Entry
from penstock.transfer import index as module
from penstock.transfer.index import Index

NAMESPACES = (Namespace("", None), Namespace("d*1.0+e*2.0", ("salt", "ab" * 32)), Namespace(None, None))


def entry(number: int) -> Entry:
    namespace = NAMESPACES[number % len(NAMESPACES)]
    return Entry(number % 2, number.to_bytes(16, "big"), b"\xff" * 16, namespace, (number, 1 << 300, 0))


def written(path: Path, count: int = 40) -> dict[int, Entry]:
    index = Index(path)
    for place in range(count):
        index.put(place, entry(place))
    for place in range(0, count, 5):
        index.drop(place)
    kept = index.entries
    index.close()
    return kept


def test_what_was_written_is_read(tmp_path: Path) -> None:
    kept = written(tmp_path / "index")
    assert len(kept) == 32 and all(one == entry(place) for place, one in kept.items())
    again = Index(tmp_path / "index")
    assert again.entries == kept and not again.damaged
    again.close()


def test_it_is_written_anew_before_it_grows_without_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SPARE_LINES", 10)
    index = Index(tmp_path / "index")
    for number in range(1000):
        index.put(number % 3, entry(number))
    assert len((tmp_path / "index").read_bytes().splitlines()) <= 17
    assert index.entries == {0: entry(999), 1: entry(997), 2: entry(998)}
    index.close()
    again = Index(tmp_path / "index")
    assert again.entries == index.entries
    again.close()


def test_a_line_that_was_written_halfway_is_left_out(tmp_path: Path) -> None:
    kept = written(tmp_path / "index")
    everything = {place: entry(place) for place in range(40)}
    data = (tmp_path / "index").read_bytes()
    for cut in range(1, 60):
        (tmp_path / "index").write_bytes(data[:-cut])
        index = Index(tmp_path / "index")
        assert kept.items() <= index.entries.items() <= everything.items(), "the last lines tell what was given up"
        index.close()


@pytest.mark.parametrize("seed", range(60))
def test_a_damaged_journal_gives_less_and_nothing_else(seed: int, tmp_path: Path) -> None:
    written(tmp_path / "index")
    everything = {place: entry(place) for place in range(40)}
    rng = random.Random(seed)
    data = bytearray((tmp_path / "index").read_bytes())
    for _ in range(rng.choice((1, 5, 100))):
        kind = rng.randrange(4)
        at = rng.randrange(len(data))
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            del data[at : at + rng.randrange(50)]
        elif kind == 2:
            data[at:at] = rng.randbytes(rng.randrange(50))
        else:
            data[at:at] = data[rng.randrange(len(data)) :][:200]
    (tmp_path / "index").write_bytes(data)
    index = Index(tmp_path / "index")
    assert index.entries.items() <= everything.items()
    index.close()


@pytest.mark.parametrize(
    "text",
    [b"[]", b"{}", b"null", b"[1.5]", b"[true]", b'["a"]', b"[1,2]", b"[1,0,1,2,3,4,5]", b'[1,0,"zz","","",null,[1]]',
     b'[1,0,"","",{},null,[1]]', b'[1,0,"","",[[1]],null,[1]]', b'[1,0,"","","",null,"abc"]',
     b'[1,0,"","","",null,[1.5]]', b'[1,true,"","","",null,[1]]', b"[" * 5000, b"9" * 5000,
     b'[1,0,"","","",null,[' + b"9" * 5000 + b"]]", b"\xff\xfe"],
)  # fmt: skip
def test_a_line_of_a_stranger_is_left_out(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "index").write_bytes(b"%08x " % zlib.crc32(text) + text + b"\n")
    index = Index(tmp_path / "index")
    assert index.entries == {} and index.damaged == 1
    index.close()


def test_no_more_is_read_than_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 1 << 16)
    with (tmp_path / "index").open("wb") as file:
        os.truncate(file.fileno(), 1 << 40)
    index = Index(tmp_path / "index")
    assert not index.entries and (tmp_path / "index").stat().st_size == 0
    index.close()


def test_lines_can_be_sealed(tmp_path: Path) -> None:
    def turned(data: bytes) -> bytes:
        return bytes(byte ^ 0x80 for byte in data)

    index = Index(tmp_path / "index", turned, turned)
    index.put(1, entry(1))
    index.close()
    assert b"salt" not in (tmp_path / "index").read_bytes()
    again = Index(tmp_path / "index", turned, turned)
    assert again.entries == {1: entry(1)}
    again.close()
    plain = Index(tmp_path / "index")
    assert not plain.entries and plain.damaged == 1
    plain.close()


def test_the_longest_keys_are_read_again(tmp_path: Path) -> None:
    """Those of tokens behind four activated adapters, in a block of 256."""
    key = tuple(int.from_bytes(b"\x02" * 300, "big") << 1024 | token for token in range(256))
    index = Index(tmp_path / "index")
    index.put(1, entry(1)._replace(key=key))
    index.close()
    again = Index(tmp_path / "index")
    assert again.entries[1].key == key and not again.damaged
    again.close()


def test_who_gives_a_place_up_waits_for_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a full one make the journal be written anew again and again."""
    monkeypatch.setattr(module, "_SPARE_LINES", 10)
    index = Index(tmp_path / "index")
    for place in range(40):
        index.put(place, entry(place))
    tried: list[None] = []

    def full(*_: object) -> None:
        tried.append(None)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as there:
        there.setattr(os, "replace", full)
        before = (tmp_path / "index").stat().st_size
        for place in range(20):
            index.drop(place)
        assert (tmp_path / "index").stat().st_size == before and len(index.entries) == 20
        for number in range(200):
            index.put(50, entry(number))
        assert 1 <= len(tried) <= 8 and not (tmp_path / "index.new").exists()
    index.put(50, entry(1))
    kept = index.entries
    index.close()
    again = Index(tmp_path / "index")
    assert again.entries == kept and len(kept) == 21
    again.close()
