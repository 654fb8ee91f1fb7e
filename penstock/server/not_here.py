"""Routes of other engines for what is not here: each answers 501 with what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from fastapi import APIRouter
from starlette.responses import Response

from penstock.server.document import gives
from penstock.server.errors import HttpError

_NO_WEIGHTS = "Weights do not change while they are served; start a server of the new ones."
_NO_ADAPTERS = "Adapters are loaded by POST /v1/load_lora_adapter, and named by requests as their model."
_NO_PROFILE = "There is no profiler to switch; /metrics tells the time of each part of a step."
_NO_MEDIA = "There are no media whose states are kept."
_NO_FILES = "Files are not kept here: send their text in the request."
_NO_TRAINING = "Models are not trained here; serve the files of one that was trained elsewhere."
_LISTED_AT_OPENAI: Final = frozenset(
    ("/v1/files", "/v1/uploads", "/v1/vector_stores", "/v1/batches", "/v1/fine_tuning/jobs", "/v1/assistants")
)
NOT_HERE: Mapping[str, str] = MappingProxyType(
    {
        # OpenAI
        **dict.fromkeys(("/v1/files", "/v1/uploads", "/v1/vector_stores"), _NO_FILES),
        "/v1/batches": "Batches are run by the command line: penstock generate --batch FILE.",
        "/v1/fine_tuning/jobs": _NO_TRAINING,
        **dict.fromkeys(("/v1/assistants", "/v1/threads"), "OpenAI ended it; use /v1/responses."),
        **dict.fromkeys(("/v1/images/generations", "/v1/images/edits"), "Models served here answer with text."),
        **dict.fromkeys(("/v1/audio/speech", "/v1/audio/transcriptions"), "Models served here take and give text."),
        # vLLM
        "/release_kv_cache_memory": "An engine gives back all its memory or none: POST /sleep.",
        "/abort_requests": "A request ends when its client leaves: close its connection, or POST /abort_request.",
        **dict.fromkeys(("/reset_mm_cache", "/reset_encoder_cache"), _NO_MEDIA),
        "/collective_rpc": "No function of the engine is called from outside.",
        **dict.fromkeys(
            ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"),
            _NO_WEIGHTS,
        ),
        "/scale_elastic_ep": "One engine process computes a model here; start more servers behind a proxy.",
        "/v1/systemone": "The same questions are answered by POST /v1/decisions, in OpenAI's form.",
        # vLLM and SGLang
        **dict.fromkeys(("/start_profile", "/stop_profile"), _NO_PROFILE),
        "/update_weight_version": _NO_WEIGHTS,
        # text-generation-webui
        "/v1/internal/stop-generation": "Others are answered beside you: close a request's connection to end it.",
        **dict.fromkeys(("/v1/internal/lora/load", "/v1/internal/lora/unload"), _NO_ADAPTERS),
        # SGLang
        **dict.fromkeys(
            ("/update_weights_from_disk", "/update_weights_from_tensor", "/update_weights_from_distributed"),
            _NO_WEIGHTS,
        ),
        **dict.fromkeys(
            ("/update_weights_from_ipc", "/init_weights_update_group", "/destroy_weights_update_group"), _NO_WEIGHTS
        ),
        "/get_weights_by_name": _NO_WEIGHTS,
        "/configure_logging": "Logging is set when the server starts: --log-requests.",
    }
)
"""By path, what to do instead."""


LISTED: Final = tuple(path for path in NOT_HERE if path in _LISTED_AT_OPENAI)
"""Those that OpenAI's clients list too, and whose members they ask for and delete."""


def not_here_router() -> APIRouter:
    """All of those routes."""
    router = APIRouter()
    for path, instead in NOT_HERE.items():
        _add(router, path, path, instead, ("GET", "POST") if path in LISTED else ("POST",))
    for path in LISTED:
        _add(router, path + "/{id:path}", path, NOT_HERE[path], ("GET", "POST", "DELETE"))
    return router


def _add(router: APIRouter, path: str, told: str, instead: str, methods: tuple[str, ...]) -> None:
    async def refused() -> Response:
        raise HttpError(501, f"{told} is not available here. {instead}", code="not_available")

    for method in methods:
        name = f"{method} {path}"
        router.add_api_route(
            path, refused, methods=[method], summary="Not here", openapi_extra=gives("application/json"), name=name
        )
