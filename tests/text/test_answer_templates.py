"""An assistant's turn as real templates write it is read back; formats are found from the templates by themselves."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.config.errors import TemplateError
from penstock.text.parsers.format import AnswerFormat, choose
from penstock.text.parsers.reading import opened_by
from penstock.text.template import ChatTemplate
from tests.text.answers import SCHEMAS, TOOLS, cut, read

USER = [{"role": "user", "content": "QUESTION"}]
CALLS: list[dict[str, Any]] = [
    {"city": 'Köln "x"\nz', "days": 3, "tags": ["a", "b"], "opt": {"a": True}},
    {"city": "Rome"},
]
# Template: its format of calls and of reasoning, as the names of the field.
FORMATS = {
    "Apertus-8B-Instruct": ("apertus", ""),
    "Apriel-1.6-15b-Thinker-fixed": ("jamba", "apriel"),
    "Bielik-11B-v3.0-Instruct": ("hermes", "qwen3"),
    "ByteDance-Seed-OSS": ("seed_oss", "seed_oss"),
    "Cohere2MoE": ("cohere", "cohere"),
    "CohereForAI-c4ai-command-r-plus-tool_use": ("command_r", ""),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("cohere", "cohere"),
    "GLM-4.6": ("glm45", "qwen3"),
    "GLM-4.7-Flash": ("glm47", "qwen3"),
    "GigaChat3-10B-A1.8B": ("gigachat3", ""),
    "GigaChat3.1-10B-A1.8B": ("gigachat3", ""),
    "HuggingFaceTB-SmolLM3-3B": ("", "qwen3"),
    "Kimi-K2-Instruct": ("kimi_k2", ""),
    "Kimi-K2-Thinking": ("kimi_k2", "kimi_k2"),
    "Kimi-K3": ("kimi_k3", "kimi_k3"),
    "LFM2-8B-A1B": ("lfm2", ""),
    "LFM2.5-8B-A1B": ("lfm2", "qwen3"),
    "LFM2.5-Instruct": ("lfm2", "qwen3"),
    "MiMo-VL": ("hermes", ""),
    "MiniMax-M1": ("minimax", ""),
    "MiniMax-M2": ("minimax_m2", "minimax_m2"),
    "MiniMax-M3": ("", "minimax_m3"),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral", ""),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen3_coder", "qwen3"),
    "NVIDIA-Nemotron-Nano-v2": ("nemotron", "qwen3"),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("hermes", ""),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", ""),
    "Qwen-QwQ-32B": ("hermes", "qwen3"),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", ""),
    "Qwen-Qwen3-0.6B": ("hermes", "qwen3"),
    "Qwen3-Coder": ("qwen3_coder", ""),
    "Qwen3.5-4B": ("qwen3_coder", "qwen3"),
    "Reka-Edge": ("hermes", "qwen3"),
    "Spark2.5": ("glm47", "qwen3"),
    "StepFun3.5-Flash": ("qwen3_coder", "qwen3"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": ("deepseek_v3", "qwen3"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek_v3", "qwen3"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek_v31", "qwen3"),
    "deepseek-ai-DeepSeek-V3.2": ("deepseek_v32", "qwen3"),
    "deepseek-ai-DeepSeek-V4": ("deepseek_v4", "qwen3"),
    "deepseek-ai-DeepSeek-V4-Flash-0731": ("deepseek_v4", "qwen3"),
    "fireworks-ai-llama-3-firefunction-v2": ("phi4mini", ""),
    "google-gemma-2-2b-it": ("", ""),
    "google-gemma-4-31B-it": ("gemma4", "gemma4"),
    "google-gemma-4-31B-it-interleaved": ("gemma4", "gemma4"),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", "granite"),
    "ibm-granite-granite-4.0": ("hermes", ""),
    "ibm-granite-granite-4.1": ("hermes", ""),
    "inclusionai-ling-3.0-flash": ("glm45", "qwen3"),
    "llama-cpp-deepseek-r1": ("deepseek_v3", "qwen3"),
    "llama-cpp-rwkv-world": ("", "qwen3"),
    "meetkai-functionary-medium-v3.1": ("functionary_v31", ""),
    "meetkai-functionary-medium-v3.2": ("", ""),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3_json", ""),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3_json", ""),
    "meta-llama-Llama-3.3-70B-Instruct": ("llama3_json", ""),
    "microsoft-Phi-3.5-mini-instruct": ("", ""),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral", "mistral"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", ""),
    "moonshotai-Kimi-K2": ("kimi_k2", ""),
    "muse-glimmer": ("", ""),
    "openai-gpt-oss-120b": ("openai", "openai_gptoss"),
    "openbmb-MiniCPM5-1B": ("minicpm5", "qwen3"),
    "poolside-Laguna-S-2.1": ("glm45", "qwen3"),
    "poolside-Laguna-XS-2.1": ("glm45", "qwen3"),
    "poolside-Laguna-XS.2": ("glm45", "qwen3"),
    "tencent-Hy3": ("hy_v3", "hy_v3"),
    "unsloth-Apriel-1.5": ("jamba", "apriel"),
    "unsloth-mistral-Devstral-Small-2507": ("mistral", ""),
    "upstage-Solar-Open-100B": ("solar_open", "solar_open"),
}
# Templates that write no calls of an earlier turn, or put them where no model does.
WITHOUT = {
    "CohereForAI-c4ai-command-r-plus-tool_use": "writes what was said before in an order of its own",
    "HuggingFaceTB-SmolLM3-3B": "leaves calls out",
    "Kimi-K2-Instruct": "appends to a list, which the sandbox refuses, as transformers' does",
    "Kimi-K2-Thinking": "as above",
    "LFM2-8B-A1B": "leaves calls out",
    "LFM2.5-Instruct": "leaves calls out",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "leaves calls out of turns whose content is not null",
    "ibm-granite-granite-3.3-2B-Instruct": "leaves calls out",
    "llama-cpp-deepseek-r1": "writes declarations by way of a generator, which is no JSON",
}


@pytest.fixture(scope="module")
def templates(shared_data: Path) -> dict[str, str]:
    return {path.stem: path.read_text(encoding="utf-8") for path in (shared_data / "templates").glob("*.jinja")}


def test_formats_are_found_from_the_templates(templates: dict[str, str]) -> None:
    found = {name: choose(source) for name, source in templates.items()}
    assert {name: (format.tool_name, format.reasoning_name) for name, format in found.items()} == FORMATS


def turn(template: ChatTemplate, format: AnswerFormat, message: dict[str, Any]) -> tuple[bool | None, str] | None:
    """What a template writes after a prompt for an assistant's turn, and whether the prompt has opened reasoning.

    Some open (and close) reasoning in prompts but leave that out of earlier turns: there, it is left out of the prompt.
    None if the template does not go on from a prompt.
    """
    marks = (
        "|".join(re.escape(mark.strip()) for mark in (*format.reasoning.begins, *format.reasoning.ends))
        if format.reasoning
        else "(?!)"
    )
    for variables in ({"enable_thinking": True}, {"enable_thinking": False}, {}):
        try:
            prompt = template.render(USER, tools=TOOLS, **variables)
            whole = template.render([*USER, message], tools=TOOLS, add_generation_prompt=False, **variables)
        except TemplateError:
            return None
        if whole.startswith(prompt):
            answer = whole[len(prompt) :]
            opened = opened_by(format, "", prompt[-200:])
            if opened and not any(end in answer for end in format.reasoning.ends):  # type: ignore[union-attr]
                continue
            return opened, answer
        bare = re.sub(rf"(?:\s*(?:{marks}))+\s*$", "", prompt)
        if bare != prompt and whole.startswith(bare):
            answer = whole[len(bare) :].lstrip()
            ends = format.reasoning.ends if format.reasoning else ()
            return True if any(end in answer for end in ends) else None, answer
    return None


@pytest.mark.parametrize("name", [name for name, (calls, _) in FORMATS.items() if calls])
def test_a_turn_is_read_back(templates: dict[str, str], name: str) -> None:
    template, format = ChatTemplate(templates[name], bos_token="<BOS>", eos_token="<EOS>"), choose(templates[name])
    chances, called = random.Random(name), 0
    for reasoning, text, count in (
        ("", "", 1),
        ("", "", 2),
        ("", "CONTENT", 2),
        ("REASON", "", 1),
        ("REASON", "CONTENT", 2),
    ):
        calls = [
            {"id": f"call{i:05d}", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
            for i, arguments in enumerate(CALLS[:count])
        ]
        message = {"role": "assistant", "content": text, "reasoning_content": reasoning, "tool_calls": calls}
        written = turn(template, format, message)
        if written is None:
            continue
        opened, answer = written
        pieces = [answer], list(answer), cut(answer, chances)
        found = [read(format, piece, SCHEMAS, opened=opened) for piece in pieces]
        assert found[0] == found[1] == found[2]
        present = len(re.findall(r"K(?:ö|\\u00f6)ln|Rome", answer))
        assert found[0].arguments == CALLS[:present]
        called += present
        if format.channels is None:  # which let text stand for reasoning
            assert ("CONTENT" in found[0].text) == ("CONTENT" in answer)
        assert ("REASON" in found[0].reasoning) == ("REASON" in answer)
        assert "REASON" not in found[0].text
        assert "get_weather" not in found[0].text + found[0].reasoning
    assert (called == 0) == (name in WITHOUT)
