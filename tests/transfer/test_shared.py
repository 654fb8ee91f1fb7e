"""Values of shared stores: what is taken for a block, how much is asked for, how long one that fails is left alone."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.config.environment import store_access
from penstock.config.errors import ConfigError
from penstock.config.kv_store import StoreAddress, check_store, store_address
from penstock.core.kv.node import Namespace
from penstock.core.policies.bounded_tier import Entry
from penstock.core.policies.shared_tier import Chain, Search
from penstock.transfer import remote, shared
from penstock.transfer.object_store import ObjectStore
from penstock.transfer.remote import Rests, packed, unpacked
from penstock.transfer.sealing import PLAIN, Sealing, sealing_of
from penstock.transfer.shared import SharedStore
from penstock.transfer.store import StoreError

SIZE = 3000
KEY = bytes(range(32))


def entry(number: int, group: int = 0) -> Entry:
    return Entry(group, number.to_bytes(16, "big"), b"", Namespace("", "o"), (number,))


@pytest.mark.parametrize("sealing", [PLAIN, sealing_of(KEY)], ids=["plain", "sealed"])
def test_nothing_else_is_taken_for_a_block(sealing: Sealing) -> None:
    """Any byte changed, any length, another's name or another's digest."""
    rng = random.Random(3)
    data = rng.randbytes(SIZE)
    value = packed("a:0", entry(1), data, sealing)
    assert bytes(unpacked("a:0", entry(1), value, SIZE, sealing)) == data
    for _ in range(300):
        other = bytearray(value)
        other[rng.randrange(len(other))] ^= rng.randrange(1, 256)
        if other[36:64] == value[36:64]:  # what a head does not use
            with pytest.raises(StoreError):
                unpacked("a:0", entry(1), bytes(other), SIZE, sealing)
    wrong = [value[: rng.randrange(len(value))] for _ in range(50)] + [b"", value + b"x", rng.randbytes(len(value))]
    for short in wrong:
        with pytest.raises(StoreError):
            unpacked("a:0", entry(1), short, SIZE, sealing)
    for name, one in (("b:0", entry(1)), ("a:0", entry(2))):
        with pytest.raises(StoreError):
            unpacked(name, one, value, SIZE, sealing)


def test_a_key_opens_only_its_own() -> None:
    """And a sealed value that was put under another name with a fresh checksum is refused all the same."""
    mine, other = sealing_of(KEY), sealing_of(KEY[::-1])
    data = b"x" * SIZE
    sealed = mine.seal([data], b"a")
    assert data not in b"".join(sealed) and sum(map(len, sealed)) == SIZE + mine.overhead
    assert mine.unseal(b"".join(sealed), b"a") == data
    for sealing, name in ((mine, b"b"), (other, b"a")):
        with pytest.raises(ValueError, match="not sealed with this key"):
            sealing.unseal(b"".join(sealed), name)
    assert mine.unseal_line(mine.seal_line(b"line\n")) == b"line\n" and b"\n" not in mine.seal_line(b"\n" * 99)
    for text in (b"", b"!", b"AAAA", other.seal_line(b"line")):
        with pytest.raises(ValueError, match=r"padding|ase64|short|key"):
            mine.unseal_line(text)
    assert mine.key_id != other.key_id and sealing_of(KEY).key_id == mine.key_id
    assert mine.seal([data], b"a")[0] != sealed[0]  # a nonce is never used again


class Probed(ObjectStore):
    """Objects of which only that they are there is known."""

    def __init__(self, there: int) -> None:
        self.there = there
        self.asked = 0

    def held(self, names: Sequence[str]) -> Sequence[bool]:
        self.asked += len(names)
        return [int(name) < self.there for name in names]


@pytest.mark.parametrize("total", [0, 1, 2, 15, 16, 17, 31, 100, 257, 8192])
def test_a_few_probes_find_where_a_prefix_ends(total: int) -> None:
    rows = [[str(number)] for number in range(total)]
    for there in sorted({0, 1, total // 3, total // 2, total - 1, total} & set(range(total + 1))):
        store = Probed(there)
        assert store.leading(rows) == there
        assert store.asked <= 16 * 5


def test_a_store_that_failed_is_left_alone_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(remote, "monotonic", lambda: now[0])
    rests, calls = Rests(), []

    def failing() -> None:
        calls.append(now[0])
        raise OSError("gone")

    while now[0] < 200:
        with pytest.raises((OSError, StoreError)):
            rests.ask(failing)
        now[0] += 0.5
    assert calls[:6] == [0, 1, 3, 7, 15, 31] and calls[-1] - calls[-2] == 30
    now[0] += 30
    assert rests.ask(lambda: 5) == 5
    with pytest.raises(StoreError):
        rests.ask(lambda: (_ for _ in ()).throw(StoreError("refused")))
    assert not rests.resting  # a store that refuses is there


class Held:
    """Values in memory; with a gate, each waits there."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.closed = False

    def get(self, name: str) -> Any:
        if name not in self.values:
            raise StoreError("it is not there any more")
        return self.values[name]

    def put(self, name: str, value: Any) -> None:
        self.values[name] = value

    def leading(self, rows: Sequence[Sequence[str]]) -> int:
        whole = [all(name in self.values for name in row) for row in rows]
        return whole.index(False) if False in whole else len(whole)

    def held(self, names: Sequence[str]) -> Sequence[bool]:
        return [name in self.values for name in names]

    def remove(self, name: str) -> None:
        self.values.pop(name, None)

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def searched(store: SharedStore, chain: Chain) -> Search:
    search = Search(chain, 0.0)
    assert store.seek(search)
    assert search.answered.wait(60)
    return search


def test_a_search_tells_what_is_there_in_which_groups_and_not_what_was_spoilt() -> None:
    held = Held()
    store = SharedStore(held, ("s",), (8, 8, 8), (0, 1), None, PLAIN)
    chain = Chain(b"before", tuple(range(40)), 4)
    digests = chain.digests()
    assert digests[0] == chain.first and chain.block(2) == (8, 9, 10, 11) and len(set(digests)) == 10
    for number, digest in enumerate(digests[:6]):
        for group in (0, 1, 2):
            if (number, group) not in ((2, 2), (5, 1)):
                one = Entry(group, digest, b"", Namespace("", "o"), chain.block(number))
                held.values[store.name(digest, group)] = packed(store.name(digest, group), one, b"12345678", PLAIN)
    assert searched(store, chain).groups == [(0, 1, 2), (0, 1, 2), (0, 1), (0, 1, 2), (0, 1, 2)]
    bad = Entry(1, digests[3], b"", Namespace("", "o"), chain.block(3))
    held.values[store.name(digests[3], 1)] = b"damaged"
    store.describe(1, bad)
    with pytest.raises(StoreError, match="it has 7 bytes"):
        store.read(1, bad)
    assert store.name(digests[3], 1) not in held.values  # nobody else meets it
    held.values[store.name(digests[3], 1)] = b"damaged"
    assert len(searched(store, chain).groups) == 3
    store.close()
    assert held.closed and not store.seek(Search(chain, 0.0))


def test_what_is_queued_is_bounded_and_read_before_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "MOST_QUEUED", 100)
    monkeypatch.setattr(shared, "_CLOSING_S", 0.0)
    gate, held = threading.Event(), Held()
    put = held.put
    held.put = lambda name, value: (gate.wait(60), put(name, value))[1]  # type: ignore[method-assign]
    store = SharedStore(held, ("s",), (40,), (0,), None, PLAIN)
    for place in (1, 2):
        store.describe(place, entry(place))
        store.write(place, entry(place), (bytes([place]) * 40,))
    assert store.unsent == 80 and store.read(2, entry(2)) == b"\2" * 40
    with pytest.raises(StoreError, match="more slowly than they are computed"):
        store.write(3, entry(3), (b"\3" * 40,))
    gate.set()
    store.close()


def test_addresses_tell_no_password() -> None:
    access = store_access({"PENSTOCK_KV_STORE_PASSWORD": "p@ss/word"})
    address = store_address("valkeys://user:old@cache:7000/3", access)
    assert str(address) == "valkeys://…@cache:7000/3" and address.url == "rediss://user:p%40ss%2Fword@cache:7000/3"
    assert "old" not in repr(address) and "word" not in repr(address) + repr(access)
    assert store_address("s3://some.bucket/a/b/") == StoreAddress(
        "s3", "s3://some.bucket/a/b/", "", "some.bucket", "a/b/"
    )
    check_store("redis://cache", 0)
    with pytest.raises(ConfigError, match="lifecycle rules"):
        check_store("s3://bucket", 60)
    for url in (
        "redis://u:secret@h:1/x",
        "redis://u:secret@h:99999",
        "http://u:secret@h",
        "redis://u:se cret@h",
        "s3://u:secret@b",
    ):
        with pytest.raises(ConfigError) as error:
            check_store(url, None)
        assert "secret" not in str(error.value) and "cret" not in str(error.value)
    given = {
        "AWS_REGION": "eu-west-1",
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_SESSION_TOKEN": "t",
    }
    assert store_access(given).endpoint == "https://s3.eu-west-1.amazonaws.com" and store_access(given).token == "t"
    with pytest.raises(ConfigError, match="AWS_ENDPOINT_URL"):
        store_access({"AWS_ENDPOINT_URL": "ftp://x"})
