"""Opens whatever checkpoint lies at a path."""

from __future__ import annotations

from pathlib import Path

from penstock.config.errors import CheckpointError
from penstock.config.names import BUNDLED_MODEL
from penstock.weights.checkpoint import Checkpoint, with_overrides
from penstock.weights.readers.gguf import open_gguf, shard_paths
from penstock.weights.readers.safetensors import describe_folder, open_safetensors

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def bundled_model_path() -> Path:
    """Folder of the small chat model that ships inside the package.

    Raises:
        CheckpointError: the package was installed without it.
    """
    folder = Path(__file__).resolve().parents[1] / "models_data" / BUNDLED_MODEL
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"the bundled model is not at {folder}; install Penstock again, or name a model.")
    return folder


def _open_folder(folder: Path) -> Checkpoint:
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be listed: {error.strerror or error}.") from error
    ggufs = [path for path in entries if path.suffix == ".gguf"]
    if any(path.suffix == ".safetensors" for path in entries) or not ggufs:
        return open_safetensors(folder)
    models = {tuple(shard_paths(path)) for path in ggufs}
    if len(models) > 1:
        names = ", ".join(path.name for path in ggufs[:20])
        raise CheckpointError(f"{folder} holds several GGUF models; name one of these files: {names}.")
    return open_gguf(ggufs[0])


def open_checkpoint(path: str | Path, overrides: str | None = None) -> Checkpoint:
    """Opens a model without reading its weights.

    Args:
        path: a Hugging Face folder with safetensors, a .gguf file (any shard of a split one), a folder with one GGUF
            model, or "penstock-concierge", the bundled model.
        overrides: other values for its configuration: EngineOptions.hf_overrides.

    Raises:
        CheckpointError: nothing usable lies there; the message says what was looked for.
    """
    return with_overrides(_opened(path), overrides)


def _opened(path: str | Path) -> Checkpoint:
    if str(path) == BUNDLED_MODEL and not Path(path).exists():
        return open_safetensors(bundled_model_path())
    path = Path(path).expanduser()
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise CheckpointError(
            f"there is no model at {path}; give a Hugging Face folder, a .gguf file, or {BUNDLED_MODEL!r}, "
            "the model that ships with Penstock."
        )
    if path.suffix == ".gguf":
        return open_gguf(path)
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path} is one file of a model; give the folder it lies in, {path.parent}.")
    if path.suffix in _PICKLES:
        raise CheckpointError(
            f"{path} is a pickle, which can run code when it is read; give a folder with safetensors, "
            "made for example with transformers' save_pretrained."
        )
    raise CheckpointError(f"{path} is no model Penstock reads: a Hugging Face folder or a .gguf file is needed.")


def open_description(path: str | Path, overrides: str | None = None) -> Checkpoint:
    """Opens what a model's files say beside its weights, which a Hugging Face folder may lack.

    Raises:
        CheckpointError: as `open_checkpoint`.
    """
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file() or any(folder.glob("*.safetensors")) or any(folder.glob("*.gguf")):
        return open_checkpoint(path, overrides)
    return with_overrides(describe_folder(folder), overrides)
