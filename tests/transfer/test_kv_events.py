"""KV events reach subscribers that know vLLM's layout alone, tell what the cache has, and nobody waits for them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from penstock.config.adapters import AdapterUse
from penstock.config.cache_spec import CacheGroup, CacheKind
from penstock.config.errors import ConfigError
from penstock.config.kv_events import KVEvents, kv_events
from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.kv.node import Namespace, Node
from penstock.core.policies.naming import media_key
from penstock.core.request import EngineRequest
from penstock.core.sequence import Sequence as TokenSequence
from penstock.engine.build import build_engine
from penstock.engine.loop import Engine
from penstock.kernels.cpu import native
from penstock.transfer.block_hashes import BlockHasher
from penstock.transfer.kv_events import EventPublisher, EventWriter
from penstock.transfer.told_blocks import ToldBlocks
from tests.models import tiny

DEADLINE_MS = 60_000
FULL = CacheGroup(CacheKind.FULL, None, (0,), 8)
SLIDING = CacheGroup(CacheKind.SLIDING, 6, (1,), 8)


# As subscribers declare it: vLLM since 2026, where events are maps, and its example before, where they are arrays.
class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class Event(msgspec.Struct, tag=True, omit_defaults=True):
    pass


class BlockStored(Event):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(Event):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Event):
    pass


class KVEventBatch(Batch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class OldEvent(msgspec.Struct, array_like=True, tag=True, omit_defaults=True):
    pass


class OldBlockStored(OldEvent, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class OldBlockRemoved(OldEvent, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None


class OldAllBlocksCleared(OldEvent, tag="AllBlocksCleared"):
    pass


class OldBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[OldBlockStored | OldBlockRemoved | OldAllBlocksCleared]


class Subscriber:
    """Reads what is published, and keeps the blocks that there are."""

    def __init__(self, events: str, replay: str = "") -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"kv")
        self.socket.connect(events)
        self.again = self.context.socket(zmq.DEALER)
        if replay:
            self.again.connect(replay)
        self.blocks: set[tuple[str | None, int | None, bytes | int]] = set()
        self.tokens: dict[bytes | int, tuple[int, ...]] = {}

    def take(self, payload: bytes) -> list[Any]:
        batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
        assert batch.data_parallel_rank == 0 and batch.ts > 1e9
        for event in batch.events:
            if isinstance(event, BlockStored):
                size = event.block_size
                assert len(event.token_ids) == size * len(event.block_hashes)
                for index, name in enumerate(event.block_hashes):
                    self.tokens[name] = tuple(event.token_ids[index * size : (index + 1) * size])
                self.blocks.update((event.medium, event.group_idx, name) for name in event.block_hashes)
            elif isinstance(event, BlockRemoved):
                gone = {(event.medium, event.group_idx, name) for name in event.block_hashes}
                assert gone <= self.blocks
                self.blocks -= gone
            else:
                self.blocks.clear()
        return batch.events

    def replayed(self, first: int) -> list[tuple[int, bytes]]:
        """Batches from a number on, as they are given again."""
        self.again.send_multipart((b"", first.to_bytes(8, "big")))
        found: list[tuple[int, bytes]] = []
        while True:
            assert self.again.poll(DEADLINE_MS)
            _, number, payload = self.again.recv_multipart()
            if int.from_bytes(number, "big", signed=True) == -1:
                assert payload == b""
                return found
            found.append((int.from_bytes(number, "big"), payload))

    def close(self) -> None:
        self.context.destroy(linger=0)


def node_of(parent: Node | None, key: Sequence[int], space: Any = "", owner: Any = ("", "")) -> Node:
    """A node of a tree; the first of a prefix hangs below its owner's portal."""
    if parent is None:
        root = Node(None, space, (), 2)
        parent = Node(root, Namespace(space, owner).portal, (), 2)
    return Node(parent, tuple(key), tuple(key), 2)


def written(blocks: ToldBlocks, **asked: Any) -> list[Any]:
    """The events of all notes, by a subscriber of the layout."""
    settings = KVEvents(**{"block_hashes": "int", **asked})
    writer = EventWriter(settings, BlockHasher("sha256_cbor", "0"), (FULL, SLIDING), "DISK")
    kind: Any = KVEventBatch if settings.layout == "map" else OldBatch
    notes = list(blocks.notes)
    blocks.notes.clear()
    return msgspec.msgpack.decode(writer.batch(notes, time.time()), type=kind).events  # type: ignore[no-any-return]


def told(most: int = 1000) -> ToldBlocks:
    return ToldBlocks(4, 2, most, lambda: None)


@pytest.mark.parametrize("layout", ["map", "array"])
def test_events_say_what_came_and_went(layout: str) -> None:
    blocks = told()
    first = node_of(None, (1, 2, 3, 4))
    second = node_of(first, (0, 23, 24, 65536))
    other = node_of(None, (1, 2, 3, 4), owner=("", "another"))
    blocks.stored(first, 0)
    blocks.stored(second, 0)
    blocks.stored(node_of(second, (5, 6)), 0)  # no whole block
    blocks.stored(other, 0)  # the same by content
    blocks.stored(second, 1)
    blocks.stored(second, 0, below=True)
    blocks.stored(second, 2, below=True)  # a recurrent state
    blocks.removed(first, 0)  # another has it still
    blocks.removed(second, 0)
    cleared, stored, sliding, below, removed = written(blocks, layout=layout)
    assert type(cleared).__name__.endswith("AllBlocksCleared")
    assert stored.block_hashes == [0x1A021E0B2E028EF071CB & 2**64 - 1, 0xB83DEF824256AE9FA8E5E & 2**64 - 1]
    assert (stored.parent_block_hash, stored.token_ids) == (None, [1, 2, 3, 4, 0, 23, 24, 65536])
    assert (stored.block_size, stored.lora_id, stored.medium) == (4, None, "GPU")
    assert (sliding.block_hashes, sliding.parent_block_hash) == (stored.block_hashes[1:], stored.block_hashes[0])
    assert (below.medium, below.block_hashes) == ("DISK", stored.block_hashes[1:])
    assert (removed.block_hashes, removed.medium) == (stored.block_hashes[1:], "GPU")
    if layout == "map":
        assert (stored.group_idx, stored.kv_cache_spec_kind, stored.extra_keys) == (0, "full_attention", None)
        assert (sliding.group_idx, sliding.kv_cache_spec_kind, sliding.kv_cache_spec_sliding_window) == (
            1,
            "sliding_window",
            6,
        )
    blocks.removed(other, 0)
    assert written(blocks, layout=layout)[0].block_hashes == stored.block_hashes[:1]


def test_the_hash_covers_adapters_media_and_salts() -> None:
    blocks = told()
    hasher = BlockHasher("sha256_cbor", "0")

    def stored(node: Node) -> BlockStored:
        blocks.notes.clear()
        blocks.stored(node, 0)
        return written(blocks, block_hashes="bytes")[0]  # type: ignore[no-any-return]

    def expected(tokens: Sequence[int], extra: tuple[Any, ...] | None, before: bytes = b"") -> bytes:
        return hasher.hash(before, tokens, extra)

    salted = node_of(None, (1, 2, 3, 4), owner=("tenant-a", "key"))
    event = stored(salted)
    assert event.block_hashes == [expected((1, 2, 3, 4), ("tenant-a",))]
    assert event.extra_keys == [("tenant-a",)]
    behind = stored(node_of(salted, (5, 6, 7, 8)))  # a salt is in the first block's hash alone
    assert behind.block_hashes == [expected((5, 6, 7, 8), None, event.block_hashes[0])]  # type: ignore[arg-type]

    use = AdapterUse("d1gest", "/adapter", name="my-adapter")
    request = EngineRequest("a", (1,), SamplingParams(max_tokens=1), adapters=(use,))
    blocks.begins(TokenSequence(request, 0, 0, Namespace("d1gest*1.0"), [1]))
    event = stored(node_of(None, (1, 2, 3, 4), space="d1gest*1.0"))
    assert (event.lora_name, event.extra_keys) == ("my-adapter", [("my-adapter",)])
    assert event.block_hashes == [expected((1, 2, 3, 4), ("my-adapter",))]

    key = (9, media_key("pic", 0), media_key("pic", 1), media_key("pic", 2))
    picture = node_of(None, key)
    assert stored(picture).block_hashes == [expected((9, 0, 0, 0), (("pic", 1),))]
    assert stored(node_of(picture, (media_key("pic", 3), 7, 7, 7))).extra_keys == [(["pic", -3],)]

    root = Node(None, "", (), 2)  # a shared prompt, which a salted chat goes on from
    public = Node(root, (1, 2, 3, 4), (1, 2, 3, 4), 2)
    portal = Node(public, Namespace("", ("s", "")).portal, (), 2)
    assert stored(public).block_hashes == [expected((1, 2, 3, 4), None)]
    event = stored(Node(portal, (5, 6, 7, 8), (5, 6, 7, 8), 2))
    assert event.parent_block_hash == expected((1, 2, 3, 4), ("s",))
    assert stored(Node(public, (5, 6, 7, 8), (5, 6, 7, 8), 2)).parent_block_hash == expected((1, 2, 3, 4), None)


def test_what_is_not_taken_is_bounded_and_forgotten() -> None:
    blocks = told(most=8)
    nodes = [node_of(None, (n, n, n, n)) for n in range(20)]
    for node in nodes:
        blocks.stored(node, 0)
    assert (len(blocks.notes), blocks.lost) == (8, 13)
    assert dict(blocks.figures()["kv_events"]) == {"published": 0, "dropped": 13}
    blocks.cleared()  # nothing was: all of them are in use
    assert len(blocks.notes) == 8
    for node in nodes:
        blocks.removed(node, 0)
        node.told = None
    blocks.cleared()
    assert [note.told for note in blocks.notes] == [None]
    del nodes, node
    assert not blocks._known


def test_batches_are_numbered_and_can_be_had_again(tmp_path: Path) -> None:
    asked = KVEvents(
        f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/again", buffer_steps=3, topic="kv", block_hashes="int"
    )
    publisher = EventPublisher(asked, EventWriter(asked, BlockHasher("sha256_cbor", "0"), (FULL,), "CPU"))
    with pytest.raises(ConfigError, match="endpoints of its own"):
        EventPublisher(KVEvents("tcp://*:*", "ipc:///no/such/folder/x"), EventWriter(asked, None, (), ""))  # type: ignore[arg-type]
    blocks = ToldBlocks(4, 1, 1000, publisher.wake)
    reader = Subscriber(*publisher.endpoints)
    publisher.start(blocks)
    try:
        reader.replayed(0)  # from here on it is connected
        seen: dict[int, bytes] = {}
        for n in range(6):
            blocks.stored(node_of(None, (n, n, n, n)), 0)
            want = blocks.published + 1
            while blocks.published < want and not seen.get(n + 1):
                if reader.socket.poll(50):
                    topic, number, payload = reader.socket.recv_multipart()
                    assert topic == b"kv"
                    seen[int.from_bytes(number, "big")] = payload
        kept = reader.replayed(0)
        assert len(kept) == 3 and [number for number, _ in kept] == sorted(number for number, _ in kept)
        assert all(seen[number] == payload for number, payload in kept if number in seen)
        assert reader.replayed(kept[-1][0]) == kept[-1:]
        assert reader.replayed(2**63) == []
        reader.again.send_multipart((b"", b"short"))  # is no question
        assert reader.replayed(kept[0][0]) == kept
    finally:
        publisher.close()
        reader.close()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ('{"enable_kv_cache_events": 1}', "true or false"),
        ('{"publisher": "kafka"}', "zmq, null"),
        ('{"endpoint": "udp://x:1"}', "tcp://HOST:PORT"),
        ('{"endpoint": "tcp://*:99999"}', "tcp://HOST:PORT"),
        ('{"endpoints": "tcp://*:1"}', "there are: enable_kv_cache_events"),
        ('{"hwm": 0}', "from 1 to"),
        ('{"layout": "json"}', "map, array"),
    ],
)
def test_what_cannot_be_meant_is_refused(given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        kv_events(given)
    assert (
        kv_events(None) is kv_events('{"enable_kv_cache_events": false, "publisher": "zmq"}') is kv_events("{}") is None
    )
    assert kv_events('{"publisher": "zmq"}') == kv_events('{"enable_kv_cache_events": true}') == KVEvents()  # SGLang's


def in_tree(engine: Engine) -> set[tuple[str, tuple[int, ...]]]:
    """Medium and path in tokens of every block that can be found."""
    tree, size = engine.scheduler.cache.tree, engine.scheduler.cache.block_size
    found = set()
    for root in tree._roots.values():
        for node in tree._walk(root):
            path, up = list[int](), node
            while up is not None:
                path[:0] = up.key
                up = up.parent  # type: ignore[assignment]
            if len(node.key) == size and node.blocks[0]:
                found.add(("GPU", tuple(path)))
            if node.below:
                found.add(("DISK", tuple(path)))
    return found


@pytest.mark.skipif(not native.available(), reason="the native library is not built")
def test_a_subscriber_knows_what_an_engine_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    model = tmp_path / "model"
    model.mkdir()
    tiny.save("qwen3", model)
    asked = {
        "enable_kv_cache_events": True, "topic": "kv",
        "endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/again",
    }  # fmt: skip
    given = EngineOptions(
        model=str(model), device="cpu", pack_cache="off", threads=1, max_num_seqs=2, kv_blocks=14, max_model_len=96,
        max_num_batched_tokens=32, block_size=8, kv_disk=1 << 20, kv_disk_path=str(tmp_path / "kv"),
        kv_events_config=asked,
    )  # fmt: skip
    hasher = BlockHasher("sha256_cbor", "0")
    last: Any = None
    for life in range(2):  # the second finds what the first left on disk
        engine, _ = build_engine(given)
        reader = Subscriber(asked["endpoint"], asked["replay_endpoint"])  # type: ignore[arg-type]
        try:
            for number in range(4):
                prompt = (*tiny.prompt(20, number % 3), *tiny.prompt(21, 9))
                engine.add(EngineRequest(f"{number}", prompt, SamplingParams(max_tokens=4, ignore_eos=True)))
                while engine.has_work:
                    engine.step()
                while engine.prepare() and engine.scheduler.cache.transfers.owed:
                    pass
            expected = in_tree(engine)
            names = set()
            for medium, path in expected:
                name = b""
                for start in range(0, len(path), 8):
                    name = hasher.hash(name, path[start : start + 8], None)
                names.add((medium, 0, name))
            assert {medium for medium, _, _ in names} == {"GPU", "DISK"}
            until = time.monotonic() + DEADLINE_MS / 1000
            while reader.blocks != names:
                assert time.monotonic() < until, "what is told is not what there is"
                reader.blocks.clear()
                for _, payload in reader.replayed(0):
                    reader.take(payload)
            stats = engine.stats()
            assert dict(stats.kv_events)["published"] > 0 == dict(stats.kv_events)["dropped"]
            if life:  # a flush leaves nothing
                engine.scheduler.cache.clear()
                while reader.blocks or not isinstance(last, AllBlocksCleared):
                    assert time.monotonic() < until
                    for _, payload in reader.replayed(0):
                        last = reader.take(payload)[-1]
        finally:
            engine.close()
            reader.close()
