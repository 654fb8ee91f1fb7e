"""A wheel has every file of the package in it, and serves every Python of its platform."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import zipfile
from pathlib import Path

import nanobind
import pytest

ROOT = Path(__file__).resolve().parents[1]
BUILD = (
    "import sys; from scikit_build_core.build import build_wheel; build_wheel(sys.argv[1], {'wheel.cmake': 'false'})"
)
TRY = ROOT / ".ci" / "try-wheel.py"
NATIVE = "penstock/_native.abi3.so"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel without the native library."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-c", BUILD, str(folder)], cwd=ROOT, check=True, timeout=100)
    (wheel,) = folder.glob("*.whl")
    return wheel


def faults(wheel: Path) -> tuple[int, str]:
    """What is said of a wheel: status, and the faults."""
    done = subprocess.run([sys.executable, str(TRY), str(wheel)], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


def test_a_wheel_without_the_native_library_has_all_files_of_the_package(plain: Path) -> None:
    assert plain.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(plain) as archive:
        packed = {name for name in archive.namelist() if name.startswith("penstock/")}
        scripts = archive.read(next(name for name in archive.namelist() if name.endswith("entry_points.txt"))).decode()
    files = {path for path in (ROOT / "penstock").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    tree = {str(path.relative_to(ROOT)) for path in files if path.suffix != ".so"}
    assert packed == tree
    assert {Path(name).suffix for name in tree} >= {".py", ".typed", ".toml", ".json", ".jinja", ".safetensors", ".txt"}
    assert "penstock = penstock.__main__:main" in scripts


def test_a_wheel_has_the_licence_of_all_that_is_in_it(plain: Path) -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license-files"]
    with zipfile.ZipFile(plain) as archive:
        for name in wanted:
            (packed,) = [other for other in archive.namelist() if other.endswith(f"dist-info/licenses/{name}")]
            assert archive.read(packed) == (ROOT / name).read_bytes()


def test_what_a_wheel_lacks_is_told(plain: Path, tmp_path: Path) -> None:
    """Of one that is whole nothing is told; then each fault by itself."""
    named = tmp_path / plain.name.replace("py3-none-any", "cp311-abi3-manylinux_2_34_x86_64")
    shutil.copy(plain, named)
    assert faults(named) == (1, f"{named.name}: it has no native library for every Python\n")
    with zipfile.ZipFile(named, "a") as archive:
        archive.writestr(NATIVE, "")
    assert faults(named) == (0, "\n")
    (compiled := ROOT / "penstock" / "__pycache__").mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=compiled, prefix="cli.cpython-311.pyc."):  # another process compiles
        assert faults(named) == (0, "\n")
    status, said = faults(plain)
    assert status == 1 and "its tag is not that of every Python" in said
    less = tmp_path / "less" / named.name
    less.parent.mkdir()
    with zipfile.ZipFile(named) as source, zipfile.ZipFile(less, "w") as target:
        for name in source.namelist():
            if not name.endswith(("server/web/static/chat.js", "licenses/LICENSE")):
                target.writestr(name, source.read(name))
    status, said = faults(less)
    assert status == 1 and "server/web/static/chat.js" in said and "lacks the licence /licenses/LICENSE" in said


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_what_reads_python_objects_keeps_to_the_stable_interface() -> None:
    """Or it could not be one file for every Python; the rest of the binding uses nanobind alone, which does."""
    includes = [ROOT / "csrc", Path(nanobind.include_dir()), Path(sysconfig.get_path("include"))]
    stable = ["-DPy_LIMITED_API=0x030B0000", "-DNB_BACKEND_MODULE=nanobind_backend"]
    source = ROOT / "csrc" / "binding" / "binding_decode.cpp"
    command = ["g++", "-std=c++20", "-fsyntax-only", *stable, *(f"-I{path}" for path in includes), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    others = [path for path in (ROOT / "csrc" / "binding").glob("*.[ch]*") if path != source]
    assert [path.name for path in others if "PyTuple_" in path.read_text() or "PyList_" in path.read_text()] == []
