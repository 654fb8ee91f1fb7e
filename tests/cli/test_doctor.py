"""`penstock doctor`: huge pages, the folder of packed weights, the table of formats."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from penstock.cli.doctor import _huge_kilobytes, examine, huge_pages, pack_cache_state
from penstock.cli.main import app
from penstock.config.machine import Accelerator
from penstock.kernels.cpu import native

native_only = pytest.mark.skipif(not native.available(), reason="the native library is not built")


def test_the_folder_of_packed_weights_is_counted(tmp_path: Path) -> None:
    assert pack_cache_state("off") == {"folder": None, "files": 0, "bytes": 0, "left": {}}
    nowhere = tmp_path / "nowhere"
    assert pack_cache_state(str(nowhere)) == {"folder": str(nowhere), "files": 0, "bytes": 0, "left": {}}
    for name, size in (("a.packed", 100), ("b.packed", 11), ("c.partial", 1000)):
        (tmp_path / name).write_bytes(bytes(size))
    left = {"a.packed": "it is truncated to 100 bytes", "b.packed": "it is truncated to 11 bytes"}
    assert pack_cache_state(str(tmp_path)) == {"folder": str(tmp_path), "files": 2, "bytes": 111, "left": left}
    told = CliRunner().invoke(app, ["doctor"], env={"PENSTOCK_PACK_CACHE": str(tmp_path), "COLUMNS": "500"})
    assert f"2 files, 111 B, in {tmp_path}; safe to delete" in told.stdout
    assert "a.packed will be written anew: it is truncated to 100 bytes" in told.stdout
    assert "switched off" in CliRunner().invoke(app, ["doctor"], env={"PENSTOCK_PACK_CACHE": "off"}).stdout


@native_only
def test_huge_pages_are_measured_and_a_lack_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = huge_pages()
    assert found["had"] is True or "huge" in found["why_not"]
    assert examine()["memory"]["huge_pages"].keys() == found.keys()
    monkeypatch.setattr("penstock.cli.doctor._huge_kilobytes", lambda address: 0)
    lacking = huge_pages()
    assert lacking["had"] is False
    assert "huge" in lacking["why_not"]


def test_huge_pages_of_a_mapping_are_read_from_the_system(tmp_path: Path) -> None:
    smaps = tmp_path / "smaps"
    smaps.write_text(
        "7f00-8000 rw-p 00000000 00:00 0 \nSize: 4 kB\nAnonHugePages:      6144 kB\n"
        "8000-9000 rw-p 00000000 00:00 0 \nAnonHugePages:      2048 kB\n"
    )
    assert [_huge_kilobytes(at, smaps) for at in (0x7F00, 0x7FFF, 0x8000, 0x9000)] == [6144, 6144, 2048, 0]
    assert _huge_kilobytes(1, tmp_path / "none") == 0
    small = np.zeros(100, dtype=np.uint8)
    assert _huge_kilobytes(small.ctypes.data) % 2048 == 0


@native_only
def test_formats_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app, ["doctor", "--formats"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
    assert " run " in lines["q4_k"]
    assert "1.03" in lines["q4_k"]
    assert " converted " in lines["exl3"]
    as_json = json.loads(CliRunner().invoke(app, ["doctor", "--formats", "--json"]).stdout)["formats"]
    assert {
        key: value for key, value in next(row for row in as_json if row["format"] == "q8_0").items() if key != "packing"
    } == {"format": "q8_0", "runs": True, "resident_per_file_byte": 1.0}


def test_kernels_of_another_device_are_told() -> None:
    found = json.loads(CliRunner().invoke(app, ["doctor", "--device", "interpreter", "--json"]).stdout)
    chosen = {op["op"]: op["implementation"] for op in found["kernels"]["ops"]}
    assert found["kernels"]["device"] == "interpreter"
    if find_spec("triton") is None:
        assert found["triton"]["version"] is None and "penstock-llm[gpu]" in found["triton"]["why_not"]
        assert chosen["rms_norm"] == "reference"
    else:
        assert found["triton"]["version"] and chosen["paged_attention"] == "triton (interpreted)"
    assert CliRunner().invoke(app, ["doctor", "--device", "abacus"]).exit_code != 0


def test_gpus_are_shown_and_the_one_that_auto_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 1 << 30
    first = Accelerator("cuda", 0, "H", 80 * gib, 79 * gib, (9, 0), 132)
    second = Accelerator("cuda", 1, "T", 16 * gib, 16 * gib, (7, 5), no_bfloat16="it has no bfloat16")
    monkeypatch.setattr("penstock.kernels.devices.accelerators", lambda *_: (first, second))
    told = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "300"}).stdout
    assert "H, 79.0 GiB free of 80.0 GiB, compute capability 9.0, 132 multiprocessors" in told
    assert "T, 16.0 GiB, compute capability 7.5; not: it has no bfloat16" in told
    assert "Kernels for float32 on cuda" in told
    assert examine(device="cuda:1")["kernels"]["device"] == "cuda:1"
    found = examine(device="cpu")
    assert (found["kernels"]["device"], [gpu["name"] for gpu in found["gpus"]]) == ("cpu", ["H", "T"])
    assert examine(device="interpreter")["gpus"] == []
