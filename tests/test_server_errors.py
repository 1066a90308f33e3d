"""What a caller did wrong is a 4xx in OpenAI's shape, at once, and nobody else notices."""

import json
import resource
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import openai
import pytest
from helpers_server import CHAT, HI, MODEL, TEXT, Live, error_of, live_server, with_setup

from minivllm.server import middleware


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server() as live:
        yield live
        live.wait_until_idle()


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
