"""What must start fast or run beside the engine never loads torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.architecture.source import ROOT, Module, imports, modules

HEAVY = ("torch", "triton", "transformers", "numba", "scipy", "pandas", "matplotlib")
FREE = (
    "penstock.config", "penstock.core", "penstock.text", "penstock.host", "penstock.server", "penstock.engine",
    "penstock.library",
    "penstock.llm", "penstock.weights.readers", "penstock.weights.checkpoint", "penstock.weights.open",
    "penstock.quant.tensor", "penstock.structured", "penstock.startup.memory_plan", "penstock.startup.resident",
    "penstock.startup.gpu_memory", "penstock.startup.shortage", "penstock.cli.plan", "penstock.weights.facts",
    "penstock.models.defaults", "penstock.models.families", "penstock.models.family_facts", "penstock.models.fields",
    "penstock.models.gguf",
    "penstock.startup.cache_plan", "penstock.startup.draft_room", "penstock.startup.header_plan",
    "penstock.startup.kept_start", "penstock.startup.scheduling",
    "penstock.startup.started", "penstock.startup.restart", "penstock.startup.start_workers",
    "penstock.parallel.ranks", "penstock.runtime.ranks.wire", "penstock.runtime.ranks.group",
    "penstock.kernels.cpu.journal", "penstock.kernels.cpu.packed", "penstock.kernels.cpu.step_program",
    "penstock.weights.pack_cache", "penstock.weights.kept_text", "penstock.runtime.replay",
)  # fmt: skip
# Their files may not even name torch, not in a function either.
NEVER_NAMED = tuple(name for name in FREE if name != "penstock.engine")

BLOCK = """
import importlib, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in HEAVY:
            raise ImportError(f"{name} was imported")
HEAVY = set(sys.argv[1].split(","))
sys.meta_path.insert(0, Block())
failed = []
for name in sys.argv[2:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed.append(f"{name}: {error}")
failed.extend(name for name in sys.modules if name.split(".")[0] in HEAVY)
print("\\n".join(failed))
"""


def free() -> list[Module]:
    return [m for m in modules() if not m.part or m.within(*FREE)]


def run(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_torch_free_modules_import_without_torch() -> None:
    names = [module.name for module in free()]
    assert {"penstock", "penstock.core.protocol", "penstock.text.template"} <= set(names)
    assert run(BLOCK, ",".join(HEAVY), *names) == ""


def test_the_block_works() -> None:
    if not any(module.name == "penstock.layers.decoder" for module in modules()):
        pytest.skip("there are no layers yet")
    assert "torch was imported" in run(BLOCK, ",".join(HEAVY), "penstock.layers.decoder")


@pytest.mark.parametrize(
    "name", ["penstock", "penstock.server.app", "penstock.cli.main", "penstock.host.process_client"]
)
def test_an_entry_point_loads_nothing_heavy(name: str) -> None:
    if not any(module.name == name for module in modules()):
        pytest.skip(f"there is no {name} yet")
    code = f"import sys, {name}; print([m for m in {HEAVY!r} if m in sys.modules])"
    assert run(code) == "[]"


def test_torch_free_files_do_not_name_torch() -> None:
    named = [
        f"{module.path}:{line} imports {name}"
        for module in modules()
        if module.within(*NEVER_NAMED)
        for line, name in imports(module)
        if name.split(".")[0] in HEAVY
    ]
    assert named == []
