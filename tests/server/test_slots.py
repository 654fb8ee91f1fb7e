"""Slots that are saved, restored and erased by llama-server's names: files of tokens, each key's own."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.config.errors import ConfigError, RequestError
from penstock.config.options import ServerOptions
from penstock.engine.text_pipeline import TextPipeline
from penstock.server.slot_files import MOST_FILES, SlotFiles
from penstock.server.slots import SlotKey, Slots
from tests.server.support import Running, running

FACTS = {"model": "m", "architecture": "A", "vocab_size": 1000}
PROMPT = "A table for two by the window, at seven this evening, and a chair for a child beside it. " * 4


def asked(server: Running, path: str, key: str = "one", **body: Any) -> Any:
    answer = httpx.post(server.url + path, json=body, headers={"x-api-key": key}, timeout=60)
    return answer.json() | {"status": answer.status_code}


@pytest.fixture
def saving(text: TextPipeline, tmp_path: Path) -> Iterator[Running]:
    with running(text, ServerOptions(api_keys=("one", "two"), slot_save_path=str(tmp_path / "saved"))) as server:
        yield server


def test_what_a_slot_had_is_found_again_in_another_server(text: TextPipeline, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    options = ServerOptions(slot_save_path=str(folder))
    with running(text, options) as server:
        told = asked(server, "/completion", prompt=PROMPT, id_slot=3, n_predict=4)
        assert told["id_slot"] == 3
        saved = asked(server, "/slots/3?action=save", filename="a.bin")
        assert {*saved} == {"id_slot", "filename", "n_saved", "n_written", "timings", "status"}
        assert saved["n_saved"] == told["tokens_evaluated"] + told["tokens_predicted"]
        assert saved["n_written"] == (folder / "a.bin").stat().st_size and {*saved["timings"]} == {"save_ms"}
        assert asked(server, "/slots/3?action=erase") == {"id_slot": 3, "n_erased": saved["n_saved"], "status": 200}
        assert "nothing of yours" in asked(server, "/slots/3?action=save", filename="a.bin")["error"]["message"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "a.bin").stat().st_mode) == 0o600
    with running(text, options) as server:
        restored = asked(server, "/slots/0?action=restore", filename="a.bin")
        assert {*restored} == {"id_slot", "filename", "n_restored", "n_read", "timings", "status"}
        assert (restored["n_restored"], restored["n_read"]) == (saved["n_saved"], saved["n_written"])
        again = asked(server, "/completion", prompt=PROMPT, n_predict=4)
        assert again["timings"]["cache_n"] == again["tokens_evaluated"] - 1
        assert asked(server, "/slots/0?action=save", filename="b.bin")["n_saved"] == saved["n_saved"]


def test_each_key_has_its_own_and_chats_have_slots_too(saving: Running) -> None:
    chat = {"model": "scripted", "messages": [{"role": "user", "content": PROMPT}], "id_slot": 2}
    assert asked(saving, "/v1/chat/completions", **chat)["status"] == 200
    saved = asked(saving, "/slots/2?action=save", filename="chat")
    assert saved["n_saved"] > 40
    assert asked(saving, "/slots/2?action=save", "two", filename="chat")["status"] == 400
    assert asked(saving, "/slots/2?action=restore", "two", filename="chat")["status"] == 404
    assert asked(saving, "/slots/2?action=erase", "two")["n_erased"] == 0
    assert asked(saving, "/slots/1?action=restore", filename="chat")["n_restored"] == saved["n_saved"]


def test_what_others_would_not_find_is_not_kept(saving: Running) -> None:
    for more in ({"cache_prompt": False}, {"id_slot": 64}):
        assert asked(saving, "/completion", prompt=PROMPT, n_predict=2, **more)["status"] == 200
    assert asked(saving, "/slots/0?action=save", filename="x")["status"] == 400


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/slots/64?action=erase", {}, "0 to 63"),
        ("/slots/-1?action=erase", {}, "0 to 63"),
        ("/slots/0?action=load", {}, "action"),
        ("/slots/0", {}, "action"),
        ("/slots/0?action=save", {}, "filename"),
        *(
            ("/slots/0?action=restore", {"filename": name}, "filename")
            for name in ("", "../a", "/a", ".a", "a.", "a/b", "a\\b", "a\0", "a\n", "é", "a" * 128, 3)
        ),
    ],
)
def test_what_is_refused(saving: Running, path: str, body: dict[str, Any], said: str) -> None:
    told = asked(saving, path, **body)
    assert told["status"] == 400 and said in told["error"]["message"], told


def test_files_that_are_none_give_a_sentence(tmp_path: Path) -> None:
    files = SlotFiles(tmp_path / "saved")
    files.write("", "whole", FACTS, range(50))
    whole = (tmp_path / "saved" / "whole").read_bytes()
    assert files.read("", "whole", FACTS, 50) == (list(range(50)), len(whole))
    bad = {"empty": b"", "short": whole[:-1], "long": whole + b"\0", "text": b"{}" * 40, "huge": b"\0" * 9000}
    bad |= {f"flip{at}": whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(whole))}
    for name, data in bad.items():
        (tmp_path / "saved" / name).write_bytes(data)
        with pytest.raises(RequestError, match="cannot be restored"):
            files.read("", name, FACTS, 50)
    for facts, most in (({**FACTS, "model": "n"}, 50), ({**FACTS, "vocab_size": 49}, 50), (FACTS, 49)):
        with pytest.raises(RequestError, match="cannot be restored"):
            files.read("", "whole", facts, most)
    (tmp_path / "saved" / "link").symlink_to("whole")
    os.mkfifo(tmp_path / "saved" / "pipe")
    for name in ("link", "pipe", "none"):
        with pytest.raises(RequestError):
            files.read("", name, FACTS, 50)
    with pytest.raises(RequestError, match="of yours"):
        files.read("two", "whole", FACTS, 50)


def test_files_are_few_and_a_folder_is_needed(tmp_path: Path) -> None:
    files = SlotFiles(tmp_path)
    for number in range(MOST_FILES):
        (tmp_path / f"f{number}").touch()
    with pytest.raises(RequestError, match="the most there may be"):
        files.write("", "one-more", FACTS, (1,))
    assert files.write("", "f7", FACTS, (1,)) > 0
    with pytest.raises(ConfigError, match="--slot-save-path"):
        SlotFiles(Path("/dev/null/x"))


def test_what_is_remembered_is_bounded(tmp_path: Path) -> None:
    slots = Slots(tmp_path)
    for number in range(300):
        slots.put(SlotKey("", "m", number), (1, 2))
    assert not slots.get(SlotKey("", "m", 0)) and slots.get(SlotKey("", "m", 299))
    slots.put(SlotKey("", "m", 1), [0] * 2**22)
    assert not slots.get(SlotKey("", "m", 299)) and slots.erase(SlotKey("", "m", 1)) == 2**22
