"""Admission: from what a client sends to a request that the engine can carry, or a refusal that says why.

Everything about a request is checked here, before any work is done. Knows nothing of queues, blocks or steps.
"""

import operator
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np

from minivllm.engine.beam_search import BeamSearch
from minivllm.engine.output_builder import OutputBuilder
from minivllm.engine.outputs import RequestOutput
from minivllm.engine.pooling import Pooler
from minivllm.engine.request import Request
from minivllm.errors import ContextLengthError, RequestError, counted, shown
from minivllm.kv_cache.kv_pool import KVGeometry
from minivllm.sampling_params import BeamSearchParams, EmbeddingParams, RequestParams, SamplingParams
from minivllm.sequence import Sequence, SequenceGroup
from minivllm.structured_outputs import StructuredOutputsParams
from minivllm.text.chat_template import render_chat
from minivllm.text.grammar import Grammar, GrammarCompiler
from minivllm.text.tokenizer import Tokenizer

Prompt = str | Seq[int]

MAX_SALT_LENGTH = 1024
_MASK64 = 2**64 - 1


@dataclass(frozen=True)
class Admission:
    """What the model can take. Fields as in ``InferenceEngine``."""

    tokenizer: Tokenizer | None
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    geometry: KVGeometry
    max_num_seqs: int
    max_num_batched_tokens: int
    seed: int
    compiler: GrammarCompiler | None  #: None if there is no tokenizer

    def requests(
        self,
        first: int,
        prompts: Seq[Prompt],
        params: Seq[RequestParams],
        request_ids: Seq[str] | None,
        unfinished: Collection[str],
        *,
        stream: bool,
        outbox: deque[RequestOutput],
        cache_salt: str | None,
        priority: int,
        grammars: Seq[Grammar | None],
    ) -> dict[str, Request]:
        """Check requests and give them their sequences; by request_id. Changes nothing.

        Args:
            first: ordinal of the first of them.
            unfinished: request ids that may not be used.
            others: as in ``InferenceEngine.add_requests``.

        Raises:
            RequestError: anything about one of them is wrong; which one is said.
        """
        check_lists(prompts, params, request_ids)
        namespace, priority = _namespace(cache_salt), _priority(priority)
        requests: dict[str, Request] = {}
        for i, (prompt, wish, grammar) in enumerate(zip(prompts, params, grammars, strict=True)):
            with numbered("prompt", i, len(prompts)):
                if request_ids is None:
                    request_id = str(first + i)
                    while request_id in unfinished:  # a client chose it
                        request_id += "_"
                else:
                    request_id = request_ids[i]
                    _check_request_id(request_id, unfinished, requests)
                requests[request_id] = self._request(
                    first + i, request_id, prompt, wish, namespace, priority, stream, outbox, grammar
                )
        return requests

    def _request(
        self,
        ordinal: int,
        request_id: str,
        prompt: Prompt,
        wish: RequestParams,
        namespace: bytes,
        priority: int,
        stream: bool,
        outbox: deque[RequestOutput],
        grammar: Grammar | None,
    ) -> Request:
        if not isinstance(wish, RequestParams):
            raise RequestError(
                f"sampling_params is a {type(wish).__name__}; it must be a SamplingParams",
                "sampling_params",
            )
        params = wish if isinstance(wish, SamplingParams) else wish.sampling_params()
        if self.tokenizer is None:
            for name in ("stop", "include_stop_str_in_output"):
                if getattr(params, name):
                    raise RequestError(
                        f"{name} is about text, but this model has no tokenizer; use stop_token_ids", name
                    )
        params.check_vocabulary(self.vocab_size, self.eos_token_ids)
        token_ids = self._prompt_token_ids(prompt)
        width_name = "n" if wish is params else "beam_width"
        max_num_tokens = self._max_num_tokens(len(token_ids), params, width_name)
        end_token_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            end_token_ids = end_token_ids.union(self.eos_token_ids)
        first = Sequence(
            seq_id=ordinal,
            request_id=request_id,
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            params=params,
            seed=derived_seed(self.seed, ordinal) if params.seed is None else params.seed,
            max_num_tokens=max_num_tokens,
            end_token_ids=end_token_ids,
            pooling=wish.pooling if isinstance(wish, EmbeddingParams) else None,
            namespace=namespace,
        )
        search = None
        sequences = [first]
        if isinstance(wish, BeamSearchParams):
            search = BeamSearch(wish, end_token_ids, len(token_ids), max_num_tokens)
            first.num_candidates = search.num_candidates
            if search.num_candidates > self.vocab_size:
                raise RequestError(
                    f"beam_width is {wish.beam_width}, which takes {search.num_candidates} tokens to choose "
                    f"from, but the vocabulary has {self.vocab_size:,}",
                    "beam_width",
                )
        else:
            sequences += [first.fork(choice) for choice in range(1, params.n)]
        return Request(
            request_id=request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=token_ids,
            group=SequenceGroup(sequences, params.n, priority),
            params=params,
            builders=[OutputBuilder(sequence, self.tokenizer) for sequence in sequences],
            matchers=[None if grammar is None else grammar.matcher(end_token_ids) for _ in sequences],
            search=search,
            pooler=Pooler(wish) if isinstance(wish, EmbeddingParams) else None,
            prompt_logprobs=None if params.prompt_logprobs is None else [None] * len(token_ids),
            tokenizer=self.tokenizer,
            seed=first.seed,
            stream=stream,
            outbox=outbox,
        )

    def grammars(self, wishes: Seq[RequestParams]) -> list[Grammar | None]:
        """The grammars of the forms that requests' answers must have; None: it may have any.

        Equal forms are compiled once. They take a while. Safe to call from any thread.

        Raises:
            RequestError: the model has no tokenizer, or as ``GrammarCompiler.compile``.
        """
        result: list[Grammar | None] = []
        compiled: dict[StructuredOutputsParams, Grammar] = {}
        if not isinstance(wishes, Seq):
            return result  # ``requests`` refuses it
        for i, wish in enumerate(wishes):
            form = wish.structured_outputs if isinstance(wish, SamplingParams) else None
            with numbered("prompt", i, len(wishes)):
                if form is not None and self.compiler is None:
                    raise RequestError(
                        "structured outputs are about text, but this model has no tokenizer",
                        "structured_outputs",
                    )
                if form is not None and self.compiler is not None and form not in compiled:
                    compiled[form] = self.compiler.compile(form)
                result.append(None if form is None else compiled[form])
        return result

    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer, for what cannot do without one."""
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer; give the prompt as token ids", "prompt")
        return self.tokenizer

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt. What cannot fit in any case is refused before it is tokenised."""
        tokenizer = self.text_tokenizer()
        if tokenizer.max_token_bytes is not None:
            size = len(text.encode(errors="replace"))
            if size > self.max_model_len * tokenizer.max_token_bytes:
                raise ContextLengthError(
                    f"the prompt's text of {size:,} bytes is longer than max_model_len, "
                    f"{self.max_model_len:,} tokens, can be",
                    "prompt",
                )
        return tokenizer.encode(text, add_special_tokens)

    def chat_prompt(self, messages: Seq[Mapping[str, Any]], **options: Any) -> list[int]:
        """See ``InferenceEngine.chat_prompt``."""
        tokenizer = self.text_tokenizer()
        text = render_chat(
            tokenizer.chat_template,
            messages,
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            **options,
        )
        return self.encode(text, add_special_tokens=False)

    def _prompt_token_ids(self, prompt: Prompt) -> list[int]:
        """The prompt as a new list of ids that the model knows, and not empty."""
        if isinstance(prompt, str):
            token_ids = self.encode(prompt) if prompt else []
        else:
            token_ids = _integers(prompt, self._check_length)
        if not token_ids:
            raise RequestError("the prompt is empty; give it at least one token", "prompt")
        for outside in (min(token_ids), max(token_ids)):
            if not 0 <= outside < self.vocab_size:
                raise RequestError(
                    f"the prompt has token id {shown(outside)}; "
                    f"the vocabulary is 0 to {self.vocab_size - 1:,}",
                    "prompt",
                )
        return token_ids

    def _check_length(self, prompt_length: int) -> None:
        if prompt_length >= self.max_model_len:
            raise ContextLengthError(
                f"the prompt has {counted(prompt_length, 'token')}, which leaves no room for an answer: "
                f"max_model_len is {self.max_model_len:,}",
                "prompt",
            )

    def _max_num_tokens(self, prompt_length: int, params: SamplingParams, width_name: str) -> int:
        """Prompt and output tokens at which each of the request's sequences ends."""
        limit = self.max_model_len
        self._check_length(prompt_length)
        for name, most in (
            ("max_num_seqs", self.max_num_seqs),
            ("max_num_batched_tokens", self.max_num_batched_tokens),
        ):
            if params.n > most:
                raise RequestError(
                    f"{width_name} is {params.n}, but they all run at once, and {name} is {most:,}",
                    width_name,
                )
        for name in ("min_tokens", "max_tokens"):
            wanted = getattr(params, name)
            if wanted is not None and prompt_length + wanted > limit:
                raise ContextLengthError(
                    f"the prompt has {counted(prompt_length, 'token')} and {name} is {wanted:,}, together "
                    f"{prompt_length + wanted:,}, but max_model_len is {limit:,}",
                    name,
                )
        size, num_blocks = self.geometry.block_size, self.geometry.num_blocks
        shared = prompt_length // size
        fitting = (shared + (num_blocks - shared) // params.n) * size
        wanted = params.max_tokens or params.min_tokens or 1
        if prompt_length + wanted > fitting:
            own = -(-(prompt_length + wanted) // size) - shared
            raise RequestError(
                f"{params.n} times {counted(wanted, 'token')} after a prompt of {prompt_length:,} take "
                f"{counted(shared + params.n * own, 'block')} of the KV cache, {shared:,} that they share "
                f"and {own:,} for each, but there are {num_blocks:,}; use a smaller {width_name} "
                f"or max_tokens",
                width_name,
            )
        return min(limit, fitting) if params.max_tokens is None else prompt_length + params.max_tokens


def derived_seed(engine_seed: int, ordinal: int) -> int:
    """The seed of the ``ordinal``-th request (from 0) when it brings none: 64 bits.

    It is the number that SplitMix64, started with the engine's seed, gives after ``ordinal`` others: close
    seeds and neighbouring requests have nothing in common. (Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", OOPSLA 2014.)
    """
    z = (engine_seed + (ordinal + 1) * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def _check_request_id(request_id: object, *taken: Collection[str]) -> None:
    if not isinstance(request_id, str) or not request_id:
        raise RequestError(
            f"request_id is {shown(request_id)}; it must be a string, and not empty", "request_id"
        )
    if any(request_id in ids for ids in taken):
        raise RequestError(
            f"there is an unfinished request {shown(request_id)} already; choose another request_id",
            "request_id",
        )


def _namespace(cache_salt: object) -> bytes:
    """Of the prefix index; that of requests without a salt is empty."""
    if cache_salt is None:
        return b""
    if not isinstance(cache_salt, str) or not 0 < len(cache_salt) <= MAX_SALT_LENGTH:
        raise RequestError(
            f"cache_salt is {shown(cache_salt)}; it must be a string of 1 to {MAX_SALT_LENGTH:,} characters",
            "cache_salt",
        )
    return cache_salt.encode(errors="surrogatepass")


def _priority(priority: object) -> int:
    if isinstance(priority, bool) or not isinstance(priority, Integral) or abs(int(priority)) >= 2**63:
        raise RequestError(
            f"priority is {shown(priority)}; it must be an integer of 64 bits, the lower the sooner",
            "priority",
        )
    return int(priority)


def check_lists(prompts: object, params: object, request_ids: object) -> None:
    """Check that these are lists, with as many params, and ids if there are any, as prompts.

    Raises:
        RequestError: they are not.
    """
    lists = {"prompts": prompts, "sampling_params": params, "request_ids": request_ids}
    if request_ids is None:
        del lists["request_ids"]
    lengths = {}
    for name, values in lists.items():
        if not isinstance(values, Seq) or isinstance(values, str | bytes):
            raise RequestError(f"{name} is {shown(values)}; it must be a list", name)
        lengths[name] = len(values)
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{count} {name}" for name, count in lengths.items())
        raise RequestError(f"there are {said}; give as many of each", "prompts")


@contextmanager
def numbered(what: str, index: int, count: int) -> Iterator[None]:
    """Let a refusal say which one of several is meant."""
    try:
        yield
    except RequestError as error:
        if count == 1:
            raise
        raise type(error)(f"{what} {index + 1} of {count}: {error}", error.param) from None


def _integers(prompt: object, check_length: Callable[[int], None]) -> list[int]:
    """The prompt's token ids as a new list of ints. Numpy's integers are fine; bools and floats are not."""
    if isinstance(prompt, np.ndarray):
        check_length(prompt.size)
        prompt = prompt.tolist()
    if isinstance(prompt, Mapping):
        raise RequestError(
            f"the prompt is a {type(prompt).__name__}, which is not supported; give the string or the list "
            f"of token ids that is in it",
            "prompt",
        )
    if not isinstance(prompt, Seq) or isinstance(prompt, bytes | bytearray | memoryview):
        raise RequestError(
            f"the prompt is a {type(prompt).__name__}; it must be a string or a list of token ids", "prompt"
        )
    check_length(len(prompt))
    token_ids = []
    for token_id in prompt:
        try:
            if isinstance(token_id, bool):
                raise TypeError
            token_ids.append(operator.index(token_id))
        except TypeError:
            raise RequestError(
                f"the prompt has {shown(token_id)} among its token ids; they must be integers", "prompt"
            ) from None
    return token_ids
