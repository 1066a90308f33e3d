"""What a caller did wrong is a 4xx in OpenAI's shape, at once, and nobody else notices."""

import json
import resource
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from helpers_server import MODEL, Live, eventually, live_server, with_setup
from typer.testing import CliRunner

from minivllm.cli import app
from minivllm.errors import ConfigError
from minivllm.server import middleware
from minivllm.server.run import listen
from minivllm.server.settings import ServerSettings, read_api_keys

HI: Any = [{"role": "user", "content": "Hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server() as live:
        yield live
        live.wait_until_idle()


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error, whose shape is always the same."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json" and response.headers["x-request-id"]
    body = response.json()
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["message"] and len(body["error"]["message"]) < 700
    return dict(body["error"])


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (TEXT, {"prompt": ""}, "prompt"),
        (TEXT, {"prompt": [""]}, "prompt"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": [[]]}, "prompt"),
        (TEXT, {"prompt": ["a", ""]}, "prompt"),
        (TEXT, {"prompt": None}, "prompt"),
        (TEXT, {"prompt": 5}, "prompt"),
        (TEXT, {"prompt": {"a": 1}}, "prompt"),
        (TEXT, {"prompt": ["a", 5]}, "prompt"),
        (TEXT, {"prompt": [5, "a"]}, "prompt"),
        (TEXT, {"prompt": [[5], "a"]}, "prompt"),
        (TEXT, {"prompt": [5.5]}, "prompt"),
        (TEXT, {"prompt": [True]}, "prompt"),
        (TEXT, {"prompt": [256]}, "prompt"),
        (TEXT, {"prompt": [-1]}, "prompt"),
        (TEXT, {"prompt": [10**30]}, "prompt"),
        (TEXT, {"prompt": ["a"] * 257}, "prompt"),
        (TEXT, {"temperature": -1}, "temperature"),
        (TEXT, {"temperature": "hot"}, "temperature"),
        (TEXT, {"temperature": True}, "temperature"),
        (TEXT, {"temperature": 10**400}, "temperature"),
        (TEXT, {"top_p": 1.5}, "top_p"),
        (TEXT, {"top_k": -2}, "top_k"),
        (TEXT, {"top_k": 10**18}, "top_k"),
        (TEXT, {"min_p": 2}, "min_p"),
        (TEXT, {"seed": 2**64}, "seed"),
        (TEXT, {"seed": 1.5}, "seed"),
        (TEXT, {"max_tokens": 0}, "max_tokens"),
        (TEXT, {"max_tokens": -1}, "max_tokens"),
        (TEXT, {"max_tokens": 10**25}, "max_tokens"),
        (TEXT, {"max_tokens": "5"}, "max_tokens"),
        (TEXT, {"presence_penalty": 3}, "presence_penalty"),
        (TEXT, {"repetition_penalty": 0}, "repetition_penalty"),
        (TEXT, {"n": 0}, "n"),
        (TEXT, {"n": 5_000_000}, "n"),
        (TEXT, {"n": 65}, "n"),
        (TEXT, {"prompt": ["a"] * 256, "n": 5}, "n"),
        (TEXT, {"best_of": 2}, "best_of"),
        (TEXT, {"prompt_logprobs": 21}, "prompt_logprobs"),
        (TEXT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (TEXT, {"cache_salt": ""}, "cache_salt"),
        (TEXT, {"cache_salt": "x" * 1025}, "cache_salt"),
        (TEXT, {"priority": 2**63}, "priority"),
        (TEXT, {"priority": 0.5}, "priority"),
        (TEXT, {"suffix": "x"}, "suffix"),
        (TEXT, {"logprobs": 21}, "logprobs"),
        (TEXT, {"logprobs": -1}, "logprobs"),
        (TEXT, {"logprobs": True}, "logprobs"),
        (TEXT, {"stop": ""}, "stop"),
        (TEXT, {"stop": 5}, "stop"),
        (TEXT, {"stop": ["a", None]}, "stop"),
        (TEXT, {"stop": ["a"] * 65}, "stop"),
        (TEXT, {"stop": "a" * 1025}, "stop"),
        (TEXT, {"stop_token_ids": [256]}, "stop_token_ids"),
        (TEXT, {"stop_token_ids": [-1]}, "stop_token_ids"),
        (TEXT, {"stop_token_ids": [10**12]}, "stop_token_ids"),
        (TEXT, {"logit_bias": {"256": 1}}, "logit_bias"),
        (TEXT, {"logit_bias": {"-1": 1}}, "logit_bias"),
        (TEXT, {"logit_bias": {"a": 1}}, "logit_bias"),
        (TEXT, {"logit_bias": {"1": 101}}, "logit_bias"),
        (TEXT, {"logit_bias": {"1": "x"}}, "logit_bias"),
        (TEXT, {"logit_bias": [1]}, "logit_bias"),
        (TEXT, {"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias"),
        (TEXT, {"logit_bias": {"1" * 4000: 1}}, "logit_bias"),
        (TEXT, {"stream": False, "stream_options": {"include_usage": True}}, None),
        (TEXT, {"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        (TEXT, {"stream": "yes"}, "stream"),
        (TEXT, {"guided_json": {"type": "no such"}}, "guided_json"),
        (TEXT, {"guided_json": [1]}, "guided_json"),
        (TEXT, {"guided_json": "{"}, "guided_json"),
        (TEXT, {"guided_regex": "("}, "guided_regex"),
        (TEXT, {"guided_regex": 5}, "guided_regex"),
        (TEXT, {"guided_choice": []}, "guided_choice"),
        (TEXT, {"guided_choice": [1]}, "guided_choice[0]"),
        (TEXT, {"guided_grammar": "start: x"}, "guided_grammar"),
        (TEXT, {"guided_grammar": "x" * 70_000}, "guided_grammar"),
        (TEXT, {"structured_outputs": {}}, "structured_outputs"),
        (TEXT, {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        (TEXT, {"structured_outputs": {"no_such": "a"}}, "structured_outputs.no_such"),
        (TEXT, {"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        (TEXT, {"guided_regex": "a", "min_tokens": 2}, "min_tokens"),
        (CHAT, {"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        (TEXT, {"messages": HI}, "messages"),
        (TEXT, {"no_such": 1}, "no_such"),
        (TEXT, {"min_tokens": 5, "max_tokens": 2}, "min_tokens"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": None}, "messages"),
        (CHAT, {"messages": "Hi"}, "messages"),
        (CHAT, {"messages": ["Hi"]}, "messages[0]"),
        (CHAT, {"messages": [{"content": "Hi"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": 5, "content": "Hi"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        (CHAT, {"messages": HI * 5000}, "messages"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 10**9}, "top_logprobs"),
        (CHAT, {"logprobs": 3}, "logprobs"),
        (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format"),
        (CHAT, {"response_format": {"type": "text", "json_schema": {"name": "x"}}}, "response_format"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format.type"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        (CHAT, {"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (CHAT, {"chat_template_kwargs": 5}, "chat_template_kwargs"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals(live: Live, path: str, fields: dict[str, Any], param: str | None, stream: bool) -> None:
    body: dict[str, Any] = {"model": MODEL, "stream": stream}
    body |= {"prompt": "a"} if path == TEXT else {"messages": HI}
    error = error_of(live.post(path, {**body, **fields}))
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


def deep(levels: int) -> bytes:
    return b'{"prompt":' + b"[" * levels + b"]" * levels + b"}"


@pytest.mark.parametrize(
    "body",
    [
        b"", b" ", b"{", b"null", b"[]", b'"x"', b"5", b"{}", b'{"prompt": "a"} {}', b"\xff\xfe",
        b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}', b'{"prompt": "a", "seed": ' + b"9" * 100_000 + b"}",
        b'{"prompt": "a", "prompt": "b"}', b'{"prompt": "a\x00"}', deep(50), deep(500), deep(500_000),
        b'{"prompt": [' + b"[]," * 300_000 + b"[]]}", b'{"prompt": [' + b"1," * 500_000 + b"1]}",
        b'{"prompt": [' + b'"",' * 300_000 + b'""]}',
        b"{" + b",".join(b'"%d":1' % i for i in range(100_000)) + b"}",
        b'{"prompt": "a", "stop_token_ids": [' + b'"",' * 300_000 + b'""]}',
        b'{"prompt": "' + b"a" * 1_900_000 + b'"}',
    ],
    ids=lambda body: repr(body[:40]),
)  # fmt: skip
def test_hostile_bodies(live: Live, body: bytes) -> None:
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with live.http as http:
        for path in (TEXT, CHAT, "/tokenize", "/detokenize"):
            if path == "/tokenize" and body.startswith(b'{"prompt": "aaa'):
                continue
            error_of(http.post(path, content=body, headers={"content-type": "application/json"}))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 200 * 1024  # KiB


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_of_50_megabytes(live: Live, announced: bool) -> None:
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def pieces() -> Iterator[bytes]:
        for _ in range(50):
            yield bytes(2**20)

    headers = {"content-type": "application/json"} | (
        {"content-length": str(50 * 2**20)} if announced else {}
    )
    with live.http as http:
        error = error_of(http.post(TEXT, content=pieces(), headers=headers), 413)
    assert error["code"] == "body_too_large" and "2,097,152" in error["message"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 30 * 1024


def raw(live: Live, data: bytes) -> bytes:
    """What the server answers before it closes the connection."""
    with socket.create_connection(("127.0.0.1", live.port), timeout=20) as connection:
        connection.sendall(data)
        answer = b""
        while piece := connection.recv(2**16):
            answer += piece
            if b"\r\n\r\n{" in answer and answer.endswith(b"}"):
                break
        return answer


HEADERS = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def test_a_large_body_that_waits_to_be_asked_for(live: Live) -> None:
    answer = raw(live, HEADERS + b"expect: 100-continue\r\ncontent-length: 99999999999\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413 ") and b"body_too_large" in answer


def test_a_body_that_does_not_arrive(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "BODY_SECONDS", 0.2)
    answer = raw(live, HEADERS + b'content-length: 100\r\n\r\n{"prompt"')
    assert answer.startswith(b"HTTP/1.1 408 ") and b"timeout_error" in answer


@pytest.mark.parametrize(
    "data", [b"nonsense\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000]
)
def test_what_is_no_http(live: Live, data: bytes) -> None:
    with suppress(ConnectionError):  # it may be closed before all of it is sent
        answer = raw(live, data + b"\r\n\r\n")
        assert answer == b"" or answer.startswith(b"HTTP/1.1 40")
    assert live.http.get("/health").status_code == 200


def test_other_content_types(live: Live) -> None:
    with live.http as http:
        error = error_of(http.post(TEXT, content=b'{"prompt": "a"}', headers={"content-type": "text/plain"}))
        assert "application/json" in error["message"]
        error_of(http.post(TEXT, data={"prompt": "a"}))
        charset = {"content-type": "application/json; charset=utf-8"}
        assert http.post(TEXT, content=b'{"prompt": "a"}', headers=charset).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/audio/transcriptions", 404), ("POST", "/v1/images/generations", 404),
        ("POST", "/v1/fine_tuning/jobs", 404), ("GET", "/", 404), ("GET", "/v1/%ff", 404),
        ("GET", "/..%2f..", 404), ("POST", TEXT + "/", 404), ("GET", TEXT, 405),
        ("DELETE", "/v1/models", 405), ("PUT", CHAT, 405), ("POST", "/health", 405),
    ],
)  # fmt: skip
def test_wrong_routes(live: Live, method: str, path: str, status: int) -> None:
    with live.http as http:
        response = http.request(method, path)
    error_of(response, status)
    assert status != 405 or response.headers["allow"]


@pytest.mark.parametrize(
    "path", ["/health", "/version", "/v1/models", "/metrics", "/docs", "/openapi.json", "/no/such", TEXT]
)
def test_head_is_get_without_the_body(live: Live, path: str) -> None:
    with live.http as http:
        got, head = http.get(path), http.head(path)
        assert head.status_code == got.status_code and head.content == b""
        assert head.headers["content-type"] == got.headers["content-type"]
        assert http.get("/health").status_code == 200


@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
def test_bodies_that_others_may_see_otherwise(live: Live, method: str) -> None:
    """Two lengths, of which a proxy may believe the other one; and compression, which would be ignored."""
    head = f"{method} {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n".encode()
    both = b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    with socket.create_connection(("127.0.0.1", live.port), timeout=20) as connection:
        connection.sendall(head + both + head + b"content-length: 0\r\n\r\n")
        answer = b""
        while piece := connection.recv(2**16):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1 ") == 1
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    for encoding in ("gzip", "deflate, gzip", "br"):
        with live.http as http:
            headers = {"content-type": "application/json", "content-encoding": encoding}
            assert (
                encoding
                in error_of(http.request(method, TEXT, content=b"x", headers=headers), 415)["message"]
            )


def test_every_answer_has_a_request_id(live: Live) -> None:
    with live.http as http:
        assert http.get("/health").headers["x-request-id"] != http.get("/health").headers["x-request-id"]
        assert http.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
        strange = http.get("/health", headers={"x-request-id": "a b\tc" * 50}).headers["x-request-id"]
        assert strange.startswith("req-")
        with http.stream("POST", TEXT, json={"prompt": "a", "stream": True}) as stream:
            assert stream.headers["x-request-id"]


def test_a_prompt_beyond_the_context_has_both_numbers(live: Live) -> None:
    limit = live.engine.max_model_len
    for body in ({"prompt": "a" * (limit + 5)}, {"prompt": [97] * limit}, {"prompt": ["a", "a" * limit]}):
        for stream in (False, True):
            error = error_of(live.post(TEXT, body | {"stream": stream}))
            assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
            assert f"{limit:,}" in error["message"]
    error = error_of(live.post(TEXT, {"prompt": "a" * 100, "max_tokens": limit}))
    assert error["code"] == "context_length_exceeded" and error["param"] == "max_tokens"
    assert all(number in error["message"] for number in ("100", f"{limit:,}", f"{limit + 100:,}"))
    with pytest.raises(openai.BadRequestError, match="1,024"):
        live.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "long " * 400}], stream=True
        )


def test_a_model_without_a_tokenizer() -> None:
    with live_server(with_setup(tokenizer=False)) as live:
        answer = live.post(TEXT, {"prompt": [1, 2], "max_tokens": 3}).json()
        assert answer["usage"]["completion_tokens"] == 3 and answer["choices"][0]["text"] == ""
        error_of(live.post(TEXT, {"prompt": "a"}))
        error_of(live.post(TEXT, {"prompt": [1], "logprobs": 1}))
        error_of(live.post(TEXT, {"prompt": [1], "stop": "a"}))
        error_of(live.post(CHAT, {"messages": HI}))
        error_of(live.post("/tokenize", {"prompt": "a"}))
        error_of(live.post("/detokenize", {"tokens": [1]}))


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (TEXT, {"prompt": ["a", 1]}, "prompt: a list of strings has 1 in it"),
        (TEXT, {"prompt": [[1], "a"]}, "prompt: a list of lists of token ids has 'a' in it"),
        (TEXT, [], "the body must be a JSON object"),
        (CHAT, "messages", "the body must be a JSON object"),
        ("/detokenize", 5, "the body must be a JSON object"),
        (CHAT, {"messages": [[]]}, "messages[0]: this must be a JSON object"),
        (
            TEXT,
            {"prompt": "a", "stream": True, "stream_options": 1},
            "stream_options: this must be a JSON object",
        ),
        ("/detokenize", {"tokens": [1, 10**30]}, f"tokens has {10**30}; token ids are 0 to 255"),
        ("/detokenize", {"tokens": [-1]}, "tokens has -1; token ids are 0 to 255"),
        *(
            (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"} | more]}]}, words)
            for more, words in (
                ({}, "a text part of messages[0] must have text, a string"),
                ({"text": None}, "a text part of messages[0] must have text, a string"),
                ({"text": 5}, "a text part of messages[0] must have text, a string"),
            )
        ),
    ],
)
def test_messages_say_what_is_wrong(live: Live, path: str, body: Any, message: str) -> None:
    assert error_of(live.post(path, body))["message"].startswith(message)


def test_a_model_has_a_name(live: Live) -> None:
    with live.http as http:
        assert error_of(http.get("/v1/models/"), 404)["code"] == "unknown_url"
        assert error_of(http.get("/v1/models/x"), 404)["code"] == "model_not_found"


def test_a_model_without_a_chat_template() -> None:
    with live_server(with_setup(chat_template=None)) as live:
        assert "chat template" in error_of(live.post(CHAT, {"messages": HI, "stream": True}))["message"]


def test_neighbours_of_wrong_requests_are_unharmed(live: Live) -> None:
    alone = live.client.completions.create(model=MODEL, prompt="neighbour", max_tokens=300).choices[0].text
    stream = live.client.completions.create(model=MODEL, prompt="neighbour", max_tokens=300, stream=True)
    text = next(stream).choices[0].text
    for fields in (
        {"stop_token_ids": [10**6]},
        {"logit_bias": {"9999": 5}},
        {"n": 5_000_000},
        {"prompt": []},
    ):
        assert live.post(TEXT, {"prompt": "a", **fields}).status_code == 400
    assert text + "".join(chunk.choices[0].text for chunk in stream) == alone


# --- limits ---


def test_a_full_queue_is_429() -> None:
    with live_server(with_setup(max_num_seqs=1), max_queue=2) as live, ThreadPoolExecutor(3) as pool:
        live.gate.close()
        accepted = [pool.submit(live.post, TEXT, {"prompt": "a"})]
        eventually(lambda: live.engine.metrics().num_running == 1)
        accepted += [pool.submit(live.post, TEXT, {"prompt": "a", "stream": s}) for s in (False, True)]
        eventually(lambda: live.service.num_open == 3 and live.num_waiting == 2)
        for stream in (False, True):
            response = live.post(TEXT, {"prompt": "a", "stream": stream})
            error = error_of(response, 429)
            assert error["type"] == "rate_limit_error" and int(response.headers["retry-after"]) > 0
        with pytest.raises(openai.RateLimitError):
            live.client.chat.completions.create(model=MODEL, messages=HI)
        live.gate.open()
        assert all(answer.result().status_code == 200 for answer in accepted)
        live.wait_until_idle()
        assert live.post(TEXT, {"prompt": "a"}).status_code == 200


def test_a_burst_fills_the_queue_and_no_more() -> None:
    """Though all of it comes while the prompts are still being made."""
    with live_server(with_setup(max_num_seqs=2), max_queue=3) as live, ThreadPoolExecutor(20) as pool:
        live.gate.close()
        first = [pool.submit(live.post, TEXT, {"prompt": "a"})]
        eventually(lambda: live.gate.held)
        first.append(pool.submit(live.post, TEXT, {"prompt": "a"}))
        eventually(lambda: live.num_waiting == 1)
        live.gate.step()
        eventually(lambda: live.engine.metrics().num_running == 2 and live.num_waiting == 0)
        burst = [pool.submit(live.post, TEXT, {"prompt": "a"}) for _ in range(18)]
        eventually(lambda: sum(answer.done() for answer in burst) == 15)
        assert live.num_waiting == 3
        live.gate.open()
        assert sorted(answer.result().status_code for answer in first + burst) == [200] * 5 + [429] * 15
        live.wait_until_idle()


def test_every_prompt_of_a_request_has_its_place_in_the_queue() -> None:
    with live_server(with_setup(max_num_seqs=1), max_queue=4) as live, ThreadPoolExecutor(3) as pool:

        def prompts(count: int) -> dict[str, Any]:
            return {"prompt": [f"{count} {i}" for i in range(count)], "max_tokens": 2}

        assert live.post(TEXT, prompts(9)).status_code == 200  # nobody waits
        live.gate.close()
        accepted = [pool.submit(live.post, TEXT, {"prompt": "a"})]
        eventually(lambda: live.engine.metrics().num_running == 1 and live.num_waiting == 0)
        accepted.append(pool.submit(live.post, TEXT, prompts(2)))
        eventually(lambda: live.num_waiting == 2)
        assert "2 prompts are waiting" in error_of(live.post(TEXT, prompts(3)), 429)["message"]
        accepted.append(pool.submit(live.post, TEXT, prompts(2)))
        eventually(lambda: live.num_waiting == 4)
        error_of(live.post(TEXT, prompts(1)), 429)
        live.gate.open()
        assert all(answer.result().status_code == 200 for answer in accepted)
        live.wait_until_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long(stream: bool) -> None:
    with live_server(request_timeout=0.3) as live:
        live.gate.close()
        response = live.post(TEXT, {"prompt": "a", "stream": stream})
        if stream:
            assert response.status_code == 200
            name, data = response.text.strip().split("\n")
            assert name == "event: error"
            assert json.loads(data.removeprefix("data: "))["error"]["code"] == "timeout"
            with pytest.raises(openai.APIError, match=r"0\.3 seconds"):
                list(live.client.completions.create(model=MODEL, prompt="a", stream=True))
        else:
            assert error_of(response, 408)["code"] == "timeout"
        live.gate.open()
        live.wait_until_idle()


def test_a_model_that_fails_in_the_middle() -> None:
    with live_server() as live:
        live.gate.close()
        executor: Any = live.engine.executor
        with live.http as http, http.stream("POST", TEXT, json={"prompt": "a", "stream": True}) as stream:
            live.gate.step(4)
            eventually(lambda: live.gate.num_steps == 4)
            executor.fail_at = len(executor.steps) + 1
            live.gate.open()
            text = stream.read().decode()
        assert text.count("event: error") == 1 and "[DONE]" not in text
        assert error_of(live.post(TEXT, {"prompt": "a"}), 500)["type"] == "server_error"
        executor.fail_at = None
        assert live.post(TEXT, {"prompt": "a"}).status_code == 200
        live.wait_until_idle()


def test_a_broken_engine_is_503_and_not_healthy() -> None:
    with live_server() as live:

        def broken() -> Any:
            raise RuntimeError("a bug")

        live.engine.scheduler.schedule = broken  # type: ignore[method-assign]
        assert error_of(live.post(TEXT, {"prompt": "a"}), 503)["code"] == "engine_stopped"
        assert error_of(live.post(TEXT, {"prompt": "a"}), 503)["code"] == "engine_stopped"
        with live.http as http:
            error_of(http.get("/health"), 503)


def test_our_own_bugs_are_500_in_the_same_shape(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with live_server() as live, live.http as http:
        monkeypatch.setattr(live.service.metrics, "text", lambda: 1 / 0)
        error = error_of(http.get("/metrics"), 500)
        assert error["type"] == "server_error" and "division" not in error["message"]
    assert caplog.text.count("Traceback (most recent call last)") == 1


def test_while_the_model_is_loaded() -> None:
    with live_server(load=False) as live:
        with live.http as http:
            for response in (
                http.get("/health"),
                http.get("/v1/models"),
                http.post(TEXT, json={"prompt": "a"}),
            ):
                assert error_of(response, 503)["code"] == "loading" and response.headers["retry-after"]
            assert http.get("/metrics").status_code == 200
        live.loop.call_soon_threadsafe(live.service.start, live.engine)
        eventually(lambda: live.post(TEXT, {"prompt": "a"}).status_code == 200)


# --- keys and origins ---


def test_keys_guard_every_route_but_health() -> None:
    with live_server(api_keys=("first", "second"), cors_origins=("https://page.example",)) as live:
        with live.http as http:
            assert http.get("/health").status_code == 200
            routes = [*http.get("/openapi.json", headers={"authorization": "Bearer first"}).json()["paths"]]
            assert len(routes) >= 8
            for path in [
                *routes,
                "/docs",
                "/redoc",
                "/openapi.json",
                "/v1/no/such",
                "/",
                "/health/",
                "//health",
            ]:
                for method in ("GET", "POST"):
                    for headers in (
                        {},
                        {"authorization": "Bearer third"},
                        {"authorization": "first"},
                        {"authorization": "Basic first"},
                        {"authorization": b"Bearer \xff"},
                    ):
                        if path == "/health":
                            continue
                        response = http.request(method, path, headers=headers)
                        assert error_of(response, 401)["code"] == "invalid_api_key", path
            for key in ("first", "second"):
                assert http.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200
            # A browser asks for permission without the key.
            asked = {"origin": "https://page.example", "access-control-request-method": "POST"}
            allowed = http.options(CHAT, headers=asked)
            assert allowed.status_code == 200
            assert allowed.headers["access-control-allow-origin"] == "https://page.example"
            for foreign in (
                {"origin": "https://other.example"},
                {"access-control-request-method": "PUT"},
            ):
                assert "Disallowed CORS" in error_of(http.options(CHAT, headers=asked | foreign))["message"]
            refused = http.get("/v1/models", headers={"origin": "https://page.example"})
            assert refused.status_code == 401 and "access-control-allow-origin" in refused.headers
        with pytest.raises(openai.AuthenticationError):
            live.client.models.list()


def test_other_origins_are_not_let_in_unless_asked(live: Live) -> None:
    with live.http as http:
        response = http.get("/health", headers={"origin": "https://page.example"})
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 70000}, {"max_queue": 0}, {"max_body_size": 5}, {"shutdown_timeout": -1}, {"model_name": ""},
        {"shutdown_timeout": float("nan")}, {"request_timeout": 0}, {"api_keys": ("",)}, {"api_keys": ("ä",)},
        {"ssl_keyfile": "key.pem"},
        *({"cors_origins": (origin,)} for origin in ("", "nonsense", "page.example", "https://", "*.example",
            "https://page.example/", "https://a, https://b", "https://u@page.example", "HTTPS://page.example")),
    ],
)  # fmt: skip
def test_settings_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServerSettings(**{"model_name": "m"} | wrong)


def test_origins_that_can_be() -> None:
    origins = (
        "*",
        "null",
        "https://page.example",
        "http://127.0.0.1:3000",
        "http://[::1]:80",
        "app://obsidian",
    )
    assert ServerSettings("m", cors_origins=origins).cors_origins == origins


@pytest.mark.parametrize("option", ["--max-body-size", "--request-timeout", "--shutdown-timeout"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e400", "-1", "1e300"])
def test_numbers_that_are_none(option: str, value: str) -> None:
    result = CliRunner().invoke(app, ["serve", "no.gguf", f"{option}={value}"])
    assert isinstance(result.exception, ConfigError)
    assert option[2:].replace("-", "_") in str(result.exception)


def test_limits_are_told_in_full() -> None:
    with pytest.raises(ConfigError, match=r"from 1 to 1,048,576$"):
        ServerSettings("m", max_queue=0)


def test_tls_files_that_cannot_be_used(tmp_path: Path) -> None:
    made = {}
    for name, more in (("a", ("-nodes",)), ("b", ("-nodes",)), ("locked", ("-passout", "pass:x"))):
        made[name] = subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
                *("-keyout", f"{tmp_path}/{name}.key", "-out", f"{tmp_path}/{name}.pem"),
                *("-subj", "/CN=localhost", *more),
            ],
            capture_output=True,
            check=False,
        ).returncode
    if any(made.values()):
        pytest.skip("openssl is not here to make certificates")
    (tmp_path / "text").write_text("nonsense")
    (tmp_path / "empty").write_text("")
    (tmp_path / "both.pem").write_text((tmp_path / "a.pem").read_text() + (tmp_path / "a.key").read_text())

    def settings(certificate: str, key: str | None) -> ServerSettings:
        keyfile = None if key is None else tmp_path / key
        return ServerSettings("m", ssl_certfile=tmp_path / certificate, ssl_keyfile=keyfile)

    assert settings("a.pem", "a.key").scheme == settings("both.pem", None).scheme == "https"
    for certificate, key, words in (
        ("text", "a.key", "text has no certificate"),
        ("empty", "a.key", "empty has no certificate"),
        ("a.key", "a.key", "a.key has no certificate"),
        ("a.pem", "text", "ssl_keyfile .*text has no private key"),
        ("a.pem", "a.pem", "ssl_keyfile .*a.pem has no private key"),
        ("a.pem", None, "ssl_certfile .*a.pem has no private key"),
        ("a.pem", "b.key", "b.key is not the one of the certificate in .*a.pem"),
        ("locked.pem", "locked.key", "locked.key has no private key .* without a passphrase"),
        ("none.pem", "a.key", "there is no file .*none.pem"),
    ):
        with pytest.raises(ConfigError, match=words):
            settings(certificate, key)


def test_key_files(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n one \n\ntwo\n")
    assert read_api_keys(file) == ("one", "two")
    for text in ("", "# none\n"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="no API key"):
            read_api_keys(file)
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_api_keys(path)


def test_addresses_that_cannot_be_had() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for host, port in (("127.0.0.1", taken.getsockname()[1]), ("no.such.host.invalid", 0)):
            with pytest.raises(ConfigError, match="cannot listen on"):
                listen(ServerSettings(model_name="m", host=host, port=port))
