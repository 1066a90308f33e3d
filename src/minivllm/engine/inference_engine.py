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
from typing import Any, Literal

from minivllm.batch import StepResult
from minivllm.engine.admission import Admission, Prompt
from minivllm.engine.masked_steps import MaskedSteps
from minivllm.engine.metrics import EngineMetrics
from minivllm.engine.outputs import RequestOutput
from minivllm.engine.prefix_store import load_prefix_cache, save_prefix_cache
from minivllm.engine.request import Request
from minivllm.engine.turns import Turns
from minivllm.errors import ModelError, RequestError, shown
from minivllm.executors.base import Executor
from minivllm.kv_cache.kv_cache import KVCache
from minivllm.sampler import row_without_token
from minivllm.sampling_params import RequestParams, SamplingParams
from minivllm.scheduler import Scheduler
from minivllm.sequence import ScheduledSequence, Sequence, logit_rows
from minivllm.text.grammar import Grammar, GrammarCompiler
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
        self._admission = Admission(
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            max_model_len=max_model_len,
            geometry=kv_cache.geometry,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            seed=seed,
            compiler=None if tokenizer is None else GrammarCompiler(tokenizer, vocab_size),
        )
        self._masked_steps = MaskedSteps()
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
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> str:
        """Queue a request and return its id.

        Args:
            prompt: text, or token ids (a list, a tuple, or an array of integers).
            params: None: the defaults of SamplingParams.
            request_id: None: one is made up.
            stream: give an output after every step that yields a token, each with only what is new in it;
                else one whole output at the end.
            cache_salt: prefixes are shared only among requests with the same one, so that nobody else can
                tell by the time it takes what was asked before. At most 1,024 characters.
            priority: requests with a lower one go first, and are preempted last; equal ones by arrival.

        Raises:
            RequestError: anything about the request is wrong; the engine is as it was before.
        """
        request_ids = None if request_id is None else [request_id]
        params = SamplingParams() if params is None else params
        return self.add_requests(
            [prompt], [params], request_ids, stream=stream, cache_salt=cache_salt, priority=priority
        )[0]

    def add_requests(
        self,
        prompts: Seq[Prompt],
        params: Seq[RequestParams],
        request_ids: Seq[str] | None = None,
        *,
        stream: bool = False,
        outbox: deque[RequestOutput] | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        grammars: Seq[Grammar | None] | None = None,
    ) -> list[str]:
        """Queue several requests, or none if anything about one of them is wrong. See ``add_request``.

        Args:
            outbox: their outputs are appended to it, whoever makes the engine advance; call ``abandon`` when
                it is not read any more. None: ``step`` returns them.
            grammars: what ``compile_grammar`` gave for each of ``params``; None: they are compiled here.
        """
        if grammars is None:
            grammars = self._admission.grammars(params)
        with self._turns:
            requests = self._admission.requests(
                self._num_added,
                prompts,
                params,
                request_ids,
                self._requests,
                stream=stream,
                outbox=self._ready if outbox is None else outbox,
                cache_salt=cache_salt,
                priority=priority,
                grammars=grammars,
            )
            self._num_added += len(requests)
            self._requests.update(requests)
            for request in requests.values():
                self.scheduler.add(request.group)
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
            self._end(request, "abort")
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
                self._end(request, "abort")
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
        rows = logit_rows(plan)
        result = self._execute(plan, rows)
        drawn: list[tuple[int, Sequence, int]] = []  # row, whose it is, token
        beams: dict[Request, list[int]] = {}  # rows of each search
        for row, (sequence, position, token_id) in enumerate(
            zip(*rows, result.token_ids.tolist(), strict=True)
        ):
            if position < sequence.num_prompt_tokens:
                self._requests[sequence.request_id].score_prompt(position, result, row)
            elif sequence.is_beam:
                beams.setdefault(self._requests[sequence.request_id], []).append(row)
            else:
                drawn.append((row, sequence, token_id))
        self.scheduler.commit(plan, [(sequence, token_id) for _, sequence, token_id in drawn])
        self._num_steps += 1
        self._num_computed += sum([entry.num_tokens for entry in plan])
        self._take(drawn, result)
        for request, its_rows in beams.items():
            self._branch(request, its_rows, result)
        self._pool(plan, result)

    def _execute(self, plan: Seq[ScheduledSequence], rows: tuple[Seq[Sequence], Seq[int]]) -> StepResult:
        """Run the model. If that fails, the requests that it concerns are over."""
        requests = [self._requests[sequence.request_id] for sequence in rows[0]]
        matchers = list(map(Request.matcher, requests, *rows))
        try:
            return self._masked_steps.execute(self.executor, self.kv_cache.batch(plan), *rows, matchers)
        except Exception as error:
            row = row_without_token(error)
            if row is None:
                for request_id in dict.fromkeys(entry.sequence.request_id for entry in plan):
                    self._fail(self._requests[request_id])
                raise
            failed = rows[0][row]  # the others' tokens are drawn again in the next step
            self._fail(self._requests[failed.request_id], failed)
            raise ModelError(
                f"the model's logits are no numbers for request {shown(failed.request_id)}: "
                f"its weights are damaged, or too large for their dtype ({error})"
            ) from error

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

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Threads may call it while the engine runs, which is not held up.

        Raises:
            RequestError: the model has no tokenizer, or the text cannot be a prompt.
            ContextLengthError: it is too long for any prompt; then it has not been tokenised.
        """
        return self._admission.encode(text, add_special_tokens)

    def chat_prompt(self, messages: Seq[Mapping[str, Any]], **options: Any) -> list[int]:
        """The prompt that the model's chat template makes of a conversation, as token ids.

        Args:
            messages: mappings with "role" and "content"; see ``text.chat_template.render_chat``.
            options: its keyword arguments (``add_generation_prompt``, ``tools`` …).

        Raises:
            RequestError: the model has no chat template, or the template does not take these messages.
        """
        return self._admission.chat_prompt(messages, **options)

    def compile_grammar(self, params: RequestParams) -> Grammar | None:
        """The grammar of a request's ``structured_outputs``, for ``add_requests``. None: any form will do.

        It may take a second, in any thread; the engine goes on meanwhile. Raises as ``add_request``.
        """
        return self._admission.grammars([params])[0]

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix that no running request uses, so that the next ones compute it anew."""
        with self._turns:
            self.kv_cache.reset_prefix_cache()

    def save_prefix_cache(self, path: str | Path) -> int:
        """Write what is cached to a file and return the number of blocks: see ``engine.prefix_store``."""
        with self._turns:
            return save_prefix_cache(path, self.kv_cache, self.executor)

    def load_prefix_cache(self, path: str | Path) -> int:
        """Take a saved cache and return the number of its blocks: see ``engine.prefix_store``."""
        with self._turns:
            return load_prefix_cache(path, self.kv_cache, self.executor)

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
            f"KV cache: {self.kv_cache.geometry}\n{self.executor.name} executor on {self.executor.device}, "
            f"up to {self.max_model_len:,} tokens a request"
        )

    def _take(self, drawn: Seq[tuple[int, Sequence, int]], result: StepResult) -> None:
        """Turn the tokens of a step into text, end what a stop string ends, and deliver what can be given."""
        for row, sequence, token_id in drawn:
            request = self._requests[sequence.request_id]
            stop = request.builders[sequence.choice].add(token_id, result, row)
            if stop is not None:
                self.scheduler.finish(sequence, "stop", stop)
            if ending := request.match(sequence, token_id):
                self.scheduler.finish(sequence, *ending)
        self._num_generated += len(drawn)
        for request_id in dict.fromkeys([sequence.request_id for _, sequence, _ in drawn]):
            self._deliver(self._requests[request_id])

    def _branch(self, request: Request, rows: Seq[int], result: StepResult) -> None:
        """Replace the beams of a search by those that go on, or end it."""
        assert request.search is not None, "only those of a search are beams"
        children = request.search.extend(request.group.sequences, rows, result)
        self._num_generated += len(children)
        if children:
            self.scheduler.branch(request.group, children)
        else:
            for beam in request.group.sequences.copy():
                self.scheduler.finish(beam, "stop")
            self._deliver(request)

    def _pool(self, plan: Seq[ScheduledSequence], result: StepResult) -> None:
        """Hand out the hidden states of a step just committed; deliver the embeddings that are complete."""
        end = 0
        for sequence, *_, num_pooled in plan:
            if num_pooled:
                start, end = end, end + num_pooled
                request = self._requests[sequence.request_id]
                request.pool(sequence, result.hidden[start:end])
                if sequence.finish_reason is not None:
                    if request.embedding is None:
                        self.scheduler.finish(sequence, "error")
                    self._deliver(request)

    def _fail(self, request: Request, sequence: Sequence | None = None) -> None:
        """End a request; if it is one of several samples that has failed, only that one."""
        if sequence is not None and request.search is None and request.group.begun:
            self.scheduler.finish(sequence, "error")
        else:
            self._end(request, "error")
        self._deliver(request)

    def _end(self, request: Request, reason: Literal["abort", "error"]) -> None:
        """End all that a request still has, as it is."""
        if request.search is not None:
            request.search.interrupt(request.group.sequences, reason)
        for sequence in request.group.sequences.copy():
            self.scheduler.finish(sequence, reason)

    def _deliver(self, request: Request) -> None:
        """Give what can be given now."""
        if not request.group.sequences or (request.stream and request.search is None):
            request.outbox.append(self._output(request))

    def _output(self, request: Request) -> RequestOutput:
        """What the request has not given yet. Forgets the request when it is finished."""
        output = request.output()
        if output.finished:
            del self._requests[request.request_id]
            self._num_finished += 1
        return output
