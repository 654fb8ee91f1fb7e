"""docs/fields.md: every route with the fields of its body, and what becomes of each. Written from the API's own tables.

`python -m penstock.server.field_tables > docs/fields.md` after a change of those.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from penstock.config.options import EngineOptions, ServerOptions
from penstock.engine.frontend import Frontend
from penstock.engine.text_pipeline import TextPipeline
from penstock.engine.thread_client import ThreadClient
from penstock.server.app import create_app
from penstock.server.differences import DIFFERENCES
from penstock.server.meanings import NO_EFFECT, NOT_AVAILABLE
from penstock.server.not_here import NOT_HERE

_HEAD: Final = """# Fields of every route

What becomes of each field that a client may send, for every route that takes a body: written by
`python -m penstock.server.field_tables` from the tables that check bodies and describe them in `/openapi.json`, so
that the three cannot differ. A field that stands nowhere here is refused as a 400 with the nearest name that there is,
but where a dialect passes over what it does not know (Ollama, SGLang, KoboldAI); the pages of the dialects go deeper.

- *honoured*: it does what the sentence says.
- *no effect*: taken at any value.
- *no effect at …*: taken at these values, which ask for nothing; any other is a 400 that says the sentence beside it.
"""
_REF: Final = "#/components/schemas/"
_NULL: Final = {"type": "null"}


def page(document: Mapping[str, Any]) -> str:
    """The page of an API's OpenAPI document."""
    schemas = document["components"]["schemas"]
    routes: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            for name in _bodies(operation):
                routes.setdefault(name, []).append(f"`{method.upper()} {path}`")
    parts = [_HEAD]
    for name, where in routes.items():
        parts += [f"## {name}\n\n{', '.join(where)}\n", _table(name, schemas)]
    within = [name for name in _within(list(routes), schemas) if name not in routes]
    parts.append("## Objects within them\n")
    for name in within:
        parts += [f"### {name}\n", _table(name, schemas)]
    parts.append("## Routes that are not here\n\nThey answer 501 with this sentence.\n")
    parts.append(_rows(("Route", "What to do instead"), [(f"`{path}`", text) for path, text in NOT_HERE.items()]))
    return "\n".join(parts)


def _bodies(operation: Mapping[str, Any]) -> Iterator[str]:
    """The names of the bodies that an operation takes."""
    content = operation.get("requestBody", {}).get("content", {})
    for kind in content.values():
        schema = kind.get("schema", {})
        for one in schema.get("anyOf", [schema.get("items", schema)]):
            if "$ref" in one:
                yield one["$ref"].removeprefix(_REF)


def _within(names: Sequence[str], schemas: Mapping[str, Any]) -> list[str]:
    """What bodies are made of, the bodies first."""
    found = dict.fromkeys(names)
    waiting = list(names)
    while waiting:
        for name in _refs(schemas[waiting.pop(0)]):
            if name not in found and schemas[name].get("properties"):
                found[name] = None
                waiting.append(name)
    return list(found)


def _refs(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(ref := schema.get("$ref"), str):
            yield ref.removeprefix(_REF)
        schema = list(schema.values())
    if isinstance(schema, list):
        for inner in schema:
            yield from _refs(inner)


def _table(name: str, schemas: Mapping[str, Any]) -> str:
    schema = schemas[name]
    needed = schema.get("required", ())
    rows = []
    fields = schema.get("properties", {})
    for field in sorted(fields, key=lambda one: (one not in needed, one.lower())):
        about = fields[field]
        state = _state(name, field, about) + (", required" if field in needed else "")
        members = ", ".join(f"[{ref}](#{ref.lower()})" for ref in dict.fromkeys(_refs(about)))
        told = about.get("description", "") + (f" See {members}." if members else "")
        rows.append((f"`{field}`", state, told))
    return _rows(("Field", "Here", "Meaning, or why other values are refused"), rows)


def _state(name: str, field: str, about: Mapping[str, Any]) -> str:
    difference = DIFFERENCES.get(name, {}).get(field)
    if difference is not None:
        return "no effect" if difference.harmless is None else _at(difference.harmless)
    if about.get("description") == NO_EFFECT:
        return "no effect"
    if about.get("description") == NOT_AVAILABLE or (None in about.get("enum", ()) and "type" not in about):
        return _at([value for value in about.get("enum", ()) if value is not None])
    return "honoured"


def _at(values: Sequence[Any]) -> str:
    told = [f"`{json.dumps(value, ensure_ascii=False)}`" for value in (*values, None)]
    return f"no effect at {' '.join(told)}"


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [head, *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    lines = [f"| {' | '.join(line)} |" for line in cells]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]]) + "\n"


def document() -> Mapping[str, Any]:
    """The API's document of a server of one model, which is not loaded for it."""

    def never() -> Any:
        raise RuntimeError("the engine of a description is not built")

    frontend = Frontend(ThreadClient(never), TextPipeline.of(EngineOptions()), served_name="model")
    return dict(create_app(frontend, ServerOptions()).openapi())


if __name__ == "__main__":
    sys.stdout.write(page(document()))
