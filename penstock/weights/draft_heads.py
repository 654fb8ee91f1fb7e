"""Files of draft heads: the part of a checkpoint that is a head, and whether its numbers are any. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from penstock.config.errors import CheckpointError, quoted
from penstock.config.resolve import ModelFacts
from penstock.models.draft_heads import LAST_STATE, TargetFacts, head_config, head_kind
from penstock.models.mtp_layouts import MtpLayout, mtp_names
from penstock.quant.formats import FORMATS, decode_to_float32
from penstock.quant.tensor import StoredTensor, TensorInfo
from penstock.weights.checkpoint import Checkpoint, text_config
from penstock.weights.facts import model_facts

_FLOATS: Final = ("f32", "f16", "bf16", "f8_e4m3", "f8_e5m2")
_LOOKED_AT: Final = 1 << 22  # values at a time
_EMBEDDINGS: Final = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight")
_TABLES: Final = MappingProxyType(
    {"embed_tokens.weight": _EMBEDDINGS, "lm_head.weight": ("lm_head.weight", *_EMBEDDINGS)}
)


@dataclass(slots=True)
class HeadFiles:
    """Implements `weights.checkpoint.Checkpoint`, of a head alone.

    Attributes:
        kind: one of `config.speculation.HEADS`.
        stored: names of its tensors, and what they are called in the whole.
        layout: of a layer for multi-token prediction.
    """

    kind: str
    stored: Mapping[str, str]
    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    tokenizer_config: Mapping[str, Any]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    _whole: Checkpoint
    layout: MtpLayout | None = None

    def read(self, name: str) -> StoredTensor:
        """As Checkpoint."""
        return self._whole.read(self.stored[name])

    def facts(self) -> ModelFacts:
        """Sizes, for planning: of heads that read the last state alone no layer keeps anything.

        Raises:
            CheckpointError: as `model_facts`.
        """
        facts = model_facts(self)
        return replace(facts, layers=()) if self.kind in LAST_STATE else facts


def kind_of(checkpoint: Checkpoint, method: str) -> str | None:
    """The kind of head that lies in these files, where `method` was asked for; None for a whole model.

    Raises:
        CheckpointError: it is another than that.
    """
    found = head_kind(checkpoint.config, checkpoint.tensors)
    if found is None and method == "mtp" and mtp_names(text_config(checkpoint.config), checkpoint.tensors):
        found = "mtp"
    if method == "draft_model" or method == found or (method, found) == ("eagle3", "p-eagle"):
        return found
    named = checkpoint.config.get("architectures") or checkpoint.config.get("model_type")
    if found is not None:
        why = f"is a head for method {found}"
    elif method == "mtp":
        why = (
            "has no layer for multi-token prediction: its files have none of the tensors mtp.fc, eh_proj behind the "
            "last layer, model.mtp_layers.0.input_proj and model.mtp_linear_proj.0. Copies without it are common"
        )
    else:
        why = f"is no such head: architectures is {quoted(str(named), 80)}"
    raise CheckpointError(f"{checkpoint.path} {why}, and method {method} was asked for.")


def head_files(checkpoint: Checkpoint, kind: str) -> HeadFiles:
    """What of a checkpoint is the head."""
    layout, stored = None, {name: name for name in checkpoint.tensors}
    if kind == "mtp" and (found := mtp_names(text_config(checkpoint.config), checkpoint.tensors)) is not None:
        layout, stored = found
        stored = {name: whole for name, whole in stored.items() if not _copied(checkpoint, name, whole)}
    tensors = {name: checkpoint.tensors[whole] for name, whole in stored.items()}
    config = head_config(kind, text_config(checkpoint.config), tensors)
    if kind == "medusa":
        config = {**_medusa_sizes(config, tensors), **config}
    return HeadFiles(
        kind,
        stored,
        checkpoint.path,
        config,
        checkpoint.generation_config,
        checkpoint.tokenizer_config,
        checkpoint.metadata,
        tensors,
        checkpoint,
        layout,
    )


def _copied(checkpoint: Checkpoint, name: str, stored: str) -> bool:
    """Whether a head's table is one of its target's once more, so that the target's is used (DeepSeek-V3's, GLM's)."""
    of = next((table for table in _TABLES.get(name, ()) if table in checkpoint.tensors), stored)
    one, other = checkpoint.tensors[stored], checkpoint.tensors[of]
    if of == stored or (one.format, one.shape) != (other.format, other.shape):
        return False
    ours, theirs = checkpoint.read(stored).data, checkpoint.read(of).data
    return all(
        np.array_equal(ours[begin : begin + _LOOKED_AT], theirs[begin : begin + _LOOKED_AT])
        for begin in range(0, len(ours), _LOOKED_AT)
    )


def _medusa_sizes(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, int]:
    """What published configurations of Medusa heads leave out, from the first head's table."""
    table = tensors.get(f"0.{config.get('medusa_num_layers', 1)}.weight")
    if table is None or len(table.shape) != 2:
        return {}
    return {"vocab_size": table.shape[0], "hidden_size": table.shape[1]}


def check_numbers(files: HeadFiles) -> None:
    """Refuses values that are no numbers: with one of them nothing would ever be drafted.

    Raises:
        CheckpointError: names the tensor.
    """
    for name, info in files.tensors.items():
        if info.format not in _FLOATS:
            continue
        data, size = files.read(name).data, FORMATS[info.format].block_bytes
        for begin in range(0, len(data), _LOOKED_AT * size):
            if not np.isfinite(decode_to_float32(info.format, data[begin : begin + _LOOKED_AT * size])).all():
                raise CheckpointError(
                    f"tensor {quoted(name)} of the head {files.path} has values that are no finite numbers: the file "
                    "is damaged. Download it again."
                )


def draft_ids(files: HeadFiles, target: TargetFacts) -> npt.NDArray[np.int64] | None:
    """The target's id of each of the head's, from `d2t`, which tells how far apart they are; None where they are equal.

    Raises:
        CheckpointError: they are none of the target's, or one stands for two.
    """
    if "d2t" not in files.tensors:
        return None
    info = files.tensors["d2t"]
    if info.format not in ("i64", "i32") or len(info.shape) != 1:
        raise CheckpointError(f"tensor 'd2t' of the head {files.path} is {info.format} {list(info.shape)}, no ids.")
    apart = files.read("d2t").data.view("<i8" if info.format == "i64" else "<i4").astype(np.int64)
    found = np.arange(len(apart)) + apart
    if len(found) and not (found >= 0).all() & (found < target.vocab_size).all():
        raise CheckpointError(
            f"tensor 'd2t' of the head {files.path} names the target's token {int(found.max())}, or one below 0, and "
            f"the target has {target.vocab_size}: the head is another model's."
        )
    if len(np.unique(found)) < len(found):
        raise CheckpointError(f"tensor 'd2t' of the head {files.path} names a token of the target twice.")
    return found
