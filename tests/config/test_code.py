"""The state of the package's code."""

from __future__ import annotations

from pathlib import Path

from penstock.config import code


def test_files_that_cannot_be_looked_at_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text("1")
    (tmp_path / ".#module.py").symlink_to(tmp_path / "nowhere")  # as an editor's lock
    assert [name for name, _, _ in code._files(str(tmp_path))] == ["module.py"]


def test_the_state_is_that_of_the_import() -> None:
    state = code.code_state()
    assert ("code.py", Path(code.__file__).stat().st_size) in [(name, size) for name, size, _ in state]
    assert code.code_state() is state
