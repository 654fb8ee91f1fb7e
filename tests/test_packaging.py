"""A wheel has every file of the package in it: formats, the bundled model, what a browser is sent."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = (
    "import sys; from scikit_build_core.build import build_wheel; build_wheel(sys.argv[1], {'wheel.cmake': 'false'})"
)


def test_a_wheel_without_the_native_library_has_all_files_of_the_package(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", BUILD, str(tmp_path)], cwd=ROOT, check=True, timeout=100)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("penstock/")}
        scripts = archive.read(next(name for name in archive.namelist() if name.endswith("entry_points.txt"))).decode()
    files = {path for path in (ROOT / "penstock").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    tree = {str(path.relative_to(ROOT)) for path in files if path.suffix != ".so"}
    assert packed == tree
    assert {Path(name).suffix for name in tree} >= {".py", ".typed", ".toml", ".json", ".jinja", ".safetensors", ".txt"}
    assert "penstock = penstock.__main__:main" in scripts
