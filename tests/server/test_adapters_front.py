"""Adapters that come and go where several HTTP processes answer: all know them, also one that came later."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from penstock.kernels.cpu import native
from tests.server.support import until
from tests.server.test_serve_front import WAIT_S, fronts, running

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")
ASKED = 24  # new connections, which the system deals among the processes


def test_all_processes_know_what_comes_and_goes(shared_data: Path) -> None:
    caps = str(shared_data / "models" / "penstock-concierge-lora-caps")
    with running("--enable-lora") as served:

        def statuses(name: str) -> set[int]:
            body = {"model": name, "prompt": "Hello", "max_tokens": 2}
            return {
                httpx.post(f"{served.url}/v1/completions", json=body, timeout=WAIT_S).status_code for _ in range(ASKED)
            }

        def tell(path: str, body: object) -> httpx.Response:
            return httpx.post(f"{served.url}{path}", json=body, timeout=WAIT_S)

        assert tell("/v1/load_lora_adapter", {"lora_name": "caps", "lora_path": caps}).status_code == 200
        assert statuses("caps") == {200}
        again = tell("/v1/load_lora_adapter", {"lora_name": "caps", "lora_path": caps})
        assert again.status_code == 400 and "load_inplace" in again.text
        assert tell("/lora-adapters", [{"id": 0, "scale": 0.5}]).is_success
        listed = [httpx.get(f"{served.url}/lora-adapters", timeout=WAIT_S).json() for _ in range(ASKED)]
        assert all(one == [{"id": 0, "path": "caps", "scale": 0.5}] for one in listed)
        before = {process.pid for process in fronts(served)}
        next(iter(fronts(served))).kill()
        until(lambda: len({process.pid for process in fronts(served)} - before) == 1, WAIT_S)
        until(lambda: statuses("caps") == {200}, WAIT_S)
        assert tell("/v1/unload_lora_adapter", {"lora_name": "caps"}).status_code == 200
        assert statuses("caps") == {404}
        assert tell("/v1/unload_lora_adapter", {"lora_name": "caps"}).status_code == 404
        before = {process.pid for process in fronts(served)}
        next(iter(fronts(served))).kill()  # the host is killed while another starts, and leaves no folder
        until(lambda: len({process.pid for process in fronts(served)} - before) == 1, WAIT_S)
