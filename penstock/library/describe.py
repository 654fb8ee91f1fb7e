"""What a model of the library is, in words and numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.config.errors import PenstockError
from penstock.config.names import served_name
from penstock.config.resolve import ModelFacts
from penstock.library.hub_cache import quantisation
from penstock.library.manifest import Texts
from penstock.library.names import RegistryName, parse_name
from penstock.library.resolve import find
from penstock.library.store import Store
from penstock.text.parsers.format import choose
from penstock.weights.checkpoint import Checkpoint, text_config
from penstock.weights.facts import model_facts
from penstock.weights.open import open_checkpoint

_VISION = ("vision_config", "vision_tower", "mm_vision_tower")


@dataclass(frozen=True, slots=True)
class Description:
    """A model.

    Attributes:
        name: as it is called.
        path: where it is opened.
        bytes: of its tensors.
        architecture: as config.json names it.
        format: "gguf" or "safetensors".
        quantization: what most bytes of the weights are in.
        capabilities: of "completion", "chat", "tools", "thinking", "embedding", "vision".
        template, system, license: texts; "" where there is none.
        parameters: sampling defaults, a line each.
        facts: for the memory plan; None where config.json says too little.
        info: GGUF metadata without long lists, or config.json.
    """

    name: str
    path: Path
    bytes: int
    architecture: str
    format: str
    quantization: str
    capabilities: tuple[str, ...]
    template: str
    system: str
    license: str
    parameters: str
    facts: ModelFacts | None
    info: Mapping[str, Any] = field(repr=False)

    def rows(self) -> Iterator[tuple[str, str]]:
        """What `show` prints."""
        facts = self.facts
        yield "architecture", self.architecture
        if facts is not None:
            yield "parameters", f"{facts.parameters:,}"
            yield "context length", f"{facts.context_length:,}"
            yield "embedding length", f"{facts.hidden_size:,}"
            yield "layers", f"{len(facts.layers)} with attention"
        yield "format", self.format
        yield "quantization", self.quantization
        yield "capabilities", ", ".join(self.capabilities)
        yield "template", _first_line(self.template)
        yield "system", _first_line(self.system)
        yield "parameters of answers", self.parameters.replace("\n", ", ")
        yield "license", _first_line(self.license)
        yield "opened at", str(self.path)

    def as_json(self) -> dict[str, Any]:
        """All of it, sizes in bytes."""
        facts = self.facts
        plain = ("name", "bytes", "architecture", "format", "quantization", "template", "system", "license")
        found = {name: getattr(self, name) for name in (*plain, "parameters")}
        found |= {"path": str(self.path), "capabilities": list(self.capabilities), "model_info": dict(self.info)}
        if facts is not None:
            sizes = ("parameters", "context_length", "hidden_size", "vocab_size")
            found["sizes"] = {name: getattr(facts, name) for name in sizes}
        return found


def describe(store: Store, text: str) -> Description:
    """Reads what a model says of itself.

    Raises:
        ConfigError: there is no such model. CheckpointError: it is damaged.
    """
    found = find(text, store)
    checkpoint = open_checkpoint(found.path)
    name = found.name or served_name(str(found.path))
    parsed = parse_name(name, store.places.registry) if found.name else None
    texts = store.texts(parsed) if isinstance(parsed, RegistryName) else Texts()
    template = _template(checkpoint)
    facts = None
    with suppress(PenstockError):
        facts = model_facts(checkpoint)
    return Description(
        name=name,
        path=checkpoint.path,
        bytes=sum(info.nbytes for info in checkpoint.tensors.values()),
        architecture=", ".join(checkpoint.config.get("architectures") or ()) or "unknown",
        format="gguf" if checkpoint.metadata else "safetensors",
        quantization=_quantization(checkpoint, name),
        capabilities=_capabilities(checkpoint, template, facts),
        template=template,
        system=texts.system,
        license="\n".join(texts.licenses) or _license(checkpoint),
        parameters=_parameters(checkpoint, texts),
        facts=facts,
        info=_info(checkpoint),
    )


def modelfile_of(store: Store, text: str) -> str:
    """A Modelfile that makes the model again.

    Raises:
        as `describe`
    """
    told = describe(store, text)
    parsed = parse_name(told.name, store.places.registry) if find(text, store).name else None
    texts = store.texts(parsed) if isinstance(parsed, RegistryName) else Texts()
    lines = [f"# penstock create -f Modelfile {told.name}", f"FROM {told.path}"]
    lines += [f'TEMPLATE """{texts.template}"""'] if texts.template else []
    lines += [f'SYSTEM """{texts.system}"""'] if texts.system else []
    for name, value in texts.params.items():
        values = value if isinstance(value, list) else [value]
        lines += [f"PARAMETER {name} {json.dumps(item, ensure_ascii=False)}" for item in values]
    lines += [f'MESSAGE {turn["role"]} """{turn["content"]}"""' for turn in texts.messages]
    lines += [f'LICENSE """{license}"""' for license in texts.licenses]
    return "\n".join(lines) + "\n"


def _first_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 100 else f"{line[:97]}..."


def _template(checkpoint: Checkpoint) -> str:
    found = checkpoint.tokenizer_config.get("chat_template")
    found = found.get("default") if isinstance(found, Mapping) else found
    return found if isinstance(found, str) else ""


def _quantization(checkpoint: Checkpoint, name: str) -> str:
    """The main format of the weights: what most bytes are in."""
    method = checkpoint.config.get("quantization_config")
    if isinstance(method, Mapping):
        return str(method.get("quant_method") or "")
    sizes: dict[str, int] = {}
    for info in checkpoint.tensors.values():
        sizes[info.format] = sizes.get(info.format, 0) + info.nbytes
    told = quantisation(checkpoint.path.name) or quantisation(name.partition(":")[2])
    main = max(sizes, key=lambda kind: sizes[kind], default="")
    return told if told and checkpoint.metadata else main.upper()


def _capabilities(checkpoint: Checkpoint, template: str, facts: ModelFacts | None) -> tuple[str, ...]:
    if facts is not None and facts.whole_prompts:
        return ("embedding",)
    found = ["completion"]
    if template:
        answers = choose(template, None, None)
        found.append("chat")
        found += ["tools"] if answers.calls is not None or re.search(r"\btools\b", template) else []
        found += ["thinking"] if answers.reasoning is not None else []
    found += ["vision"] if any(checkpoint.config.get(name) for name in _VISION) else []
    return tuple(found)


def _license(checkpoint: Checkpoint) -> str:
    if told := checkpoint.metadata.get("general.license"):
        return str(told)
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    for name in ("README.md", "LICENSE", "LICENSE.txt", "LICENSE.md"):
        with suppress(OSError, UnicodeError):
            text = (folder / name).read_text(encoding="utf-8")[:65536]
            if name != "README.md":
                return text
            card = text.split("---")[1] if text.startswith("---") and text.count("---") > 1 else ""
            if stated := re.search(r"^license:\s*(\S+)", card, re.MULTILINE):
                return stated[1]
    return ""


def _parameters(checkpoint: Checkpoint, texts: Texts) -> str:
    found = dict(texts.params) or {
        name: value
        for name, value in checkpoint.generation_config.items()
        if name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    }
    lines = []
    for name, value in found.items():
        lines += [f"{name} {json.dumps(item)}" for item in (value if isinstance(value, list) else [value])]
    return "\n".join(lines)


def _info(checkpoint: Checkpoint) -> dict[str, Any]:
    plain = checkpoint.metadata or text_config(checkpoint.config)
    short = {key: value for key, value in plain.items() if not isinstance(value, (list, tuple)) or len(value) < 64}
    return {key: value for key, value in short.items() if not key.startswith("tokenizer.chat_template")}
