"""What is kept for faster starts is held to a size: the least recently used goes, never what is in use."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.config.options import EngineOptions
from penstock.engine.build import build_engine
from penstock.kernels.cpu import native
from penstock.weights.kept_files import in_use, kept_models, most_bytes, remove, trim
from penstock.weights.pack_cache import PackCache, PackWriter, file_name
from tests.models import tiny
from tests.weights.test_pack_cache import generate

SIZE = 100_000
native_only = pytest.mark.skipif(not native.available(), reason="the native library is not built")


def write(folder: Path, name: str, used: float, endings: tuple[str, ...] = (".packed", ".packed.start")) -> Path:
    """Files as starts write them, last used so many seconds after 1970; the path of the first."""
    model = folder / "models" / name
    place = folder / file_name(model, name)
    for ending in endings:
        path = place.with_name(place.name.removesuffix(".packed") + ending)
        writer = PackWriter(path, "same", str(model))
        writer.put("data", [(b"", memoryview(bytes(SIZE)))])
        writer.finish()
        for file in (path, path.with_name(f"{path.name}.checked")):
            os.utime(file, (used, used))
    return place


def names(folder: Path) -> list[str]:
    return [kept.name for kept in kept_models(folder)]


def test_the_least_recently_used_goes_first_with_all_that_is_its_own(tmp_path: Path) -> None:
    for name, used in (("old", 100), ("older.gguf", 50), ("new-q8_0", 300)):
        write(tmp_path, name, used, (".packed", ".packed.start", ".text"))
    (tmp_path / "notes.txt").write_text("a person's own")
    found = kept_models(tmp_path)
    assert [kept.name for kept in found] == ["older.gguf", "old", "new-q8_0"]
    assert [kept.used for kept in found] == [50, 100, 300]
    assert all(kept.bytes > 3 * SIZE and len(kept.files) == 6 for kept in found)
    assert found[0].model == str(tmp_path / "models" / "older.gguf")
    assert trim(tmp_path, sum(kept.bytes for kept in found)) == []
    assert [kept.name for kept in trim(tmp_path, 2 * found[0].bytes)] == ["older.gguf"]
    assert names(tmp_path) == ["old", "new-q8_0"]
    assert [kept.name for kept in trim(tmp_path, 0)] == ["old", "new-q8_0"]
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_a_use_is_noted(tmp_path: Path) -> None:
    place = write(tmp_path, "first", 100)
    write(tmp_path, "second", 200)
    assert names(tmp_path) == ["first", "second"]
    PackCache(place, "same")
    assert names(tmp_path) == ["second", "first"]


def test_what_is_mapped_or_written_stays(tmp_path: Path) -> None:
    mapped = PackCache(write(tmp_path, "mapped", 1), "same")
    write(tmp_path, "idle", 2)
    writing = PackWriter(tmp_path / file_name(tmp_path / "w", "written"), "same")
    writing.put("data", [(b"", memoryview(bytes(SIZE)))])
    assert {kept.name: in_use(kept) for kept in kept_models(tmp_path)} == {
        "mapped": True,
        "idle": False,
        "written": True,
    }
    assert [kept.name for kept in trim(tmp_path, 0)] == ["idle"]
    assert sorted(names(tmp_path)) == ["mapped", "written"]
    writing.finish()
    assert {kept.name: in_use(kept) for kept in kept_models(tmp_path)} == {"mapped": True, "written": False}
    assert bytes(mapped.data("data")[:8]) == bytes(8)
    del mapped
    assert {kept.name for kept in trim(tmp_path, 0)} == {"mapped", "written"}


def test_what_another_process_maps_stays_until_it_ends(tmp_path: Path) -> None:
    place = write(tmp_path, "model", 1)
    code = (
        "import sys; from pathlib import Path; from penstock.weights.pack_cache import PackCache\n"
        "held = PackCache(Path(sys.argv[1]), 'same'); print('mapped', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    try:
        assert other.stdout.readline() == "mapped\n"
        (kept,) = kept_models(tmp_path)
        assert in_use(kept) and not remove(kept)
        assert place.exists()
    finally:
        other.kill()
        other.wait()
    assert not in_use(kept)
    assert remove(kept)
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_locked_nothing_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "model", 1)

    def refuse(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert trim(tmp_path, 0) == []
    assert names(tmp_path) == ["model"]


def test_what_dead_writers_left_goes(tmp_path: Path) -> None:
    left = tmp_path / f"{file_name(tmp_path / 'm', 'm')}.abcdefgh.partial"
    left.write_bytes(bytes(SIZE))
    others = [tmp_path / "thesis.iso.partial", tmp_path / ".model.gguf.123.partial"]
    for other in others:
        other.write_bytes(b"not ours")
    assert trim(tmp_path, 10 * SIZE) == []
    assert not left.exists()
    assert all(other.exists() for other in others)


def test_without_a_size_it_is_half_of_the_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "model", 1)
    (kept,) = kept_models(tmp_path)
    monkeypatch.setattr("penstock.weights.kept_files.free_bytes", lambda folder: 10 * SIZE)
    assert most_bytes(tmp_path, None) == (10 * SIZE + kept.bytes) // 2
    assert most_bytes(tmp_path, 7) == 7
    assert most_bytes(tmp_path / "none", None) == 5 * SIZE


@native_only
def test_a_model_that_is_too_large_anyway_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = EngineOptions(pack_cache=str(tmp_path / "kept"), threads=1, max_num_seqs=2, kv_blocks=50)
    for name in ("one", "two"):
        tiny.save("qwen3", tmp_path / name)
    build_engine(replace(base, model=str(tmp_path / "one")))[0].close()
    monkeypatch.setattr("penstock.weights.kept_files.free_bytes", lambda folder: 0)
    build_engine(replace(base, model=str(tmp_path / "two")))[0].close()
    assert names(tmp_path / "kept") == ["one"]


@native_only
def test_starts_keep_the_folder_to_its_size(tmp_path: Path) -> None:
    base = EngineOptions(pack_cache=str(tmp_path / "kept"), threads=1, max_num_seqs=2, kv_blocks=50)
    for name in ("one", "two", "three"):
        tiny.save("qwen3", tmp_path / name)
    options = [replace(base, model=str(tmp_path / name)) for name in ("one", "two", "three")]
    first, _ = build_engine(options[0])
    (kept,) = kept_models(tmp_path / "kept")
    assert any(file.name.endswith(".packed.start") for file in kept.files)
    tight = kept.bytes * 5 // 2
    second, _ = build_engine(replace(options[1], pack_cache_size=tight))
    answer = generate(second)
    second.close()
    del second
    assert sorted(names(tmp_path / "kept")) == ["one", "two"]
    third, _ = build_engine(replace(options[2], pack_cache_size=tight))
    assert sorted(names(tmp_path / "kept")) == ["one", "three"]  # the first runs, so the second went
    assert generate(third) == generate(first) == answer
    third.close()
    first.close()
    engine, info = build_engine(replace(options[1], pack_cache_size=10))
    told = next(decision for decision in info.settings if decision.name == "packed weights")
    assert (told.value, told.reason.endswith("are more than --pack-cache-size, 10 B")) == ("not kept", True)
    engine.close()


def test_people_list_and_remove(tmp_path: Path) -> None:
    write(tmp_path, "Qwen3-0.6B", 100)
    write(tmp_path, "other", 200)
    held = PackCache(write(tmp_path, "busy", 300), "same")
    environment = {"PENSTOCK_PACK_CACHE": str(tmp_path), "COLUMNS": "200"}

    def cache(*arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(app, ["cache", *arguments], env=environment)
        assert result.exit_code == code, result.output
        return result.stdout + result.stderr

    told = json.loads(cache("list", "--json", "--pack-cache-size", "1GiB"))
    assert (told["folder"], told["most_bytes"]) == (str(tmp_path), 2**30)
    assert [(model["name"], model["in_use"]) for model in told["models"]] == [
        ("Qwen3-0.6B", False), ("other", False), ("busy", True),
    ]  # fmt: skip
    listed = cache("list")
    assert "in use" in listed and f"in {tmp_path}" in listed
    assert "Did you mean 'other'?" in cache("rm", "othr", code=1)
    assert "name what to remove, or say --all." in cache("rm", code=2)
    assert cache("rm", str(tmp_path / "models" / "Qwen3-0.6B")).startswith("removed Qwen3-0.6B (")
    last = cache("rm", "--all", code=1)
    assert "removed other" in last and "in use by a running engine or start, or on a disk without locks: busy" in last
    assert names(tmp_path) == ["busy"]
    assert held.entries
    environment["PENSTOCK_PACK_CACHE"] = "off"
    assert "switched off" in cache("list", code=1)
