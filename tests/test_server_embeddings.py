"""/v1/embeddings, through OpenAI's client and as plain HTTP."""

import base64
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from helpers_engine import TINY
from helpers_server import MODEL, Live, eventually, live_server, with_setup

from minivllm import EmbeddingParams
from minivllm.engine.inference_engine import InferenceEngine

URL = "/v1/embeddings"


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server(with_setup(model="native")) as live:
        yield live
        live.wait_until_idle()


def engine_gives(prompts: list[Any], *params: Any) -> list[list[float]]:
    """What an engine without a server says."""
    engine: InferenceEngine = with_setup(model="native").engine()
    ids = engine.add_requests(prompts, [EmbeddingParams(*params)] * len(prompts))
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output.embedding for output in engine.step()}
    return [np.asarray(outputs[request_id]).tolist() for request_id in ids]


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("hello", ["hello"]),
        (["hello", "you"], ["hello", "you"]),
        ([104, 105], ["hi"]),
        ([[104, 105], [5]], ["hi", [5]]),
    ],
)
def test_openai_client(live: Live, given: Any, prompts: list[Any]) -> None:
    expected = engine_gives(prompts)
    with live.client as client:
        by_default = client.embeddings.create(model=MODEL, input=given)  # base64, which it decodes
        floats = client.embeddings.create(model=MODEL, input=given, encoding_format="float")
    for answer in (by_default, floats):
        assert [item.embedding for item in answer.data] == expected
        assert [(item.index, item.object) for item in answer.data] == [
            (i, "embedding") for i in range(len(prompts))
        ]
        assert (answer.object, answer.model) == ("list", MODEL)
        num_tokens = sum(len(prompt) for prompt in prompts)
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (num_tokens, num_tokens)


def test_base64_is_little_endian_float32(live: Live) -> None:
    text = live.post(URL, {"input": "hello", "encoding_format": "base64"}).json()["data"][0]["embedding"]
    found = np.frombuffer(base64.b64decode(text, validate=True), "<f4")
    assert found.tolist() == engine_gives(["hello"])[0] and len(found) == TINY.hidden_size


def test_settings(live: Live) -> None:
    body = {
        "input": "hello",
        "pooling": "last",
        "normalize": False,
        "user": "u",
        "priority": 3,
        "cache_salt": "s",
    }
    assert live.post(URL, body).json()["data"][0]["embedding"] == engine_gives(["hello"], "last", False)[0]
    nulls = dict.fromkeys(["model", "encoding_format", "pooling", "normalize", "user", "dimensions"])
    assert (
        live.post(URL, {"input": "hello"} | nulls).json()["data"][0]["embedding"]
        == engine_gives(["hello"])[0]
    )


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": ""}, "input", None),
        ({"input": []}, "input", None),
        ({"input": ["a", ""]}, "input", None),
        ({"input": [[]]}, "input", None),
        ({"input": [1, 256]}, "input", None),
        ({"input": [-1]}, "input", None),
        ({"input": [1.5]}, "input", None),
        ({"input": ["a", [1]]}, "input", None),
        ({"input": {}}, "input", None),
        ({"input": None}, "input", None),
        ({"input": ["a"] * 257}, "input", None),
        ({"input": "a" * 1024}, "input", "context_length_exceeded"),
        ({"input": [[1], [1] * 1024]}, "input", "context_length_exceeded"),
        ({"dimensions": 8}, "dimensions", None),
        ({"encoding_format": "int8"}, "encoding_format", None),
        ({"pooling": "max"}, "pooling", None),
        ({"normalize": 1}, "normalize", None),
        ({"cache_salt": ""}, "cache_salt", None),
        ({"stream": True}, "stream", None),
        ({"temperature": 0}, "temperature", None),
        ({"model": "another"}, "model", "model_not_found"),
    ],
)
def test_refusals(live: Live, fields: dict[str, Any], param: str, code: str | None) -> None:
    response = live.post(URL, {"input": "a"} | fields)
    assert response.status_code == (404 if param == "model" else 400)
    error = response.json()["error"]
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")


def test_openai_client_raises_what_was_wrong(live: Live) -> None:
    with live.client as client, pytest.raises(openai.BadRequestError, match="vocabulary"):
        client.embeddings.create(model=MODEL, input=[9999])


def test_beside_a_text_that_is_being_written(live: Live) -> None:
    alone = engine_gives(["hello" * 30])[0]
    with live.client as client:
        stream = client.completions.create(model=MODEL, prompt="a", max_tokens=200, stream=True)
        next(iter(stream))
        assert client.embeddings.create(model=MODEL, input="hello" * 30).data[0].embedding == alone
        assert sum(1 for _ in stream) > 0


def test_a_model_that_fails_is_a_500() -> None:
    with live_server() as live:
        live.engine.executor.damaged = ord("a")  # type: ignore[attr-defined]
        response = live.post(URL, {"input": ["b", "a"]})
        assert response.status_code == 500 and response.json()["error"]["code"] == "internal_error"
        assert live.post(URL, {"input": "b"}).status_code == 200
        live.wait_until_idle()


def test_a_client_that_leaves_frees_its_blocks() -> None:
    with live_server() as live:
        live.gate.close()
        with live.http as http:
            thread = threading.Thread(target=lambda: _ignore(http, {"input": "a" * 500}), daemon=True)
            thread.start()
            eventually(lambda: live.gate.held)
            http.close()
        live.gate.open()
        live.wait_until_idle()


def _ignore(http: Any, body: Any) -> None:
    try:
        http.post(URL, json=body, timeout=0.5)
    except Exception as error:
        assert "time" in str(error).lower() or error.__class__.__module__.startswith("http")


def test_it_ends_when_the_time_is_up() -> None:
    with live_server(request_timeout=0.3) as live:
        live.gate.close()
        assert live.post(URL, {"input": "a"}).status_code == 408
        live.gate.open()
        live.wait_until_idle()


def test_prompt_tokens_are_counted(live: Live) -> None:
    def count() -> float:
        lines = live.http.get("/metrics").text.splitlines()
        return sum(
            float(line.split()[-1]) for line in lines if line.startswith("mini_vllm:prompt_tokens_total")
        )

    before = count()
    live.post(URL, {"input": ["hello", "you"]})
    assert count() == before + 8
