"""What other servers were reported for, and what must not happen here. Each test names its report."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import openai
import pytest
from fakes import VOCAB_SIZE
from helpers_server import CHAT, ENDLESS, MODEL, TEMPLATE, TEXT, Live, events, live_server, with_setup

from minivllm.engine.inference_engine import InferenceEngine
from minivllm.text.tokenizer import Tokenizer

HI: Any = [{"role": "user", "content": "Hi:"}]
BOS = 1
#: Tokens beside the single bytes: from id 128 on.
WORDS = ["Hello", " wor", "ld", "</", "s>", " world</s>", " more", "END", "</s"]


def words_tokenizer() -> Tokenizer:
    """Bytes below 128, then WORDS. Encoding is by bytes, with a begin token in front, as Llama's has it."""
    texts = [bytes([i]) for i in range(128)] + [word.encode() for word in WORDS]

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        spelled = [BOS] if text.startswith("<s>") else []
        return [*([BOS] if add_special_tokens else []), *spelled, *text.removeprefix("<s>").encode()]

    texts[BOS] = b"<s>"
    texts += [b""] * (VOCAB_SIZE - len(texts))
    return Tokenizer(
        encode, texts, special_ids=[BOS], bos_token_id=BOS, chat_template="{{ bos_token }}" + TEMPLATE
    )


def with_tokenizer(engine: InferenceEngine, tokenizer: Tokenizer) -> InferenceEngine:
    engine.tokenizer = tokenizer
    object.__setattr__(engine._admission, "tokenizer", tokenizer)
    return engine


@pytest.fixture(scope="module")
def words() -> Iterator[Live]:
    with live_server(with_tokenizer(ENDLESS.engine(), words_tokenizer())) as live:
        yield live
        live.wait_until_idle()


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], None]:
    """Lets the model answer every prompt, which must end with ":", with these tokens; then with dots."""

    def script(tokens: list[str]) -> None:
        ids = [128 + WORDS.index(token) if token in WORDS else ord(token) for token in tokens]

        def following(context: Sequence[int], choice: int = 0) -> tuple[int, float]:
            context = [int(token_id) for token_id in context]
            place = context[::-1].index(ord(":"))
            return (ids[place] if place < len(ids) else ord(".")), -0.5

        monkeypatch.setattr("fakes.fake_next", following)

    return script


def streamed(live: Live, path: str, body: dict[str, Any]) -> tuple[str, str, int]:
    """The text of a stream, why it ended, and the largest number of characters in one piece."""
    response = live.post(path, body | {"stream": True})
    assert response.status_code == 200, response.text
    choices = [chunk["choices"][0] for chunk in events(response.text)]
    pieces = [choice["text"] if path == TEXT else choice["delta"].get("content", "") for choice in choices]
    (reason,) = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return "".join(pieces), reason, max(map(len, pieces))


def whole(live: Live, path: str, body: dict[str, Any]) -> tuple[str, str]:
    (choice,) = live.post(path, body).json()["choices"]
    return choice["text"] if path == TEXT else choice["message"]["content"], choice["finish_reason"]


@pytest.mark.parametrize(
    ("tokens", "stop", "text"),
    [
        (["Hello", "</", "s", ">", "x"], "</s>", "Hello"),  # llama.cpp#11538: over three tokens
        (["Hello", "<", "/", "s", ">", "x"], "</s>", "Hello"),
        (["Hello", " world</s>", "x"], "</s>", "Hello world"),  # llama.cpp PR#9867: wanted text beside it
        (["Hello", " wor", "ld", "END", "x"], "ldE", "Hello wor"),
        (["Hello", "</", "</s", ">", "x"], "</s>", "Hello</"),  # it seems to begin, and begins again
        (["Hello", "</", " more", "END"], ["</s>", "END"], "Hello</ more"),
        (["Hello", "</", "s", "!", "END"], ["</s>", "END"], "Hello</s!"),
    ],
)
def test_stop_strings(
    words: Live, says: Callable[[list[str]], None], tokens: list[str], stop: Any, text: str
) -> None:
    """Also llama.cpp#13780: completions with a stop give the same streamed and whole."""
    says(tokens)
    for path, body in ((TEXT, {"prompt": "go:"}), (CHAT, {"messages": HI, "add_generation_prompt": False})):
        body |= {"stop": stop, "max_tokens": 20}
        assert whole(words, path, body) == (text, "stop"), path
        assert streamed(words, path, body)[:2] == (text, "stop"), path


def test_what_may_become_a_stop_is_told_when_the_answer_ends(
    words: Live, says: Callable[[list[str]], None]
) -> None:
    says(["Hello", "</", "s"])
    body = {"prompt": "go:", "stop": "</s>", "max_tokens": 3}
    assert whole(words, TEXT, body) == ("Hello</s", "length")
    assert streamed(words, TEXT, body)[:2] == ("Hello</s", "length")


def test_a_chat_has_one_begin_token(words: Live) -> None:
    """vllm#2012: the tokenizer and the template both put one."""
    tokens = words.post("/tokenize", {"messages": HI}).json()["tokens"]
    assert tokens[0] == BOS and tokens.count(BOS) == 1
    usage = words.post(CHAT, {"messages": HI, "max_tokens": 1}).json()["usage"]
    assert usage["prompt_tokens"] == len(tokens)
    assert words.post("/tokenize", {"prompt": "a"}).json()["tokens"] == [BOS, ord("a")]
    assert words.post("/tokenize", {"prompt": "a", "add_special_tokens": False}).json()["tokens"] == [97]


def test_empty_prompts(words: Live) -> None:
    """vllm#7283, vllm#7632: the engine died of them. Here the begin token alone is a prompt."""
    for prompt in ("", [""]):
        answer = words.post(TEXT, {"prompt": prompt, "max_tokens": 2})
        assert answer.status_code == 200 and answer.json()["usage"]["prompt_tokens"] == 1
    with live_server() as live:  # without a begin token there is nothing
        for prompt in ("", [""], [], [[]]):
            with pytest.raises(openai.BadRequestError, match="empty"):
                live.client.completions.create(model=MODEL, prompt=prompt, max_tokens=2)
        assert live.http.get("/health").status_code == 200
        assert live.post(TEXT, {"prompt": "a"}).status_code == 200


def test_token_ids_out_of_range(words: Live) -> None:
    """vllm PR#16529 (logit_bias), vllm#54195 (stop_token_ids, which corrupted neighbours)."""
    for fields in ({"logit_bias": {"256": 1}}, {"logit_bias": {"4294967295": 1}}):
        assert words.post(TEXT, {"prompt": "a", **fields}).json()["error"]["param"] == "logit_bias"
    for ids in ([256], [2**31], [2**63], [-1]):
        answer = words.post(TEXT, {"prompt": "a", "stop_token_ids": ids})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stop_token_ids")


def test_huge_numbers_cost_nothing(words: Live) -> None:
    """sglang PR#31567: n = 5,000,000 and top_logprobs = 10^9."""
    for body in (
        {"messages": HI, "n": 5_000_000},
        {"messages": HI, "logprobs": True, "top_logprobs": 10**9},
        {"messages": HI, "max_tokens": 10**18},
    ):
        assert words.post(CHAT, body).status_code == 400
    assert words.engine.metrics().num_running == words.engine.metrics().num_waiting == 0


def test_no_max_tokens(words: Live, says: Callable[[list[str]], None]) -> None:
    """vllm#42474: without max_tokens a prompt that fits is answered up to the context's end."""
    says(["Hello"])
    limit = words.engine.max_model_len
    messages = [{"role": "user", "content": "x" * (limit - 40) + ":"}]
    answer = words.post(CHAT, {"messages": messages})
    assert answer.status_code == 200 and answer.json()["choices"][0]["finish_reason"] == "length"
    assert answer.json()["usage"]["total_tokens"] == limit


def test_a_wrong_schema_is_not_our_fault(words: Live) -> None:
    """llama.cpp PR#17572: it was a 500."""
    for wrong in (
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such"}}},
        {"type": "no such"},
        {},
        5,
    ):
        answer = words.post(CHAT, {"messages": HI, "response_format": wrong})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"].startswith("response_format")


def test_usage_is_not_sent_unasked(words: Live) -> None:
    """vllm PR#36379."""
    response = words.post(CHAT, {"messages": HI, "stream": True, "max_tokens": 3})
    assert "usage" not in response.text


def test_a_request_that_can_never_fit_blocks_nobody() -> None:
    """vllm#35541: it waited at the head of the queue for blocks that the pool does not have."""
    with live_server(with_setup(num_blocks=4)) as live:
        refused = live.post(TEXT, {"prompt": "x" * 60, "max_tokens": 10})
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert live.post(TEXT, {"prompt": "x" * 50, "max_tokens": 10}).status_code == 200
        live.wait_until_idle()
