"""Pulls from Hugging Face, or a mirror of it, into the ordinary cache: only what is needed to run the model.

huggingface_hub says what a repository holds; the bytes are loaded in ranges (`library.transfer`) and held against the
digests it states, which the cache's blobs are named by.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from penstock.config.environment import ModelPlaces
from penstock.config.errors import CheckpointError, ConfigError, quoted
from penstock.config.limits import MAX_MODEL_FILE_BYTES, MAX_REPOSITORY_FILES
from penstock.library.digests import Digest
from penstock.library.files import inside, symbolic, write_whole
from penstock.library.hub_cache import ADAPTER_FILES, INDEX, is_adapter, is_whole, quantisation, repo_folder, selected
from penstock.library.names import HubName, NoSuchModelError
from penstock.library.transfer import Manner, Source, fetch_all
from penstock.library.web import Web

# What stands beside weights: configuration, tokenizer, templates, licence, and modules that pool.
SMALL_FILES: Final = (
    *("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "additional_chat_templates/*.jinja", "README.md"),
    *("LICENSE*", "LICENCE*", "[0-9]_*/config.json", "[0-9]_*/model.safetensors"),
)
_NOT_SMALL: Final = ("*.index.json", "params.json", "training_args*", "trainer_state*", "*_results.json")
_MOST_SMALL: Final = 256 << 20
_SHA1, _SHA256 = re.compile(r"[0-9a-f]{40}"), re.compile(r"[0-9a-f]{64}")
_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt")
_DEFAULT_QUANTS: Final = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q5_K_M", "Q8_0", "IQ4_XS", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class File:
    """A file of a repository: its name there, bytes, and digest."""

    name: str
    size: int
    digest: Digest


@dataclass(frozen=True, slots=True)
class Repository:
    """What the hub says of a repository at a revision.

    Attributes:
        name: as it was asked for.
        commit: which the revision stands for.
        files: by name.
        license: as its card states it; "" if it does not.
    """

    name: HubName
    commit: str
    files: Mapping[str, File]
    license: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """What will be loaded of a repository.

    Attributes:
        repository: which.
        name: with the quantisation that was chosen.
        files: to load, weights among them.
        weights: their names.
    """

    repository: Repository
    name: HubName
    files: tuple[File, ...]
    weights: tuple[str, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def weight_bytes(self) -> int:
        return sum(file.size for file in self.files if file.name in self.weights)


def describe(places: ModelPlaces, name: HubName) -> Repository:
    """Asks the hub what a repository holds.

    Raises:
        ConfigError: offline; there is no such repository or revision, or it is not open to this user; no answer.
        CheckpointError: what it states cannot be used.
    """
    if places.offline:
        raise ConfigError(f"HF_HUB_OFFLINE is set, so {name} is not loaded; unset it, or name a model that is here.")
    from huggingface_hub import HfApi
    from huggingface_hub import errors as refused

    api = HfApi(endpoint=places.endpoint, token=places.token or False)
    try:
        info = api.model_info(name.repo_id, revision=name.revision, files_metadata=True, timeout=30)
    except refused.GatedRepoError:
        where = f"{places.endpoint}/{name.repo_id}"
        raise ConfigError(f"{name.repo_id} asks for its terms to be accepted: {where}, then set HF_TOKEN.") from None
    except refused.RevisionNotFoundError:
        raise NoSuchModelError(f"{name.repo_id} has no revision {name.revision!r} at {places.endpoint}.") from None
    except refused.RepositoryNotFoundError:
        hint = "" if places.token else " If it is private, set HF_TOKEN."
        raise NoSuchModelError(f"there is no model {name.repo_id} at {places.endpoint}.{hint}") from None
    except (refused.HfHubHTTPError, OSError, ValueError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ConfigError(f"{places.endpoint} does not tell what {name.repo_id} holds: {said}") from None
    except Exception as error:
        if not type(error).__module__.startswith(("httpx", "httpcore")):
            raise
        said = str(error)[:200]
        raise ConfigError(
            f"{places.endpoint} cannot be reached ({said}); set HF_HUB_OFFLINE=1 to do without."
        ) from None
    license = str(getattr(info.card_data, "license", None) or "")
    return Repository(name, _commit(info.sha), _files(info.siblings or []), license)


def _commit(sha: str | None) -> str:
    if not _SHA1.fullmatch(sha or ""):
        raise CheckpointError(f"the hub names {quoted(str(sha), 60)} as a commit, which is none.")
    return str(sha)


def _files(siblings: Sequence[Any]) -> dict[str, File]:
    if len(siblings) > MAX_REPOSITORY_FILES:
        raise CheckpointError(f"the repository has {len(siblings)} files; {MAX_REPOSITORY_FILES} are allowed.")
    found: dict[str, File] = {}
    for sibling in siblings:
        lfs, size = sibling.lfs, sibling.size
        digest = Digest("sha256", str(lfs.sha256)) if lfs else Digest("git", str(sibling.blob_id))
        whole = (_SHA256 if lfs else _SHA1).fullmatch(digest.hex)
        if whole and type(size) is int and 0 <= size <= MAX_MODEL_FILE_BYTES:
            found[str(sibling.rfilename)] = File(str(sibling.rfilename), size, digest)
    return found


def choose(repository: Repository, index: Mapping[str, Any] | None = None) -> Choice:
    """What to load: the GGUF file that is asked for, or safetensors with what stands beside them.

    Args:
        repository: from `describe`.
        index: its model.safetensors.index.json, if it has one.

    Raises:
        ConfigError: there is nothing Penstock reads, or not that quantisation; the message lists what there is.
    """
    name, files = repository.name, repository.files
    small = [
        file
        for file in files.values()
        if any(fnmatch.fnmatchcase(file.name, form) and file.name.count("/") == form.count("/") for form in SMALL_FILES)
        and not any(fnmatch.fnmatchcase(file.name, form) for form in _NOT_SMALL)
        and file.size <= _MOST_SMALL
    ]
    if is_adapter(files) and not name.selector:
        return Choice(repository, name, tuple(files[file] for file in ADAPTER_FILES), ADAPTER_FILES[1:])
    weights = _safetensors(repository, index)
    if name.selector or (not weights and selected(list(files), "")):
        shards, selector = _gguf(repository)
        return Choice(repository, replace(name, selector=selector), tuple(files[s] for s in shards), tuple(shards))
    if not weights or "config.json" not in files:
        raise _nothing(repository)
    beside = {file.name: file for file in small} | ({INDEX: files[INDEX]} if INDEX in files else {})
    loaded = beside | {weight: files[weight] for weight in weights}
    return Choice(repository, name, tuple(loaded.values()), tuple(weights))


def _safetensors(repository: Repository, index: Mapping[str, Any] | None) -> list[str]:
    """The weights that config.json describes: as the index lists them, else model.safetensors, else all at the root."""
    files = repository.files
    if index is not None:
        mapped = index.get("weight_map")
        listed = sorted({str(file) for file in mapped.values()}) if isinstance(mapped, Mapping) else []
        if missing := [file for file in listed if file not in files]:
            raise CheckpointError(f"{repository.name} lacks {', '.join(missing[:5])}, which its index names.")
        return listed
    if "model.safetensors" in files:
        return ["model.safetensors"]
    root = [file for file in files if file.endswith(".safetensors") and "/" not in file]
    return [file for file in root if not file.startswith(("adapter", "consolidated", "optimizer"))] or root


def _gguf(repository: Repository) -> tuple[list[str], str]:
    """The shards of the asked quantisation, and its name."""
    name, files = repository.name, list(repository.files)
    models = selected(files, "")
    if name.selector:
        found = selected(files, name.selector)
    else:
        by_quant = {quantisation(shards[0]): shards for shards in reversed(models)}
        first = next((quant for quant in _DEFAULT_QUANTS if quant in by_quant), "")
        found = [by_quant[first]] if first else models
    if len(found) != 1:
        listed = ", ".join(sorted({quantisation(shards[0]) or shards[0] for shards in models})) or "none"
        what = "several of them match" if found else "there is no such file"
        asked = f" {name.selector!r}" if name.selector else ""
        raise ConfigError(
            f"{name.repo_id} has GGUF files in: {listed}. Of{asked or ' all'}, {what}; "
            f"name one: hf.co/{name.repo_id}:{(quantisation(models[0][0]) or models[0][0]) if models else 'QUANT'}"
        )
    if not is_whole(found[0]):
        raise CheckpointError(f"{name.repo_id} lacks shards of {found[0][0]}.")
    quant = quantisation(found[0][0])
    alone = len(selected(files, quant)) == 1
    return found[0], quant if quant and alone else found[0][0]


def _nothing(repository: Repository) -> ConfigError:
    pickles = [file for file in repository.files if file.endswith(_PICKLES)]
    told = f"{repository.name.repo_id} holds no model in safetensors or GGUF"
    if pickles:
        told += f", but {pickles[0]}, a pickle, which can run code when it is read"
    return ConfigError(f"{told}. Look for a conversion of it with safetensors or GGUF in its name.")


@dataclass(frozen=True, slots=True)
class Hub:
    """A repository's way into the cache."""

    web: Web
    places: ModelPlaces

    def source(self, repository: Repository, file: File) -> Source:
        """Where a file's bytes are."""
        path = f"{repository.name.repo_id}/resolve/{repository.commit}/{quote(file.name)}"
        headers = {"Authorization": f"Bearer {self.places.token}"} if self.places.token else {}
        return Source(f"{self.places.endpoint}/{path}", file.size, file.digest, headers)

    def blob(self, repository: Repository, file: File) -> Path:
        """Where the cache keeps them."""
        return repo_folder(self.places.hub, repository.name) / "blobs" / file.digest.hex

    def manner(self, repository: Repository, manner: Manner) -> Manner:
        """The manner, with the places of the cache: its locks are huggingface_hub's, so that neither loads twice."""
        folder = repo_folder(self.places.hub, repository.name)
        return replace(manner, partials=folder / ".penstock", locks=self.places.hub / ".locks" / folder.name)

    def load(self, repository: Repository, files: Sequence[File], manner: Manner) -> Path:
        """Brings files into the cache; they appear in the snapshot when all of them are there. Gives the snapshot.

        Raises:
            WebError, CheckpointError, ConfigError: as `transfer.fetch`.
        """
        folder = repo_folder(self.places.hub, repository.name)
        snapshot = folder / "snapshots" / repository.commit
        links = [(inside(snapshot, file.name), self.blob(repository, file)) for file in files]
        pairs = [(self.source(repository, file), self.blob(repository, file)) for file in files]
        fetch_all(self.web, pairs, self.manner(repository, manner))
        for link, blob in links:
            if not link.is_file():
                symbolic(inside(snapshot, link.relative_to(snapshot).as_posix()), blob)
        if repository.name.revision != repository.commit:
            write_whole(inside(folder / "refs", repository.name.revision), repository.commit.encode())
        return snapshot

    def read_json(self, repository: Repository, name: str) -> dict[str, Any] | None:
        """A small file of a repository, which stays in the cache; None if it has none of that name."""
        file = repository.files.get(name)
        if file is None:
            return None
        snapshot = self.load(repository, [file], Manner())
        try:
            found = json.loads((snapshot / name).read_bytes())
        except (OSError, ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise CheckpointError(f"{name} of {repository.name} is no JSON object.")
        return found
