"""Control vectors: added behind the layers that they name, as hooks of transformers add them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from penstock import LLM
from penstock.config.errors import CheckpointError, ConfigError
from penstock.config.options import EngineOptions
from penstock.kernels.cpu import native
from penstock.runtime.executor import EagerExecutor, RecordedExecutor
from penstock.startup.control_vectors import steer
from tests.layers.test_adapters import Through
from tests.models import tiny
from tests.models.harness import Harness, load

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")
PROMPT = tiny.prompt(17, 1)
HIDDEN = tiny.SIZES["hidden_size"]


def written(path: Path, directions: dict[int, np.ndarray], arch: str = "controlvector") -> Path:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_string("controlvector.model_hint", "llama")
    for number, direction in directions.items():
        writer.add_tensor(f"direction.{number}", direction)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def drawn(*layers: int, seed: int = 1, size: int = HIDDEN) -> dict[int, np.ndarray]:
    random = np.random.default_rng(seed)
    return {layer: random.standard_normal(size).astype(np.float32) for layer in layers}


def expected(folder: Path, added: dict[int, np.ndarray]) -> torch.Tensor:
    """transformers' logits, with hooks that add behind layers."""
    model = tiny.transformers.AutoModelForCausalLM.from_pretrained(folder)
    for number, vector in added.items():
        model.model.layers[number].register_forward_hook(functools.partial(_plus, torch.from_numpy(vector)))
    return tiny.reference_logits(model, PROMPT)


def _plus(vector: torch.Tensor, _: Any, __: Any, out: Any) -> Any:
    return (out[0] + vector, *out[1:]) if isinstance(out, tuple) else out + vector


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2", "phi"])
def test_they_are_added_behind_their_layers(family: str, recorded: bool, tmp_path: Path) -> None:
    tiny.save(family, tmp_path / "model")
    one, two = drawn(1, 2), drawn(2, seed=2)
    paths = written(tmp_path / "one.gguf", one), f"{written(tmp_path / 'two.gguf', two)}:-0.5"
    for layers, added in ((None, {1: one[1], 2: one[2] - 0.5 * two[2]}), ("1-1", {1: one[1]})):
        model = load(tmp_path / "model")
        asked = EngineOptions(control_vector=tuple(map(str, paths)), control_vector_layers=layers, device="cpu")
        assert steer(model, asked) == f"behind layers {min(added)} to {max(added)}"
        harness = Harness(model, seed=1)
        executor: Any = RecordedExecutor(model, harness.caches, 48, 48) if recorded else None
        harness.model = Through(executor or EagerExecutor(model, harness.caches, "a test"))  # type: ignore[assignment]
        with torch.inference_mode():
            found = torch.cat([harness.step({"a": part})["a"] for part in (PROMPT[:6], PROMPT[6:])])
        assert tiny.distance(found, expected(tmp_path / "model", added)) < 1e-4


@pytest.mark.parametrize(
    ("directions", "arch", "layers", "said"),
    [
        (drawn(1), "llama", None, "is no control vector"),
        (drawn(1, size=30), "controlvector", None, "30 elements"),
        (drawn(3), "controlvector", None, "layers 0 to 2"),
        ({1: np.full(HIDDEN, np.nan, np.float32)}, "controlvector", None, "no finite numbers"),
        (drawn(1), "controlvector", "2-1", "allowed: first-last"),
        (drawn(1), "controlvector", "2-2", "leaves nothing"),
    ],
)
def test_what_is_refused(
    directions: dict[int, np.ndarray], arch: str, layers: str | None, said: str, tmp_path: Path
) -> None:
    tiny.save("llama", tmp_path / "model")
    path = written(tmp_path / "a.gguf", directions, arch)
    asked = EngineOptions(control_vector=(str(path),), control_vector_layers=layers, device="cpu")
    with pytest.raises((CheckpointError, ConfigError), match=said):
        steer(load(tmp_path / "model"), asked)


def test_of_a_served_model(tmp_path: Path) -> None:
    """Never a start that was kept without it, nor the other way round."""
    path = str(written(tmp_path / "a.gguf", {3: 0.5 * drawn(3, size=256)[3]}))
    said = []
    for vectors in ((), (path,), (f"{path}:0",), ()):
        with LLM(kv_blocks=100, control_vector=vectors) as llm:
            said.append(llm.generate("Hello there", temperature=0, max_tokens=8)[0].outputs[0].text)
    assert said[0] == said[2] == said[3] != said[1]
