"""OpenAI bodies to the internal request, with no server."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config import limits
from penstock.config.constraint import ToolChoice, ToolMode
from penstock.config.errors import RequestError
from penstock.server.body import validate
from penstock.server.dialects.ollama.schema import GenerateBody, OllamaChatBody
from penstock.server.dialects.ollama.translate import chat_call as ollama_chat_call
from penstock.server.dialects.ollama.translate import generate_call
from penstock.server.dialects.openai.schema import ChatBody, CompletionBody
from penstock.server.dialects.openai.translate import OpenAICall, chat_call, completion_call
from penstock.server.prompts import of_cache

HELLO = [{"role": "user", "content": "Hello"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "book", "arguments": '{"seats": 2}'}}
PARAMETERS = "tools[1].function.parameters"
TOOL = {"type": "function", "function": {"name": "book", "parameters": {"type": "object"}}}


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def chat(defaults: dict[str, Any] | None = None, **fields: Any) -> OpenAICall:
    return chat_call(validate(ChatBody, {"messages": HELLO, **fields}), defaults or {})


def completion(defaults: dict[str, Any] | None = None, **fields: Any) -> OpenAICall:
    return completion_call(validate(CompletionBody, {"prompt": "Hello", **fields}), defaults or {})


def test_every_sampling_field_arrives() -> None:
    fields: dict[str, Any] = {
        "n": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "typical_p": 0.8,
        "repetition_penalty": 1.1,
        "presence_penalty": -1,
        "frequency_penalty": 1.5,
        "seed": -5,
        "min_tokens": 2,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "prompt_logprobs": 2,
    }
    sampling = (
        chat(**fields, stop_token_ids=[7], allowed_token_ids=[7, 8], bad_words=["no"], max_tokens=9)
        .requests[0]
        .sampling
    )
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert (sampling.stop_token_ids, sampling.allowed_token_ids, sampling.bad_words) == ((7,), (7, 8), ("no",))
    assert sampling.max_tokens == 9


def test_the_likeliest_token_alone() -> None:
    assert 0 < chat(top_p=0).requests[0].sampling.top_p < 1e-6


def test_calls_of_functions_without_parameters_need_not_say_so() -> None:
    message = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f"}}]}
    assert chat(messages=[*HELLO, message]).requests[0].messages[1]["tool_calls"][0]["function"]["arguments"] == {}


def test_a_models_own_stop_strings_hold_unless_the_client_says_others() -> None:
    own = {"stop": ("END",)}
    assert chat(own).requests[0].sampling.stop == ("END",)
    assert chat(own, stop="x").requests[0].sampling.stop == ("x",)
    for asked, stops in (({}, ("END",)), ({"stop": "x"}, ("x",)), ({"stop": []}, ())):
        body = {"model": "m", "messages": HELLO, "options": asked}
        for made in (
            ollama_chat_call(validate(OllamaChatBody, body), own),
            generate_call(validate(GenerateBody, {"model": "m", "prompt": "Hi", "options": asked}), own, True),
        ):
            assert made.request is not None and made.request.sampling.stop == stops


def test_defaults_come_from_the_model_unless_the_client_says_otherwise() -> None:
    model = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}
    left_out = chat(model).requests[0].sampling
    assert (left_out.temperature, left_out.top_p, left_out.top_k, left_out.repetition_penalty) == (0.6, 0.95, 20, 1.05)
    assert chat(model, temperature=0).requests[0].sampling.temperature == 0
    assert chat(model, temperature=None).requests[0].sampling.temperature == 0.6
    assert chat().requests[0].sampling.temperature == 1.0


def test_max_completion_tokens_wins_and_completions_default_to_sixteen() -> None:
    assert chat(max_tokens=5, max_completion_tokens=6).requests[0].sampling.max_tokens == 6
    assert chat().requests[0].sampling.max_tokens is None
    assert completion().requests[0].sampling.max_tokens == 16


def test_logit_bias_and_stop_forms() -> None:
    sampling = chat(logit_bias={"5": -100, "17": 2.5}, stop="x").requests[0].sampling
    assert sampling.logit_bias == ((5, -100), (17, 2.5))
    assert sampling.stop == ("x",)
    assert chat(stop=["a", "b"]).requests[0].sampling.stop == ("a", "b")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("one", [("one", None)]),
        ([1, 2], [(None, (1, 2))]),
        (["one", "two"], [("one", None), ("two", None)]),
        ([[1], [2, 3]], [(None, (1,)), (None, (2, 3))]),
    ],
)
def test_prompt_forms(prompt: Any, expected: list[Any]) -> None:
    requests = completion(prompt=prompt).requests
    assert [(request.prompt, request.prompt_ids) for request in requests] == expected
    assert len({request.request_id for request in requests}) == len(requests)


def test_messages_become_what_templates_know() -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "Book"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]
    seen = chat(messages=messages).requests[0].messages
    assert seen is not None
    assert seen[0] == {"role": "system", "content": "Be\nbrief."}
    assert seen[2]["tool_calls"][0]["function"]["arguments"] == {"seats": 2}
    assert messages[2]["tool_calls"][0]["function"]["arguments"] == '{"seats": 2}'  # type: ignore[index]
    assert seen[3] == messages[3]


def test_schemas_of_functions_may_say_what_schemas_may() -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "type": {"type": ["string", "null"], "enum": ["a", None]},
            "properties": {"type": "array", "items": {"$ref": "#/$defs/x"}, "minItems": 1.0},
            "any": True,
            "old": {"type": "number", "minimum": 0, "exclusiveMinimum": True, "nullable": True, "example": 5},
        },
        "required": ["type"],
        "additionalProperties": {"anyOf": [{"const": None}, {}]},
        "$defs": {"x": {"multipleOf": 0.5}},
    }
    for given in (schema, {}, {"type": ["object", "null"]}, {"properties": {}}):
        tool = {"type": "function", "function": {"name": "f", "parameters": given}}
        assert chat(tools=[tool]).requests[0].tools == (tool,)


def test_names_of_functions_are_those_that_clients_use() -> None:
    for name in ("get_weather", "mcp__files.read-all", "server:tool/2", "获取天气", "x" * 128):
        assert chat(tools=[function(name)]).requests[0].tools == (function(name),)


def test_tools_reach_the_template_unless_the_choice_is_none() -> None:
    assert chat(tools=[TOOL]).requests[0].tools == (TOOL,)
    assert chat(tools=[TOOL], tool_choice="auto").requests[0].tools == (TOOL,)
    assert chat(tools=[TOOL], tool_choice="none").requests[0].tools is None


def test_the_choice_of_tools() -> None:
    named = {"type": "function", "function": {"name": "book"}}
    assert chat(tools=[TOOL]).requests[0].tool_choice == ToolChoice()
    assert chat(tools=[TOOL], tool_choice="required", parallel_tool_calls=False).requests[0].tool_choice == ToolChoice(
        ToolMode.REQUIRED, parallel=False
    )
    assert chat(tools=[TOOL], tool_choice=named).requests[0].tool_choice == ToolChoice(ToolMode.NAMED, "book", False)


def test_a_choice_may_show_the_model_some_of_the_tools_alone() -> None:
    other = function("look")
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [other]}}
    request = chat(tools=[TOOL, other], tool_choice=allowed).requests[0]
    assert (request.tools, request.tool_choice) == ((other,), ToolChoice(ToolMode.REQUIRED))


def test_functions_are_tools_of_old() -> None:
    call = chat(functions=[TOOL["function"]], function_call={"name": "book"})
    assert call.legacy_functions
    assert call.requests[0].tools == (TOOL,)
    assert call.requests[0].tool_choice == ToolChoice(ToolMode.NAMED, "book", False)
    assert chat(functions=[TOOL["function"]], function_call="none").requests[0].tools is None


def test_continuing_the_last_message_needs_no_generation_prompt() -> None:
    request = chat(continue_final_message=True).requests[0]
    assert (request.add_generation_prompt, request.continue_final_message) == (False, True)
    assert chat().requests[0].add_generation_prompt is True


def test_logprobs_of_both_kinds() -> None:
    assert chat(logprobs=True).requests[0].sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).requests[0].sampling.logprobs == 4
    assert chat(logprobs=False).requests[0].sampling.logprobs is None
    echoed = completion(logprobs=2, echo=True).requests[0].sampling
    assert (echoed.logprobs, echoed.prompt_logprobs) == (2, 2)


def test_the_prompt_alone_can_be_scored() -> None:
    call = completion(max_tokens=0, echo=True, logprobs=1)
    assert call.no_output
    assert call.requests[0].sampling.max_tokens == 1


def test_ids() -> None:
    assert chat(request_id="mine").id == "chatcmpl-mine"
    assert completion().id.startswith("cmpl-")
    assert chat().requests[0].request_id != chat().requests[0].request_id


HARMLESS = {
    "store": False,
    "metadata": {"free": "form", "any": "key"},
    "service_tier": "auto",
    "user": "me",
    "parallel_tool_calls": True,
    "reasoning_effort": "low",
    "verbosity": "low",
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "best_of": 1,
    "prediction": {"type": "content", "content": "x"},
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "chat_template_kwargs": {"enable_thinking": False},
    "use_beam_search": False,
    "functions": [],
    "function_call": "none",
}


@pytest.mark.parametrize("field", HARMLESS)
def test_fields_that_clients_send_are_accepted(field: str) -> None:
    assert chat(**{field: HARMLESS[field]}).requests


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"temprature": 1}, "temprature", 'Did you mean "temperature"?'),
        ({"temperature": "hot"}, "temperature", '"hot"'),
        ({"temperature": True}, "temperature", "is true"),
        ({"temperature": -0.1}, "temperature", "allowed: at least 0."),
        ({"top_p": -0.1}, "top_p", "allowed: at least 0."),
        ({"typical_p": 0}, "typical_p", "allowed: more than 0."),
        ({"n": 10**9}, "n", f"at most {limits.MAX_N}"),
        ({"n": 1.5}, "n", "integer"),
        ({"n": "1"}, "n", "integer"),
        ({"max_tokens": 0}, "max_tokens", "1"),
        ({"max_tokens": -(2**63)}, "max_tokens", "1"),
        ({"max_tokens": 10**4000}, "max_tokens", "max_tokens is 1000"),
        ({"min_tokens": 5, "max_tokens": 3}, "min_tokens", "at most max_tokens (3)"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"stop": [1, 2]}, "stop[0]", "string"),
        ({"stop": ""}, "stop", "not empty"),
        ({"stop": "x" * 2000}, "stop", "1024"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "Unknown parameter"),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs: true"),
        ({"logprobs": 3}, "logprobs", "true or false"),
        ({"logprobs": True, "top_logprobs": -2}, "top_logprobs", "-1"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids", "only together with logprobs"),
        ({"messages": []}, "messages", "at least 1 entry"),
        ({"messages": "hello"}, "messages", "list"),
        ({"messages": [1]}, "messages[0]", "an object"),
        ({"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages[0].name", "a string"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": [1]}]}, "messages[0].tool_call_id", "[1]"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}]},
            "messages[0].tool_calls[0].function.arguments",
            "a string or an object",
        ),
        *(
            ({"tools": [TOOL, {**TOOL, "function": {"name": "f", "parameters": given}}]}, PARAMETERS, said)
            for given, said in (
                ("x", "an object"),
                ({"type": "string"}, f'{PARAMETERS}.type is "string"; allowed: "object"'),
                ({"properties": []}, f"{PARAMETERS}.properties is []; allowed: an object of JSON schemas"),
                (
                    {"properties": {"a": {"items": {"type": "wave"}}}},
                    '.properties.a.items.type is "wave"; allowed: one',
                ),
                ({"properties": {"a": "string"}}, '.properties.a is "string"; allowed: a JSON schema'),
                ({"properties": {"a": {"required": True}}}, ".properties.a.required is true; allowed: a list of names"),
                ({"properties": {"a": {"anyOf": []}}}, ".properties.a.anyOf is []; allowed: a list of JSON schemas"),
                ({"$defs": {"a": {"allOf": [True, 5]}}}, ".$defs.a.allOf[1] is 5; allowed: a JSON schema"),
                ({"properties": {"a": {"minLength": -1}}}, ".properties.a.minLength is -1; allowed: an integer of at"),
            )
        ),
        ({"logit_bias": {"five": 1}}, "logit_bias", 'has the key "five"; allowed: token ids, in digits'),
        ({"logit_bias": {"5": 1, "77": 101}}, 'logit_bias["77"]', "is 101; allowed: at most 100"),
        ({"logit_bias": {"5": "x"}}, 'logit_bias["5"]', "allowed: a number"),
        ({"stop": 5}, "stop", "is 5; allowed: a string or a list"),
        ({"stop": ["a", ""]}, "stop[1]", "a string that is not empty"),
        ({"stream_options": []}, "stream_options", "allowed: an object"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "system"),
        ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role", "system, developer, user"),
        ({"messages": [{"role": "k" * 65, "content": "x"}]}, "messages[0].role", "system, developer, user"),
        ({"messages": [{"role": 7, "content": "x"}]}, "messages[0].role", "is 7"),
        ({"web_search_options": {}}, "web_search_options", "not available"),
        ({"audio": {}}, "audio", "not available"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "text parts"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "5"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            "image_url",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]", "text"),
        ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "messages[0].tool_calls[0]", "function.name"),
        ({"tools": [{"type": "function"}]}, "tools[0]", "function.name"),
        ({"tools": [TOOL] * 129}, "tools", "128"),
        ({"tools": [function("")]}, "tools[0].function.name", "1 to 128 letters"),
        ({"tools": [function("a</tool_call>")]}, "tools[0].function.name", "1 to 128 letters"),
        (
            {"functions": [{"name": "f", "parameters": {"type": "x"}}]},
            "functions[0].parameters",
            "allowed: one of",
        ),
        ({"functions": [{"name": 'say "x"'}]}, "functions[0].name", "1 to 128 letters"),
        ({"tool_choice": "required"}, "tool_choice", '"auto" or "none" without tools'),
        ({"tool_choice": "always", "tools": [TOOL]}, "tool_choice", '"required"'),
        ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice", "function.name"),
        ({"tool_choice": {"type": "function", "function": {"name": "look"}}, "tools": [TOOL]}, "tool_choice", "book"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [TOOL]}, "tool_choice.tools", "a list of tools"),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [function("look")]},
                },
                "tools": [TOOL],
            },
            "tool_choice.allowed_tools.tools[0]",
            "a function among the tools: book",
        ),
        ({"functions": [{"description": "?"}]}, "functions[0]", "function.name"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "an object with name and schema"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs", "whitespace_pattern"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "send one of them"),
        ({"guided_regex": "a", "use_beam_search": True}, "use_beam_search", "leave one of them out"),
        ({"modalities": ["audio"]}, "modalities", "text"),
        ({"audio": {"voice": "x"}}, "audio", "not available"),
        ({"best_of": 1, "n": 2}, "best_of", "at least n"),
        ({"best_of": 4, "stream": True}, "best_of", "stream"),
        ({"use_beam_search": True, "best_of": 21}, "beam_width", "1 to 20"),
        ({"length_penalty": 0.5}, "length_penalty", "use_beam_search"),
        ({"early_stopping": True}, "early_stopping", "use_beam_search"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "chat_template"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "self"),
        ({"request_id": "a b"}, "request_id", "1 to 128 letters, digits and"),
        ({"cache_salt": "x" * 300}, "cache_salt", "256"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "at least 1 entry"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message", "false"),
        ({"seed": 2**64}, "seed", "18446744073709551615"),
        ({"priority": 2**40}, "priority", "2147483647"),
    ],
)
def test_refusals_name_field_value_and_what_is_allowed(fields: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert caught.value.status == 400
    assert said in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *(({"prompt": prompt}, "prompt") for prompt in (None, [], [[]], 5, [1, "a"], [-1], [True], [1.5], {"a": 1})),
        ({"prompt": ["x"] * 1025}, "prompt"),
        ({"prompt": ["x"] * 100, "n": 100}, "n"),
        ({"suffix": "end", "echo": True}, "echo"),
        ({"suffix": ["end"]}, "suffix"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": -2}, "logprobs"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"messages": HELLO}, "messages"),
    ],
)  # fmt: skip
def test_completion_refusals(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        completion(**fields)
    assert caught.value.param == param


def test_a_missing_prompt_is_named() -> None:
    with pytest.raises(RequestError, match="prompt is required") as caught:
        completion_call(validate(CompletionBody, {}), {})
    assert caught.value.code == "missing_required_parameter"


def test_a_huge_wrong_value_is_not_echoed() -> None:
    for value in ("x" * 10**6, list(range(10**5)), {"k" * 10**5: 1}):
        with pytest.raises(RequestError) as caught:
            chat(temperature=value)
        assert len(str(caught.value)) < 300


def test_no_effort_is_no_thinking() -> None:
    assert chat(reasoning_effort="none").requests[0].template_kwargs["enable_thinking"] is False
    assert "enable_thinking" not in chat(reasoning_effort="low").requests[0].template_kwargs
    own = chat(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
    assert own.requests[0].template_kwargs["enable_thinking"] is True


def test_a_body_says_which_conversation_it_is_of() -> None:
    message = [{"role": "user", "content": "Hi"}]
    for given, session in (({}, ""), ({"user": "u"}, "u"), ({"user": "u", "prompt_cache_key": "c"}, "c")):
        body = ChatBody.model_validate({"messages": message, "cache_salt": "s", **given})
        assert of_cache(body)["session"] == session
        assert of_cache(body)["cache_salt"] == "s"
