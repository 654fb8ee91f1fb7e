"""What every request handler works with: the frontend, the lifecycle, the figures, and checks against them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.config.errors import EngineDeadError, ModelNotFoundError, RequestError, format_value
from penstock.engine.api import EngineState
from penstock.server.errors import not_ready
from penstock.server.lifecycle import Lifecycle
from penstock.server.metrics import Metrics

if TYPE_CHECKING:
    from penstock.engine.frontend import Frontend


@dataclass(frozen=True, slots=True)
class ServerContext:
    """What request handlers work with."""

    frontend: Frontend
    lifecycle: Lifecycle
    metrics: Metrics
    trust_request_chat_template: bool = False

    @property
    def model(self) -> str:
        """The name clients use."""
        return self.frontend.served_name

    def max_model_len(self) -> int | None:
        """Longest prompt plus output, tokens; None before the engine has told."""
        with suppress(EngineDeadError):
            return self.frontend.info.max_model_len
        return None

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFoundError for a name that is not served here; None means the model there is."""
        if name is not None and name != self.model:
            message = f"The model {format_value(name)} is not served here; available: {format_value(self.model)}."
            raise ModelNotFoundError(message, param="model", code="model_not_found")

    def check_template(self, given: str | None) -> None:
        """Raises RequestError for a template that is not the model's, unless requests may bring their own."""
        names = self.frontend.text.template.sources if self.frontend.text.template else {}
        if given is not None and given not in names and not self.trust_request_chat_template:
            raise RequestError(
                f"chat_template is not one of the model's own ({', '.join(sorted(names)) or 'it has none'}), and this "
                "server takes no other; leave it out, or start the server with --trust-request-chat-template.",
                param="chat_template",
                code="invalid_value",
            )

    def require_ready(self) -> None:
        """Raises HttpError 503 with Retry-After when new work cannot be taken."""
        state = self.frontend.client.state
        if self.lifecycle.draining:
            raise not_ready("The server is shutting down; send the request to another one.", "shutting_down")
        if state is EngineState.STARTING:
            raise not_ready("The model is still loading; retry shortly.", "not_ready", 2)
        if state is not EngineState.READY:
            raise not_ready("The engine is restarting; retry shortly.", "engine_unavailable", 2)
