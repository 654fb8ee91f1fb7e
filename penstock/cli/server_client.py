"""How commands speak to a running server."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from penstock.config.environment import read_environment
from penstock.config.errors import ConfigError

URL = Annotated[str, typer.Option("--url", help="Of the running server.")]
DEFAULT_URL = "http://127.0.0.1:8000"


def ask(url: str, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """A server's answer to a JSON request. A key is taken from PENSTOCK_API_KEY.

    Raises:
        ConfigError: no server answers there, or it refuses; its message is told.
    """
    import httpx2

    keys = read_environment().api_keys
    headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
    root = url.rstrip("/").removesuffix("/v1")
    loopback = (urlsplit(root).hostname or "") in ("127.0.0.1", "localhost", "::1")
    try:
        with httpx2.Client(timeout=60, trust_env=not loopback) as client:
            response = client.request(method, root + path, json=body, headers=headers)
        told = response.json()
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
        raise ConfigError(f"no server answers at {root}{path} ({error}); start one with penstock serve.") from None
    if response.status_code >= 400:
        said = told.get("error", told) if isinstance(told, dict) else told
        message = said.get("message", said) if isinstance(said, dict) else said
        raise ConfigError(f"{root} answers {response.status_code}: {str(message)[:300]}")
    return told
