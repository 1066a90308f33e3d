"""LLM: the offline face, with vLLM's names. It has an engine, and is not one."""

import signal
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from minivllm.config import Dtype, EngineConfig, ExecutorName, KVCacheDtype, Quantization
from minivllm.engine.admission import Prompt, numbered
from minivllm.engine.outputs import RequestOutput
from minivllm.errors import ModelError, RequestError
from minivllm.factory import create_engine
from minivllm.sampling_params import BeamSearchParams, EmbeddingParams, Pooling, RequestParams, SamplingParams

Messages = Seq[Mapping[str, Any]]


class LLM:
    """A model, ready to answer many prompts at once.

        llm = LLM("smollm2-135m")
        for output in llm.generate(["Once upon a time", "The sea"], SamplingParams(temperature=0)):
            print(output.outputs[0].text)

    The settings are those of ``EngineConfig``.

    Raises:
        ConfigError: the settings are wrong, contradict each other, or do not fit the model or the machine.
        ModelError: there is no such model, it is damaged, or it needs something that is not implemented.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: Dtype = "auto",
        quantization: Quantization | None = "auto",
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_cache_memory: int | None = None,
        kv_cache_dtype: KVCacheDtype = "auto",
        max_num_batched_tokens: int = 512,
        max_num_seqs: int = 64,
        max_model_len: int | None = None,
        executor: ExecutorName = "native",
        device: str = "auto",
        threads: int | None = None,
        enable_prefix_caching: bool = True,
        seed: int = 0,
    ) -> None:
        self.engine = create_engine(
            EngineConfig(
                model=model,
                dtype=dtype,
                quantization=quantization,
                block_size=block_size,
                num_blocks=num_blocks,
                kv_cache_memory=kv_cache_memory,
                kv_cache_dtype=kv_cache_dtype,
                max_num_batched_tokens=max_num_batched_tokens,
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
                executor=executor,
                device=device,
                threads=threads,
                enable_prefix_caching=enable_prefix_caching,
                seed=seed,
            )
        )

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> list[RequestOutput]:
        """Answer the prompts, as many at once as fit; the results are in their order.

        Ctrl-C gives up these prompts; the engine stays usable. Several threads may call this at once: their
        prompts run together. If the model fails in a step that another thread has made, the finish_reason is
        "error".

        Args:
            prompts: a text or a list of token ids, or a list of these; of an empty list the result is empty.
            sampling_params: for all prompts, or one for each; None: the defaults.
            use_tqdm: show a progress bar on stderr when there are several prompts (vLLM's name for it).
            cache_salt: share cached prefixes only with others of the same salt.
            priority: of these prompts among those of other threads; lower ones go first.

        Raises:
            RequestError: a prompt or its parameters are wrong. None of them has been run then.
            ModelError: what the model computes are no numbers.
        """
        wanted = _prompt_list(prompts)
        params = _params_list(sampling_params, len(wanted))
        for wish in params:
            _check_kind("generate", wish, SamplingParams)
        return self._run(wanted, params, use_tqdm, cache_salt=cache_salt, priority=priority)

    def beam_search(
        self,
        prompts: Prompt | Seq[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = True,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> list[RequestOutput]:
        """Find the likeliest answers to the prompts, as transformers' ``generate(num_beams=...)`` does.

        Each result has ``beam_width`` outputs, the best first; ``cumulative_logprob`` is that of all their
        tokens. The beams of a prompt share the blocks of their common tokens, and run beside other requests.

        Args:
            prompts: as for ``generate``, and so are the others.
            params: for all prompts.

        Raises:
            RequestError: a prompt or the parameters are wrong. None of them has been run then.
            ModelError: what the model computes are no numbers.
        """
        wanted = _prompt_list(prompts)
        _check_kind("beam_search", params, BeamSearchParams)
        return self._run(wanted, [params] * len(wanted), use_tqdm, cache_salt=cache_salt, priority=priority)

    def embed(
        self,
        prompts: Prompt | Seq[Prompt],
        pooling: Pooling = "mean",
        *,
        normalize: bool = True,
        use_tqdm: bool = True,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> npt.NDArray[np.float32]:
        """A vector for each prompt, [prompts, hidden_size]: those of like texts point in like directions.

        It is made of the hidden states that the model's head would read. It depends on nothing that runs
        beside it.

        Args:
            prompts: as for ``generate``, and so are the others.
            pooling: "mean" over the tokens of the prompt, or "last": that of the last one alone.
            normalize: scale each to length 1, so that products are cosines.

        Raises:
            RequestError: a prompt or a setting is wrong. None of them has been run then.
            ModelError: what the model computes are no numbers.
        """
        wanted = _prompt_list(prompts)
        params = EmbeddingParams(pooling, normalize)
        outputs = self._run(
            wanted, [params] * len(wanted), use_tqdm, cache_salt=cache_salt, priority=priority
        )
        embeddings = [output.embedding for output in outputs if output.embedding is not None]
        if len(embeddings) < len(outputs):  # in a step that another thread has made
            raise ModelError("the model failed while it embedded a prompt")
        return np.stack(embeddings) if embeddings else np.empty((0, 0), np.float32)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix that no running request uses, so that the next ones compute it anew."""
        self.engine.reset_prefix_cache()

    def _run(
        self,
        prompts: Seq[Prompt],
        params: Seq[RequestParams],
        use_tqdm: bool,
        *,
        cache_salt: str | None,
        priority: int,
    ) -> list[RequestOutput]:
        engine = self.engine
        outbox: deque[RequestOutput] = deque()
        with _interrupts_held_back() as interrupts:
            request_ids = engine.add_requests(
                prompts, params, outbox=outbox, cache_salt=cache_salt, priority=priority
            )
            outputs: dict[str, RequestOutput] = {}
            try:
                with _progress_bar(use_tqdm, len(request_ids)) as progress:
                    while len(outputs) < len(request_ids):
                        interrupts.let_through()
                        if not outbox:
                            engine.advance(outbox)
                        while outbox:
                            output = outbox.popleft()
                            outputs[output.request_id] = output
                            tokens = [output.prompt_token_ids] if output.embedding is not None else []
                            tokens += [choice.token_ids for choice in output.outputs]
                            progress.advance(sum(map(len, tokens)))
            finally:
                engine.abandon(outbox)
            interrupts.let_through()
        return [outputs[request_id] for request_id in request_ids]

    def chat(
        self,
        messages: Messages | Seq[Messages],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        cache_salt: str | None = None,
        priority: int = 0,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Seq[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of a list of conversations, by way of the model's chat template.

        Args:
            messages: ``[{"role": "user", "content": "Hello"}, …]``, or a list of such lists.
            sampling_params: as for ``generate``, and so are ``use_tqdm``, ``cache_salt`` and ``priority``.
            add_generation_prompt: end each prompt with what begins the assistant's answer.
            continue_final_message: let the model go on with the last message instead.
            tools: descriptions of functions, as OpenAI has them, for templates that know them.
            chat_template_kwargs: further variables for the template.

        Raises:
            RequestError: the model has no chat template, or something is wrong with one of the conversations.
        """
        several = isinstance(messages, Seq) and len(messages) > 0 and isinstance(messages[0], list | tuple)
        conversations = cast("Seq[Messages]", messages if several else [messages])
        prompts = []
        for i, conversation in enumerate(conversations):
            with numbered("conversation", i, len(conversations)):
                prompt = self.engine.chat_prompt(
                    conversation,
                    add_generation_prompt=add_generation_prompt and not continue_final_message,
                    continue_final_message=continue_final_message,
                    tools=tools,
                    template_kwargs=chat_template_kwargs,
                )
            prompts.append(prompt)
        return self.generate(
            prompts, sampling_params, use_tqdm=use_tqdm, cache_salt=cache_salt, priority=priority
        )

    def save_prefix_cache(self, path: str | Path) -> int:
        """Write the prefix cache to a file: see ``engine.prefix_store``."""
        return self.engine.save_prefix_cache(path)

    def load_prefix_cache(self, path: str | Path) -> int:
        """Take a saved prefix cache: see ``engine.prefix_store``."""
        return self.engine.load_prefix_cache(path)


def _prompt_list(prompts: Prompt | Seq[Prompt]) -> Seq[Prompt]:
    """A list of prompts, whether one was given or several."""
    if isinstance(prompts, str | Mapping):  # a mapping is refused, as any prompt that is one
        return [prompts]
    if isinstance(prompts, np.ndarray):
        return [prompts] if prompts.ndim < 2 else list(prompts)
    if not isinstance(prompts, list | tuple):
        raise RequestError(
            f"prompts is a {type(prompts).__name__}; it must be a string, a list of token ids, "
            f"or a list of these",
            "prompt",
        )
    if prompts and not isinstance(prompts[0], str | list | tuple | np.ndarray | Mapping):
        return [cast("Prompt", prompts)]  # token ids, or what add_request will refuse
    return cast("Seq[Prompt]", prompts)


def _params_list(params: SamplingParams | Seq[SamplingParams] | None, count: int) -> Seq[SamplingParams]:
    if not isinstance(params, list | tuple):
        return [SamplingParams() if params is None else cast("SamplingParams", params)] * count
    if len(params) != count:
        raise RequestError(
            f"there are {count} prompts but {len(params)} sampling_params; give one for all, or one for each",
            "sampling_params",
        )
    return params


def _check_kind(method: str, params: object, kind: type[SamplingParams] | type[BeamSearchParams]) -> None:
    name = "params" if method == "beam_search" else "sampling_params"
    if not isinstance(params, kind):
        raise RequestError(f"{name} is a {type(params).__name__}; {method} takes {kind.__name__}", name)


class _Bar:
    """A progress bar that also says how many tokens come each second."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total, rate="")
        self._tokens = 0

    def advance(self, num_tokens: int) -> None:
        """One more request is finished, with that many tokens."""
        self._tokens += num_tokens
        elapsed = self._progress.tasks[0].elapsed or 1e-9
        self._progress.update(self._task, advance=1, rate=f"{self._tokens / elapsed:,.0f} tokens/s")


@contextmanager
def _progress_bar(wanted: bool, total: int) -> Iterator[_Bar]:
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not wanted or total < 2) as progress:
        yield _Bar(progress, total)


class _Interrupts:
    """Remembers a Ctrl-C until the engine is between two steps, where nothing is half done."""

    pending = False

    def note(self, signum: int, frame: FrameType | None) -> None:
        """The signal handler. A second Ctrl-C does not wait."""
        if self.pending:
            raise KeyboardInterrupt
        self.pending = True

    def let_through(self) -> None:
        """Raise the KeyboardInterrupt that was held back, if there was one."""
        if self.pending:
            raise KeyboardInterrupt


@contextmanager
def _interrupts_held_back() -> Iterator[_Interrupts]:
    interrupts = _Interrupts()
    # Only where Python's own handling is in force: a program that has its own keeps it.
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    signal.signal(signal.SIGINT, interrupts.note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
