"""How well the bundled model calls functions on 200 dialogues it was not trained on, freely and when it has to.

Every assistant turn whose prompt leaves room for an answer is asked for once, with all that was said before it and
greedily. `auto`: a call is read from what the model writes of itself. `required`, on the turns that call in the data:
the answer is held to the functions' schemas.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema

from benchmarks.report import arguments, report
from penstock import LLM, ToolChoice, ToolMode
from penstock.completions import CompletionOutput
from penstock.engine.text_pipeline import TextPipeline

MODEL = "penstock-concierge"
MAX_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Turn:
    """An assistant's turn: the functions there are, what was said before, and what the data calls, if it does."""

    tools: Sequence[dict[str, Any]]
    messages: Sequence[dict[str, Any]]
    call: dict[str, Any] | None


def turns(data: Path, dialogues: int = 200) -> Iterator[Turn]:
    """All turns of the assistant in so many dialogues."""
    lines = (data / "chat" / "sgd_dev_200.jsonl").read_text(encoding="utf-8").splitlines()
    for line in lines[:dialogues]:
        dialogue = json.loads(line)
        for index, message in enumerate(dialogue["messages"]):
            if message["role"] == "assistant":
                calls = message.get("tool_calls")
                yield Turn(dialogue["tools"], dialogue["messages"][:index], calls[0]["function"] if calls else None)


def fitting(llm: LLM, asked: Sequence[Turn]) -> list[Turn]:
    """Those whose prompt and answer fit into the model's context."""
    text, room = TextPipeline.load(MODEL), llm.info.max_model_len - MAX_TOKENS
    assert text.template is not None
    prompts = [text.template.render(turn.messages, tools=turn.tools) for turn in asked]
    sizes = [len(text.tokenizer.encode(prompt, add_special_tokens=False)) for prompt in prompts]
    return [turn for turn, size in zip(asked, sizes, strict=True) if size <= room]


def ask(llm: LLM, asked: Sequence[Turn], choice: ToolChoice) -> list[CompletionOutput]:
    """The answers to turns, in their order; each dialogue's together, so that they share what was said."""
    answers: list[CompletionOutput] = []
    first = 0
    while first < len(asked):
        last = first
        while last < len(asked) and asked[last].tools == asked[first].tools:
            last += 1
        some = llm.chat(
            [turn.messages for turn in asked[first:last]],
            tools=asked[first].tools,
            tool_choice=choice,
            parse=True,
            temperature=0,
            max_tokens=MAX_TOKENS,
        )
        answers += (completion.outputs[0] for completion in some)
        first = last
    return answers


def is_valid(turn: Turn, name: str, text: str) -> bool:
    """Whether a call names one of the functions and its arguments fit that function's schema."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in turn.tools}
    try:
        jsonschema.validate(json.loads(text), schemas[name])
    except (KeyError, ValueError, jsonschema.ValidationError):
        return False
    return True


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def measure(llm: LLM, asked: Sequence[Turn]) -> dict[str, Any]:
    """Counts of both ways."""
    calling = [turn for turn in asked if turn.call]
    free = ask(llm, asked, ToolChoice())
    held = ask(llm, calling, ToolChoice(ToolMode.REQUIRED))
    pairs = [(turn, output) for turn, output in zip(asked, free, strict=True) if turn.call]
    silent = [output for turn, output in zip(asked, free, strict=True) if not turn.call]
    written = [(turn, call) for turn, output in zip(asked, free, strict=True) for call in output.tool_calls]
    forced = [(turn, call) for turn, output in zip(calling, held, strict=True) for call in output.tool_calls]
    ended = [
        (turn, call)
        for turn, output in zip(calling, held, strict=True)
        if output.finish_reason.value != "length"
        for call in output.tool_calls
    ]
    leaked = sum("tool_call>" in output.text for output in free)
    return {
        "turns": len(asked),
        "calling_turns": len(calling),
        "auto": {
            "called": sum(bool(output.tool_calls) for _, output in pairs),
            "function_right": sum(_right(turn, output) for turn, output in pairs),
            "calls": len(written),
            "parsed": sum(is_object(call.arguments) for _, call in written),
            "valid": sum(is_valid(turn, call.name, call.arguments) for turn, call in written),
            "texts_with_marks": leaked,
            "called_where_the_data_does_not": sum(bool(output.tool_calls) for output in silent),
        },
        "required": {
            "called": sum(bool(output.tool_calls) for output in held),
            "function_right": sum(_right(turn, output) for turn, output in zip(calling, held, strict=True)),
            "calls": len(forced),
            "valid": sum(is_valid(turn, call.name, call.arguments) for turn, call in forced),
            "cut_off": sum(output.finish_reason.value == "length" for output in held),
            "calls_that_ended": len(ended),
            "valid_of_those": sum(is_valid(turn, call.name, call.arguments) for turn, call in ended),
        },
    }


def _right(turn: Turn, output: CompletionOutput) -> bool:
    return bool(turn.call and output.tool_calls and output.tool_calls[0].name == turn.call["name"])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--dialogues", type=int, default=200, help="how many dialogues")
    options = parser.parse_args()
    with LLM(MODEL) as llm:
        said = list(turns(options.data, options.dialogues))
        asked = fitting(llm, said)
        figures = measure(llm, asked) | {"turns_too_long": len(said) - len(asked)}
    auto, required, calling = figures["auto"], figures["required"], figures["calling_turns"]
    rows = [
        ("auto: of the turns that call in the data, call", auto["called"], calling, auto["called"] / calling),
        ("auto: calls that parse", auto["parsed"], auto["calls"], auto["parsed"] / auto["calls"]),
        ("auto: function right", auto["function_right"], calling, auto["function_right"] / calling),
        ("required: calls valid against their schema", required["valid_of_those"], required["calls_that_ended"],
         required["valid_of_those"] / required["calls_that_ended"]),
        ("the same, with those that max_tokens cut off", required["valid"], required["calls"],
         required["valid"] / required["calls"]),
        ("required: function right", required["function_right"], calling, required["function_right"] / calling),
    ]  # fmt: skip
    report("tool_calls", options.results, figures, ("what", "count", "of", "share"), rows)


if __name__ == "__main__":
    main()
