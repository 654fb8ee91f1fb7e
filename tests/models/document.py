"""Writes docs/models.md: what the registry has and the last test run found. Run `python -m tests.models.document`.

The first part follows from the sources alone, and a test compares it; the second from build/families.json.
"""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

import penstock.models
from penstock.kernels.api import resolve_kernels
from penstock.kernels.registry import KernelContext
from penstock.models.families import ARCHITECTURES
from penstock.models.gguf import configuration
from penstock.models.gguf.decoders import DECODERS
from penstock.models.not_run import NOT_RUN
from penstock.models.registry import build_model
from tests.models import outcomes, tiny

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "models.md"
MARK = "## What the tests found"
HEAD = """# Models

Written by `python -m tests.models.document` from the registry (`penstock/models/families.py`); do not edit.

A model is a Hugging Face folder with safetensors, or a GGUF file. The name under `architectures` in its config.json
decides what builds it. Every `…ForCausalLM` is also known as `…Model` (embeddings) and as
`…ForSequenceClassification`. Every family is tested on small random models of these kinds against what transformers
computes (float32, to 1e-4 of the logits' spread: whole prompts, chunks, token by token, ragged batches), unless the
last section says otherwise. Caches: *full* keeps keys and values of every position, *sliding* those of a window,
*latent* one vector a position, *state* a recurrent state a sequence.

"""
NOT_RUN_TEXT = "Known not to run, through transformers neither, and refused by name before anything is loaded:"
FOOT = """
## Other architectures

A causal language model that is not listed runs through transformers, if that is installed
(`pip install 'penstock-llm[fallback]'`): its modules compute, its attention reads and writes this engine's caches,
scheduling, sharing of prefixes and sampling are this engine's own. It is slower, cannot be quantised while loading,
and says so when it starts. Before it serves, the logits of a random prompt, computed in chunks, are compared with what
transformers computes alone; an architecture that keeps a state of its own, or masks in its own way, is refused. Tested
with Apertus, Arcee, BitNet, Helium and VaultGemma. No code that lies in a model's folder is ever imported.

__NOT_RUN__

## Rope scaling that depends on the length

Keys are cached rotated, so a running engine has one rotation for all lengths, where transformers chooses by each
sequence's. With *longrope* (Phi 3, Phi MoE), `--max-model-len` up to the original length takes the short factors,
a greater one the long ones, for short prompts too; the default is the model's whole context. With *dynamic*, the
default is the original length, where nothing is stretched; a greater `--max-model-len`, up to `factor` times that,
stretches all positions as transformers does for a sequence of that length.

## What transformers has no model of

InternLM2, InternLM3 and Baichuan: a Llama's weights, renamed and fused as their files have them, against that Llama
(Baichuan 13B: without its rotation and with ALiBi in its mask).

"""


def lines(module: str) -> int:
    """Lines of a model file."""
    return len((Path(penstock.models.__file__).parent / f"{module}.py").read_text().splitlines())


def known() -> dict[tuple[str, str], list[str]]:
    """(module, builder) → the architectures it builds."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, family in ARCHITECTURES.items():
        module, _, function = family.build.partition(".")
        place = module, function
        found.setdefault(place, []).append(name)
    return found


def gguf_names() -> Mapping[str, list[str]]:
    """Architecture → the names GGUF files have for it, from their tables and sources."""
    found: dict[str, list[str]] = {}
    for name, build in configuration.BUILDERS.items():
        decoder = DECODERS.get(name)
        sources = repr(decoder.architecture) + inspect.getsource(decoder.own) if decoder else inspect.getsource(build)
        for architecture in re.findall(r"""["'](\w+(?:ForCausalLM|Model|LMHeadModel))["']""", sources):
            found.setdefault(architecture.replace("LMHeadModel", "ForCausalLM"), []).append(name)
    return found


def tested() -> Mapping[str, list[str]]:
    """Architecture → its families in tiny.py."""
    found: dict[str, list[str]] = {}
    for name, (architecture, _) in tiny.FAMILIES.items():
        found.setdefault(f"{architecture}ForCausalLM", []).append(name)
    return found


def caches(family: str) -> set[str]:
    """The kinds of cache a tiny family has."""
    config = tiny.make(family).config.to_dict()
    architecture = f"{tiny.FAMILIES[family][0]}ForCausalLM"
    kernels = resolve_kernels(KernelContext("cpu", "float32"))
    model = build_model({**config, "architectures": [architecture]}, kernels, dtype=torch.float32)
    return {spec.kind.value for spec in model.cache_specs}


def registry() -> Iterator[str]:
    yield "| Architectures | built by | GGUF | caches | tested as |"
    yield "|---|---|---|---|---|"
    gguf, families = gguf_names(), tested()
    for (module, builder), names in sorted(known().items()):
        variants = [variant for name in names for variant in families.get(name, ())]
        kinds = sorted(set().union(*(caches(variant) for variant in variants)))
        files = sorted({arch for name in names for arch in gguf.get(name, ())})
        cells = (
            ", ".join(names),
            f"{module}.{builder}",
            ", ".join(files),
            ", ".join(kinds),
            ", ".join(variants) or ("test_encoders.py" if names[0].endswith("Model") else "test_layouts.py"),
        )
        yield f"| {' | '.join(cells)} |"


def findings() -> Iterator[str]:
    results: Mapping[str, Mapping[str, bool]] = {}
    if outcomes.FILE.exists():
        results = json.loads(outcomes.FILE.read_text())
    places = {name: module for (module, _), names in known().items() for name in names}
    yield f"| family | {' | '.join(outcomes.COLUMNS)} | lines of code |"
    yield "|---|" + "---|" * (len(outcomes.COLUMNS) + 1)
    for family, (architecture, _) in sorted(tiny.FAMILIES.items()):
        found = results.get(family, {})
        cells = [{True: "passed", False: "**failed**", None: ""}[found.get(column)] for column in outcomes.COLUMNS]
        yield f"| {family} | {' | '.join(cells)} | {lines(places[f'{architecture}ForCausalLM'])} |"


def static_part() -> str:
    refused = textwrap.fill(f"{NOT_RUN_TEXT} {', '.join(NOT_RUN)}.", 119, break_on_hyphens=False)
    return HEAD + "\n".join(registry()) + "\n" + FOOT.replace("__NOT_RUN__", refused)


def main() -> None:
    DOCUMENT.write_text(static_part() + MARK + "\n\n" + "\n".join(findings()) + "\n")


if __name__ == "__main__":
    main()
