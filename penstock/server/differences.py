"""Fields that clients of other engines send and that do nothing here.

Told are the values at which they ask for nothing, and why others are refused. One table checks bodies, describes the
fields in the API's document, and is the list of differences of each dialect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from penstock.config.errors import RequestError, format_value


@dataclass(frozen=True, slots=True)
class Difference:
    """A field that does nothing here.

    Attributes:
        because: why nothing depends on it; or why other values are refused, and what to do instead.
        harmless: the values that ask for nothing that is not here; null is always one. None takes every value.
    """

    because: str
    harmless: tuple[Any, ...] | None = ()


def _any(because: str) -> Difference:
    return Difference(because, None)


_NO_MEDIA = "There are no media to process: messages and prompts are text."
_NO_EXTENSIONS = "Extensions of other engines are not here; leave it out."
_NO_CODE = "Requests bring no code: name what the server was started with in logits_processors."
_NO_TRANSFER = "Keys and values are not handed from one engine to another here; leave it out."
_NO_SLOTS = "Every request finds what others have computed of its prompt; a slot is what POST /slots/{id} saves."
_NO_SHIFT = "The context is never shifted: an answer ends where it is full."
_NO_DRAFTS = "num_speculative_tokens says how many drafts a step verifies; how they are made is the server's."
_NO_BEAMS_OF_TOKENS = "Log-probabilities are told of the token that was taken and of the likeliest: send top_logprobs."

_VLLM: Mapping[str, Difference] = MappingProxyType(
    {
        "spaces_between_special_tokens": _any("Tokens are told byte for byte; no spaces are put between them."),
        "mm_processor_kwargs": _any(_NO_MEDIA),
        "media_io_kwargs": _any(_NO_MEDIA),
        "mm_payload": Difference("Media are not available; leave it out."),
        "return_mm_kwargs": Difference("Media are not available; leave it out.", (False,)),
        "kv_transfer_params": Difference(_NO_TRANSFER, ({},)),
        "ec_transfer_params": Difference(_NO_TRANSFER, ({},)),
        "vllm_xargs": Difference(_NO_EXTENSIONS, ({},)),
        "custom_logit_processor": Difference(_NO_CODE),
        "custom_params": Difference(_NO_CODE, ({},)),
        "prompt_logprob_token_ids": Difference(_NO_BEAMS_OF_TOKENS, ([],)),
        "return_weight_versions": Difference("Weights do not change while they are served.", (False,)),
        "routed_experts_prompt_start": Difference("Which experts computed a token is not told; leave it out."),
        "stream_interval": _any("Events go out as tokens come, together where they come faster than they are read."),
        "session_id": _any("Prefixes are found by what they say, whoever sends them."),
        "watermarking": Difference("Texts are not watermarked; leave it out.", (False,)),
        "field_names": Difference("Answers have the fields of OpenAI's API; leave it out."),
    }
)
"""Fields of vLLM's clients, and of SGLang's where they send what vLLM's do."""
_LLAMA_ANSWERS: Mapping[str, Difference] = MappingProxyType(
    {
        "n_keep": _any(_NO_SHIFT),
        "n_discard": _any(_NO_SHIFT),
        "n_cache_reuse": Difference("Only whole prefixes are used again; send 0.", (0,)),
        "backend_sampling": _any("Tokens are chosen where logits are, whatever is asked."),
        "verbose": Difference("The log tells more where the server is started so; leave it out.", (False,)),
        "grammar_lazy": Difference(
            "A grammar holds from the first token, and tools are called by their own; leave it out.", (False,)
        ),
        "grammar_triggers": Difference("A grammar holds from the first token; leave it out.", ([],)),
        "preserved_tokens": _any("Special tokens are always tokens of their own."),
        "speculative.n_max": _any(_NO_DRAFTS),
        "speculative.n_min": _any(_NO_DRAFTS),
        "speculative.p_min": _any(_NO_DRAFTS),
        "speculative.type": _any(_NO_DRAFTS),
    }
)
"""Fields of llama-server's clients that do nothing at any route."""
_LLAMA_SHAPES: Mapping[str, Difference] = MappingProxyType(
    {
        "id_slot": _any(_NO_SLOTS),
        "return_tokens": Difference("Token ids are told with return_token_ids: true.", (False,)),
        "post_sampling_probs": Difference("Log-probabilities are the model's own; leave it out.", (False,)),
        "response_fields": Difference("Answers have the fields of OpenAI's API; send it to /completion.", ([],)),
        "n_indent": Difference("Send it to /completion.", (0,)),
        "t_max_predict_ms": Difference("Send it to /completion.", (0, -1)),
        "min_keep": Difference("Samplers keep one token at least, and no more than they are told to; send 0.", (0, 1)),
        "parse_tool_calls": _any("Calls are told apart wherever there are tools."),
        "chat_format": _any("How the model writes is known from its template."),
        "thinking_forced_open": _any("Whether reasoning has begun is read from the prompt."),
        "generation_prompt": _any("What opens the answer is the template's."),
        "reasoning_budget_message": Difference("The end of a budget has no message; leave it out.", ("",)),
        **{
            name: _any("The marks of reasoning are the model's own.")
            for name in ("reasoning_budget_start_tag", "reasoning_budget_end_tag", "reasoning_budget_end_tags")
        },
    }
)
"""Those that do nothing in OpenAI's shapes alone."""
_MIN_KEEP = Difference("Samplers keep one token at least, and no more than they are told to; send 0.", (0, 1))
_LLAMA_COMPLETIONS: Mapping[str, Difference] = MappingProxyType(
    {
        **_LLAMA_ANSWERS,
        "min_keep": _MIN_KEEP,
        "multimodal_data": Difference("Media are not available; leave it out.", ([],)),
        "stream_options": _any("A stream tells the usage in its last event."),
    }
)
_NO_CHOSEN_TOKENS = "Log-probabilities are told of the token taken and of the likeliest: send top_logprobs_num."
_MEDIA = Difference("Media are not available; leave it out.", ([],))
_SGLANG: Mapping[str, Difference] = MappingProxyType(
    {
        **dict.fromkeys(("image_data", "audio_data", "video_data", "modalities"), _MEDIA),
        **{name: Difference(_NO_TRANSFER) for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room")},
        "input_embeds": Difference("Prompts are texts or token ids; leave it out."),
        "return_hidden_states": Difference("Hidden states are told by /pooling and /encode.", (False,)),
        "return_routed_experts": Difference("Which experts computed a token is not told; leave it out.", (False,)),
        "return_flat_raw_top_logprobs": Difference("Log-probabilities are told as lists; leave it out.", (False,)),
        "token_ids_logprob": Difference(_NO_CHOSEN_TOKENS, ([],)),
        "session_id": _any("Prefixes are found by what they say, whoever sends them."),
        "log_metrics": _any("Every request is counted."),
        "no_logs": _any("What a request says is not logged."),
    }
)
"""Fields of SGLang's clients."""
_WEBUI: Mapping[str, Difference] = MappingProxyType(
    {
        **dict.fromkeys(("api_type", "api_server", "legacy_api"), _any("Which server a client takes this one for.")),
        **dict.fromkeys(("rep_pen", "rep_pen_range", "rep_pen_slope"), _any("repetition_penalty and its range count.")),
        "sampler_seed": _any("seed counts."),
        "min_length": _any("min_tokens counts."),
        **dict.fromkeys(("num_predict", "num_ctx"), _any("max_tokens and the model's own context count.")),
        **dict.fromkeys(("prompt_lookup_num_tokens", "speculative_ngram"), _any(_NO_DRAFTS)),
        "static_cache": _any("How keys and values are kept is the server's."),
        "num_beams": Difference("Send use_beam_search with n or best_of.", (1,)),
        "skew": Difference("That sampler is not here; send 0.", (0,)),
        "encoder_repetition_penalty": Difference("That sampler is not here; send 1.", (1,)),
        "penalty_alpha": Difference("Contrastive search is not here; send 0.", (0,)),
        "max_tokens_second": Difference("Tokens come as fast as they are computed; send 0.", (0,)),
        "auto_max_new_tokens": Difference("Leave max_tokens out of a chat: it has what the context leaves.", (False,)),
        "preserve_thinking": Difference("Send it in chat_template_kwargs, of models that know it.", (False,)),
        "preset": Difference("Presets are not kept here; send the samplers themselves.", ("",)),
    }
)
"""Fields of text-generation-webui's clients."""
_NO_CHARACTER = "Characters are not kept here; write what they are into a system message."
_NO_TEMPLATE = "Templates are not kept under names here; send chat_template."
_WEBUI_CHATS: Mapping[str, Difference] = MappingProxyType(
    {
        **_WEBUI,
        "mode": Difference("Chats are asked as instructions; write a character into a system message.", ("instruct",)),
        "instruction_template": Difference(_NO_TEMPLATE),
        "character": Difference(_NO_CHARACTER),
        **dict.fromkeys(("name1", "name2", "user_name", "bot_name", "user_bio"), _any("Said to characters alone.")),
        **dict.fromkeys(("context", "greeting", "chat_instruct_command"), _any("Said to characters alone.")),
    }
)
_POOLED: Mapping[str, Difference] = MappingProxyType(
    {
        "padding": Difference("Texts are not padded: models served here know where they end.", ("do_not_pad",)),
        "mm_processor_kwargs": _any(_NO_MEDIA),
    }
)
"""Fields of vLLM's clients where nothing is generated."""
_POOLED_INPUTS: Mapping[str, Difference] = MappingProxyType({**_POOLED, "media_io_kwargs": _any(_NO_MEDIA)})
_NOT_KEPT = "Chats and responses are kept; leave it out, or send the request to one of those."

DIFFERENCES: Mapping[str, Mapping[str, Difference]] = MappingProxyType(
    {
        "ChatBody": {
            **_VLLM,
            **_LLAMA_ANSWERS,
            **_LLAMA_SHAPES,
            **_WEBUI_CHATS,
            "prompt_embeds": Difference("In chats rows are parts of a message's content, of type prompt_embeds."),
            "modalities": Difference('Only text is available; leave it out or send ["text"].', (["text"], [])),
            "audio": Difference("Audio is not available; leave it out."),
            "web_search_options": Difference("Web search is not available; leave it out."),
        },
        "CompletionBody": {
            **_VLLM,
            **_LLAMA_ANSWERS,
            **_LLAMA_SHAPES,
            **_WEBUI,
            **dict.fromkeys(("enable_thinking", "reasoning_effort"), _any("Texts are continued as they are.")),
            "return_prompt_text": Difference("Send echo: true.", (False,)),
            "reasoning_control": Difference("Reasoning is told apart in chats alone; send a chat.", (False,)),
            "store": Difference(_NOT_KEPT, (False,)),
        },
        **dict.fromkeys(("EmbeddingBody", "PoolingBody", "ClassifyBody"), _POOLED_INPUTS),
        **dict.fromkeys(("RerankBody", "ScoreBody"), _POOLED),
        "CohereEmbedBody": {
            "images": Difference("Models served here take text; send texts."),
            "inputs": Difference("Send texts; models served here take nothing else."),
        },
        "TokensBody": {
            "features": Difference("Models served here take text."),
            "content_parts": Difference("Models served here take text."),
            "token_offsets": _any("Nothing depends on where tokens stood in a text."),
            "reasoning_ended": _any("What is generated is told as it is; reasoning is not told apart."),
            "reasoning_parser_kwargs": _any("Reasoning is not told apart here."),
            "parse_context": _any("Answers are told as tokens and text."),
            "kv_transfer_params": Difference(_NO_TRANSFER, ({},)),
            "ec_transfer_params": Difference(_NO_TRANSFER, ({},)),
        },
        "LlamaCompletionBody": _LLAMA_COMPLETIONS,
        "InfillBody": _LLAMA_COMPLETIONS,
        "SglangBody": _SGLANG,
    }
)
"""By body: the fields that do nothing."""


def _equal(value: Any, other: Any) -> bool:
    """As JSON has it: true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def without_differences(body: str, data: dict[str, Any]) -> dict[str, Any]:
    """A body's fields without those that do nothing here.

    Raises:
        RequestError: one of those asks for something.
    """
    fields = DIFFERENCES.get(body, {})
    found = fields.keys() & data.keys()
    if not found:
        return data
    for name in fields:
        if name not in found or (value := data[name]) is None or (harmless := fields[name].harmless) is None:
            continue
        if not any(_equal(value, other) for other in harmless):
            message = f"{name} is {format_value(value)}. {fields[name].because}"
            raise RequestError(message, param=name, code="unsupported_parameter")
    return {name: value for name, value in data.items() if name not in found}
