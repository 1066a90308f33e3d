"""Grammars: masks held against their definition, for every kind of vocabulary, and hostile forms."""

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from helpers_engine import byte_tokenizer
from helpers_grammar import allowed
from helpers_text import byte_level_metadata, sentencepiece_metadata
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.errors import RequestError
from minivllm.structured_outputs import MAX_GRAMMAR_LENGTH, StructuredOutputsParams
from minivllm.text.char_tokenizer import char_tokenizer
from minivllm.text.gguf_tokenizer import gguf_tokenizer
from minivllm.text.grammar import GrammarCompiler
from minivllm.text.vocabulary import Tokenizer

PADDED = 500  #: a model's vocabulary may be larger than its tokenizer's
TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": byte_tokenizer,
    "byte-level": lambda: gguf_tokenizer(byte_level_metadata()),
    "sentencepiece": lambda: gguf_tokenizer(sentencepiece_metadata()),
}
COMPILERS = {name: GrammarCompiler(make(), PADDED) for name, make in TOKENIZERS.items()}
END = frozenset({2, 40})  #: an end token, and an ordinary one that the client wants to end the text


def form(**fields: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**fields)


# --- masks ---


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(
    choices=st.lists(
        st.one_of(
            st.text("the catsond", min_size=1, max_size=8),
            st.text(min_size=1, max_size=4),
            st.sampled_from(["<|im_end|>", "</s>", "<tool>", ' "quoted"\n', "a\\b", "漢字", "日", "\0"]),
        ),
        min_size=1,
        max_size=5,
        unique=True,
    ),
    seed=st.integers(0, 2**32),
)
def test_a_mask_allows_the_tokens_that_lead_to_a_choice(name: str, choices: list[str], seed: int) -> None:
    tokenizer, rng = TOKENIZERS[name](), random.Random(seed)
    texts = [choice.encode() for choice in choices]
    matcher = COMPILERS[name].compile(form(choice=choices)).matcher(END)
    done = b""
    while not matcher.complete:
        tokens = allowed(matcher)
        leading = {
            i
            for i in range(tokenizer.vocab_size)
            if (data := tokenizer.token_bytes(i)) and i not in tokenizer.special_ids
            if any(text.startswith(done + data) for text in texts)
        }
        assert (tokens >= END) == (done in texts)
        if done not in texts:
            assert tokens <= leading
            going_on = {text[len(done)] for text in texts if text.startswith(done)}
            assert {tokenizer.token_bytes(i)[0] for i in tokens} == going_on, "no choice is cut off"
            # Where there is one way to go on, only the tokens that the model expects may be allowed.
            assert tokens == leading or len(going_on) == 1
        if not (tokens := tokens & leading):
            break
        token_id = rng.choice(sorted(tokens))
        matcher.accept(token_id)
        assert matcher.failure is None
        done += tokenizer.token_bytes(token_id)
    assert done in texts


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_only_way_to_go_on_is_taken_in_the_models_own_tokens(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    matcher = COMPILERS[name].compile(form(regex="the cat sat")).matcher(END)
    tokens = []
    while not matcher.complete:
        tokens.append(min(allowed(matcher)))
        matcher.accept(tokens[-1])
    if name == "sentencepiece":  # its own first token has a space in front, which is not to be there
        assert b"".join(map(tokenizer.token_bytes, tokens)) == b"the cat sat"
    else:
        assert tokens == tokenizer.encode("the cat sat", add_special_tokens=False)


def test_a_long_text_without_alternatives() -> None:
    tokenizer = TOKENIZERS["byte-level"]()
    text = "the cat sat on the mat, and " * 2000
    matcher = COMPILERS["byte-level"].compile(form(choice=[text])).matcher(END)
    tokens = []
    for _ in range(300):
        tokens.append(min(allowed(matcher)))
        matcher.accept(tokens[-1])
    assert tokens == tokenizer.encode(text, add_special_tokens=False)[:300]


def test_special_tokens_are_no_text() -> None:
    tokenizer = TOKENIZERS["byte-level"]()
    matcher = COMPILERS["byte-level"].compile(form(regex="(?s:.*)")).matcher(frozenset({2}))
    tokens = allowed(matcher)
    assert tokens & tokenizer.special_ids == {2}, "but for an end token, where the text can end"
    assert max(tokens) < tokenizer.vocab_size, "ids beyond the tokenizer's stand for nothing"


def test_without_end_tokens_an_answer_is_complete_where_nothing_but_an_end_can_come() -> None:
    compiler = GrammarCompiler(char_tokenizer({"itos": list("ab")}), 2)
    matcher = compiler.compile(form(regex="a(é)?")).matcher(frozenset())
    assert allowed(matcher) == {0}
    matcher.accept(0)
    assert matcher.complete
    matcher = compiler.compile(form(regex="a(é)?")).matcher(frozenset({1}))
    matcher.accept(0)
    assert not matcher.complete and allowed(matcher) == {1}


def test_a_grammar_that_the_vocabulary_cannot_follow() -> None:
    compiler = GrammarCompiler(char_tokenizer({"itos": list("ab")}), 2)
    for impossible in (form(json_object=True), form(choice=["c"]), form(regex="[cd]a"), form(regex="b{0}")):
        with pytest.raises(RequestError) as refusal:
            compiler.compile(impossible).matcher(frozenset())
        assert refusal.value.param == "structured_outputs"
    matcher = compiler.compile(form(regex="a[cd]|ab[cd]")).matcher(frozenset({0}))
    matcher.accept(0)
    while matcher.failure is None:
        tokens = allowed(matcher)
        if matcher.failure is None:
            assert tokens == {1}
            matcher.accept(1)
    assert allowed(matcher) >= {0, 1}, "something can be drawn"


def test_matchers_of_one_grammar_know_nothing_of_each_other() -> None:
    grammar = COMPILERS["bytes"].compile(form(choice=["ab", "cd"]))
    first, second = grammar.matcher(END), grammar.matcher(END)
    first.accept(ord("a"))
    assert allowed(second) == {ord("a"), ord("c")}
    assert allowed(first) == {ord("b")}
    assert allowed(grammar.matcher(END)) == {ord("a"), ord("c")}


def test_a_form_that_was_too_much_for_one_request_is_not_for_the_next() -> None:
    """What llguidance keeps of a grammar grows while answers follow it, and is theirs alone."""
    hard = form(regex=r"(\p{L}{0,100}\w{0,100}){0,20}")
    lengths = []
    for _ in range(2):
        matcher = COMPILERS["bytes"].compile(hard).matcher(END)
        rng, length = random.Random(0), 0
        while matcher.failure is None and not matcher.complete and length < 500:
            tokens = sorted(allowed(matcher) - END)
            matcher.accept(rng.choice(tokens))
            length += 1
        lengths.append(length)
    assert lengths[0] == lengths[1] > 5


# --- what is refused ---


DEEP = "(" * 30_000
BAD: dict[str, dict[str, Any]] = {
    "nothing": {},
    "two": {"regex": "a", "json_object": True},
    "false": {"json_object": False},
    "no regex": {"regex": 3},
    "empty": {"regex": ""},
    "no choice": {"choice": []},
    "a choice of nothing": {"choice": ["a", ""]},
    "choice": {"choice": "ab"},
    "schema": {"json": 3},
    "not JSON": {"json": "{"},
    "no JSON": {"json": {"enum": [object()]}},
    "NaN": {"json": {"const": float("nan")}},
    "type": {"json": {"type": "strin"}},
    "not": {"json": {"not": {"type": "string"}}},
    "if": {"json": {"if": {}, "then": {}}},
    "format": {"json": {"type": "string", "format": "unheard-of"}},
    "nothing is valid": {"json": False},
    "contradiction": {"json": {"type": "integer", "minimum": 3, "maximum": 2}},
    "no such reference": {"json": {"$ref": "#/$defs/none"}},
    "a file": {"json": {"$ref": "file:///etc/passwd"}},
    "the network": {"json": {"$ref": "http://127.0.0.1:9/schema.json"}},
    "itself": {"json": {"$ref": "#"}},
    "lenient": {"json": {"x-guidance": {"lenient": True}, "not": {}}},
    "regex": {"regex": "("},
    "lookahead": {"regex": "(?=a)b"},
    "lark": {"grammar": "start: unknown"},
    "no start": {"grammar": 'other: "a"'},
    "endless": {"grammar": "start: start"},
    "gbnf": {"grammar": "root ::= unknown"},
    "long gbnf": {"grammar": 'root ::= "' + "a" * 20_000 + '"'},
    "surrogate": {"regex": "\ud800"},
    "long": {"regex": "a" * (MAX_GRAMMAR_LENGTH + 1)},
    "long choices": {"choice": [f"{i:08}" for i in range(MAX_GRAMMAR_LENGTH // 8 + 1)]},
    "deep regex": {"regex": DEEP + "a" + ")" * 30_000},
    "deep lark": {"grammar": "start: " + DEEP + '"a"' + ")" * 30_000},
    "deep gbnf": {"grammar": "root ::= " + DEEP + '"a"' + ")" * 30_000},
    "deep schema": {"json": "[" * 30_000 + "]" * 30_000},
    "a large product": {
        "json": {
            "allOf": [
                {"anyOf": [{"properties": {f"p{i}_{j}": {"type": "integer"}}} for j in range(4)]}
                for i in range(12)
            ]
        }
    },
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_served_is_refused(name: str) -> None:
    with pytest.raises(RequestError) as refusal:
        COMPILERS["byte-level"].compile(form(**BAD[name]))
    assert refusal.value.param == "structured_outputs"
    assert len(str(refusal.value)) < 500 and "\n" not in str(refusal.value)


#: Forms that are meant to take long or much.
GREEDY: dict[str, dict[str, Any]] = {
    "many properties": {
        "json": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1800)}}
    },
    "many values": {"json": {"enum": [f"value {i}" for i in range(3000)]}},
    "a long string": {"json": {"type": "string", "minLength": 10**6, "maxLength": 10**6}},
    "long arrays": {
        "json": {"type": "array", "items": {"type": "array", "minItems": 10**6}, "minItems": 10**6}
    },
    "endless": {
        "json": {
            "$defs": {"n": {"type": "object", "properties": {"c": {"$ref": "#/$defs/n"}}, "required": ["c"]}},
            "$ref": "#/$defs/n",
        }
    },
    "powers": {"regex": "((a{1000}){1000}){1000}"},
    "states": {"regex": "(a|b)*c(a|b){300}"},
    "unicode": {"regex": r"(\p{L}{0,500}\w{0,500}){0,20}"},
    "many rules": {
        "grammar": "\n".join(f'r{i} ::= "a" r{i + 1}' for i in range(800)) + '\nr800 ::= "b"\nroot ::= r0'
    },
    "ambiguous": {"grammar": 'start: start start start | "a" | start start | ""'},
}


@pytest.mark.parametrize("name", GREEDY)
def test_greedy_forms_keep_within_bounds(name: str) -> None:
    """They are refused, or followed as far as they go; none takes the memory or the hours it asks for."""
    try:
        matcher = COMPILERS["byte-level"].compile(form(**GREEDY[name])).matcher(END)
    except RequestError:
        return
    rng = random.Random(0)
    for _ in range(200):
        tokens = allowed(matcher) - END
        if matcher.failure is not None or matcher.complete or not tokens:
            break
        matcher.accept(rng.choice(sorted(tokens)))
    assert matcher.failure is None or "\n" not in matcher.failure


def test_others_go_on_while_a_grammar_is_compiled() -> None:
    compiler = GrammarCompiler(byte_tokenizer(), 256)
    compiling = threading.Thread(target=lambda: compiler.compile(form(**GREEDY["many properties"])))
    compiling.start()
    num_turns = 0
    while compiling.is_alive():
        time.sleep(0.001)
        num_turns += 1
    assert num_turns > 20, "it takes about half a second"
