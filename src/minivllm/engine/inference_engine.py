"""InferenceEngine: requests in, outputs out, one step of the model at a time.

    add_request ─► [ schedule ─► execute ─► commit ─► outputs ] ─► RequestOutput
                     Scheduler   Executor   Scheduler  OutputBuilder

Everything about a request is checked when it arrives, so that nothing later on can fail because of it. Knows
nothing of HTTP, of files, or of what the executor does. Not thread-safe: one owner drives it.
"""

import operator
from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from minivllm.batch import StepResult
from minivllm.engine.metrics import EngineMetrics
from minivllm.engine.output_builder import OutputBuilder
from minivllm.engine.outputs import RequestOutput
from minivllm.errors import RequestError, shown
from minivllm.executors.base import Executor
from minivllm.kv_cache.kv_cache import KVCache
from minivllm.sampler import sampling_batch
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler import Scheduler
from minivllm.sequence import ScheduledSequence, Sequence
from minivllm.text.chat_template import render_chat
from minivllm.text.tokenizer import Tokenizer

Prompt = str | Seq[int]

_MASK64 = 2**64 - 1


@dataclass(eq=False)
class _Request:
    """A request that is not finished."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    sequence: Sequence
    builder: OutputBuilder
    stream: bool


class InferenceEngine:
    """Owner of the requests. ``minivllm.factory`` puts one together; tests hand in other parts.

    Args:
        executor: the model, on the pool that ``kv_cache`` plans for.
        kv_cache: block tables.
        scheduler: queues, over the same ``kv_cache``.
        tokenizer: None for a model without one; prompts are then token ids, and texts are empty.
        vocab_size: token ids are 0 to vocab_size - 1.
        eos_token_ids: the model's end tokens.
        max_model_len: prompt and output tokens of a request, at most; the pool holds as many.
        seed: the seeds of requests without one follow from this.
    """

    def __init__(
        self,
        *,
        executor: Executor,
        kv_cache: KVCache,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        max_model_len: int,
        seed: int = 0,
    ) -> None:
        self.executor = executor
        self.kv_cache = kv_cache
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.max_model_len = max_model_len
        self.seed = seed
        self._requests: dict[str, _Request] = {}
        self._mailboxes: dict[str, deque[RequestOutput]] = {}  # of the open ``stream`` iterators
        self._ready: list[RequestOutput] = []  # what the next step returns
        self._num_added = 0
        self._num_steps = self._num_computed = self._num_generated = self._num_finished = 0

    # --- requests ---

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        stream: bool = False,
    ) -> str:
        """Queue a request and return its id.

        Args:
            prompt: text, or token ids (a list, a tuple, or an array of integers).
            params: None: the defaults of SamplingParams.
            request_id: None: one is made up.
            stream: give an output after every step that yields a token, each with only what is new in it;
                else one whole output at the end.

        Raises:
            RequestError: anything about the request is wrong; the engine is as it was before.
        """
        request_ids = None if request_id is None else [request_id]
        return self.add_requests([prompt], [params or SamplingParams()], request_ids, stream=stream)[0]

    def add_requests(
        self,
        prompts: Seq[Prompt],
        params: Seq[SamplingParams],
        request_ids: Seq[str] | None = None,
        *,
        stream: bool = False,
    ) -> list[str]:
        """Queue several requests, or none if anything about one of them is wrong. See ``add_request``."""
        first = self._num_added
        if request_ids is None:
            request_ids = [self._unused_id(first + i) for i in range(len(prompts))]
        requests: dict[str, _Request] = {}
        for i, (prompt, wish, request_id) in enumerate(zip(prompts, params, request_ids, strict=True)):
            if not isinstance(request_id, str) or not request_id:
                raise RequestError(
                    f"request_id is {shown(request_id)}; it must be a string, and not empty", "request_id"
                )
            if request_id in self._requests or request_id in requests:
                raise RequestError(
                    f"there is an unfinished request {shown(request_id)} already; choose another request_id",
                    "request_id",
                )
            requests[request_id] = self._request(first + i, request_id, prompt, wish, stream)
        self._num_added += len(requests)
        self._requests.update(requests)
        for request in requests.values():
            self.scheduler.add(request.sequence)
        return list(requests)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request at once and release its blocks.

        Returns its last output, with finish_reason "abort"; None if there is no such unfinished request.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        self.scheduler.finish(request.sequence, "abort")
        return self._output(request)

    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has something to do or to give."""
        return bool(self._requests or self._ready)

    # --- the loop ---

    def step(self) -> list[RequestOutput]:
        """Run the model once, and return what there is to give: at most one output for each request.

        Raises:
            Exception: whatever the executor raised. The requests of that step are over and their blocks free;
                the next step returns their outputs, with finish_reason "error", and serves the others.
        """
        plan = self.scheduler.schedule()
        if plan:
            rows = [entry.sequence for entry in plan if entry.yields_token]
            try:
                result = self.executor.execute(self.kv_cache.batch(plan), sampling_batch(rows))
            except Exception:
                for entry in plan:
                    self.scheduler.finish(entry.sequence, "error")
                    self._ready.append(self._output(self._requests[entry.sequence.request_id]))
                raise
            token_ids = result.token_ids.tolist()
            self.scheduler.commit(plan, token_ids)
            self._count(plan)
            self._ready += self._outputs(rows, token_ids, result)
        outputs, self._ready = self._ready, []
        return outputs

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> Iterator[RequestOutput]:
        """Add a request and yield its outputs as they arise, each with what is new; the last is finished.

        It steps the engine when it needs to, so several streams and other requests run together. Closing the
        iterator aborts the request.

        Raises:
            RequestError: with the first ``next``: see ``add_request``.
        """
        request_id = self.add_request(prompt, params, request_id, stream=True)
        mailbox = self._mailboxes[request_id] = deque()
        try:
            while True:
                while mailbox:
                    output = mailbox.popleft()
                    yield output
                    if output.finished:
                        return
                self.step()
        finally:
            del self._mailboxes[request_id]
            self.abort(request_id)

    def chat_prompt(self, messages: Seq[Mapping[str, Any]], **options: Any) -> list[int]:
        """The prompt that the model's chat template makes of a conversation, as token ids.

        Args:
            messages: mappings with "role" and "content"; see ``text.chat_template.render_chat``.
            options: its keyword arguments (``add_generation_prompt``, ``tools`` …).

        Raises:
            RequestError: the model has no chat template, or the template does not take these messages.
        """
        tokenizer = self._text_tokenizer()
        text = render_chat(
            tokenizer.chat_template,
            messages,
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            **options,
        )
        return tokenizer.encode(text, add_special_tokens=False)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix, so that the next requests compute everything. Running ones go on."""
        self.kv_cache.reset_prefix_cache()

    # --- what others may see ---

    def metrics(self) -> EngineMetrics:
        """Counts at this moment."""
        return EngineMetrics(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            num_blocks=self.kv_cache.geometry.num_blocks,
            num_free_blocks=self.kv_cache.num_free_blocks,
            num_cached_blocks=self.kv_cache.num_cached_blocks,
            steps=self._num_steps,
            computed_tokens=self._num_computed,
            generated_tokens=self._num_generated,
            preemptions=self.scheduler.num_preemptions,
            queried_tokens=self.scheduler.num_queried_tokens,
            cached_tokens=self.scheduler.num_cached_tokens,
            finished_requests=self._num_finished,
        )

    def describe(self) -> str:
        """What is reserved and what fits, in a line or two for people."""
        return (
            f"KV cache: {self.kv_cache.geometry}\n"
            f"{self.executor.name} executor on {self.executor.device}, "
            f"up to {self.max_model_len:,} tokens a request"
        )

    # --- inside ---

    def _outputs(self, rows: Seq[Sequence], token_ids: Seq[int], result: StepResult) -> list[RequestOutput]:
        """Turn the tokens of a step into text, end what a stop string ends, and collect what can be given."""
        outputs = []
        for row, (sequence, token_id) in enumerate(zip(rows, token_ids, strict=True)):
            request = self._requests[sequence.request_id]
            stop = request.builder.add(token_id, result, row)
            if stop is not None:
                self.scheduler.finish(sequence, "stop", stop)
            if request.stream or sequence.finish_reason is not None:
                outputs.append(self._output(request))
        return outputs

    def _output(self, request: _Request) -> RequestOutput:
        """What the request has not given yet. Forgets the request when it is finished."""
        sequence = request.sequence
        completion = request.builder.take()
        output = RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[completion],
            finished=completion.finished,
            num_cached_tokens=sequence.num_cached_tokens or 0,
            seed=sequence.seed,
        )
        if output.finished:
            del self._requests[request.request_id]
            self._num_finished += 1
        mailbox = self._mailboxes.get(request.request_id)
        if mailbox is not None:
            mailbox.append(output)
        return output

    def _count(self, plan: Seq[ScheduledSequence]) -> None:
        self._num_steps += 1
        self._num_computed += sum(entry.num_tokens for entry in plan)
        self._num_generated += sum(entry.yields_token for entry in plan)

    def _request(
        self, ordinal: int, request_id: str, prompt: Prompt, params: SamplingParams, stream: bool
    ) -> _Request:
        """Check a request and give it its sequence. Changes nothing."""
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params is a {type(params).__name__}; it must be a SamplingParams",
                "sampling_params",
            )
        params.check_vocabulary(self.vocab_size, self.eos_token_ids)
        token_ids = self._prompt_token_ids(prompt)
        sequence = Sequence(
            seq_id=ordinal,
            request_id=request_id,
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            params=params,
            seed=derived_seed(self.seed, ordinal) if params.seed is None else params.seed,
            max_num_tokens=self._max_num_tokens(len(token_ids), params),
            end_token_ids=frozenset(params.stop_token_ids).union(
                () if params.ignore_eos else self.eos_token_ids
            ),
        )
        text = prompt if isinstance(prompt, str) else None
        builder = OutputBuilder(sequence, self.tokenizer)
        return _Request(request_id, text, token_ids, sequence, builder, stream)

    def _text_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer; give the prompt as token ids", "prompt")
        return self.tokenizer

    def _prompt_token_ids(self, prompt: Prompt) -> list[int]:
        """The prompt as a new list of ids that the model knows, and not empty."""
        if isinstance(prompt, str):
            token_ids = self._text_tokenizer().encode(prompt) if prompt else []
        else:
            token_ids = _integers(prompt)
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

    def _max_num_tokens(self, prompt_length: int, params: SamplingParams) -> int:
        """Prompt and output tokens at which the request ends."""
        limit = self.max_model_len
        if prompt_length >= limit:
            raise RequestError(
                f"the prompt has {prompt_length:,} tokens, which leaves no room for an answer: "
                f"max_model_len is {limit:,}",
                "prompt",
            )
        for name in ("max_tokens", "min_tokens"):
            wanted = getattr(params, name)
            if wanted is not None and prompt_length + wanted > limit:
                raise RequestError(
                    f"the prompt has {prompt_length:,} tokens and {name} is {wanted:,}, together "
                    f"{prompt_length + wanted:,}, but max_model_len is {limit:,}",
                    name,
                )
        return limit if params.max_tokens is None else prompt_length + params.max_tokens

    def _unused_id(self, ordinal: int) -> str:
        request_id = str(ordinal)
        while request_id in self._requests:  # a client chose it
            request_id += "_"
        return request_id


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


def _integers(prompt: object) -> list[int]:
    """The prompt's token ids as a new list of ints. Numpy's integers are fine; bools and floats are not."""
    if isinstance(prompt, np.ndarray):
        prompt = prompt.tolist()
    if not isinstance(prompt, Seq) or isinstance(prompt, bytes | bytearray | memoryview):
        raise RequestError(
            f"the prompt is a {type(prompt).__name__}; it must be a string or a list of token ids", "prompt"
        )
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
