"""The Hugging Face cache, as huggingface_hub lays it out, read without it: whole models, each under its name.

models--OWNER--REPO/refs/main             the commit that a name stands for
                   /snapshots/COMMIT/…    the files, as links to
                   /blobs/DIGEST
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.config.limits import MAX_REPOSITORY_FILES
from penstock.library.files import remove_file
from penstock.library.names import HubName

_COMMIT = re.compile(r"[0-9a-f]{40}")
_QUANT = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q[1-8]|TQ[12]|MXFP4|NVFP4|BF16|F16|F32|FP16|FP32)(?:_[A-Z0-9]+)*)(?=[-.]|$)", re.I
)
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})$")
INDEX: Final = "model.safetensors.index.json"
ADAPTER_FILES: Final = ("adapter_config.json", "adapter_model.safetensors")  # of PEFT


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A whole model in the cache, or an adapter.

    Attributes:
        name: as it can be asked for.
        path: of its folder, or of its (first) GGUF file.
        commit: of the repository.
        bytes: of all that was loaded of it.
        modified: when, seconds since 1970.
    """

    name: HubName
    path: Path
    commit: str
    bytes: int
    modified: float


def repo_folder(hub: Path, name: HubName) -> Path:
    """Where a repository lies, or would."""
    owner = f"{name.owner}--" if name.owner else ""
    return hub / f"models--{owner}{name.repo}"


def quantisation(file: str) -> str:
    """Q4_K_M of "model-Q4_K_M-00001-of-00002.gguf", upper case; "" if the name tells none."""
    stem = _SHARD.sub("", file.removesuffix(".gguf"))
    found = _QUANT.findall(stem)
    return found[-1].upper() if found else ""


def selected(files: Sequence[str], selector: str) -> list[list[str]]:
    """The GGUF models among a repository's files that a selector names, each as its shards in order.

    A selector is a quantisation in any case, or a file's name, with or without the ending. "" names all models.
    """
    models: dict[str, list[str]] = {}
    for file in files:
        base = file.rpartition("/")[2].lower()
        if base.endswith(".gguf") and not base.startswith(("mmproj", "imatrix")):
            models.setdefault(_SHARD.sub("", file.removesuffix(".gguf")), []).append(file)
    wanted = _SHARD.sub("", selector.removesuffix(".gguf")).lower()
    exact = [stem for stem in models if wanted in (stem.lower(), stem.rpartition("/")[2].lower())]
    chosen = exact or [stem for stem in models if not wanted or quantisation(f"{stem}.gguf").lower() == wanted]
    return [sorted(models[stem]) for stem in chosen]


def is_whole(shards: Sequence[str]) -> bool:
    """Whether all files of a split model are there."""
    match = _SHARD.search(shards[0].removesuffix(".gguf"))
    return match is None or int(match[2]) == len(shards)


def cached_models(hub: Path) -> Iterator[CachedModel]:
    """Every whole model of a cache."""
    for folder, name in _repositories(hub):
        yield from models_of(folder, name)


def models_of(folder: Path, name: HubName) -> Iterator[CachedModel]:
    """Every whole model of a repository's folder; of `name` its owner and repository."""
    for snapshot, revised in _snapshots(folder, name):
        yield from _models(snapshot, revised, snapshot.name)


def cached_adapters(hub: Path) -> Iterator[CachedModel]:
    """Every adapter of a cache."""
    for folder, name in _repositories(hub):
        yield from adapters_of(folder, name)


def adapters_of(folder: Path, name: HubName) -> Iterator[CachedModel]:
    """The adapters of a repository's folder, one a revision; of `name` its owner and repository."""
    for snapshot, revised in _snapshots(folder, name):
        files = snapshot_files(snapshot)
        if is_adapter(files):
            yield _model(revised, snapshot, snapshot.name, list(files.values()))


def _repositories(hub: Path) -> Iterator[tuple[Path, HubName]]:
    with suppress(OSError):
        for folder in sorted(hub.glob("models--*")):
            parts = folder.name.split("--")
            if len(parts) in (2, 3):
                yield folder, HubName(parts[1] if len(parts) == 3 else "", parts[-1])


def _snapshots(folder: Path, name: HubName) -> Iterator[tuple[Path, HubName]]:
    """The folders of a repository's commits, each with the name that it can be asked for by."""
    named = _refs(folder)
    snapshots = folder / "snapshots"
    try:
        commits = sorted(path.name for path in snapshots.iterdir() if _COMMIT.fullmatch(path.name))
    except OSError:
        return
    for commit in commits:
        refs = [ref for ref, target in named.items() if target == commit]
        revision = "main" if "main" in refs else (sorted(refs) or [commit])[0]
        yield snapshots / commit, HubName(name.owner, name.repo, revision)


def _refs(folder: Path) -> Mapping[str, str]:
    found: dict[str, str] = {}
    base = folder / "refs"
    for path in base.rglob("*"):
        with suppress(OSError, UnicodeError):
            commit = path.read_text(encoding="ascii").strip() if path.is_file() else ""
            if _COMMIT.fullmatch(commit):
                found[path.relative_to(base).as_posix()] = commit
    return found


def _models(snapshot: Path, name: HubName, commit: str) -> Iterator[CachedModel]:
    files = snapshot_files(snapshot)
    if "config.json" in files and _weights_are_whole(snapshot, files):
        others = {file for shards in selected(list(files), "") for file in shards}
        yield _model(name, snapshot, commit, [path for file, path in files.items() if file not in others])
    for shards in selected(list(files), ""):
        if is_whole(shards):
            quant = quantisation(shards[0])
            alone = len(selected(list(files), quant)) == 1
            selector = quant if quant and alone else shards[0]
            gguf = HubName(name.owner, name.repo, name.revision, selector)
            yield _model(gguf, files[shards[0]], commit, [files[shard] for shard in shards])


def is_adapter(files: Container[str]) -> bool:
    """Whether a repository holds an adapter in PEFT's layout, and no model."""
    return "config.json" not in files and all(file in files for file in ADAPTER_FILES)


def snapshot_files(snapshot: Path) -> dict[str, Path]:
    """The files of a snapshot whose bytes are there, by name."""
    found: dict[str, Path] = {}
    for folder, folders, names in os.walk(snapshot):
        folders.sort()
        for name in sorted(names):
            path = Path(folder, name)
            if path.is_file() and not name.startswith("."):
                found[path.relative_to(snapshot).as_posix()] = path
        if len(found) > MAX_REPOSITORY_FILES:
            break
    return found


def _weights_are_whole(snapshot: Path, files: Mapping[str, Path]) -> bool:
    if INDEX in files:
        with suppress(OSError, ValueError, AttributeError, RecursionError):
            return set(json.loads(files[INDEX].read_bytes())["weight_map"].values()) <= files.keys()
        return False
    return any(file.endswith(".safetensors") and "/" not in file and "adapter" not in file for file in files)


def _model(name: HubName, path: Path, commit: str, files: Sequence[Path]) -> CachedModel:
    stats = [file.stat() for file in files]
    return CachedModel(name, path, commit, sum(stat.st_size for stat in stats), max(stat.st_mtime for stat in stats))


def remove_model(hub: Path, model: CachedModel) -> int:
    """Removes a model or adapter of a cache, and what only it needed; the bytes that became free."""
    folder = repo_folder(hub, model.name)
    snapshot = folder / "snapshots" / model.commit
    files = snapshot_files(snapshot)
    ggufs = {file for shards in selected(list(files), "") for file in shards}
    mine = (
        set(next(iter(selected(list(files), model.name.selector)), [])) if model.name.selector else files.keys() - ggufs
    )
    others = [file for file in files if file not in mine and (file in ggufs or file.endswith(".safetensors"))]
    for file in mine if others else files:
        files[file].unlink(missing_ok=True)
    if not others:
        for ref, commit in _refs(folder).items():
            if commit == model.commit:
                remove_file(folder / "refs" / ref)
        _remove_empty(snapshot)
    return sweep(folder)


def sweep(folder: Path) -> int:
    """Removes the blobs of a repository that no snapshot links to; the bytes that became free."""
    used = {os.path.realpath(path) for path in (folder / "snapshots").rglob("*") if path.is_symlink()}
    blobs = [path for path in (folder / "blobs").glob("*") if re.fullmatch(r"[0-9a-f]{40,64}", path.name)]
    freed = sum(remove_file(path) for path in blobs if os.path.realpath(path) not in used)
    if not any((folder / "snapshots").glob("*/*")):
        for part in ("blobs", "refs", "snapshots", ".penstock"):
            _remove_empty(folder / part)
        _remove_empty(folder)
    return freed


def _remove_empty(folder: Path) -> None:
    """Removes a folder, and those in it, as far as they are empty."""
    for path, _, _ in os.walk(folder, topdown=False):
        with suppress(OSError):
            os.rmdir(path)
