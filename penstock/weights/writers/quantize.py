"""`quantize`: a model in, a smaller model out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from penstock.config.errors import ConfigError
from penstock.config.names import served_name
from penstock.config.quantisation import GGUF_FILE_TYPES, QUANTIZE_FORMATS, SAFETENSORS_FORMATS
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.imatrix import ImportanceMatrix, read_imatrix
from penstock.weights.open import open_checkpoint
from penstock.weights.writers.files import check_replaceable, replacing
from penstock.weights.writers.folder_model import plan_folder
from penstock.weights.writers.gguf import Progress, write_gguf
from penstock.weights.writers.gguf_model import gguf_name, plan_gguf, source_of
from penstock.weights.writers.safetensors import copy_side_files, write_safetensors

_HEEDING = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4", "tq", "int4")  # beginnings of formats that use importance


@dataclass(frozen=True, slots=True)
class Written:
    """What came out.

    Attributes:
        path: the file or folder.
        nbytes: its size.
        source_bytes: the tensors' size before.
        formats: storage format → bytes in it.
        remarks: sentences on tensors that could not take the format asked for.
    """

    path: Path
    nbytes: int
    source_bytes: int
    formats: dict[str, int]
    remarks: tuple[str, ...]


def default_output(model: str, format: str) -> Path:
    """`<model>-Q4_K_M.gguf` or `<model>-int8`, in the current folder."""
    stem = served_name(model)
    return Path(f"{stem}-{format.upper()}.gguf" if format in GGUF_FILE_TYPES else f"{stem}-{format}")


def quantize_model(
    model: str,
    format: str,
    output: Path | None = None,
    *,
    imatrix: Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Written:
    """Writes a quantised copy of a model.

    Args:
        model: a Hugging Face folder, a .gguf file in f32, f16 or bf16, or the bundled model's name.
        format: one of `config.quantisation.QUANTIZE_FORMATS`.
        output: a .gguf file, or a folder for the safetensors formats; None for `default_output`.
        imatrix: an importance matrix from `penstock imatrix` or llama-imatrix.
        force: replace what lies at the output.
        progress: called with (bytes written, bytes in all).
        tell: gets a sentence on every tensor that could not take the format, before the work begins.

    Raises:
        ConfigError: an unknown format, an output that is there already or cannot be written, or a model that is
            quantised already. CheckpointError: a model or matrix that cannot be read.
    """
    if format not in QUANTIZE_FORMATS:
        raise ConfigError(f"--to is {format!r}; allowed: {', '.join(QUANTIZE_FORMATS)}.")
    path = (output or default_output(model, format)).expanduser()
    checkpoint = open_checkpoint(model)
    _check_output(path, format, checkpoint, force)
    importance = None if imatrix is None else read_imatrix(imatrix)
    if importance is not None and not format.startswith(_HEEDING):
        tell(f"{format} has no use for an importance matrix; it is left out")
        importance = None
    write = _write_folder if format in SAFETENSORS_FORMATS else _write_gguf
    return write(checkpoint, format, path, importance, progress, tell)


def _check_output(path: Path, format: str, checkpoint: Checkpoint, force: bool) -> None:
    if format in SAFETENSORS_FORMATS:
        if checkpoint.metadata:
            raise ConfigError(f"{format} is written from a Hugging Face folder; {checkpoint.path} is a GGUF file.")
        if path.suffix == ".gguf":
            raise ConfigError(f"--output is {path}; {format} is written as a folder, not as a .gguf file.")
    elif path.suffix != ".gguf":
        raise ConfigError(f"--output is {path}; {format} is written to a file whose name ends in .gguf.")
    if path.exists() and path.resolve() in (checkpoint.path.resolve(), *checkpoint.path.resolve().parents):
        raise ConfigError(f"--output is {path}, where the model itself lies; choose another place.")
    if path.exists() and not force:
        raise ConfigError(f"{path} exists already; choose another --output, or replace it with --force.")
    check_replaceable(path)


def _source_bytes(checkpoint: Checkpoint) -> int:
    return sum(info.nbytes for info in checkpoint.tensors.values())


def _write_gguf(
    checkpoint: Checkpoint,
    format: str,
    path: Path,
    importance: ImportanceMatrix | None,
    progress: Progress | None,
    tell: Callable[[str], None],
) -> Written:
    plan = plan_gguf(source_of(checkpoint, importance is not None), format, importance)
    for remark in plan.remarks:
        tell(remark)
    formats: dict[str, int] = {}
    for tensor in plan.tensors:
        formats[tensor.format] = formats.get(tensor.format, 0) + tensor.nbytes
    size = write_gguf(path, plan.metadata, plan.tensors, progress)
    return Written(path, size, _source_bytes(checkpoint), formats, plan.remarks)


def _write_folder(
    checkpoint: Checkpoint,
    format: str,
    path: Path,
    importance: ImportanceMatrix | None,
    progress: Progress | None,
    tell: Callable[[str], None],
) -> Written:
    names = partial(gguf_name, checkpoint) if importance is not None else None
    config, groups, remarks = plan_folder(checkpoint, format, importance, names)
    for remark in remarks:
        tell(remark)
    formats: dict[str, int] = {}
    for group in groups:
        for tensor in group.tensors:
            formats[tensor.format] = formats.get(tensor.format, 0) + tensor.nbytes
    with replacing(path) as partial_path:
        partial_path.mkdir()
        size = write_safetensors(partial_path, groups, progress)
        copy_side_files(checkpoint.path, partial_path)
        (partial_path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return Written(path, size, _source_bytes(checkpoint), formats, tuple(remarks))
