#!/usr/bin/env python3
"""Looks into a wheel, installs it in an environment of its own for each Python, and asks the bundled model.

.ci/try-wheel.py build/dist/*.whl python3.11 python3.12…    the exit status is 0 only if it answered with each

torch is taken as pip finds it: an index of CPU builds (PIP_EXTRA_INDEX_URL) or PIP_FIND_LINKS spares gigabytes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
QUESTION, ANSWER = "I am looking for a place to eat.", "What kind of food do you like?"
ISAS = ("generic", "avx2", "avx512", "avx512_bf16", "amx")
TOLD = """
import sys
from penstock import __file__ as there, _native
print(sys.version.split()[0], _native.isa(), "of", *_native.built_isas(), "from", there)
"""


def faults(wheel: Path) -> list[str]:
    """What is wrong with a wheel's name or what it holds."""
    found = []
    if not re.search(r"-cp311-abi3-manylinux_2_\d+_\w+\.whl$", wheel.name):
        found.append(f"its tag is not that of every Python from 3.11 on, on a named glibc: {wheel.name}")
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
        metadata = archive.read(next(name for name in packed if name.endswith(".dist-info/METADATA"))).decode()
    files = [path for path in (ROOT / "penstock").rglob("*") if "__pycache__" not in path.parts and path.is_file()]
    missing = {str(path.relative_to(ROOT)) for path in files if path.suffix != ".so"} - packed
    if missing:
        found.append(f"files of the package that it lacks: {sorted(missing)[:5]}")
    if "penstock/_native.abi3.so" not in packed:
        found.append("it has no native library for every Python")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    licences = {f"/licenses/{name}" for name in project["license-files"]}
    found += [f"it lacks the licence {name}" for name in licences if not any(other.endswith(name) for other in packed)]
    found += [f"it does not require {name}" for name in project["dependencies"] if name.split(">")[0] not in metadata]
    return found


def trial(wheel: Path, python: str, folder: Path) -> list[str]:
    """What is wrong with it once it is installed for a Python."""
    bin_ = folder / "venv" / "bin"
    subprocess.run([python, "-m", "venv", str(folder / "venv")], check=True)
    subprocess.run([bin_ / "python", "-m", "pip", "install", "-q", "--no-compile", wheel], check=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "PYTHON"))}
    here = clean | {"HOME": str(folder), "NO_COLOR": "1"}

    def said(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=folder, env=here, capture_output=True, text=True, timeout=300)
        return done.stdout + (done.stderr if done.returncode else "")

    told = said(bin_ / "python", "-c", TOLD)
    answer = said(bin_ / "penstock", "run", "penstock-concierge", QUESTION, "--temperature", "0")
    print(f"{told.strip()}\n  {answer.strip()}", flush=True)
    found = [f"its native library has no {isa}" for isa in ISAS if f" {isa} " not in f"{told.partition(' of ')[2]} "]
    if str(folder) not in told:
        found.append("what was imported is not what was installed")
    if ANSWER not in answer:
        found.append(f"the bundled model said something else than “{ANSWER}”")
    return found


def main(arguments: list[str]) -> int:
    """The exit status."""
    wheel = Path(arguments[0]).resolve()
    found = faults(wheel)
    for python in arguments[1:]:
        with tempfile.TemporaryDirectory() as folder:
            found += [f"{python}: {fault}" for fault in trial(wheel, python, Path(folder))]
    print(*(f"{wheel.name}: {fault}" for fault in found), sep="\n", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1:]))
