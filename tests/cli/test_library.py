"""Commands of the library, as people type them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM
from penstock.config.errors import ConfigError
from penstock.library.pull import pull
from penstock.library.store import open_store
from penstock.library.wish import Wish
from penstock.weights.open import bundled_model_path
from penstock.weights.writers.quantize import quantize_model
from tests.cli.conftest import Penstock
from tests.library.servers import Files, Handler, Hub, running


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running(Hub()) as server:
        yield server


@pytest.fixture
def places(tmp_path: Path, hub: Hub) -> dict[str, str]:
    """Variables that keep a command's models in a temporary folder."""
    return {
        "PENSTOCK_MODELS": str(tmp_path / "store"),
        "HF_HOME": str(tmp_path / "hf"),
        "OLLAMA_MODELS": str(tmp_path / "ollama"),
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "",
        "PENSTOCK_PACK_CACHE": "off",
    }


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "concierge-Q8_0.gguf"
    quantize_model("penstock-concierge", "q8_0", path)
    return path


def bundled() -> dict[str, bytes]:
    card = b"---\nlicense: apache-2.0\n---\n# A concierge\n"
    return {path.name: path.read_bytes() for path in bundled_model_path().iterdir() if path.is_file()} | {
        "README.md": card
    }


def test_pull_list_show_run_and_rm(penstock: Penstock, hub: Hub, places: dict[str, str]) -> None:
    hub.put("me/Concierge-7M", bundled())
    pulled = penstock("pull", "me/Concierge-7M", **places)
    assert (pulled.returncode, pulled.stdout, pulled.stderr) == (0, "me/Concierge-7M\n", "")
    assert "me/Concierge-7M" in penstock("list", **places).stdout
    listed = json.loads(penstock("list", "--json", **places).stdout)
    assert [(entry["name"], entry["where"]) for entry in listed] == [
        ("me/Concierge-7M", "hugging face"),
        ("penstock-concierge", "bundled"),
    ]
    shown = json.loads(penstock("show", "me/Concierge-7M", "--json", **places).stdout)
    assert shown["architecture"] == "Qwen3ForCausalLM" and shown["license"] == "apache-2.0"
    assert shown["capabilities"] == ["completion", "chat", "tools"] and shown["needs"]["fits"]
    plan = json.loads(penstock("plan", "me/Concierge-7M", "--json", **places).stdout)
    assert plan["parameters"] == shown["sizes"]["parameters"]
    assert penstock("run", "me/Concierge-7M", "--max-tokens", "8", "Hello", **places).stdout.strip()
    assert "became free" in penstock("rm", "me/Concierge-7M", **places).stdout
    gone = penstock("run", "me/Concierge-7M", "Hello", **places)
    assert gone.returncode == 1 and "Nearest here: penstock-concierge. To load it: penstock pull" in gone.stderr


def test_a_question_in_the_place_of_a_model_is_told(penstock: Penstock, places: dict[str, str]) -> None:
    done = penstock("run", "what is a river?", **places)
    assert done.returncode == 1
    assert "penstock run penstock-concierge 'what is a river?'" in done.stderr


def test_what_cannot_run_here_is_refused_with_what_can(
    penstock: Penstock, hub: Hub, places: dict[str, str], quantised: Path
) -> None:
    """The larger file claims more bytes than any machine has; its header is all that is loaded of it."""

    class Large(bytes):
        def __len__(self) -> int:
            return 2**43

        def __getitem__(self, part: Any) -> Any:
            return bytes(self)[part].ljust(part.stop - part.start, b"\0")

    data = quantised.read_bytes()
    hub.put("me/g", {"g-Q8_0.gguf": Large(data), "g-Q4_0.gguf": data})
    done = penstock("pull", "hf.co/me/g:Q8_0", **places)
    assert done.returncode == 1
    assert "cannot run here" in done.stderr and "What can: penstock pull hf.co/me/g:Q4_0" in done.stderr


def test_library_commands_load_no_torch(penstock: Penstock, places: dict[str, str]) -> None:
    code = """
import sys
sys.argv = ["penstock", *sys.argv[1:]]
from penstock.__main__ import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
assert "torch" not in sys.modules
"""
    for arguments in (["list"], ["show", "penstock-concierge"], ["prune"], ["--help"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env={**os.environ, **places}
        )
        assert done.returncode == 0, done.stderr


def test_python_takes_names_too(
    hub: Hub, places: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in places.items():
        monkeypatch.setenv(name, value)
    hub.put("me/c", bundled())
    pull(open_store(), "me/c", Wish())
    with LLM("me/c", max_num_seqs=1, max_model_len=64) as llm:
        assert llm.info.model == "me/c"
    with pytest.raises(ConfigError, match="penstock pull me/d"):
        LLM("me/d")


def test_create_import_inspect_and_convert(
    penstock: Penstock, places: dict[str, str], tmp_path: Path, quantised: Path
) -> None:
    assert penstock("import", str(quantised), "base", **places).stdout == "imported base:latest\n"
    (tmp_path / "Modelfile").write_text("FROM base\nSYSTEM Answer in one word.\nPARAMETER temperature 0\n")
    made = penstock("create", "mine", "-f", str(tmp_path / "Modelfile"), **places)
    assert (made.returncode, made.stdout, made.stderr) == (0, "created mine:latest\n", "")
    assert penstock("show", "mine", "--system", "--parameters", **places).stdout.splitlines() == [
        "Answer in one word.", "temperature 0.0",
    ]  # fmt: skip
    tensors = json.loads(penstock("inspect", "mine", "--json", **places).stdout)["tensors"]
    assert {tensor["format"] for tensor in tensors} == {"q8_0", "f32"}
    folder = tmp_path / "converted"
    done = penstock("convert", "mine", "--output", str(folder), "--to", "f16", **places)
    assert done.returncode == 0 and (folder / "model.safetensors").is_file(), done.stderr
    back = penstock("convert", str(folder), "-o", str(tmp_path / "back.gguf"), **places)
    assert back.returncode == 0 and (tmp_path / "back.gguf").is_file(), back.stderr
    wrong = penstock("create", "mine", "-f", str(tmp_path / "none"), **places)
    assert wrong.returncode == 1 and "cannot be read" in wrong.stderr


def test_ps_and_stop_speak_to_a_server(penstock: Penstock, places: dict[str, str]) -> None:
    class Server(Files):
        def answer(self, handler: Handler, path: str) -> bool:
            if path == "/api/ps":
                model = {"name": "m:x", "digest": "a" * 64, "size": 2**20, "context_length": 4096}
                model["expires_at"] = "2026-01-01T00:00:00.5Z"
                handler.send_json({"models": [model]})
                return True
            return False

    class Posting(Handler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if asked == {"model": "m:x", "keep_alive": 0, "stream": False}:
                self.send_json({"done": True, "done_reason": "unload"})
            else:
                self.send_json({"error": f"model '{asked['model']}' not found"}, 404)

    server = Server()
    server.RequestHandlerClass = Posting
    with running(server):
        url = ("--url", server.url)
        assert "m:x   aaaaaaaaaaaa  1.0 MiB  4,096    2026-01-01T00:00:00" in penstock("ps", *url, **places).stdout
        assert penstock("stop", "m:x", *url, **places).stdout == "stopped m:x\n"
        other = penstock("stop", "other", *url, **places)
        assert other.returncode == 1 and "answers 404: model 'other' not found" in other.stderr
    gone = penstock("ps", *url, **places)
    assert gone.returncode == 1 and "no server answers" in gone.stderr
