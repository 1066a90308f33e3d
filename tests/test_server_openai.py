"""The OpenAI contract, driven by OpenAI's own package, sync and async, over a fake model of bytes."""

import asyncio
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from fakes import fake_continuation, fake_next
from helpers_server import HI, MODEL, Live, events, eventually, live_server, with_setup
from pydantic import TypeAdapter

from minivllm.server.responses import ChatCompletion, ChatCompletionChunk, Completion
from minivllm.text.chat_template import render_chat


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server() as live:
        yield live
        live.wait_until_idle()


def expected_text(prompt: str, max_tokens: int) -> str:
    tokens = fake_continuation(list(prompt.encode()), max_tokens, frozenset())
    text = bytes(tokens).decode(errors="replace")
    return text


def prompt_of(messages: Any, live: Live, **options: Any) -> str:
    assert live.engine.tokenizer is not None
    return render_chat(live.engine.tokenizer.chat_template, messages, **options)


def chat_chunks(live: Live, **body: Any) -> list[Any]:
    response = live.post("/v1/chat/completions", {"messages": HI, "stream": True} | body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response.text)


def text_chunks(live: Live, **body: Any) -> list[Any]:
    response = live.post("/v1/completions", {"prompt": "ab", "stream": True} | body)
    assert response.status_code == 200, response.text
    return events(response.text)


# --- chat ---


def test_chat(live: Live) -> None:
    answer = live.client.chat.completions.create(model=MODEL, messages=HI, max_tokens=12)
    (choice,) = answer.choices
    assert (answer.object, answer.model, choice.index, choice.finish_reason) == (
        "chat.completion", MODEL, 0, "length",
    )  # fmt: skip
    assert choice.message.role == "assistant"
    assert expected_text(prompt_of(HI, live), 12).startswith(choice.message.content or "?")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len("<user>Hi<a>"), 12)
    assert answer.usage.total_tokens == len("<user>Hi<a>") + 12
    assert answer.id.startswith("chatcmpl-") and answer.system_fingerprint
    assert choice.logprobs is None


def test_chat_stream_is_the_whole_in_pieces(live: Live) -> None:
    whole = live.client.chat.completions.create(model=MODEL, messages=HI, max_completion_tokens=30)
    chunks = list(
        live.client.chat.completions.create(model=MODEL, messages=HI, max_completion_tokens=30, stream=True)
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"


def test_the_form_of_a_chat_stream(live: Live) -> None:
    chunks = chat_chunks(live, max_tokens=5)
    assert {(c["id"], c["created"], c["model"], c["object"]) for c in chunks} == {
        (chunks[0]["id"], chunks[0]["created"], MODEL, "chat.completion.chunk")
    }
    for chunk in chunks:
        TypeAdapter(ChatCompletionChunk).validate_python(chunk, strict=True)
        assert "usage" not in chunk
        assert chunk["system_fingerprint"] == chunks[0]["system_fingerprint"]
    first, *middle, last = (c["choices"][0] for c in chunks)
    assert first["delta"] == {"role": "assistant", "content": ""} and first["finish_reason"] is None
    assert middle and all(set(c["delta"]) == {"content"} and c["finish_reason"] is None for c in middle)
    assert last["delta"] == {} and last["finish_reason"] == "length"


def test_usage_is_sent_only_to_those_who_ask(live: Live) -> None:
    for ask in (chat_chunks, text_chunks):
        assert all("usage" not in chunk for chunk in ask(live, max_tokens=3))
        assert all("usage" not in c for c in ask(live, max_tokens=3, stream_options={"include_usage": False}))
        *chunks, last = ask(live, max_tokens=3, stream_options={"include_usage": True})
        assert all(chunk["usage"] is None for chunk in chunks)
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 3
        prompt_tokens = last["usage"]["prompt_tokens"]
        assert last["usage"]["total_tokens"] == prompt_tokens + 3


def test_cached_tokens_are_told(live: Live) -> None:
    prompt = "the same beginning, longer than a block of the cache"
    for cached in (0, len(prompt) // 16 * 16):
        usage = live.client.completions.create(model=MODEL, prompt=prompt, max_tokens=1).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == cached


@pytest.mark.parametrize("top", [None, 0, 3, 20])
def test_chat_logprobs(live: Live, top: int | None) -> None:
    options: dict[str, Any] = {} if top is None else {"top_logprobs": top}
    answer = live.client.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=6, logprobs=True, **options
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    tokens = list(prompt_of(HI, live).encode())
    assert len(logprobs.content) == 6
    for entry in logprobs.content:
        token, logprob = fake_next(tokens)
        tokens.append(token)
        assert entry.bytes == [token] and entry.logprob == logprob
        assert entry.token == bytes([token]).decode(errors="replace")
        assert len(entry.top_logprobs) == (top or 0)
        assert [t.logprob for t in entry.top_logprobs] == sorted(
            (t.logprob for t in entry.top_logprobs), reverse=True
        )
        if top:
            assert entry.top_logprobs[0].bytes == [token]


def test_streamed_logprobs_are_those_of_the_whole(live: Live) -> None:
    options: Any = {"max_tokens": 20, "logprobs": True, "top_logprobs": 2}
    whole = live.post("/v1/chat/completions", {"messages": HI, **options}).json()
    chunks = chat_chunks(live, **options)
    pieces = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert [e for piece in pieces for e in piece["content"]] == whole["choices"][0]["logprobs"]["content"]


def test_message_contents(live: Live) -> None:
    def prompt_tokens(messages: Any, **more: Any) -> int:
        answer = live.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1, **more})
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens"])

    parts = [{"type": "text", "text": "Hi"}]
    assert prompt_tokens([{"role": "user", "content": parts}]) == len("<user>Hi<a>")
    talk = [{"role": "developer", "content": "x"}, {"role": "assistant", "content": None}, *HI]
    assert prompt_tokens(talk) == len("<system>x<assistant><user>Hi<a>")
    assert prompt_tokens(HI, add_generation_prompt=False) == len("<user>Hi")
    assert prompt_tokens(HI, continue_final_message=True) == len("<user>Hi")
    assert prompt_tokens(HI, chat_template_kwargs={"unknown": 1}) == len("<user>Hi<a>")


def test_without_a_limit_a_chat_goes_on_to_the_end_of_the_context() -> None:
    with live_server() as live:
        answer = live.client.chat.completions.create(model=MODEL, messages=HI)
        assert answer.usage is not None and answer.usage.total_tokens == live.engine.max_model_len
        assert answer.choices[0].finish_reason == "length"
        text = live.client.completions.create(model=MODEL, prompt="a")
        assert text.usage is not None and text.usage.completion_tokens == 16


# --- text completions ---


@pytest.mark.parametrize("prompt", ["ab", ["ab"], [97, 98], [[97, 98]]])
def test_the_ways_to_give_a_prompt(live: Live, prompt: Any) -> None:
    answer = live.client.completions.create(model=MODEL, prompt=prompt, max_tokens=8)
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    (choice,) = answer.choices
    assert choice.text and expected_text("ab", 8).startswith(choice.text)
    assert choice.finish_reason == "length"


@pytest.mark.parametrize("prompts", [["ab", "c", "def"], [[97, 98], [99], [100, 101, 102]]])
@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts(live: Live, prompts: Any, stream: bool) -> None:
    texts, ends = {0: "", 1: "", 2: ""}, []
    answer: Any = live.client.completions.create(model=MODEL, prompt=prompts, max_tokens=9, stream=stream)
    for chunk in answer if stream else [answer]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends += [choice.index] if choice.finish_reason else []
    assert sorted(ends) == [0, 1, 2]
    for index, prompt in enumerate(["ab", "c", "def"]):
        assert texts[index] and expected_text(prompt, 9).startswith(texts[index])


def test_completion_logprobs(live: Live) -> None:
    whole = live.client.completions.create(model=MODEL, prompt="ab", max_tokens=20, logprobs=2)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    tokens, data = list(b"ab"), b""
    assert logprobs.tokens and logprobs.token_logprobs and logprobs.top_logprobs and logprobs.text_offset
    for text, logprob, top, offset in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset, strict=True
    ):
        token, expected = fake_next(tokens)
        tokens.append(token)
        name = chr(token) if token < 128 else f"bytes:\\x{token:02x}"
        assert (text, logprob, top[name], len(top)) == (name, expected, expected, 2)
        if token < 128:  # a character by itself: it is where it is said to be
            assert whole.choices[0].text[offset] == text
        data += bytes([token])
    chunks = text_chunks(live, max_tokens=20, logprobs=2)
    pieces = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for piece in pieces for value in piece[name]] == getattr(logprobs, name)


def test_echo(live: Live) -> None:
    plain = live.client.completions.create(model=MODEL, prompt=["ab", "c"], max_tokens=5)
    echoed = live.client.completions.create(model=MODEL, prompt=["ab", "c"], max_tokens=5, echo=True)
    assert [c.text for c in echoed.choices] == [
        p + c.text for p, c in zip(["ab", "c"], plain.choices, strict=True)
    ]
    pieces = text_chunks(live, max_tokens=5, echo=True)
    assert "".join(c["choices"][0]["text"] for c in pieces) == "ab" + plain.choices[0].text


def test_every_answer_is_of_the_documented_form(live: Live) -> None:
    chat = live.post("/v1/chat/completions", {"messages": HI, "max_tokens": 3, "logprobs": True}).json()
    TypeAdapter(ChatCompletion).validate_python(chat, strict=True)
    text = live.post("/v1/completions", {"prompt": "a", "max_tokens": 3, "logprobs": 1}).json()
    TypeAdapter(Completion).validate_python(text, strict=True)
    for chunk in text_chunks(live, max_tokens=3, logprobs=1):
        TypeAdapter(Completion).validate_python(chunk, strict=True)


def test_what_changes_nothing_is_taken(live: Live) -> None:
    live.client.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=1, user="u", store=False, metadata={"a": "b"}, n=1,
        service_tier="auto", parallel_tool_calls=True, response_format={"type": "text"}, modalities=["text"],
        logit_bias={"5": 1}, presence_penalty=0.5, frequency_penalty=-0.5, temperature=0.3, top_p=0.9, seed=7,
        stop=["never this", "nor this"],
        extra_body={
            "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "stop_token_ids": [7], "ignore_eos": True,
            "min_tokens": 1, "priority": 0, "skip_special_tokens": False,
        },
    )  # fmt: skip
    live.client.completions.create(model=MODEL, prompt="a", max_tokens=1, best_of=1, n=1, suffix=None)


# --- several answers, and what vLLM adds ---


@pytest.fixture(scope="module")
def native() -> Iterator[Live]:
    """A tiny random model that draws."""
    with live_server(with_setup(model="native")) as live:
        yield live
        live.wait_until_idle()


@pytest.mark.parametrize("prompts", [["ab"], ["ab", "cd"]])
def test_n_answers_both_ways(native: Live, prompts: list[str]) -> None:
    """vllm#52398: n = 4, streamed and whole."""
    options: Any = {"model": MODEL, "max_tokens": 12, "n": 4, "seed": 3}
    whole = native.client.completions.create(prompt=prompts, **options)
    texts = [choice.text for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == list(range(4 * len(prompts)))
    assert len(set(texts)) > 1, "they are drawn apart"
    assert whole.usage is not None and whole.usage.completion_tokens == 48 * len(prompts)
    assert whole.usage.prompt_tokens == 2 * len(prompts)
    pieces, ends, seen = [""] * len(texts), [0] * len(texts), []
    native.gate.seconds = 0.005  # or all of it would be one piece
    for chunk in native.client.completions.create(prompt=prompts, stream=True, **options):
        (choice,) = chunk.choices
        assert not ends[choice.index], "nothing comes after the end"
        pieces[choice.index] += choice.text
        ends[choice.index] += choice.finish_reason is not None
        seen.append(choice.index)
    native.gate.seconds = 0
    assert pieces == texts and set(ends) == {1}
    assert seen != sorted(seen), "they are interleaved"


def test_n_chats(native: Live) -> None:
    options: Any = {"model": MODEL, "messages": HI, "max_tokens": 12, "n": 4, "seed": 3, "logprobs": True}
    whole = native.client.chat.completions.create(**options)
    texts, roles = [""] * 4, []
    for chunk in native.client.chat.completions.create(stream=True, **options):
        (choice,) = chunk.choices
        roles += [choice.index] if choice.delta.role else []
        texts[choice.index] += choice.delta.content or ""
    assert roles == [0, 1, 2, 3] and texts == [c.message.content for c in whole.choices]
    assert all(c.logprobs and c.logprobs.content and len(c.logprobs.content) == 12 for c in whole.choices)


@pytest.mark.parametrize("prompt", ["Say:\u00e9 ", list("Say:\u00e9 ".encode())])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(live: Live, prompt: Any, stream: bool) -> None:
    """vllm#5334: the offsets are places in the text that is given back."""
    for cached in (False, True):
        body = {"prompt": prompt, "max_tokens": 9, "echo": True, "logprobs": 2}
        if stream:
            choices = [chunk["choices"][0] for chunk in text_chunks(live, **body)]
        else:
            choices = live.post("/v1/completions", body).json()["choices"]
        text = "".join(choice["text"] for choice in choices)
        parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        tokens, logprobs, tops, offsets = (
            [value for part in parts for value in part[name]]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        )
        assert text.startswith("Say:\u00e9 ") and len(tokens) == 7 + 9, cached
        assert offsets == sorted(offsets) and offsets[:7] == [0, 1, 2, 3, 4, 4, 5]
        for token, offset in zip(tokens, offsets, strict=True):
            if not token.startswith("bytes:"):
                assert text[offset : offset + len(token)] == token
        assert logprobs[0] is None and tops[0] is None
        assert None not in logprobs[1:]
        assert all(token in top for token, top in zip(tokens[1:], tops[1:], strict=True))


def test_prompt_logprobs(native: Live) -> None:
    body = {"prompt": "abcd", "max_tokens": 1, "prompt_logprobs": 2}
    text = native.post("/v1/completions", body).json()["choices"][0]["prompt_logprobs"]
    assert text[0] is None and len(text) == 4
    for known, token in zip(text[1:], "bcd", strict=True):
        assert str(ord(token)) in known and {1, 2} <= {entry["rank"] for entry in known.values()}
    chat = native.post("/v1/chat/completions", {"messages": HI, "max_tokens": 1, "prompt_logprobs": 0}).json()
    assert [len(known) for known in chat["prompt_logprobs"][1:]] == [1] * (len("<user>Hi<a>") - 1)
    assert "prompt_logprobs" not in native.post("/v1/completions", {"prompt": "a"}).json()["choices"][0]


def test_cache_salts_keep_tenants_apart(live: Live) -> None:
    def cached(salt: str | None) -> int:
        prompt = "~ a prompt of several blocks, for two tenants"
        body = {"prompt": prompt, "max_tokens": 1, "cache_salt": salt}
        usage = live.post("/v1/completions", body).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached(salt) for salt in ("one", "two", "one", "two", None)] == [0, 0, 32, 32, 0]


def test_priorities() -> None:
    with live_server(with_setup(max_num_seqs=1)) as live, ThreadPoolExecutor(4) as pool:
        live.gate.close()
        done: list[int] = []

        def ask(priority: int) -> None:
            answer = live.post("/v1/completions", {"prompt": "a", "max_tokens": 5, "priority": priority})
            assert answer.status_code == 200
            done.append(priority)

        calls = [pool.submit(ask, -9)]
        eventually(lambda: live.engine.metrics().num_running == 1)
        for number, priority in enumerate((3, -1, 2), start=2):
            calls.append(pool.submit(ask, priority))
            eventually(lambda number=number: live.service.num_open == number)
        eventually(lambda: live.num_waiting == 3)
        live.gate.open()
        for call in calls:
            call.result()
        assert done == [-9, -1, 2, 3]


# --- sync and async, many at once ---


def test_async_streams_side_by_side(live: Live) -> None:
    async def ask(i: int) -> str:
        stream = await live.async_client.completions.create(
            model=MODEL, prompt=f"prompt {i}", max_tokens=20 + i, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def ask_all() -> list[str]:
        return await asyncio.gather(*(ask(i) for i in range(24)))

    for i, text in enumerate(asyncio.run(ask_all())):
        assert text and expected_text(f"prompt {i}", 20 + i).startswith(text)


# --- the routes beside ---


def test_models(live: Live) -> None:
    (card,) = live.client.models.list().data
    assert (card.id, card.object) == (MODEL, "model") and card == live.client.models.retrieve(MODEL)
    for refused in (
        lambda: live.client.models.retrieve("gpt/5"),
        lambda: live.client.completions.create(model="gpt-5", prompt="a"),
        lambda: live.client.chat.completions.create(model="gpt-5", messages=HI),
    ):
        with pytest.raises(openai.NotFoundError) as error:
            refused()
        assert error.value.code == "model_not_found"


def test_tokens_and_back(live: Live) -> None:
    tokens = live.post("/tokenize", {"prompt": "héllo", "return_token_strs": True}).json()
    assert tokens["tokens"] == list("héllo".encode()) and tokens["count"] == 6
    assert tokens["max_model_len"] == live.engine.max_model_len and len(tokens["token_strs"]) == 6
    assert live.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "héllo"}
    chat = live.post("/tokenize", {"messages": HI}).json()
    assert bytes(chat["tokens"]).decode() == "<user>Hi<a>" and chat["token_strs"] is None
    for body in ({}, {"prompt": "a", "messages": HI}, {"tokens": [1]}):
        assert live.post("/tokenize", body).status_code == 400
    for wrong in ([256], [-1], "a", [1.5], None, [10**400]):
        assert live.post("/detokenize", {"tokens": wrong}).status_code == 400


def test_health_version_and_documentation(live: Live) -> None:
    with live.http as http:
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/version").json()["version"]
        assert http.get("/docs").status_code == 200
        paths = http.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize", "/metrics"} <= paths.keys()


def test_metrics(live: Live) -> None:
    live.client.completions.create(model=MODEL, prompt="metrics", max_tokens=4)
    with live.http as http:
        answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    lines = [line for line in answer.text.splitlines() if not line.startswith("#")]
    values = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}
    label = f'model_name="{MODEL}"'

    def value(name: str, more: str = "") -> float:
        return values[f"mini_vllm:{name}{{{more}{label}}}"]

    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "num_preemptions_total",
    ):
        assert value(name) == 0
    assert value("generation_tokens_total") >= 4 and value("prompt_tokens_total") >= len("metrics")
    assert value("prefix_cache_queries_total") >= value("prefix_cache_hits_total") >= 0
    finished = value("request_success_total", 'finished_reason="length",')
    for name in (
        "time_to_first_token",
        "e2e_request_latency",
        "request_queue_time",
        "request_prefill_time",
        "request_decode_time",
    ):
        assert value(f"{name}_seconds_count") >= finished > 0
    assert value("inter_token_latency_seconds_count") >= 3
    assert value("iteration_tokens_total_count") == live.engine.metrics().steps
    assert value("iteration_tokens_total_sum") == live.engine.metrics().computed_tokens


def test_the_dashboard_asks_for_metrics_that_exist(live: Live) -> None:
    dashboard = Path(__file__).parent.parent / "examples" / "grafana-dashboard.json"
    with live.http as http:
        text = http.get("/metrics").text
    known = {line.split("{")[0] for line in text.splitlines() if not line.startswith("#")}
    queries = [t["expr"] for panel in json.loads(dashboard.read_text())["panels"] for t in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"mini_vllm:\w+", query)}
    assert len(asked) > 10 and asked <= known


def test_events_are_json_on_one_line(live: Live) -> None:
    with (
        live.http as http,
        http.stream(
            "POST", "/v1/completions", json={"prompt": "x", "max_tokens": 200, "stream": True}
        ) as answer,
    ):
        for line in answer.iter_lines():
            assert line == "" or line == "data: [DONE]" or json.loads(line.removeprefix("data: "))
