"""The chat template of a model, with the system message and the turns that its maker put before every conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.config.errors import TemplateError
from penstock.library.template.jinja import translate
from penstock.library.template.source import literal


def is_jinja(source: str) -> bool:
    """Whether a template is Jinja's; Go's has no blocks in {% %}."""
    return "{%" in source


def conversation_template(
    source: str | None, own: str, system: str = "", messages: Sequence[Mapping[str, str]] = ()
) -> str:
    """A Jinja template.

    Args:
        source: Jinja or Go; None takes `own`.
        own: the model file's template, Jinja; "" if it has none.
        system: what stands before a conversation that begins without a system message.
        messages: turns that come before a conversation.

    Raises:
        TemplateError: there is no template, or one that cannot be translated.
    """
    if source is None and not own:
        raise TemplateError("the model has a system message (SYSTEM) but no chat template; give it one with TEMPLATE.")
    if source is not None and not is_jinja(source):
        source = translate(source)
    return before(system, messages) + (own if source is None else source)


def before(system: str, messages: Sequence[Mapping[str, str]]) -> str:
    """Jinja that puts a system message and turns at the front of `messages`."""
    lines = []
    if messages:
        turns = ", ".join(
            f"{{'role': {literal(turn['role'])}, 'content': {literal(turn['content'])}}}" for turn in messages
        )
        head = "messages[:1] if messages and messages[0]['role'] == 'system' else []"
        rest = "messages[1:] if messages and messages[0]['role'] == 'system' else messages"
        lines.append(f"{{%- set messages = ({head}) + [{turns}] + ({rest}) %}}")
    if system:
        turn = f"{{'role': 'system', 'content': {literal(system)}}}"
        lines.append(
            "{%- if not messages or messages[0]['role'] != 'system' %}"
            f"{{%- set messages = [{turn}] + messages %}}"
            "{%- endif %}"
        )
    return "".join(lines)
