#!/usr/bin/env python3
"""Lines of code of every part, and the longest file of each: what a change adds is seen where it is reviewed.

.ci/sizes.py [REVISION]    with a revision, what changed since then
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.architecture.source import code_lines  # noqa: E402

NATIVE = (".cpp", ".h")
Sizes = dict[str, tuple[int, int]]


def part_of(path: Path) -> str:
    """penstock/<package>, csrc, tests or benchmarks; the package's own files are "penstock"."""
    names = path.parts
    return "/".join(names[:2]) if names[0] == "penstock" and len(names) > 2 else names[0]


def sizes(root: Path) -> Sizes:
    """Lines of code and the longest file, by part. Native code is counted without blank lines and comment lines."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for folder in ("penstock", "csrc", "tests", "benchmarks"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix == ".py":
                found[part_of(path.relative_to(root))].append(code_lines(path.read_text(encoding="utf-8")))
            elif path.suffix in NATIVE:
                lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
                found[part_of(path.relative_to(root))].append(sum(bool(line) and line[:2] != "//" for line in lines))
    return {part: (sum(files), max(files)) for part, files in sorted(found.items())}


def earlier(revision: str) -> Sizes:
    """The sizes at a revision."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        return sizes(Path(folder))


def main() -> None:
    now, before = sizes(ROOT), earlier(sys.argv[1]) if len(sys.argv) > 1 else {}
    print(f"{'part':24}{'lines of code':>14}{'longest file':>14}" + ("       change" if before else ""))
    for part in sorted(now.keys() | before.keys()):
        lines, longest = now.get(part, (0, 0))
        change = f"{lines - before.get(part, (0, 0))[0]:>+13,}" if before else ""
        print(f"{part:24}{lines:>14,}{longest:>14,}{change}")
    total = sum(lines for part, (lines, _) in now.items() if part not in ("tests", "benchmarks"))
    print(f"{'product (penstock, csrc)':24}{total:>14,}")


if __name__ == "__main__":
    main()
