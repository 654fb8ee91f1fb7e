"""Copies on disk: what comes back is what was written there, or nothing."""

from __future__ import annotations

import errno
import os
import random
import stat
import threading
import time
from pathlib import Path

import pytest

from penstock.config.errors import ConfigError
from penstock.core.kv.node import Namespace
from penstock.core.policies.bounded_tier import Entry, place_numbers
from penstock.transfer import disk
from penstock.transfer.disk import DiskStore, remove_others
from penstock.transfer.folder import size_and_use
from penstock.transfer.index import read_entries
from penstock.transfer.places import place_bytes
from penstock.transfer.store import StoreError

DEADLINE_S = 60.0
SIZES = (100, 5000)
PLACES = (range(1, 9), range(9, 17))


def entry(number: int, group: int = 0) -> Entry:
    return Entry(group, number.to_bytes(16, "big"), b"", Namespace("", ("salt", "owner")), (number, 1 << 200))


def block(number: int, group: int = 0) -> bytes:
    return random.Random(number).randbytes(SIZES[group])


def opened(folder: Path) -> DiskStore:
    return DiskStore(folder / "kept", SIZES, PLACES)


def filled(folder: Path) -> DiskStore:
    store = opened(folder)
    for place in (*PLACES[0], *PLACES[1]):
        group = int(place in PLACES[1])
        store.describe(place, entry(place, group))
        store.write(place, entry(place, group), (block(place, group)[:30], memoryview(block(place, group))[30:]))
    return store


def test_what_is_written_is_read_by_another_process(tmp_path: Path) -> None:
    filled(tmp_path).close()
    store = opened(tmp_path)
    found = dict(store.found())
    assert found == {place: entry(place, int(place in PLACES[1])) for place in (*PLACES[0], *PLACES[1])}
    for place, one in found.items():
        assert bytes(store.read(place, one)) == block(place, one.group)
    store.close()


def test_what_was_given_up_is_not_found(tmp_path: Path) -> None:
    store = filled(tmp_path)
    store.forget(3)
    with pytest.raises(KeyError):
        store.entry(3)
    store.close()
    store = opened(tmp_path)
    assert 3 not in dict(store.found())
    store.close()


def test_a_place_is_its_last_writers(tmp_path: Path) -> None:
    store = filled(tmp_path)
    store.describe(3, entry(77))
    store.write(3, entry(77), (block(77),))
    with pytest.raises(StoreError, match="another block"):
        store.read(3, entry(3))
    assert bytes(store.read(3, entry(77))) == block(77)
    store.close()


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    store = filled(tmp_path)
    path = tmp_path / "kept" / "blocks"
    whole = path.read_bytes()
    rng = random.Random(1)
    for _ in range(200):
        place = rng.choice(PLACES[0])
        start = (place - 1) * sum(map(place_bytes, SIZES))
        at = start + rng.randrange(36 + SIZES[0])  # the head's last bytes say nothing
        at += 28 if at - start >= 36 else 0
        damaged = bytearray(whole)
        damaged[at] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(StoreError):
            store.read(place, entry(place))
    path.write_bytes(whole)
    for place in PLACES[0]:
        assert bytes(store.read(place, entry(place))) == block(place)
    store.close()


def test_a_file_that_ends_early_is_a_miss(tmp_path: Path) -> None:
    store = filled(tmp_path)
    os.truncate(tmp_path / "kept" / "blocks", 20)
    with pytest.raises(StoreError, match="too short"):
        store.read(1, entry(1))
    store.close()


def test_a_block_of_another_size_is_not_written(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with pytest.raises(StoreError, match="99 bytes instead of 100"):
        store.write(1, entry(1), (b"x" * 99,))
    store.close()


def test_a_full_disk_is_left_in_peace_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    tried: list[int] = []

    def full(handle: int, views: object, start: int) -> int:
        tried.append(start)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match="No space"):
        store.write(1, entry(1), (block(1),))
    with pytest.raises(StoreError, match="full a moment ago"):
        store.write(2, entry(2), (block(2),))
    assert len(tried) == 1
    assert not dict(store.found()), "what was not written is not in the index"
    store.close()


def test_a_disk_that_is_full_at_the_start_gives_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path).close()
    opens = os.open

    def full(path: Path, flags: int, mode: int = 0o777, **more: int) -> int:
        if flags & os.O_TRUNC:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return opens(path, flags, mode, **more)

    monkeypatch.setattr(os, "open", full)
    store = opened(tmp_path)
    found = dict(store.found())
    assert len(found) == 16
    assert bytes(store.read(3, found[3])) == block(3)
    store.close()


def test_writes_in_pieces_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system call may take less than it was given, and takes so many buffers at most."""
    whole = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda handle, views, start: whole(handle, [views[0][:3]], start))
    store = DiskStore(tmp_path / "kept", (2000,), (range(1, 3),))
    data = random.Random(3).randbytes(2000)
    store.write(2, entry(2), [data[at : at + 1] for at in range(2000)])
    assert bytes(store.read(2, entry(2))) == data
    store.close()


def test_only_this_user_may_look(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir(mode=0o755)
    store = filled(tmp_path)
    assert stat.S_IMODE((tmp_path / "kept").stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "kept").iterdir()} == {0o600}
    store.close()


@pytest.mark.parametrize("name", ["blocks", "index", "lock"])
def test_links_are_not_followed(name: str, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    target = tmp_path / "somebody else's"
    target.write_bytes(b"precious")
    (tmp_path / "kept" / name).symlink_to(target)
    with pytest.raises(ConfigError, match="cannot keep blocks"):
        opened(tmp_path)
    assert target.read_bytes() == b"precious"


def test_a_folder_is_one_processs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_LOCK_S", 0.1)
    store = opened(tmp_path)
    with pytest.raises(ConfigError, match="another engine keeps blocks in"):
        opened(tmp_path)
    store.close()
    opened(tmp_path).close()


def test_other_versions_go_where_there_is_no_room_unless_somebody_has_them(tmp_path: Path) -> None:
    sizes, places = (100,), (range(1, 3),)
    mine, older, newer, held = (tmp_path / f"m-{digit * 16}" for digit in "abcd")
    for used, folder in enumerate((older, newer), 1000):
        store = DiskStore(folder, sizes, places)
        store.describe(1, entry(1))
        store.write(1, entry(1), (bytes(100),))
        store.close()
        for path in (*folder.iterdir(), folder):
            os.utime(path, (used, used))
    theirs = DiskStore(held, sizes, places)
    other = DiskStore(tmp_path / f"n-{'d' * 16}", sizes, places)
    both = sum(size_and_use(folder)[0] for folder in (older, newer, held))
    assert remove_others(mine, "m", both) == [], "there is room for all"
    assert remove_others(mine, "m", both - 1) == [older]
    (newer / "somebody else's").write_text("precious")
    assert remove_others(mine, "m", 0) == [newer]
    assert held.is_dir() and (tmp_path / f"n-{'d' * 16}").is_dir() and not older.exists()
    assert [path.name for path in newer.iterdir()] == ["somebody else's"]
    theirs.close()
    other.close()


def test_what_was_given_up_is_not_there_after_a_crash(tmp_path: Path) -> None:
    """Without another write, and without an end."""
    store = filled(tmp_path)
    store.forget(3)
    until = time.monotonic() + DEADLINE_S
    while 3 in read_entries(tmp_path / "kept" / "index")[0]:
        assert time.monotonic() < until
        time.sleep(0.01)
    store.forget(4)
    store.close()
    assert not {3, 4} & read_entries(tmp_path / "kept" / "index")[0].keys()


@pytest.mark.parametrize(("more", "kept"), [(9, 4), (4, 4), (3, 3)])
def test_with_other_room_copies_of_all_groups_stay_where_they_are(more: int, kept: int, tmp_path: Path) -> None:
    store = DiskStore(tmp_path, SIZES, numbers := place_numbers((4, 4)))
    for group, places in enumerate(numbers):
        for place in places:
            store.describe(place, entry(place, group))
            store.write(place, entry(place, group), (block(place, group),))
    store.close()
    store = DiskStore(tmp_path, SIZES, place_numbers((more, more)))
    found = dict(store.found())
    assert len(found) == 2 * kept
    assert all(bytes(store.read(place, one)) == block(place, one.group) for place, one in found.items())
    store.close()


def test_a_folder_shrinks_to_what_it_is_given(tmp_path: Path) -> None:
    filled(tmp_path).close()
    before = (tmp_path / "kept" / "blocks").stat().st_size
    fewer = DiskStore(tmp_path / "kept", SIZES, (range(1, 4), range(4, 7)))
    assert (tmp_path / "kept" / "blocks").stat().st_size == 3 * sum(map(place_bytes, SIZES)) < before
    kept = [place for place, one in fewer.found() if one.group == 0]
    assert kept == [1, 2, 3] and all(bytes(fewer.read(place, entry(place))) == block(place) for place in kept)
    fewer.close()


def test_an_engine_that_is_ending_is_waited_for(tmp_path: Path) -> None:
    first = filled(tmp_path)
    found: list[DiskStore] = []
    second = threading.Thread(target=lambda: found.append(opened(tmp_path)))
    second.start()
    first.close()
    second.join()
    assert len(dict(found[0].found())) == 16
    found[0].close()


def test_a_folder_that_cannot_be_used_can_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_LOCK_S", 0.0)
    filled(tmp_path).close()
    (tmp_path / "kept" / "blocks").unlink()
    (tmp_path / "kept" / "blocks").mkdir()
    for _ in range(2):
        with pytest.raises(ConfigError, match="cannot keep blocks in"):
            opened(tmp_path)
    (tmp_path / "kept" / "blocks").rmdir()
    opened(tmp_path).close()
