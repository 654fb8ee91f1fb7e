"""A store in a temporary folder, and servers to pull from."""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.config.environment import ModelPlaces
from penstock.library.store import Store
from penstock.weights.open import bundled_model_path
from tests.library.servers import Files, Hub, running


@pytest.fixture
def files() -> Iterator[Files]:
    with running(Files()) as server:
        yield server


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running(Hub()) as server:
        yield server


@pytest.fixture
def places(tmp_path: Path) -> ModelPlaces:
    return ModelPlaces(tmp_path / "store", tmp_path / "hub", (tmp_path / "ollama",), endpoint="http://127.0.0.1:9")


@pytest.fixture
def store(places: ModelPlaces) -> Store:
    return Store(places)


@pytest.fixture(scope="session")
def some_bytes() -> bytes:
    return random.Random(1).randbytes(3_000_001)


@pytest.fixture(scope="session")
def concierge() -> dict[str, bytes]:
    """The files of the bundled model."""
    return {path.name: path.read_bytes() for path in bundled_model_path().iterdir() if path.is_file()}


@pytest.fixture(scope="session")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model as a GGUF file."""
    from penstock.weights.writers.quantize import quantize_model

    path = tmp_path_factory.mktemp("gguf") / "concierge-Q8_0.gguf"
    quantize_model("penstock-concierge", "q8_0", path)
    return path


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The host of a real registry; skips where Debian's docker-registry is not installed."""
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip("docker-registry is not installed (apt-get install docker-registry)")
    folder = tmp_path_factory.mktemp("registry")
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    config = folder / "config.yml"
    config.write_text(
        f"version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {folder}/data}}, "
        f"delete: {{enabled: true}}}}\nhttp: {{addr: 127.0.0.1:{port}}}\n"
    )
    with subprocess.Popen(
        [program, "serve", str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        for _ in range(200):
            with socket.socket() as asked:
                if asked.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"127.0.0.1:{port}"
        process.terminate()
