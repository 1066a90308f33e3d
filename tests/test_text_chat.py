"""Chat templates: against transformers, and what malformed messages and hostile templates do."""

import time
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers_chat import CHATML, LLAMA3_LIKE, QWEN_LIKE
from helpers_text import write_hf_directory

from minivllm.errors import RequestError
from minivllm.text import template_sandbox
from minivllm.text.chat_template import render_chat

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Says <what> it's like & \u00fcber",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
SIMPLE = [
    {"role": "system", "content": "  Short answers. "},
    {"role": "user", "content": "Hi <there> & “you”\n"},
    {"role": "assistant", "content": "<think>hm</think>\n\nHello."},
    {"role": "user", "content": "Weather in Köln? "},
]
CALL = {"type": "function", "id": "1", "function": {"name": "weather", "arguments": {"city": "Köln <3"}}}
WITH_CALLS = [
    *SIMPLE,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": '{"temperature": 12}'},
]


@pytest.mark.transformers
@pytest.mark.parametrize("template", [CHATML, LLAMA3_LIKE, QWEN_LIKE], ids=["chatml", "llama3", "qwen"])
def test_rendered_as_transformers_renders_it(tmp_path: Path, template: str) -> None:
    from transformers import AutoTokenizer

    directory = write_hf_directory(tmp_path, bos_token="<|im_start|>", eos_token="<|im_end|>")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    calls = [] if template is CHATML else [WITH_CALLS]
    for messages in (SIMPLE, SIMPLE[1:], SIMPLE[:2], *calls):
        for tools in (None, TOOLS):
            for more in (
                {"add_generation_prompt": True},
                {"add_generation_prompt": False},
                {"add_generation_prompt": True, "enable_thinking": False, "date_string": "1 May"},
                {"add_generation_prompt": False, "continue_final_message": True},
            ):
                own = {k: more[k] for k in ("add_generation_prompt", "continue_final_message") if k in more}
                render = partial(
                    render_chat,
                    template,
                    messages,
                    tools=tools,
                    bos_token="<|im_start|>",
                    eos_token="<|im_end|>",
                    template_kwargs={k: v for k, v in more.items() if k not in own},
                    **own,
                )
                try:
                    expected = tokenizer.apply_chat_template(
                        messages, tools=tools, chat_template=template, tokenize=False, **more
                    )
                except ValueError:  # the last message is changed by the template
                    with pytest.raises(RequestError, match="leaves out or changes"):
                        render()
                else:
                    assert render() == expected


@pytest.mark.real_model
@pytest.mark.transformers
def test_smollm2_template_as_transformers_renders_it(tmp_path: Path) -> None:
    from conftest import find_real_model
    from transformers import AutoTokenizer

    from minivllm.models.gguf import load_gguf

    path = find_real_model()
    assert path is not None
    source = load_gguf(path).tokenizer
    assert source is not None and source.data is not None
    template = source.data["tokenizer.chat_template"]
    tokenizer = AutoTokenizer.from_pretrained(write_hf_directory(tmp_path))
    for messages in (SIMPLE, SIMPLE[1:], SIMPLE[:2]):
        expected = tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True
        )
        assert render_chat(template, messages) == expected


def test_chatml() -> None:
    text = render_chat(CHATML, [{"role": "user", "content": "hi"}])
    assert text == (
        "<|im_start|>system\nBe helpful.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render_chat(CHATML, ({"role": "user", "content": "hi"},), add_generation_prompt=False) in text


def test_text_parts_are_joined_and_messages_left_as_they_were() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    messages = [message, {"role": "assistant", "content": "c"}]
    text = render_chat(CHATML, messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("user\na\nb<|im_end|>\n<|im_start|>assistant\nc")
    assert messages == [message, {"role": "assistant", "content": "c"}]
    assert isinstance(message["content"], list)


def test_arguments_of_calls_may_be_json_text() -> None:
    as_text = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln <3"}'}}
    ours = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [as_text]}]
    theirs = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    for template in (LLAMA3_LIKE, QWEN_LIKE):
        assert render_chat(template, ours) == render_chat(template, theirs)
        assert '{"city": "Köln <3"}' in render_chat(template, ours)
    no_calls = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "x", "tool_calls": None}]
    assert "assistant<|end_header_id|>\n\nx<|eot_id|>" in render_chat(LLAMA3_LIKE, no_calls)


def test_the_date() -> None:
    before, text, after = (
        datetime.now(),
        render_chat("{{ strftime_now('%Y-%m-%d %H:%M:%S') }}", SIMPLE),
        datetime.now(),
    )
    assert before.replace(microsecond=0) <= datetime.strptime(text, "%Y-%m-%d %H:%M:%S") <= after


OK = {"role": "user", "content": "x"}
DOUBLING = "{{% set ns = namespace(s='a') %}}{{% for i in range(99) %}}{{% set ns.s = {} %}}{{% endfor %}}"


@pytest.mark.parametrize(
    ("messages", "param", "said"),
    [
        (None, "messages", "a list"),
        ("hi", "messages", "a list"),
        ({"role": "user", "content": "x"}, "messages", "a list"),
        ([], "messages", "not empty"),
        (["hi"], r"messages\[0\]", "an object"),
        ([OK, 7], r"messages\[1\]", "an object"),
        ([{"content": "x"}], r"messages\[0\].role", "a role"),
        ([{"role": 3, "content": "x"}], r"messages\[0\].role", "a role"),
        ([{"role": "", "content": "x"}], r"messages\[0\].role", "a role"),
        ([OK, {"role": "user"}], r"messages\[1\].content", "content"),
        ([{"role": "user", "content": None}], r"messages\[0\].content", "content"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content", "content"),
        ([{"role": "user", "content": {"a": 1}}], r"messages\[0\].content", "content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\].content", "'image_url'"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\].content", "'str'"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], r"messages\[0\].content", "have text"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], r"messages\[0\].content", "content"),
        ([{"role": "assistant", "tool_calls": "x"}], r"messages\[0\].tool_calls", "a list"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], r"messages\[0\].tool_calls", "name"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            r"messages\[0\].tool_calls",
            "not JSON",
        ),
        ([{"role": "user", "content": "x", "extra": {1, 2}}], "messages", "JSON"),
        ([{"role": "user", "content": "x", "extra": object()}], "messages", "JSON"),
    ],
)
def test_malformed_messages(messages: Any, param: str, said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        render_chat(CHATML, messages)
    assert caught.value.param is not None
    assert caught.value.param == param.replace("\\", "")


def test_deeply_nested_messages_are_refused() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(RequestError, match="nested"):
        render_chat(CHATML, [{"role": "user", "content": "x", "extra": nested}])
    circular: dict[str, Any] = {"role": "user", "content": "x"}
    circular["self"] = circular
    with pytest.raises(RequestError, match="JSON"):
        render_chat(CHATML, [circular])


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"tools": "x"}, "tools"),
        ({"tools": [1]}, "tools"),
        ({"tools": [{"a": object()}]}, "tools"),
        ({"template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"template_kwargs": {"x": object()}}, "chat_template_kwargs"),
        ({"template_kwargs": ["x"]}, "chat_template_kwargs"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
)
def test_malformed_arguments(arguments: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        render_chat(CHATML, SIMPLE, **arguments)
    assert caught.value.param == param


def test_a_model_without_template() -> None:
    with pytest.raises(RequestError, match=r"no chat template.*give it a prompt"):
        render_chat(None, SIMPLE)


def test_a_template_that_drops_the_message_to_continue() -> None:
    with pytest.raises(RequestError, match="leaves out or changes"):
        render_chat("nothing", SIMPLE, add_generation_prompt=False, continue_final_message=True)


BIG = "{% set s = 'x' * 2**23 %}"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for %}", "Expected an expression"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ unknown.field.deeper }}", "'unknown' is undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% include '/etc/passwd' %}", "loader"),
        # what would run code, or change what is shared
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ self.__init__.__globals__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].update(a=1) }}", "unsafe"),
        ("{{ dict.fromkeys }}{{ dict.mro() }}", "undefined|no attribute"),
        ("{% set ns = namespace(__html__=1) %}", "namespace"),
        ("{% set ns = namespace() %}{% set ns.__html__ = 1 %}", "namespace"),
        ("{{ lipsum(n=10**9) }}", "undefined"),
        # what would take memory
        ("{{ 'a' * 10**9 }}", "more than"),
        ("{{ 10**9 * 'a' }}", "more than"),
        ("{{ [1] * 10**9 }}", "more than"),
        ("{{ 10**10000000 }}", "bits"),
        ("{{ 'a'.ljust(10**9) }}", "pads"),
        ("{{ 'a'|center(10**9) }}", "pads"),
        ("{{ range(10**9)|list }}", "Range too big"),
        ("{{ (range(99999)|list * 160)|sort|length }}", "more than 100000 entries"),
        ("{{ 160 * (range(99999)|list) }}", "more than 100000 entries"),
        ("{{ ('x ' * 99999 ~ 'y z').split()|length }}", "more than 100000 entries"),
        (BIG + "{{ ([s] * 99999)|join }}", "join would work on more"),
        (BIG + "{{ (range(99999)|list)|join(s) }}", "join would work on more"),
        (BIG + "{{ s.join(range(99999)|list) }}", "join would work on more"),
        (BIG + "{{ ''.join([s] * 99999) }}", "join would work on more"),
        (BIG + "{{ [s] * 99999 }}", "string would work on more"),
        (BIG + "{{ '' ~ [s] * 99999 }}", "string would work on more"),
        (BIG + "{{ ([s] * 99999)|string }}", "string would work on more"),
        (BIG + "{{ ([s] * 99999)|tojson }}", "tojson would work on more"),
        (BIG + "{{ ([s] * 99999)|sort|length }}", "sort would work on more"),
        (BIG + "{{ [[[s] * 999] * 999]|string }}", "string would work on more"),
        (BIG + "{{ s|replace('x', s) }}", "replace would work on more"),
        (BIG + "{{ s.replace('x', s) }}", "replace would work on more"),
        (BIG + "{{ s.replace('', s) }}", "replace would work on more"),
        (BIG + "{{ s.translate({120: s}) }}", "translate would work on more"),
        (BIG + "{{ ('%s' * 9999) % (([s] * 9999)|list) }}", "% would work on more"),
        (BIG + "{{ ('{0}' * 9999).format(s) }}", "format would work on more"),
        (BIG + "{{ (['x'] * 99999)|map('replace', 'x', s)|list|length }}", "characters and entries together"),
        (BIG + "{{ (['x'] * 99999)|map('center', 10**7)|list|length }}", "characters and entries together"),
        ("{{ ('\\n' * 99999)|indent(10**7) }}", "indent would work on more"),
        ("{{ ('\\t' * 99999).expandtabs(10**7) }}", "expandtabs would work on more"),
        ("{{ (range(99999)|list)|tojson(indent=10**7) }}", "tojson would work on more"),
        ("{{ ([[1]] * 99999)|sum(start=[]) }}", "sums up lists"),
        ("{{ '%1000000000d' % 5 }}", "width"),
        ("{{ '%*d' % (10**9, 5) }}", "width"),
        ("{{ '{:1000000000}'.format(5) }}", "width"),
        ("{{ '%1000000000d'|format(5) }}", "width"),
        (DOUBLING.format("ns.s ~ ns.s"), "more than"),
        (DOUBLING.format("ns.s + ns.s"), "more than"),
        (DOUBLING.format("ns.s|replace('a', 'aa')"), "more than"),
        (DOUBLING.format("ns.s.replace('a', 'aa')"), "more than"),
        ("{% set s = 'x' * 2**20 %}{% for i in range(99) %}{{ s }}{% endfor %}", "more than"),
    ],
)
def test_templates_that_fail_or_harm(template: str, said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        render_chat(template, SIMPLE)
    assert caught.value.param == "messages"
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    "expression",
    [
        "messages.__class__",
        "raise_exception.__globals__",
        "messages|attr('__class__')",
        "'{0.__class__}'.format(messages)",
        "dict.__subclasses__",
        "namespace.__init__",
        "joiner.__init__ is defined",
    ],
)
def test_pythons_internals_read_as_undefined(expression: str) -> None:
    assert render_chat("{{ " + expression + " }}", SIMPLE) in ("", "False")


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for m in messages recursive %}{% if loop.depth < 90 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
    ],
)
def test_templates_that_would_run_for_ever(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_RENDER_SECONDS", 0.2)
    start = time.thread_time()
    with pytest.raises(RequestError, match=r"more than 0\.2 seconds"):
        render_chat(template, SIMPLE)
    assert time.thread_time() - start < 30  # it ends at all: otherwise this test would not


def test_what_templates_may_use() -> None:
    template = (
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
        "{{ m.role|upper ~ loop.index }} {% endfor %}"
        "{{ {'b': '<é>', 'a': [1, none, true]} | tojson }} {{ dict(a=1).a }} {{ 2 ** 10 % 7 + 3 * 2 }}"
        "{% generation %}!{% endgeneration %}"
    )
    assert render_chat(template, SIMPLE) == 'SYSTEM1 USER2 {"b": "<é>", "a": [1, null, true]} 1 8!'
