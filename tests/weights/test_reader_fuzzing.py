"""Damaged and hostile model files: a CheckpointError or a sound checkpoint, never anything else, in bounded memory."""

from __future__ import annotations

import io
import itertools
import json
import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.config.errors import CheckpointError
from penstock.quant.formats import FORMATS, decode_to_float32
from penstock.weights.facts import model_facts
from penstock.weights.open import open_checkpoint

WriteGguf = Callable[..., Path]
Metadata = Callable[..., dict[str, Any]]
HOSTILE_U64 = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**56, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
MOST_GROWTH = 96 * 2**20


def check(path: Path) -> bool:
    """Opens and reads everything; True if it was accepted. Every accepted tensor is whole and decodable."""
    try:
        checkpoint = open_checkpoint(path)
        model_facts(checkpoint)
    except CheckpointError:
        return False
    for name, info in itertools.islice(checkpoint.tensors.items(), 500):
        try:
            stored = checkpoint.read(name)
        except CheckpointError:
            continue
        assert stored.data.size == stored.info.nbytes == info.nbytes
        assert all(size >= 0 for size in info.shape)
        if info.format in FORMATS and info.nbytes < 2**16:
            assert decode_to_float32(info.format, stored.data).size == int(np.prod(info.shape))
    return True


@pytest.fixture(scope="module")
def gguf_seeds(
    tmp_path_factory: pytest.TempPathFactory,
    write_gguf: WriteGguf,
    base_metadata: Metadata,
    dense_tensors: dict[str, np.ndarray],
) -> list[bytes]:
    """A Llama with experts and a GPT-OSS with MXFP4 experts and tokenizer metadata."""
    path = tmp_path_factory.mktemp("seed") / "seed.gguf"
    rng = np.random.default_rng(0)
    embedding = dense_tensors["model.embed_tokens.weight"]
    tensors = {"token_embd.weight": embedding, "output_norm.weight": embedding[0], "rope_freqs.weight": np.ones(2)}
    tensors |= {"blk.0.attn_q.weight": embedding[:16], "blk.0.attn_k.weight": embedding[:8]}
    stacks = {f"blk.0.ffn_{which}_exps.weight": rng.normal(size=(2, 32, 32)) for which in ("gate", "up", "down")}
    tokens = {"tokenizer.ggml.tokens": ["a", "<0x-1>", "ä", ""], "tokenizer.ggml.scores": [0.5, 1.0, 2.0, 3.0]}
    more = {"expert_count": 2, "expert_used_count": 1, "attention.sliding_window": 8, "expert_feed_forward_length": 32}
    seeds = []
    for arch, kind in (("llama", "Q8_0"), ("gpt-oss", "MXFP4"), ("gemma3", "F32")):
        metadata = base_metadata(arch, **more) | tokens | {"tokenizer.ggml.eos_token_id": 2, "split.count": 1}
        metadata |= {"split.no": 0, "tokenizer.chat_template": "{{ messages }}", "general.alignment": 32}
        seeds.append(write_gguf(path, arch, metadata, tensors | stacks, dict.fromkeys(stacks, kind)).read_bytes())
    return seeds


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch")


def flip(data: bytearray, where: float, value: int) -> None:
    if data:
        data[int(where * len(data))] ^= 1 << value % 8


def number(data: bytearray, where: float, value: int) -> None:
    at = int(where * max(1, len(data) - 8))
    data[at : at + 8] = struct.pack("<Q", HOSTILE_U64[value % len(HOSTILE_U64)])


def small_number(data: bytearray, where: float, value: int) -> None:
    at = int(where * max(1, len(data) - 4))
    data[at : at + 4] = struct.pack("<I", value % 64)


def truncate(data: bytearray, where: float, value: int) -> None:
    del data[int(where * len(data)) :]


def repeat(data: bytearray, where: float, value: int) -> None:
    at = int(where * len(data))
    data[at:at] = data[at : at + value % 300]


def remove(data: bytearray, where: float, value: int) -> None:
    at = int(where * len(data))
    del data[at : at + value % 40]


def text(data: bytearray, where: float, value: int) -> None:
    hostile = (b"\xff\xfe\x80", b"\0\0\0", b"../../x", b'"}]', b"\xed\xa0\x80", b"<0x-1>", b"-1", b"1e999", b"[[[[")
    at, new = int(where * len(data)), hostile[value % len(hostile)]
    data[at : at + len(new)] = new


MUTATIONS = (flip, number, small_number, truncate, repeat, remove, text)
changes = st.lists(
    st.tuples(st.sampled_from(MUTATIONS), st.floats(0, 1, exclude_max=True), st.integers(0, 2**16)),
    min_size=1,
    max_size=4,
)


def mutated(seed: bytes, steps: list[tuple[Callable[[bytearray, float, int], None], float, int]]) -> bytes:
    """The header is where damage matters, so three in four positions are mapped into the first part of the file."""
    data = bytearray(seed)
    for mutation, where, value in steps:
        mutation(data, where / 4 if value % 4 else where, value)
    return bytes(data)


@pytest.fixture
def bounded_memory() -> Iterator[None]:
    process = psutil.Process(os.getpid())
    before = process.memory_info().rss
    yield
    assert process.memory_info().rss - before < MOST_GROWTH


quick = settings(max_examples=1200, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.usefixtures("bounded_memory")
@quick
@given(which=st.integers(0, 2), steps=changes)
def test_mutated_gguf(
    gguf_seeds: list[bytes], tmp_path_factory: pytest.TempPathFactory, which: int, steps: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.gguf"
    path.write_bytes(mutated(gguf_seeds[which], steps))
    check(path)


@pytest.mark.usefixtures("bounded_memory")
def test_every_header_byte_of_a_gguf_damaged(gguf_seeds: list[bytes], tmp_path: Path) -> None:
    seed, path = gguf_seeds[0], tmp_path / "fuzz.gguf"
    path.write_bytes(seed)
    assert check(path)
    header = seed.index(np.float32(1).tobytes() * 2)  # the data begins with numbers, rope_freqs are two ones
    rng = random.Random(0)
    accepted = 0
    for at in range(min(header, 2500)):
        data = bytearray(seed)
        data[at] = rng.choice((0, 0xFF, 0x7F, 0x80, data[at] ^ 1, data[at] + 1 & 0xFF))
        path.write_bytes(data)
        accepted += check(path)
    assert 100 < accepted < 2400


@pytest.mark.usefixtures("bounded_memory")
@pytest.mark.parametrize("which", [0, 1])
def test_every_truncation_of_a_gguf_is_refused(gguf_seeds: list[bytes], tmp_path: Path, which: int) -> None:
    seed, path = gguf_seeds[which], tmp_path / "fuzz.gguf"
    whole = len(seed) - 31  # the last tensor may be followed by padding
    for length in range(0, whole, 1 + whole // 700):
        path.write_bytes(seed[:length])
        assert not check(path), length


@pytest.fixture(scope="module")
def safetensors_seed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    from safetensors.numpy import save_file

    folder = tmp_path_factory.mktemp("folder")
    config = {"model_type": "llama", "hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 32}))
    templates = [{"name": "default", "template": "{{ x }}"}, {"name": "tool_use", "template": "{{ y }}"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    arrays = {"a": np.arange(6, dtype=np.float32), "b": np.zeros((2, 2), np.float16), "c": np.zeros(3, np.int8)}
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, (folder / "model.safetensors").read_bytes()


@pytest.mark.usefixtures("bounded_memory")
@quick
@given(steps=changes, in_header=st.booleans())
def test_mutated_safetensors(safetensors_seed: tuple[Path, bytes], steps: Any, in_header: bool) -> None:
    folder, seed = safetensors_seed
    if in_header:  # damage within the JSON, with a length that fits it, gets past the first check
        size = struct.unpack("<Q", seed[:8])[0]
        header = mutated(seed[8 : 8 + size], steps)
        data = struct.pack("<Q", len(header)) + header + seed[8 + size :]
    else:
        data = mutated(seed, steps)
    (folder / "model.safetensors").write_bytes(data)
    check(folder)


@pytest.mark.usefixtures("bounded_memory")
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=changes, name=st.sampled_from(["config.json", "tokenizer_config.json"]))
def test_mutated_json_files(safetensors_seed: tuple[Path, bytes], steps: Any, name: str) -> None:
    folder, seed = safetensors_seed
    (folder / "model.safetensors").write_bytes(seed)
    original = (folder / name).read_bytes()
    try:
        (folder / name).write_bytes(mutated(original, steps))
        check(folder)
    finally:
        (folder / name).write_bytes(original)


@pytest.mark.parametrize("template", [3, None, [], [[]], [{"name": [], "template": "x"}], {"default": "x"}, [{"x": 1}]])
def test_chat_templates_of_the_wrong_type_are_no_templates(
    safetensors_seed: tuple[Path, bytes], tmp_path: Path, template: Any
) -> None:
    folder, seed = safetensors_seed
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(seed)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert "chat_template" not in open_checkpoint(tmp_path).tokenizer_config


# -- named cases: published flaws of other readers, and limits one by one -------------------------------------------


def string(value: bytes | str) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


def tensor(name: str, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    packed = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return string(name) + packed + struct.pack("<IQ", kind, offset)


def container(
    keys: tuple[bytes, ...] = (), tensors: tuple[bytes, ...] = (), data: bytes = b"", **header: int | bytes
) -> bytes:
    out = io.BytesIO()
    out.write(header.get("magic", b"GGUF"))  # type: ignore[arg-type]
    version, tensor_count = header.get("version", 3), header.get("tensor_count", len(tensors))
    out.write(struct.pack("<IQQ", version, tensor_count, header.get("key_count", len(keys))))
    out.write(b"".join(keys) + b"".join(tensors))
    out.write(bytes(-out.tell() % 32) + data)
    return out.getvalue()


ARRAY, U8, U32, STRING = 9, 0, 4, 8
NAMED = {
    "tensor larger than the file (CVE-2026-7482)": (
        container(tensors=(tensor("w", (1000,)),), data=bytes(64)),
        "tensor 'w' lies at bytes 64 to 4064, but the file ends at 128",
    ),
    "offset beyond the file": (
        container(tensors=(tensor("w", (1,), offset=2**62),), data=bytes(64)),
        "but the file ends at 128",
    ),
    "offset near 2^64": (
        container(tensors=(tensor("w", (1,), offset=2**64 - 32),), data=bytes(64)),
        "but the file ends at 128",
    ),
    "key count beyond the file (CVE-2024-21802)": (
        container(key_count=65_000),
        "the type of '' needs 4 bytes at offset 32",
    ),
    "huge key count": (container(key_count=2**64 - 1), "claims 18446744073709551615 metadata keys; at most 65536"),
    "huge tensor count": (container(tensor_count=2**63), "claims 9223372036854775808 tensors"),
    "string longer than the file": (
        container(keys=(string("k") + struct.pack("<IQ", STRING, 1000),)),
        "the value of 'k' needs 1000 bytes",
    ),
    "string length with the sign bit (CVE-2025-49847)": (
        container(keys=(key("k", ARRAY, struct.pack("<IQ", STRING, 1) + struct.pack("<Q", 2**64 - 1)),)),
        "item 0 of the value of 'k' claims 18446744073709551615 bytes",
    ),
    "string length bomb": (
        container(keys=(string("k") + struct.pack("<IQ", STRING, 2**63),)),
        "claims 9223372036854775808 bytes; at most",
    ),
    "array length bomb": (
        container(keys=(key("k", ARRAY, struct.pack("<IQ", U32, 2**62)),)),
        "claims 4611686018427387904 items",
    ),
    "array past the end": (
        container(keys=(key("k", ARRAY, struct.pack("<IQ", U32, 1_000_000)),)),
        "the value of 'k' needs 4000000 bytes",
    ),
    "string array past the end": (
        container(keys=(key("k", ARRAY, struct.pack("<IQ", STRING, 50)),)),
        "the value of 'k'",
    ),
    "arrays nested too deeply": (
        container(keys=(key("k", ARRAY, struct.pack("<IQ", ARRAY, 1) * 50),)),
        "nests arrays more than 4 deep",
    ),
    "unknown value type": (container(keys=(key("k", 13, bytes(8)),)), "unknown value type 13; known are 0 to 12"),
    "a key twice": (container(keys=(key("k", U8, b"1"), key("k", U8, b"2"))), "the metadata key 'k' appears twice"),
    "a key that is not UTF-8": (container(keys=(string(b"\xff\xfe") + bytes(5),)), "metadata key 0 is not UTF-8"),
    "product overflow (CVE-2025-53630)": (
        container(tensors=(tensor("w", (2**32, 2**32, 2)),), data=bytes(64)),
        "36893488147419103232 elements",
    ),
    "product that wraps to a small number (CVE-2026-27940)": (
        container(tensors=(tensor("w", (2**33, 2**31 + 1)),), data=bytes(64)),
        "elements; 1 to 2^63 - 1 are allowed",
    ),
    "dimensions that a 32-bit kernel would truncate (CVE-2026-53923)": (
        container(tensors=(tensor("w", (2**32 + 32,), kind=2),), data=bytes(64)),
        "but the file ends at 128",
    ),
    "zero dimension": (container(tensors=(tensor("w", (4, 0)),)), "has 0 elements"),
    "no dimensions": (container(tensors=(tensor("w", ()),)), "has 0 dimensions"),
    "too many dimensions": (container(tensors=(tensor("w", (1,) * 9),)), "has 9 dimensions; 1 to 8"),
    "dimension count bomb": (
        container(tensors=(string("w") + struct.pack("<I", 2**32 - 1),)),
        "has 4294967295 dimensions",
    ),
    "unknown ggml type": (container(tensors=(tensor("w", (32,), kind=99),)), "the ggml type 99, which is not known"),
    "removed ggml type": (container(tensors=(tensor("w", (32,), kind=4),)), "the ggml type 4, which is not known"),
    "row of partial blocks": (
        container(tensors=(tensor("w", (31, 32), kind=2),), data=bytes(640)),
        "rows of 31 values, no multiple of the q4_0 block of 32",
    ),
    "overlapping tensors": (
        container(tensors=(tensor("v", (16,)), tensor("w", (8,), offset=32)), data=bytes(64)),
        "tensors 'v' and 'w' overlap: the first has 64 bytes from offset 0, the second starts at 32",
    ),
    "a tensor twice": (
        container(tensors=(tensor("w", (8,)), tensor("w", (8,), offset=32)), data=bytes(64)),
        "tensor 'w' appears twice",
    ),
    "misaligned tensor": (
        container(tensors=(tensor("w", (8,), offset=4),), data=bytes(64)),
        "offset 4, no multiple of the alignment 32",
    ),
    "alignment that is no power of two": (
        container(keys=(key("general.alignment", U32, struct.pack("<I", 48)),)),
        "general.alignment is 48; a power of two",
    ),
    "alignment 0": (container(keys=(key("general.alignment", U32, bytes(4)),)), "general.alignment is 0"),
    "alignment of the wrong type": (container(keys=(key("general.alignment", STRING, string("32")),)), "is 32;"),
    "big-endian file": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is big-endian; convert the model again"),
    "version 1": (container(version=1), "is GGUF version 1; versions 2 and 3 are read"),
    "version 4": (container(version=4), "is GGUF version 4"),
    "another kind of file": (container(magic=b"PK\x03\x04"), "starts with b'PK\\x03\\x04'"),
    "an empty header": (b"GG", "the magic number needs 4 bytes"),
    "no architecture": (container(), "general.architecture is 'None'"),
    "hostile architecture name": (
        container(keys=(key("general.architecture", STRING, string("\x1b[2J" + "x" * 500)),)),
        "general.architecture is '\\x1b[2Jxxx",
    ),
}


@pytest.mark.usefixtures("bounded_memory")
@pytest.mark.parametrize("case", NAMED)
def test_named_cases(tmp_path: Path, case: str) -> None:
    data, message = NAMED[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.usefixtures("bounded_memory")
def test_many_claimed_experts_cost_no_memory(
    tmp_path: Path, write_gguf: WriteGguf, base_metadata: Metadata, dense_tensors: dict[str, np.ndarray]
) -> None:
    tensors = {"token_embd.weight": dense_tensors["model.embed_tokens.weight"]}
    tensors |= {f"blk.{layer}.ffn_up_exps.weight": np.zeros((4096, 1, 1)) for layer in range(100)}
    metadata = base_metadata("qwen3moe", expert_count=4096, expert_used_count=1, expert_feed_forward_length=1)
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", metadata, tensors)
    with pytest.raises(CheckpointError, match="more than 262144 tensors"):
        open_checkpoint(path)
