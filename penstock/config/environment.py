"""The only reader of environment variables. Options on the command line come before these."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from penstock.config.errors import ConfigError
from penstock.config.kv_store import MooncakeMember, StoreAccess
from penstock.config.limits import MAX_THREADS
from penstock.config.logs import LOG_FORMATS
from penstock.config.resolve import ISAS

_NAMES: Final = ("ISA", "THREADS", "LOG_LEVEL", "LOG_FORMAT", "MODEL", "PACK_CACHE")
HUB_ENDPOINT: Final = "https://huggingface.co"
REGISTRY: Final = "registry.ollama.ai"
HUB_HOSTS: Final = ("hf.co", "huggingface.co")  # what names of models of the hub may begin with
DOCKER_REGISTRIES: Final = ("docker.io", "index.docker.io", "registry-1.docker.io")
DOCKER_AUTHORITY: Final = "auth.docker.io"  # which gives tokens for those
_LOG_LEVELS: Final = ("critical", "error", "warning", "info", "debug")

_TELLING: Final = (
    *("PENSTOCK_", "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "MALLOC_", "LD_", "CUDA_", "NVIDIA_", "ROCR_", "HIP_"),
    *("TRITON_", "TORCH", "PYTORCH_", "HF_", "TRANSFORMERS_", "OLLAMA_", "XDG_", "PYTHON", "HTTP_PROXY", "HTTPS_PROXY"),
    *("ALL_PROXY", "NO_PROXY", "LANG", "LC_", "TERM", "COLUMNS"),
)
_SECRET: Final = ("KEY", "TOKEN", "SECRET", "PASS", "CREDENTIAL", "AUTH", "COOKIE")
_LONGEST_TOLD: Final = 200


@dataclass(frozen=True, slots=True)
class Environment:
    """What the environment asks for; a variable that is unset or empty leaves the default.

    Attributes:
        api_keys: PENSTOCK_API_KEY, separated by commas: keys the server accepts.
        isa: PENSTOCK_ISA: native instruction set to force.
        threads: PENSTOCK_THREADS: threads of native and torch kernels.
        log_level: PENSTOCK_LOG_LEVEL, lower case.
        log_format: PENSTOCK_LOG_FORMAT: text, or json for an object a line.
        model: PENSTOCK_MODEL: the model where none is named.
        pack_cache: PENSTOCK_PACK_CACHE: folder of packed weights, or "off".
    """

    api_keys: tuple[str, ...] = ()
    isa: str = "auto"
    threads: int | None = None
    log_level: str = "info"
    log_format: str = "text"
    model: str | None = None
    pack_cache: str = "auto"


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Reads and checks Penstock's variables.

    Args:
        variables: the environment to read; None reads the process's own.

    Raises:
        ConfigError: a value is not allowed; the message names the variable (and never shows a key).
    """
    given = os.environ if variables is None else variables
    text = {name: given.get(f"PENSTOCK_{name}", "").strip() for name in _NAMES}
    return Environment(
        api_keys=_keys(given.get("PENSTOCK_API_KEY", "")),
        isa=_one_of("PENSTOCK_ISA", text["ISA"], ISAS, "auto"),
        threads=_threads(text["THREADS"]),
        log_level=_one_of("PENSTOCK_LOG_LEVEL", text["LOG_LEVEL"], _LOG_LEVELS, "info"),
        log_format=_one_of("PENSTOCK_LOG_FORMAT", text["LOG_FORMAT"], LOG_FORMATS, "text"),
        model=_model(text["MODEL"]),
        pack_cache=text["PACK_CACHE"] or "auto",
    )


def flag_variable(name: str) -> str:
    """The variable that sets a flag: max_model_len → PENSTOCK_MAX_MODEL_LEN."""
    return "PENSTOCK_MODELS_FILE" if name == "models" else f"PENSTOCK_{name.upper()}"  # PENSTOCK_MODELS is the store


def flag_variables(names: Iterable[str], variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Of these flags, what the environment says; an empty variable says nothing."""
    given = os.environ if variables is None else variables
    found = {name: given.get(flag_variable(name), "").strip() for name in names}
    return {name: text for name, text in found.items() if text}


def _refuse(name: str, shown: str, allowed: str) -> ConfigError:
    return ConfigError(f"{name} is {shown}; allowed: {allowed}. Correct the variable or unset it.")


def _one_of(name: str, value: str, allowed: tuple[str, ...], default: str) -> str:
    lowered = value.lower()
    if lowered and lowered not in allowed:
        raise _refuse(name, repr(value[:80]), ", ".join(allowed))
    return lowered or default


def _threads(value: str) -> int | None:
    if not value:
        return None
    if not (value.isascii() and value.isdigit() and len(value) < 10 and 1 <= int(value) <= MAX_THREADS):
        raise _refuse("PENSTOCK_THREADS", repr(value[:80]), f"a whole number from 1 to {MAX_THREADS}")
    return int(value)


def _model(value: str) -> str | None:
    if "\0" in value or "\n" in value:
        raise _refuse("PENSTOCK_MODEL", repr(value[:80]), "a folder, a .gguf file or a model's name")
    return value or None


def _keys(value: str) -> tuple[str, ...]:
    keys = tuple(key.strip() for key in value.split(",") if key.strip())
    for number, key in enumerate(keys, 1):
        if not key.isascii() or not key.isprintable() or " " in key:
            raise _refuse(
                "PENSTOCK_API_KEY", f"unusable in its key number {number}", "printable ASCII without spaces, by commas"
            )
    return keys


def told_variables(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables that change what is done here, for a report: of what is secret only that it is set."""
    given = os.environ if variables is None else variables
    found = dict[str, str]()
    for name, value in sorted(given.items()):
        if value and name.upper().startswith(_TELLING):
            hidden = any(word in name.upper() for word in _SECRET)
            found[name] = "(set)" if hidden else _without_secrets(value)[:_LONGEST_TOLD]
    return found


def _without_secrets(value: str) -> str:
    """A value without what may be a name and password before a host, or a token behind a question mark."""
    address, mark, _ = value.partition("?")
    before, at, host = address.rpartition("@")
    scheme = before.partition("://")[0] + "://" if "://" in before else ""
    return (f"{scheme}…@{host}" if at else address) + ("?…" if mark else "")


def key_of(name: str) -> str | None:
    """The key for another server that a variable holds; None where it is unset or empty."""
    return os.environ.get(name, "").strip() or None


def cache_folder() -> Path:
    """Where files that can be made again are kept: $XDG_CACHE_HOME/penstock, ~/.cache/penstock if that is unset."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "penstock"


@dataclass(frozen=True, slots=True)
class ModelPlaces:
    """Where models lie on this machine, and where others come from.

    Attributes:
        store: PENSTOCK_MODELS, else $XDG_DATA_HOME/penstock/models: what Penstock keeps itself.
        hub: the Hugging Face cache: HF_HUB_CACHE, else HF_HOME/hub, as huggingface_hub has it.
        ollama: existing stores of Ollama: OLLAMA_MODELS, else ~/.ollama/models; they are read in place.
        endpoint: HF_ENDPOINT: the hub or a mirror of it.
        token: HF_TOKEN, else what `hf auth login` left; never shown.
        offline: HF_HUB_OFFLINE: nothing is loaded.
        registry: PENSTOCK_REGISTRY: the host that names without one are of.
        docker: what `docker login` keeps: DOCKER_CONFIG, else ~/.docker.
    """

    store: Path
    hub: Path
    ollama: tuple[Path, ...] = ()
    endpoint: str = HUB_ENDPOINT
    token: str | None = field(default=None, repr=False)
    offline: bool = False
    registry: str = REGISTRY
    docker: Path = Path()


def model_places(variables: Mapping[str, str] | None = None, home: Path | None = None) -> ModelPlaces:
    """Reads where models are; `variables` and `home` for others than the process's own.

    Raises:
        ConfigError: a value is not allowed, or the user has no home folder.
    """
    given = os.environ if variables is None else variables
    text = {name: value.strip() for name, value in given.items()}
    try:
        home = home or Path.home()
    except RuntimeError:
        raise ConfigError("this user has no home folder; set PENSTOCK_MODELS, HF_HOME and HOME.") from None
    data, cache = (
        _folder(text, "XDG_DATA_HOME", home / ".local/share"),
        _folder(text, "XDG_CACHE_HOME", home / ".cache"),
    )
    hub_home = _folder(text, "HF_HOME", cache / "huggingface")
    ollama = _folder(text, "OLLAMA_MODELS", home / ".ollama/models")
    system = Path("/usr/share/ollama/.ollama/models")  # of the service, where its installer puts one
    endpoint = (text.get("HF_ENDPOINT") or HUB_ENDPOINT).rstrip("/")
    if not re.fullmatch(r"https?://[^\s/@?#]+(/[^\s?#]*)?", endpoint):
        raise _refuse("HF_ENDPOINT", repr(endpoint[:80]), "a web address such as https://hub.example")
    registry = text.get("PENSTOCK_REGISTRY") or REGISTRY
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*(:[0-9]{1,5})?", registry):
        raise _refuse("PENSTOCK_REGISTRY", repr(registry[:80]), "a host such as registry.example:5000")
    offline = (text.get("HF_HUB_OFFLINE") or text.get("TRANSFORMERS_OFFLINE") or "").lower()
    return ModelPlaces(
        store=_folder(text, "PENSTOCK_MODELS", data / "penstock/models"),
        hub=_folder(text, "HF_HUB_CACHE", hub_home / "hub"),
        ollama=tuple(dict.fromkeys((ollama,) if text.get("OLLAMA_MODELS") else (ollama, system))),
        endpoint=endpoint,
        token=_token(text, _folder(text, "HF_TOKEN_PATH", hub_home / "token")),
        offline=offline in ("1", "on", "yes", "true"),
        registry=registry,
        docker=_folder(text, "DOCKER_CONFIG", home / ".docker") / "config.json",
    )


def _folder(text: Mapping[str, str], name: str, default: Path) -> Path:
    value = text.get(name, "")
    return Path(os.path.expandvars(value)).expanduser() if value and "\0" not in value else default


def _token(text: Mapping[str, str], kept: Path) -> str | None:
    token = text.get("HF_TOKEN") or text.get("HUGGING_FACE_HUB_TOKEN") or ""
    if not token and text.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").lower() not in ("1", "on", "yes", "true"):
        with suppress(OSError, UnicodeError):
            token = kept.read_text(encoding="utf-8").strip()
    if not token.isascii() or not token.isprintable() or " " in token:
        raise _refuse("HF_TOKEN", "unusable", "printable ASCII without spaces")
    return token or None


def state_folder() -> Path:
    """Where what a user would miss is kept: $XDG_STATE_HOME/penstock, ~/.local/state/penstock if that is unset.

    Raises:
        RuntimeError: the user has no home.
    """
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".local" / "state") / "penstock"


def pack_folder(setting: str) -> Path | None:
    """Where files of packed weights are kept; `setting` is EngineOptions.pack_cache. None: switched off, or "auto" for
    a user without a home.
    """
    if setting == "off":
        return None
    if setting != "auto":
        return Path(setting).expanduser()
    try:
        return cache_folder() / "packed"
    except RuntimeError:
        return None


def kv_folder(setting: str | None) -> Path:
    """Where folders of copies of blocks are; `setting` is EngineOptions.kv_disk_path.

    Raises:
        RuntimeError: the user has no home.
    """
    return Path(setting).expanduser() if setting else cache_folder() / "kv"


def hash_seed() -> str | None:
    """PYTHONHASHSEED: what engines have in common whose hashes of blocks are to be equal; None where it is not set."""
    return os.environ.get("PYTHONHASHSEED")


def whole_block_hashes() -> bool:
    """Whether VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES is 0: KV events name blocks by all bytes of their hashes."""
    return os.environ.get("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "").strip().lower() in ("0", "false")


def kv_key(variables: Mapping[str, str] | None = None) -> bytes | None:
    """PENSTOCK_KV_KEY: the 32 bytes that what is kept of prompts is encrypted with; None where it is unset or empty.

    Raises:
        ConfigError: it is no such key; it is not shown.
    """
    text = (os.environ if variables is None else variables).get("PENSTOCK_KV_KEY", "").strip()
    if not text:
        return None
    with suppress(ValueError):
        key = bytes.fromhex(text) if len(text) == 64 else base64.b64decode(text, validate=True)
        if len(key) == 32:
            return key
    allowed = "32 random bytes as 64 hexadecimal digits or in base64; `openssl rand -hex 32` makes some"
    raise _refuse("PENSTOCK_KV_KEY", "unusable", allowed)


def worker_token(variables: Mapping[str, str] | None = None) -> str:
    """PENSTOCK_WORKER_TOKEN: what workers of other machines and who leads them know; "" where it is unset."""
    return (os.environ if variables is None else variables).get("PENSTOCK_WORKER_TOKEN", "").strip()


def store_access(variables: Mapping[str, str] | None = None) -> StoreAccess:
    """Who may use a shared store: PENSTOCK_KV_STORE_PASSWORD of Redis, AWS_* of an object store, MOONCAKE_*.

    Raises:
        ConfigError: a value is not allowed.
    """
    given = os.environ if variables is None else variables
    text = {
        name: value.strip() for name, value in given.items() if name.startswith(("AWS_", "PENSTOCK_KV_", "MOONCAKE_"))
    }
    region = text.get("AWS_REGION") or text.get("AWS_DEFAULT_REGION") or "us-east-1"
    endpoint = text.get("AWS_ENDPOINT_URL_S3") or text.get("AWS_ENDPOINT_URL") or f"https://s3.{region}.amazonaws.com"
    if not re.fullmatch(r"https?://[^\s/@?#]+/?", endpoint):
        raise _refuse(
            "AWS_ENDPOINT_URL", repr(endpoint[:80]), "a web address without a path, such as https://s3.example"
        )
    return StoreAccess(
        password=text.get("PENSTOCK_KV_STORE_PASSWORD") or None,
        endpoint=endpoint.rstrip("/"),
        region=region,
        key=text.get("AWS_ACCESS_KEY_ID") or None,
        secret=text.get("AWS_SECRET_ACCESS_KEY") or None,
        token=text.get("AWS_SESSION_TOKEN") or None,
        mooncake=_mooncake(text),
    )


def _mooncake(text: Mapping[str, str]) -> MooncakeMember:
    """MOONCAKE_LOCAL_HOSTNAME, _GLOBAL_SEGMENT_SIZE, _TE_META_DATA_SERVER, _PROTOCOL, _DEVICE, as SGLang has them."""
    usual = MooncakeMember()
    size = text.get("MOONCAKE_GLOBAL_SEGMENT_SIZE", "0").lower()
    number, unit = (size[:-2], 1 << 30) if size.endswith("gb") else (size, 1)
    if not (number.strip().isascii() and number.strip().isdigit() and len(number) < 16):
        raise _refuse("MOONCAKE_GLOBAL_SEGMENT_SIZE", repr(size[:80]), "a number of bytes, or of gigabytes as in 4gb")
    protocol = text.get("MOONCAKE_PROTOCOL") or usual.protocol
    if protocol not in ("tcp", "rdma"):
        raise _refuse("MOONCAKE_PROTOCOL", repr(protocol[:80]), "tcp or rdma")
    return MooncakeMember(
        host=text.get("MOONCAKE_LOCAL_HOSTNAME") or usual.host,
        bytes=int(number) * unit,
        metadata=text.get("MOONCAKE_TE_META_DATA_SERVER") or usual.metadata,
        protocol=protocol,
        devices=text.get("MOONCAKE_DEVICE", ""),
    )


def settle_torch() -> None:
    """Sets what torch's libraries read from the environment when they load; call it before torch is imported.

    OpenMP threads sleep at barriers instead of spinning: a spinning team slows down manyfold as soon as anything else
    wants one of its cores, an HTTP process or a browser. oneDNN keeps 64 compiled products instead of 1,024, which is
    hundreds of MiB for a server whose steps differ in their number of rows; compiling one anew costs little. Values the
    user set stay.
    """
    for name, value in (
        ("OMP_WAIT_POLICY", "PASSIVE"),
        ("LRU_CACHE_CAPACITY", "64"),
        ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64"),
    ):
        os.environ.setdefault(name, value)


def interpret_triton() -> None:
    """Has Triton run its kernels on the CPU, in its interpreter; Triton reads this when it is first imported."""
    os.environ["TRITON_INTERPRET"] = "1"
