"""``mini-vllm serve | run-batch``: options, nothing else. The server is loaded when it is asked for."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from minivllm.cli_options import EngineOptions, spread
from minivllm.errors import counted
from minivllm.factory import create_engine
from minivllm.models.pull import MODEL_ALIASES

IN_FLIGHT = 2  # lines of a batch under way for each sequence that runs: the next ones wait at hand

notes = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)


def _server(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Server", **more)


def _engine(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Engine")


@dataclass(frozen=True)
class ServeEngineOptions(EngineOptions):
    """The engine's settings, with those that matter when many ask at once."""

    max_num_seqs: Annotated[int, _engine("--max-num-seqs", help="Sequences computed at once, at most.")] = 64
    enable_prefix_caching: Annotated[
        bool,
        _engine(
            "--enable-prefix-caching/--no-enable-prefix-caching", help="Let equal beginnings share blocks."
        ),
    ] = True


@dataclass(frozen=True)
class ServerOptions:
    """``ServerSettings`` on the command line."""

    host: Annotated[str, _server("--host", help="The address to listen on; 0.0.0.0: all.")] = "127.0.0.1"
    port: Annotated[int, _server("--port", help="0: any that is free.")] = 8000
    served_model_name: Annotated[
        str | None,
        _server(
            "--served-model-name", help="What clients call the model; default: MODEL, of a path the end."
        ),
    ] = None
    api_key: Annotated[
        list[str] | None,
        _server("--api-key", envvar="MINIVLLM_API_KEY", help="A key that opens the server; may be repeated."),
    ] = None
    api_key_file: Annotated[
        Path | None, _server("--api-key-file", help="A file with a key on each line.")
    ] = None
    max_queue: Annotated[int, _server("--max-queue", help="Refuse requests when this many prompts wait.")] = (
        256
    )
    max_body_size: Annotated[float, _server("--max-body-size", help="MiB of a request's body, at most.")] = 2
    request_timeout: Annotated[
        float | None, _server("--request-timeout", help="Seconds for an answer; default: any time.")
    ] = None
    shutdown_timeout: Annotated[
        float, _server("--shutdown-timeout", help="Seconds that running answers get at the end.")
    ] = 30.0
    cors_origin: Annotated[
        list[str] | None,
        _server(
            "--cors-origin", help="A web page's origin that may use the server; may be repeated; *: all."
        ),
    ] = None
    ssl_certfile: Annotated[Path | None, _server("--ssl-certfile", help="Serve HTTPS: PEM file.")] = None
    ssl_keyfile: Annotated[Path | None, _server("--ssl-keyfile", help="Its key.")] = None
    access_log: Annotated[bool, _server("--access-log", help="Log each request's line, never its body.")] = (
        False
    )


@spread(server=ServerOptions, engine=ServeEngineOptions)
def serve(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help=f"As for generate: an alias ({', '.join(MODEL_ALIASES)}), a path …"
        ),
    ],
    server: ServerOptions,
    engine: ServeEngineOptions,
) -> None:
    """Answer OpenAI's API over HTTP: /v1/chat/completions, /v1/completions and more; see /docs there."""
    from minivllm.server.run import run_server
    from minivllm.server.settings import ServerSettings, read_api_keys

    file_keys = () if server.api_key_file is None else read_api_keys(server.api_key_file)
    settings = ServerSettings(
        model_name=_name(model) if server.served_model_name is None else server.served_model_name,
        host=server.host,
        port=server.port,
        api_keys=(*(server.api_key or ()), *file_keys),
        max_queue=server.max_queue,
        max_body_size=server.max_body_size * 2**20,
        request_timeout=server.request_timeout,
        shutdown_timeout=server.shutdown_timeout,
        cors_origins=tuple(server.cors_origin or ()),
        ssl_certfile=server.ssl_certfile,
        ssl_keyfile=server.ssl_keyfile,
        access_log=server.access_log,
    )
    run_server(engine.config(model), settings, lambda line: notes.print(line, style="dim"))


@spread(engine=ServeEngineOptions)
def run_batch(
    requests: Annotated[
        Path,
        typer.Argument(
            metavar="INPUT", help="JSON lines, each with custom_id, method (POST), url (of a route) and body."
        ),
    ],
    answers: Annotated[
        Path,
        typer.Argument(metavar="OUTPUT", help="Gets a line for each, with its custom_id, as they are done."),
    ],
    model: Annotated[str, typer.Option("--model", help="As for serve.")],
    engine: ServeEngineOptions,
    served_model_name: Annotated[
        str | None,
        typer.Option("--served-model-name", help="What the requests call it; default: as for serve."),
    ] = None,
) -> None:
    """Answer a file of requests in OpenAI's batch format, as the server would.

    A run that was cut off goes on where it was when it is started again with the same files.
    """
    from minivllm.server.batch_file import open_batch
    from minivllm.server.run_batch import answer_batch

    config = engine.config(model)
    name = _name(model) if served_model_name is None else served_model_name
    with open_batch(requests, answers) as batch:
        before, total = batch.num_answered, batch.num_requests
        num_errors = 0
        if before < total:
            with notes.status(f"loading {model} ..."):
                running = create_engine(config)
            notes.print(running.describe(), style="dim")
            columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            with Progress(*columns, console=notes, transient=True) as progress:
                task = progress.add_task("", total=total, completed=before)
                in_flight = IN_FLIGHT * engine.max_num_seqs
                num_errors = answer_batch(
                    batch, running, name, in_flight, lambda: progress.advance(task), config
                )
        earlier = f", {before:,} of them by an earlier run" if before else ""
        answered = counted(total, "request")
        notes.print(f"{answered} answered{earlier}; {num_errors:,} of this run with an error")


def _name(model: str) -> str:
    """Of a path its last part, without a file's suffix; an alias and a Hub name are names already."""
    path = Path(model).resolve()
    return model if not path.exists() else path.stem if path.is_file() else path.name
