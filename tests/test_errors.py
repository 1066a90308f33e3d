"""Values in messages: short, on one line, and never in the words of Python's own limits."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_engine import TINY, Setup
from helpers_text import write_hf_directory

from minivllm.block_allocator import create_block_allocator
from minivllm.config import EngineConfig
from minivllm.errors import ConfigError, MiniVLLMError, counted, shown
from minivllm.models.json_file import Fields, parse_json
from minivllm.models.pull import pull
from minivllm.sampling_params import SamplingParams
from minivllm.text.char_tokenizer import char_tokenizer
from minivllm.text.gguf_tokenizer import gguf_tokenizer
from minivllm.text.hf_tokenizer import hf_tokenizer

#: Too long for str(): Python refuses integers of more than 4300 digits.
HUGE = 10**5000


class Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (HUGE, "a number of 16610 bits"),
        (-HUGE, "a number of 16610 bits"),
        ([HUGE], "[a number of 16610 bits]"),
        ({"a": HUGE}, "{'a': a number of 16610 bits}"),
        (2**64, "18446744073709551616"),
        (np.int64(3), "3"),
        (np.float32(0.5), "0.5"),
        (True, "True"),
        (None, "None"),
        (float("nan"), "nan"),
        ("two\nlines", "'two\\nlines'"),
        (Hostile(), "a test_errors.Hostile"),
        (np.zeros(3), "a numpy.ndarray"),
        (b"bytes", "a bytes"),
    ],
    ids=lambda value: type(value).__name__,  # pytest, too, would print the number
)
def test_values_in_messages(value: Any, text: str) -> None:
    assert shown(value) == text


@pytest.mark.parametrize(
    "value", ["x" * 10**6, ["x" * 10**6] * 9, [[["deep"] * 99] * 99] * 99, dict.fromkeys(range(99), "x" * 99)]
)
def test_long_values_are_cut(value: Any) -> None:
    assert len(shown(value)) <= 121


def test_counts_in_words() -> None:
    assert [counted(n, "block") for n in (0, 1, 2, 1024)] == [
        "0 blocks",
        "1 block",
        "2 blocks",
        "1,024 blocks",
    ]


@pytest.mark.parametrize("value", ["none", "int3", 8, True])
def test_what_quantization_may_be_is_listed_whole(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"use one of 'auto', 'int8', 'int4', None$"):
        EngineConfig("m", quantization=value)


REFUSALS: dict[str, Callable[[], object]] = {
    "a token id": lambda: Setup().engine().add_request([1, HUGE]),
    "a request id": lambda: Setup().engine().add_request("a", request_id=HUGE),
    "a long request id": lambda: (
        Setup().engine().add_requests(["a"] * 2, [SamplingParams()] * 2, ["x" * 9999] * 2)
    ),
    "max_tokens": lambda: SamplingParams(max_tokens=HUGE),
    "stop_token_ids": lambda: SamplingParams(stop_token_ids=[HUGE]),
    "num_blocks": lambda: EngineConfig("m", num_blocks=HUGE),
    "dtype": lambda: EngineConfig("m", dtype=HUGE),
    "model": lambda: EngineConfig(HUGE),
    "device": lambda: EngineConfig("m", device=HUGE),
    "quantization": lambda: EngineConfig("m", quantization=HUGE),
    "enable_prefix_caching": lambda: EngineConfig("m", enable_prefix_caching=HUGE),
    "an allocator": lambda: create_block_allocator(4, 4, HUGE),
    "a model's size": lambda: replace(TINY, num_layers=HUGE),
    "JSON": lambda: parse_json(b'{"hidden_size": 1' + b"0" * 5000 + b"}", "it"),
    "a field": lambda: Fields({"n_embd": HUGE}, "it").integer("n_embd"),
    "a field of another type": lambda: Fields({"bias": HUGE}, "it").boolean("bias"),
    "a token": lambda: char_tokenizer({"itos": [HUGE]}),
    "a GGUF token": lambda: gguf_tokenizer({"tokenizer.ggml.model": HUGE, "tokenizer.ggml.tokens": ["a"]}),
    "an alias": lambda: pull(HUGE),
}


@pytest.mark.parametrize("place", REFUSALS)
def test_numbers_too_long_to_print_are_refused_in_a_sentence(place: str) -> None:
    with pytest.raises(MiniVLLMError) as error:
        REFUSALS[place]()
    message = str(error.value)
    assert "Exceeds the limit" not in message and len(message) < 400 and "\n" not in message


def test_numbers_too_long_to_print_beside_what_is_read(tmp_path: Path) -> None:
    write_hf_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        '{"eos_token": "<|endoftext|>", "n": 1' + "0" * 5000 + "}"
    )
    assert hf_tokenizer(tmp_path).eos_token == "<|endoftext|>"
