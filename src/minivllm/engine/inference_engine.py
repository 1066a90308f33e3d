"""InferenceEngine: requests in, outputs out, one step of the model at a time.

    add_request ─► [ schedule ─► execute ─► commit ─► outputs ] ─► RequestOutput
                     Scheduler   Executor   Scheduler  OutputBuilder

Everything about a request is checked when it arrives, so that nothing later on can fail because of it. Knows
nothing of HTTP, of files, or of what the executor does.

Threads may share an engine: each call that changes something waits for its turn, and a step is one turn.
A KeyboardInterrupt within a call can leave requests half done: ``LLM.generate`` holds Ctrl-C back until its
step is finished, and whoever steps by hand does the same, or makes a new engine after one.
"""

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from minivllm.batch import StepResult
from minivllm.engine.admission import Admission, Prompt, Request, check_lists, numbered
from minivllm.engine.metrics import EngineMetrics
from minivllm.engine.outputs import RequestOutput
from minivllm.engine.prefix_store import load_prefix_cache, save_prefix_cache
from minivllm.engine.turns import Turns
from minivllm.errors import ModelError, RequestError, shown
from minivllm.executors.base import Executor
from minivllm.kv_cache.kv_cache import KVCache
from minivllm.sampler import row_without_token, sampling_batch
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler import Scheduler
from minivllm.sequence import ScheduledSequence, Sequence
from minivllm.text.chat_template import render_chat
from minivllm.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

__all__ = ["InferenceEngine", "Prompt"]


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
        self._admission = Admission(tokenizer, vocab_size, eos_token_ids, max_model_len, seed)
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.max_model_len = max_model_len
        self.seed = seed
        self._requests: dict[str, Request] = {}
        self._ready: deque[RequestOutput] = deque()  # outbox of those without one: for ``step``
        self._abandoned: deque[deque[RequestOutput]] = deque()  # outboxes whose requests are to be aborted
        self._turns = Turns()
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
        params = SamplingParams() if params is None else params
        return self.add_requests([prompt], [params], request_ids, stream=stream)[0]

    def add_requests(
        self,
        prompts: Seq[Prompt],
        params: Seq[SamplingParams],
        request_ids: Seq[str] | None = None,
        *,
        stream: bool = False,
        outbox: deque[RequestOutput] | None = None,
    ) -> list[str]:
        """Queue several requests, or none if anything about one of them is wrong. See ``add_request``.

        Args:
            outbox: their outputs are appended to it, whoever makes the engine advance; call ``abandon`` when
                it is not read any more. None: ``step`` returns them.
        """
        with self._turns:
            return self._add(prompts, params, request_ids, stream, self._ready if outbox is None else outbox)

    def _add(
        self,
        prompts: Seq[Prompt],
        params: Seq[SamplingParams],
        request_ids: Seq[str] | None,
        stream: bool,
        outbox: deque[RequestOutput],
    ) -> list[str]:
        check_lists(prompts, params, request_ids)
        first = self._num_added
        if request_ids is None:
            request_ids = [self._unused_id(first + i) for i in range(len(prompts))]
        requests: dict[str, Request] = {}
        for i, (prompt, wish, request_id) in enumerate(zip(prompts, params, request_ids, strict=True)):
            with numbered("prompt", i, len(prompts)):
                if not isinstance(request_id, str) or not request_id:
                    raise RequestError(
                        f"request_id is {shown(request_id)}; it must be a string, and not empty", "request_id"
                    )
                if request_id in self._requests or request_id in requests:
                    raise RequestError(
                        f"there is an unfinished request {shown(request_id)} already; "
                        f"choose another request_id",
                        "request_id",
                    )
                requests[request_id] = self._admission.request(
                    first + i, request_id, prompt, wish, stream, outbox
                )
        self._num_added += len(requests)
        self._requests.update(requests)
        for request in requests.values():
            self.scheduler.add(request.sequence)
        return list(requests)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request at once and release its blocks.

        Returns its last output, with finish_reason "abort", which also ends its ``stream``; None if there is
        no such unfinished request.
        """
        if not isinstance(request_id, str):
            raise RequestError(f"request_id is {shown(request_id)}; it must be a string", "request_id")
        with self._turns:
            request = self._requests.get(request_id)
            if request is None:
                return None
            self.scheduler.finish(request.sequence, "abort")
            output = self._output(request)
            if request.outbox is not self._ready:
                request.outbox.append(output)
            return output

    def abandon(self, outbox: deque[RequestOutput]) -> None:
        """Abort the unfinished requests whose outputs go to ``outbox``, which is not read any more."""
        self._abandoned.append(outbox)
        if not self._turns.mine:  # else the garbage collector is closing a stream in the middle of a step
            with self._turns:
                self._abort_abandoned()

    def _abort_abandoned(self) -> None:
        while self._abandoned:
            outbox = self._abandoned.popleft()
            for request in [request for request in self._requests.values() if request.outbox is outbox]:
                self.scheduler.finish(request.sequence, "abort")
                self._output(request)

    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has something to do or to give."""
        return bool(self._requests or self._ready)

    # --- the loop ---

    def step(self) -> list[RequestOutput]:
        """Run the model once, and return what there is to give to those who have no outbox.

        These are the outputs of this step and of those that others have made since the last call: in a stream
        there may be several for one request.

        Raises:
            ModelError: the logits of a request are no numbers. That one is over; the others go on.
            Exception: whatever else the executor raised. The requests of that step are over.
                Their last outputs have finish_reason "error", and the next step returns them.
        """
        with self._turns:
            self._advance()
            outputs = list(self._ready)
            self._ready.clear()
            return outputs

    def advance(self, outbox: deque[RequestOutput]) -> None:
        """Run the model once, as ``step`` does, and leave every output in the outbox where it belongs.

        Args:
            outbox: the caller's, empty.

        Raises:
            Exception: as ``step``, if a request of this outbox is over by it. Otherwise it is logged.
        """
        try:
            with self._turns:
                self._advance()
        except Exception as error:
            if outbox:
                raise
            logger.error("a step failed for the requests of others: %s", error)

    def _advance(self) -> None:
        self._abort_abandoned()
        plan = self.scheduler.schedule()
        if not plan:
            return
        rows = [entry.sequence for entry in plan if entry.yields_token]
        try:
            result = self.executor.execute(self.kv_cache.batch(plan), sampling_batch(rows))
        except Exception as error:
            row = row_without_token(error)
            if row is None:
                self._fail([entry.sequence for entry in plan])
                raise
            self._fail([rows[row]])  # the others' tokens of this step are drawn again in the next
            raise ModelError(
                f"the model's logits are no numbers for request {shown(rows[row].request_id)}: "
                f"its weights are damaged, or too large for their dtype ({error})"
            ) from error
        token_ids = result.token_ids.tolist()
        self.scheduler.commit(plan, token_ids)
        self._count(plan)
        self._take(rows, token_ids, result)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> Iterator[RequestOutput]:
        """Add a request and yield its outputs as they arise, each with what is new; the last is finished.

        It makes the engine advance when it needs to, so several streams and other requests run together.
        Closing the iterator aborts the request.

        Raises:
            RequestError: with the first ``next``: see ``add_request``.
        """
        outbox: deque[RequestOutput] = deque()
        request_ids = None if request_id is None else [request_id]
        params = SamplingParams() if params is None else params
        self.add_requests([prompt], [params], request_ids, stream=True, outbox=outbox)
        try:
            finished = False
            while not finished:
                while not outbox:
                    self.advance(outbox)
                output = outbox.popleft()
                finished = output.finished
                yield output
        finally:
            self.abandon(outbox)

    def chat_prompt(self, messages: Seq[Mapping[str, Any]], **options: Any) -> list[int]:
        """The prompt that the model's chat template makes of a conversation, as token ids.

        Args:
            messages: mappings with "role" and "content"; see ``text.chat_template.render_chat``.
            options: its keyword arguments (``add_generation_prompt``, ``tools`` …).

        Raises:
            RequestError: the model has no chat template, or the template does not take these messages.
        """
        tokenizer = self._admission.text_tokenizer()
        text = render_chat(
            tokenizer.chat_template,
            messages,
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            **options,
        )
        return self._admission.encode(text, add_special_tokens=False)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix, so that the next requests compute everything. Running ones go on."""
        with self._turns:
            self.kv_cache.reset_prefix_cache()

    def save_prefix_cache(self, path: str | Path) -> int:
        """Write every published block and its tokens to a file, for ``load_prefix_cache`` after a restart.

        What requests with a ``cache_salt`` have published is left out. Whoever reads the file can tell the
        prompts: it is made readable for its owner alone. A file that is there is replaced once the new one
        is complete. No step is made meanwhile.

        Returns: the number of blocks.

        Raises:
            ConfigError: prefix caching is off.
            PrefixCacheError: the file cannot be written.
        """
        with self._turns:
            return save_prefix_cache(Path(path), self.kv_cache, self.executor)

    def load_prefix_cache(self, path: str | Path) -> int:
        """Take the blocks of a file that ``save_prefix_cache`` has written into the prefix cache.

        They go to blocks that hold nothing; if these are too few, beginnings are taken before what continues
        them. Whatever has been cached or is in use stays. Trust a file as you trust a model: a forged one can
        hold any keys and values.

        Returns: the number of blocks taken.

        Raises:
            ConfigError: prefix caching is off.
            PrefixCacheError: there is no such file, it is damaged, or it was saved by another version of
                mini-vllm or with another model, instruction set, dtype, quantization or block size. Nothing
                has changed.
        """
        with self._turns:
            return load_prefix_cache(Path(path), self.kv_cache, self.executor)

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

    def _take(self, rows: Seq[Sequence], token_ids: Seq[int], result: StepResult) -> None:
        """Turn the tokens of a step into text, end what a stop string ends, and deliver what can be given."""
        for row, (sequence, token_id) in enumerate(zip(rows, token_ids, strict=True)):
            request = self._requests[sequence.request_id]
            stop = request.builder.add(token_id, result, row)
            if stop is not None:
                self.scheduler.finish(sequence, "stop", stop)
            if request.stream or sequence.finish_reason is not None:
                self._deliver(request)

    def _fail(self, sequences: Seq[Sequence]) -> None:
        for sequence in sequences:
            self.scheduler.finish(sequence, "error")
            self._deliver(self._requests[sequence.request_id])

    def _deliver(self, request: Request) -> None:
        request.outbox.append(self._output(request))

    def _output(self, request: Request) -> RequestOutput:
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
        return output

    def _count(self, plan: Seq[ScheduledSequence]) -> None:
        self._num_steps += 1
        self._num_computed += sum(entry.num_tokens for entry in plan)
        self._num_generated += sum(entry.yields_token for entry in plan)

    def _unused_id(self, ordinal: int) -> str:
        request_id = str(ordinal)
        while request_id in self._requests:  # a client chose it
            request_id += "_"
        return request_id
