"""The file of packed weights: written once, mapped afterwards, replaced when anything changed, never in the way."""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import multiprocessing
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.config.arithmetic import ARITHMETIC_VERSION
from penstock.config.options import EngineOptions
from penstock.engine.build import build_engine
from penstock.engine.loop import Engine
from penstock.kernels.api import resolve_kernels
from penstock.kernels.cpu import native
from penstock.kernels.cpu.ops import pack_linear
from penstock.kernels.cpu.packed import PACKING
from penstock.kernels.plain import plain_matrix
from penstock.kernels.registry import KernelContext
from penstock.models.registry import Model, build_model
from penstock.quant.tensor import StoredTensor
from penstock.startup.engine_spec import make_engine_spec, packed_file
from penstock.weights import pack_cache
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.loader import load_weights
from penstock.weights.open import open_checkpoint
from penstock.weights.pack_cache import PackCache, PackCacheError, PackedFile, PackWriter, file_name, fingerprint
from penstock.weights.weight_plan import LoadTarget, plan_weights
from tests.models import tiny
from tests.models.harness import Harness

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")
TOKENS = tiny.prompt(19)
Load = Callable[[], "Loaded"]


@dataclass
class Counting:
    """A checkpoint that notes what is read of it."""

    inner: Checkpoint
    read_names: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def read(self, name: str) -> StoredTensor:
        self.read_names.append(name)
        return self.inner.read(name)


@dataclass(frozen=True)
class Loaded:
    model: Model
    describe: str
    matrices_read: tuple[str, ...]
    logits: Tensor


def load(folder: Path, path: Path) -> Loaded:
    checkpoint = Counting(open_checkpoint(folder))
    model = build_model(checkpoint.config, resolve_kernels(KernelContext("cpu", "float32")), dtype=torch.float32)
    cache = PackedFile(path, fingerprint(checkpoint.inner.path, PACKING))
    plans = plan_weights(model, checkpoint.inner, LoadTarget(torch.float32))
    load_weights(model, checkpoint, plans, cache=cache)  # type: ignore[arg-type]
    matrices = tuple(n for n in checkpoint.read_names if len(checkpoint.tensors[n].shape) > 1)
    return Loaded(model, cache.describe, matrices, Harness(model).step({"row": TOKENS})["row"])


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.save("qwen3-moe", folder)
    return folder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "packed" / "model.packed"


@pytest.fixture
def again(model_folder: Path, path: Path) -> Load:
    """Loads once more; what it gives equals the first load to the bit."""
    first = load(model_folder, path)
    assert path.exists()

    def once_more() -> Loaded:
        found = load(model_folder, path)
        assert torch.equal(found.logits, first.logits)
        return found

    return once_more


def is_whole(path: Path, folder: Path) -> bool:
    """Whether the next load would map the file."""
    try:
        PackCache(path, fingerprint(folder, PACKING))
    except PackCacheError:
        return False
    return True


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss", "gemma3"])
def test_the_first_load_writes_and_the_second_reads_no_matrix(family: str, tmp_path: Path) -> None:
    tiny.save(family, tmp_path / "model")
    path = tmp_path / "deep" / "folder" / "x.packed"
    first, second = (load(tmp_path / "model", path) for _ in range(2))
    assert first.describe == f"packed and written to {path}: there is none yet"
    assert second.describe == f"mapped from {path}"
    assert len(first.matrices_read) > 10
    assert not [name for name in second.matrices_read if "sinks" not in name and "bias" not in name]
    assert torch.equal(first.logits, second.logits)
    assert files(path.parent) == [path.name, f"{path.name}.checked"]
    for loaded in (first, second):  # memory holds one copy: the file's pages
        packed = [weight.tensor for weight in loaded.model.weights() if weight.pack is not None]
        assert packed
        assert not any(part.huge_pages for weight in packed for part in weight.parts)


@pytest.mark.parametrize("family", ["deepseek-v2", "mamba", "jamba"])
def test_weights_made_of_one_tensor_have_names_of_their_own(family: str, tmp_path: Path) -> None:
    tiny.save(family, tmp_path / "model")
    path = tmp_path / "x.packed"
    first, second = (load(tmp_path / "model", path) for _ in range(2))
    assert second.describe == f"mapped from {path}"
    matrices = [
        [unpacked(part) for weight in loaded.model.weights() if weight.pack is not None for part in weight.tensor.parts]
        for loaded in (first, second)
    ]
    truth = [
        unpacked(part)
        for weight in alone(tmp_path / "model").weights()
        if weight.pack is not None
        for part in weight.tensor.parts
    ]
    for found in matrices:
        assert all(map(np.array_equal, found, truth))


def unpacked(matrix: Any) -> npt.NDArray[np.float32]:
    out = np.empty((matrix.experts * matrix.rows, matrix.cols), np.float32)
    matrix.unpack(out)
    return out


def alone(folder: Path) -> Model:
    """The model, its weights packed and kept nowhere."""
    checkpoint = open_checkpoint(folder)
    model = build_model(checkpoint.config, resolve_kernels(KernelContext("cpu", "float32")), dtype=torch.float32)
    load_weights(model, checkpoint, plan_weights(model, checkpoint, LoadTarget(torch.float32)))
    return model


def test_a_weight_lies_in_the_file_as_soon_as_it_is_written(path: Path) -> None:
    packed = pack_linear((plain_matrix(torch.randn(32, 64)),))
    writer = PackWriter(path, "identity")
    writer.put("a", packed.matrices())
    there = writer.mapped("a")
    writer.discard()  # the disk was full, say: what was mapped stays
    assert there is not None and there is not packed
    assert np.array_equal(unpacked(there.parts[0]), unpacked(packed.parts[0]))
    assert files(path.parent) == []


def test_maps_leave_files_to_open(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_cache, "_most_maps", lambda: 1)
    packed = pack_linear((plain_matrix(torch.randn(32, 64)), plain_matrix(torch.randn(16, 64))))
    writer = PackWriter(path, "identity")
    for name in ("a", "b"):
        writer.put(name, packed.matrices())
    first = writer.mapped("a")  # of two matrices, in one map
    assert first is not None
    assert [
        np.array_equal(unpacked(one), unpacked(two)) for one, two in zip(first.parts, packed.parts, strict=True)
    ] == [True, True]
    assert writer.mapped("b") is None
    writer.discard()


def test_a_changed_model_replaces_its_file(tmp_path: Path) -> None:
    folder, path = tmp_path / "model", tmp_path / "model.packed"
    tiny.save("llama", folder)
    before = load(folder, path)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = 2 * tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    after = load(folder, path)
    assert "have changed since it was written" in after.describe
    assert torch.equal(after.logits, 2 * before.logits)
    assert load(folder, path).describe == f"mapped from {path}"
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    assert "have changed" in load(folder, path).describe
    assert [entry.name for entry in tmp_path.glob("*.packed")] == [path.name]


def test_another_arithmetic_is_another_fingerprint(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(model_folder, PACKING)
    monkeypatch.setattr(pack_cache, "ARITHMETIC_VERSION", ARITHMETIC_VERSION + 1)
    assert fingerprint(model_folder, PACKING) != before


def test_only_a_models_own_files_make_its_fingerprint(tmp_path: Path) -> None:
    for name in ("a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"x")
    one, split = tmp_path / "b.gguf", tmp_path / "a-00001-of-00002.gguf"
    prints = [fingerprint(at, "1") for at in (one, split)]
    (tmp_path / "c.gguf").write_bytes(b"another model")
    assert prints == [fingerprint(at, "1") for at in (one, split)]
    (tmp_path / "a-00002-of-00002.gguf").write_bytes(b"longer")
    assert fingerprint(split, "1") != prints[1]
    assert fingerprint(one, "1") == prints[0] != fingerprint(one, "2")
    assert file_name(one, "b") != file_name(split, "b")


def files(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def cut(data: bytearray) -> None:
    del data[-100:]


def cut_to_nothing(data: bytearray) -> None:
    data.clear()


def cut_to_less_than_a_page(data: bytearray) -> None:
    del data[50:]


def flip_in_index(data: bytearray) -> None:
    data[-20] ^= 1


def other_magic(data: bytearray) -> None:
    data[:8] = b"PNSTPK77"


def flip_in_data(data: bytearray) -> None:
    data[pack_cache.PAGE + 5] ^= 16


DAMAGES = {
    cut: "bytes of",
    cut_to_nothing: "it cannot be read (cannot mmap an empty file)",
    cut_to_less_than_a_page: "it is truncated to 50 bytes",
    flip_in_index: "its index is damaged",
    other_magic: "it is of another version",
    flip_in_data: "the data of model.",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_file_is_written_anew(
    damage: Callable[[bytearray], None], again: Load, path: Path, model_folder: Path
) -> None:
    data = bytearray(path.read_bytes())
    damage(data)
    path.write_bytes(data)
    found = again()
    assert found.describe.startswith(f"packed and written to {path}: ")
    assert DAMAGES[damage] in found.describe
    assert found.matrices_read
    assert again().describe == f"mapped from {path}"


def test_data_are_checked_once_in_every_run_of_the_system(
    again: Load, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = []
    real = PackCache._check_data
    monkeypatch.setattr(PackCache, "_check_data", lambda self, weights: (checks.append(1), real(self, weights)))
    again()
    assert not checks
    monkeypatch.setattr(pack_cache, "_boot_id", lambda: "9" * 36)
    for _ in range(3):
        assert again().describe == f"mapped from {path}"
    assert len(checks) == 1
    monkeypatch.setattr(pack_cache, "_boot_id", lambda: "")  # a system that does not tell
    again()
    again()
    assert len(checks) == 3


def write_in_place(path: Path, data: bytes, at: int) -> None:
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), data, at)


def write_mapped(path: Path, data: bytes, at: int) -> None:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[at : at + len(data)] = data


@pytest.mark.parametrize("overwrite", [write_in_place, write_mapped], ids=lambda overwrite: overwrite.__name__)
def test_what_is_overwritten_between_two_starts_is_found(
    overwrite: Callable[[Path, bytes, int], None], again: Load, path: Path
) -> None:
    """Whatever time of change the file is given afterwards."""
    assert again().describe == f"mapped from {path}"
    before = path.stat()
    overwrite(path, b"\x55" * 64, pack_cache.PAGE + 128)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    found = again()
    assert "the data of model." in found.describe and found.matrices_read
    assert again().describe == f"mapped from {path}"


def test_a_file_that_was_only_touched_is_checked_and_mapped(again: Load, path: Path) -> None:
    os.utime(path)
    assert again().describe == f"mapped from {path}"


def rewrite_headers(path: Path, change: Callable[[bytearray], None]) -> None:
    """Changes the header of one matrix of the last weights, with an index that is right about it."""
    data = path.read_bytes()
    magic, offset, _, _ = pack_cache._HEAD.unpack_from(data)
    index = json.loads(data[offset:])
    for parts in list(index["weights"].values())[-3:]:
        header = bytearray.fromhex(parts[0]["header"])
        change(header)
        parts[0]["header"] = header.hex()
    text = json.dumps(index).encode()
    head = pack_cache._HEAD.pack(magic, offset, len(text), hashlib.sha256(text).digest())
    path.write_bytes(head + data[len(head) : offset] + text)


def test_headers_of_another_version_are_not_used(again: Load, path: Path) -> None:
    rewrite_headers(path, lambda header: header.__setitem__(4, header[4] + 1))
    found = again()
    assert "its packing is of another version" in found.describe
    assert f"{path} was left" in found.describe
    assert "delete it" in found.describe
    assert found.matrices_read
    path.unlink()
    assert again().describe.endswith("there is none yet")


def test_a_file_that_lacks_a_weight_is_left(model_folder: Path, path: Path) -> None:
    writer = PackWriter(path, fingerprint(model_folder, PACKING))
    writer.finish()
    found = load(model_folder, path)
    assert "it lacks a weight of this model" in found.describe
    assert found.matrices_read


def test_a_folder_that_cannot_be_written_is_said(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    found = load(model_folder, tmp_path / "file" / "deep" / "model.packed")
    assert found.describe.startswith("packed, and not kept: ")
    assert "cannot be written (Not a directory)" in found.describe
    assert found.matrices_read


@pytest.mark.parametrize("room", [100, 20_000, -1], ids=["first matrix", "later matrix", "index"])
def test_a_full_disk_is_said_and_leaves_nothing(room: int, model_folder: Path, path: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    truth = load(model_folder, whole)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = pack_cache.PAGE + room if room > 0 else whole.stat().st_size - 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        found = load(model_folder, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert found.describe == f"packed, and not kept: {path} cannot be written (File too large)"
    assert torch.equal(found.logits, truth.logits)
    assert list(path.parent.iterdir()) == []


def test_a_disk_that_fills_while_the_file_is_completed(
    model_folder: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: PackWriter) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(PackWriter, "finish", full)
    found = load(model_folder, path)
    assert "No space left on device" in found.describe
    assert list(path.parent.iterdir()) == []


def _load_in_process(folder: Path, path: Path, start: Any, told: Any) -> None:
    start.wait()
    found = load(folder, path)
    told.put((found.describe, found.logits.numpy().tobytes()))


def test_two_processes_write_at_once(model_folder: Path, path: Path) -> None:
    context = multiprocessing.get_context("fork")
    start, told = context.Barrier(2), context.Queue()
    writers = [context.Process(target=_load_in_process, args=(model_folder, path, start, told)) for _ in range(2)]
    torch.set_num_threads(1)
    native.set_num_threads(1)
    for writer in writers:
        writer.start()
    results = [told.get(timeout=60) for _ in writers]
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    assert results[0][1] == results[1][1]
    for describe, _ in results:
        assert describe.startswith((f"packed and written to {path}", f"mapped from {path}"))
    assert files(path.parent) == [path.name, f"{path.name}.checked"]
    found = load(model_folder, path)
    assert found.describe == f"mapped from {path}"
    assert found.logits.numpy().tobytes() == results[0][1]


def test_a_file_removed_before_it_was_locked_is_made_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    create = pack_cache.tempfile.mkstemp  # type: ignore[attr-defined]

    def removed_once(**where: Any) -> tuple[int, str]:
        number, name = create(**where)
        if not made:
            Path(name).unlink()
        made.append(Path(name))
        return number, name

    monkeypatch.setattr(pack_cache.tempfile, "mkstemp", removed_once)  # type: ignore[attr-defined]
    PackWriter(path, "identity").finish()
    assert len(made) == 2
    assert files(path.parent) == [path.name, f"{path.name}.checked"]


def test_what_a_dead_writer_left_is_removed_and_a_living_one_is_let_be(path: Path) -> None:
    living = PackWriter(path, "first")
    other_model = path.with_name("other.packed.abc.partial")
    dead = path.with_name(f"{path.name}.abc.partial")
    for left in (other_model, dead):
        left.write_bytes(b"half")
    living.put("weight", [(b"h", memoryview(b"data"))])
    second = PackWriter(path, "second")
    assert not dead.exists()
    assert other_model.exists()
    second.finish()
    assert PackCache(path, "second").entries == {}
    living.finish()
    assert list(PackCache(path, "first").entries) == ["weight"]
    assert files(path.parent) == sorted((path.name, f"{path.name}.checked", other_model.name))


def generate(engine: Engine) -> list[Any]:
    from tests.engine.test_equality import SAMPLED, ask, finish

    engine.add(ask("it", tuple(TOKENS), how=SAMPLED))
    answer = finish(engine)["it"]
    return [answer.tokens, answer.logprobs]


def test_engines_keep_packed_weights_where_they_are_told(model_folder: Path, tmp_path: Path) -> None:
    base = EngineOptions(model=str(model_folder), threads=1, max_num_seqs=2, kv_blocks=50)
    answers, told = [], []
    for folder in ("off", "auto", str(tmp_path), str(tmp_path), "/proc/nowhere"):
        engine, info = build_engine(replace(base, pack_cache=folder))
        note = next(decision for decision in info.settings if decision.name == "packed weights")
        told.append((note.value, note.reason))
        answers.append(generate(engine))
        engine.close()
    assert all(answer == answers[0] for answer in answers)
    (written,) = tmp_path.glob("*.packed")
    assert told[0] == ("not kept", "switched off")
    assert told[1][0] == "not kept"
    assert "less than a moment" in told[1][1]
    assert told[2] == ("kept", f"packed and written to {written}: there is none yet")
    assert told[3] == ("kept", f"mapped from {written}")
    assert "/proc/nowhere" in told[4][1]


def test_without_room_nothing_is_written(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.startup.engine_spec.free_bytes", lambda folder: 1000)
    options = EngineOptions(model=str(model_folder), pack_cache=str(tmp_path / "there"))
    cache, why = packed_file(make_engine_spec(options))
    assert cache is None
    assert "only 1000 B are free" in why
