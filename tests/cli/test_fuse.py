"""`penstock fuse` as people call it; what comes out is compared with peft in tests/layers/test_peft.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Penstock


@pytest.mark.parametrize(
    ("format", "output", "made"),
    [("fp8", "out", True), ("q8_0", "out.gguf", True), ("q8_0", "out", False), ("fp8", "out.gguf", False)],
)
def test_the_form_of_what_is_written(
    format: str, output: str, made: bool, penstock: Penstock, shared_data: Path, tmp_path: Path
) -> None:
    base = shared_data / "models" / "penstock-concierge"
    place = tmp_path / output
    done = penstock("fuse", str(base), "--adapter", f"{base}-lora-caps", "--quantize", format, "--output", str(place))
    assert done.returncode == (0 if made else 1), done.stderr
    assert place.exists() == made
    if made:
        assert f"42 matrices changed, then written as {format}" in done.stdout
    else:
        assert "a folder is written, or a .gguf file with --quantize" in done.stderr
