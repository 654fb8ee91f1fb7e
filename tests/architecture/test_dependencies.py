"""The table of docs/architecture.md lists what pyproject.toml requires, and the package imports nothing else."""

from __future__ import annotations

import re
import sys
import tomllib

from tests.architecture.source import ROOT, imports, modules

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
IMPORTED_AS = {
    "lm-eval": "lm_eval",
    "pyzmq": "zmq",
    "nanobind-backend": "nanobind_backend",
    "pyyaml": "yaml",
    "grpcio": "grpc",
    "mooncake-transfer-engine-non-cuda": "mooncake",
    "protobuf": "google",
    **dict.fromkeys(("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"), "opentelemetry"),
}
EXTRAS = (
    "bench",
    "encryption",
    "eval",
    "fallback",
    "gpu",
    "grpc",
    "mcp",
    "mooncake",
    "otel",
    "ray",
    "redis",
    "s3",
)  # which people install
BROUGHT = {"starlette", "pydantic", "pydantic_core"}  # by fastapi, which is made of them


def names(requirements: list[str]) -> set[str]:
    return {re.match(r"[A-Za-z0-9_-]+", requirement)[0] for requirement in requirements}  # type: ignore[index]


def required() -> set[str]:
    """What running needs, with the extras."""
    project = PROJECT["project"]
    extras = (names(project["optional-dependencies"][extra]) for extra in EXTRAS)
    return names(project["dependencies"]).union(*extras)


def test_the_table_lists_what_is_required() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \| [^|]+ \|$", text.split("## Dependencies")[1].split("\n## ")[0], re.M)
    listed = {re.sub(r" \(.*", "", name) for row in rows[1:] for name in row.split(", ")}
    assert listed == required() | names(PROJECT["build-system"]["requires"])


def test_what_is_imported_is_required_and_the_other_way() -> None:
    found = {name.split(".")[0] for module in modules() for _, name in imports(module)}
    outside = found - set(sys.stdlib_module_names) - {"penstock"} - BROUGHT
    # Named to uvicorn, imported by the native library of a wheel, imported by uvicorn's protocol.
    started = {"httptools", "nanobind_backend", "websockets"}
    assert outside | started == {IMPORTED_AS.get(name, name) for name in required()}


def test_what_is_required_is_pinned() -> None:
    lines = (ROOT / "requirements" / "runtime.txt").read_text().lower().splitlines()
    pinned = {line.split("==")[0] for line in lines if "==" in line}
    assert names(PROJECT["project"]["dependencies"]) <= pinned
