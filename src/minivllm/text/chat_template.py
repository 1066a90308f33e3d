"""render_chat: messages → the prompt text that a model's chat template makes of them.

Knows nothing of tokenizers; the rendered text spells out its special tokens, so it is encoded with
``add_special_tokens=False``.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from minivllm.errors import RequestError, shown
from minivllm.text.template_sandbox import TemplateError, render_template

#: Names that belong to this module; ``template_kwargs`` cannot replace them.
_RESERVED = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"}
#: Put at the end of the message to be continued, to find where it ends in the rendered text. The space tells
#: whether the template trims its messages.
_END_MARK = "\ue000end of the message to continue\ue000 "


def render_chat(
    template: str | None,
    messages: object,
    *,
    bos_token: str = "",
    eos_token: str = "",
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: object = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Render ``messages`` with a model's chat ``template``.

    Args:
        template: jinja2 source, ``Tokenizer.chat_template``.
        messages: a list of mappings with "role" (a string) and "content": a string, or a list of parts
            ``{"type": "text", "text": …}``, which are joined by line breaks. "content" may be null or missing
            where there are "tool_calls". Other keys are passed on.
        add_generation_prompt: end with what begins the assistant's answer.
        continue_final_message: end within the last message, so that the model goes on with it; excludes
            ``add_generation_prompt``.
        tools: a list of JSON-schema descriptions of functions, as OpenAI has them, or None.
        template_kwargs: further variables of the template ("enable_thinking" …).

    Raises:
        RequestError: there is no template; messages or tools are malformed; the template refuses them, fails,
            or exceeds a limit.
    """
    if template is None:
        raise RequestError(
            "this model has no chat template, so it cannot take messages; give it a prompt instead",
            "messages",
        )
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other; set one of them to false",
            "continue_final_message",
        )
    chat = _checked_messages(messages)
    if continue_final_message:
        chat[-1]["content"] += _END_MARK
    if not isinstance(template_kwargs, Mapping | None):
        raise RequestError("chat_template_kwargs must be an object", "chat_template_kwargs")
    variables = _plain("chat_template_kwargs", dict(template_kwargs or {}))
    if wrong := _RESERVED & variables.keys():
        raise RequestError(
            f"chat_template_kwargs must not set {shown(sorted(wrong)[0])}, which has a place of its own",
            "chat_template_kwargs",
        )
    variables |= {
        "messages": chat,
        "tools": _checked_tools(tools),
        "add_generation_prompt": add_generation_prompt,
        "bos_token": bos_token,
        "eos_token": eos_token,
    }
    try:
        text = render_template(template, variables)
    except TemplateError as error:
        raise RequestError(
            f"the model's chat template does not take these messages: {error}", "messages"
        ) from None
    return _cut_at_mark(text, chat[-1]["content"]) if continue_final_message else text


def _cut_at_mark(text: str, marked_content: str) -> str:
    mark = _END_MARK.rstrip()
    end = text.rfind(mark)
    if end < 0 or not text[: end + len(mark)].endswith(marked_content.strip()):
        raise RequestError(
            "continue_final_message cannot be used: the model's chat template leaves out or changes the last "
            "message",
            "continue_final_message",
        )
    # Where the template trims its messages, the message as the model sees it has no space at its end.
    return text[:end] if text[end : end + len(_END_MARK)] == _END_MARK else text[:end].rstrip()


def _plain(param: str, value: object) -> Any:
    """A copy of ``value`` out of plain JSON types, which have no methods that a template could abuse."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError):
        raise RequestError(f"{param} must be JSON data, not nested too deeply", param) from None


def _checked_messages(messages: object) -> list[dict[str, Any]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise RequestError("messages must be a list of messages, and not empty", "messages")
    plain = _plain("messages", [dict(m) if isinstance(m, Mapping) else m for m in messages])
    return [_checked_message(index, message) for index, message in enumerate(plain)]


def _checked_message(index: int, message: object) -> dict[str, Any]:
    param = f"messages[{index}]"
    if not isinstance(message, dict):
        raise RequestError(f"{param} must be an object with role and content", param)
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise RequestError(
            f"{param} must have a role ('system', 'user', 'assistant' …), a string", f"{param}.role"
        )
    calls = message.get("tool_calls")
    if calls is None:
        message.pop("tool_calls", None)
    else:
        _parse_arguments(calls, param)
    content = message.get("content")
    if content is None and calls:
        content = ""
    if isinstance(content, list):
        content = "\n".join(_text_of(part, param) for part in content)
    if not isinstance(content, str):
        raise RequestError(f"{param} must have content, a string or a list of text parts", f"{param}.content")
    message["content"] = content
    return message


def _text_of(part: object, param: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text":
        if not isinstance(part.get("text"), str):
            message = f"a text part of {param} must have text, a string"
            raise RequestError(message, f"{param}.content")
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise RequestError(
        f'{param}.content has a part of type {shown(kind)}; only {{"type": "text", "text": …}} is taken',
        f"{param}.content",
    )


def _parse_arguments(calls: object, param: str) -> None:
    """Turn the arguments of tool calls, which OpenAI has as JSON text, into the objects templates expect."""
    param = f"{param}.tool_calls"
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(
                f'{param} must be a list of {{"function": {{"name": …, "arguments": …}}}}', param
            )
        if isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"] or "{}")
            except (ValueError, RecursionError):
                raise RequestError(f"{param} has arguments that are not JSON", param) from None


def _checked_tools(tools: object) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    plain = _plain("tools", tools)
    if not isinstance(plain, list) or not all(isinstance(tool, dict) for tool in plain):
        raise RequestError("tools must be a list of objects that describe functions", "tools")
    return plain
