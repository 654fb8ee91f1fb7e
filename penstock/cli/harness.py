"""A model as EleutherAI's evaluation harness (lm-eval) asks it: over OpenAI's API, `/tokenize` and `/apply-template`.

The engine is one in this process, through the server's own application, or that of a running server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from penstock.cli.server_client import PATIENCE_S, patiently
from penstock.config.errors import ConfigError, RequestError

if TYPE_CHECKING:
    import httpx2
    from lm_eval.api.instance import Instance

DEFAULT_ANSWER: Final = 256
"""Tokens of an answer where a task does not say how many."""

_REMEMBERED: Final = 4096  # texts whose tokens are known

Told = Callable[[int, int], None]


class HarnessModel(TemplateLM):  # type: ignore[misc]  # which is not typed
    """Scores texts and continues them; requests run side by side, their results come in the order of the requests."""

    def __init__(
        self,
        runner: asyncio.Runner,
        client: httpx2.AsyncClient,
        model: str,
        *,
        at_once: int = 32,
        prefix: int | None = None,
        progress: Callable[[str], Told] = lambda title: lambda done, total: None,
    ) -> None:
        """
        Args:
            runner: whose event loop the client belongs to.
            client: of the server.
            model: the name it has there.
            at_once: requests on their way at a time.
            prefix: the token that a text without a context comes after; else the one that the tokenizer begins with.
            progress: makes what is told how much of a kind of request is done.

        Raises:
            EngineDeadError, RequestError: the server does not answer, or refuses.
        """
        super().__init__()
        self._runner, self._client = runner, client
        self._model, self._at_once = model, at_once
        self._progress, self._templated = progress, False
        self._prefix = prefix
        self._encoded: dict[tuple[str, bool], list[int]] = {}
        listed = runner.run(self._asked("GET", "/v1/models", None))["data"]
        found: dict[str, Any] = next((entry for entry in listed if entry.get("id") == model), {})
        self.max_length = int(found.get("max_model_len") or 2048)

    @property
    def eot_token_id(self) -> int:
        """The token that comes before a text without a context.

        Raises:
            ConfigError: the tokenizer has none, and none was named.
        """
        if self._prefix is None:
            begin = self.tok_encode("", add_special_tokens=True)
            if not begin:
                raise ConfigError("this model's texts begin with no token of their own; name one with --prefix-token.")
            self._prefix = begin[0]
        return self._prefix

    @property
    def tokenizer_name(self) -> str:
        """What tells this model's prompts from others', for the harness's caches."""
        return self._model

    def chat_template(self, chat_template: bool | str = False) -> str:
        """What the harness writes down of the template."""
        return f"{self._model}'s own" if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a chat in the model's own template."""
        self._templated = True
        body = {"messages": chat_history, "add_generation_prompt": add_generation_prompt}
        if not add_generation_prompt:
            body["continue_final_message"] = True
        return str(self._runner.run(self._asked("POST", "/apply-template", body))["prompt"])

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        """A text's tokens; a template has written the special ones itself."""
        special = not self._templated if add_special_tokens is None else add_special_tokens
        if (found := self._encoded.get((string, special))) is None:  # a context is asked for with each continuation
            found = self._encoded[string, special] = self._runner.run(self._tokens(string, special))
            if len(self._encoded) > _REMEMBERED:
                self._encoded.pop(next(iter(self._encoded)))
        return list(found)

    async def _tokens(self, text: str, special: bool) -> list[int]:
        found = await self._asked("POST", "/tokenize", {"prompt": text, "add_special_tokens": special})
        return [int(token) for token in found["tokens"]]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: object
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, whether greedy decoding gives it) of continuations; too long contexts lose their begin."""
        jobs = []
        for _texts, context, continuation in requests:
            whole = (context + continuation)[-(self.max_length - 1) :]
            jobs.append(partial(self._scored, whole, max(1, len(whole) - len(continuation))))
        return self._all("Scoring", jobs)

    async def _scored(self, ids: Sequence[int], first: int) -> tuple[float, bool]:
        """Of the tokens from position `first` on."""
        body = {"prompt": list(ids), "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
        choice = (await self._asked("POST", "/v1/completions", body))["choices"][0]
        entries = [entry[str(token)] for entry, token in zip(choice["prompt_logprobs"], ids, strict=True) if entry]
        scored = entries[first - 1 :]  # the first token has no entry
        return sum(float(entry["logprob"]) for entry in scored), all(entry["rank"] == 1 for entry in scored)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, each token with as much of the text before it as the model takes."""

        async def whole(text: str) -> float:
            ids = await self._tokens(text, False)
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length - 2, 1)
            total = 0.0
            for context, predicted in map(make_disjoint_window, windows):
                total += (await self._scored([*context, *predicted], len(context)))[0]
            return total

        _ = self.prefix_token_id  # asks the server once, before requests run side by side
        return self._all("Scoring texts", [partial(whole, request.args[0]) for request in requests])

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continuations of contexts, up to the texts that end them."""
        return self._all("Answering", [partial(self._answer, *request.args) for request in requests])

    async def _answer(self, context: str, wanted: dict[str, Any]) -> str:
        stops = wanted.get("until") or []
        most = int(wanted.get("max_gen_toks") or wanted.get("max_tokens") or DEFAULT_ANSWER)
        sampled = wanted.get("do_sample", True) and float(wanted.get("temperature") or 0.0) > 0
        ids = await self._tokens(context, not self._templated)
        most = max(1, min(most, self.max_length - min(len(ids), self.max_length // 2)))
        body: dict[str, Any] = {"prompt": ids[-(self.max_length - most) :], "max_tokens": most, "temperature": 0}
        if sampled:
            body |= {name: wanted[name] for name in ("temperature", "top_p", "top_k", "min_p") if name in wanted}
        stops = [stop for stop in ([stops] if isinstance(stops, str) else stops) if stop]
        found = await self._asked("POST", "/v1/completions", body | {"stop": stops or None})
        return str(found["choices"][0]["text"])

    def _all(self, title: str, jobs: Sequence[Callable[[], Coroutine[Any, Any, Any]]]) -> list[Any]:
        """The results of all jobs, some at a time; one that fails ends all."""
        told, ended = self._progress(title), 0

        async def main() -> list[Any]:
            slots = asyncio.Semaphore(self._at_once)

            async def one(job: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
                nonlocal ended
                async with slots:
                    found = await job()
                ended += 1
                told(ended, len(jobs))
                return found

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(job)) for job in jobs]
            return [task.result() for task in tasks]

        try:
            return self._runner.run(main())
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _asked(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        """The JSON of an answer; a busy server is asked again."""
        sent = None if body is None else {**body, "model": self._model}
        answer = await patiently(self._client, method, path, sent, PATIENCE_S)
        if answer.status_code != 200:
            raise RequestError(f"{path} answers {answer.status_code}: {answer.text[:300]}")
        return answer.json()
