"""Mistral's own chat format (github.com/mistralai/mistral-common), for models that ship tekken.json and no template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from penstock.config.errors import CheckpointError

_VERSIONS: Final = (3, 7, 11, 13)

# Tools stand before the last user turn, from version 13 on before the first; system prompts are part of the last user
# turn in version 3; messages of the same role that follow one another are joined by an empty line.
_SOURCE: Final = r"""
{%- macro text(content) -%}
  {%- if content is string %}{{ content }}
  {%- else %}{% for part in content or [] %}{{ part.text }}{% endfor %}{% endif -%}
{%- endmacro -%}
{%- macro value(content) -%}
  {%- if content is string and content and content[0] not in '{["-0123456789' %}{{ content|tojson -}}
  {%- else %}{{ content if content is string and content else (content or {})|tojson }}{% endif -%}
{%- endmacro -%}
{%- set at = namespace(tools=-1, first=true, system='') -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}
    {%- if (version < 13 or at.tools < 0) and (loop.first or loop.previtem.role != 'user') -%}
      {%- set at.tools = loop.index0 -%}
    {%- endif -%}
  {%- elif message.role == 'system' and version < 7 -%}
    {%- set at.system = at.system ~ text(message.content) ~ '\n\n' -%}
  {%- endif -%}
{%- endfor -%}
{%- if at.tools < 0 %}{{ raise_exception('The conversation has no message of the user.') }}{% endif -%}
{{- bos_token -}}
{%- for message in messages -%}
  {%- set before = none if loop.first else loop.previtem.role -%}
  {%- set after = none if loop.last else loop.nextitem.role -%}
  {%- if message.role == 'user' -%}
    {%- if before == 'user' -%}
      {{- '\n\n' -}}
    {%- else -%}
      {%- if tools and loop.index0 == at.tools -%}
        {{- '[AVAILABLE_TOOLS]' ~ tools|tojson ~ '[/AVAILABLE_TOOLS]' -}}
      {%- endif -%}
      {{- '[INST]' ~ (at.system if loop.index0 == at.tools else '') -}}
    {%- endif -%}
    {{- text(message.content) -}}
    {%- if after != 'user' %}{{ '[/INST]' }}{% endif -%}
  {%- elif message.role == 'system' -%}
    {%- if version >= 7 %}{{ '[SYSTEM_PROMPT]' ~ text(message.content) ~ '[/SYSTEM_PROMPT]' }}{% endif -%}
  {%- elif message.role == 'assistant' -%}
    {%- set said = text(message.content).rstrip(' ') -%}
    {%- if not said and not message.tool_calls -%}
      {{- raise_exception('A message of the assistant has neither content nor tool calls.') -}}
    {%- elif said and message.tool_calls and version < 7 -%}
      {{- raise_exception('A message of the assistant has both content and tool calls; allowed: one of them.') -}}
    {%- endif -%}
    {%- if before == 'assistant' %}{{ '\n\n' }}{% endif -%}
    {%- if message.reasoning_content and version >= 13 -%}
      {{- '[THINK]' ~ message.reasoning_content ~ '[/THINK]' -}}
    {%- endif -%}
    {{- said -}}
    {%- if message.tool_calls and version < 11 %}{{ '[TOOL_CALLS][' }}{% endif -%}
    {%- for call in message.tool_calls or [] -%}
      {%- set given = value(call.function.arguments) -%}
      {%- if version >= 11 -%}
        {{- '[TOOL_CALLS]' ~ call.function.name -}}
        {%- if version < 13 %}{{ '[CALL_ID]' ~ call.id }}{% endif -%}
        {{- '[ARGS]' ~ given -}}
      {%- else -%}
        {{- '{"name": ' ~ call.function.name|tojson ~ ', "arguments": ' ~ given -}}
        {%- if call.id %}{{ ', "id": ' ~ call.id|tojson }}{% endif -%}
        {{- '}' ~ ('' if loop.last else ', ') -}}
      {%- endif -%}
    {%- endfor -%}
    {%- if message.tool_calls and version < 11 %}{{ ']' }}{% endif -%}
    {%- if after != 'assistant' %}{{ eos_token }}{% endif -%}
  {%- elif message.role == 'tool' -%}
    {{- '[TOOL_RESULTS]' -}}
    {%- if version < 7 -%}
      {{- '{"content": ' ~ value(text(message.content)) ~ ', "call_id": ' ~ message.tool_call_id|tojson ~ '}' -}}
    {%- else -%}
      {%- if version < 13 %}{{ message.tool_call_id ~ '[TOOL_CONTENT]' }}{% endif -%}
      {{- text(message.content) -}}
    {%- endif -%}
    {{- '[/TOOL_RESULTS]' -}}
  {%- else -%}
    {{- raise_exception('The role ' ~ message.role ~ ' is not known; allowed: system, user, assistant, tool.') -}}
  {%- endif -%}
{%- endfor -%}
"""


def mistral_template(file: Path) -> str | None:
    """Jinja source of the format that a tekken.json's version stands for; None for a version that is not known.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        version = str(json.loads(file.read_bytes())["config"].get("version", "v3"))
    except KeyError as error:
        raise CheckpointError(f"{file}: this tekken vocabulary lacks {error}. Get another copy of it.") from error
    except Exception as error:
        raise CheckpointError(f"{file} is no usable tekken vocabulary: {error}. Get another copy of it.") from error
    number = int(version[1:]) if version[1:].isdecimal() else 0
    return f"{{%- set version = {number} -%}}{_SOURCE}" if number in _VERSIONS else None
