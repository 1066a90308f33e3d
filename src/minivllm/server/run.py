"""run_server: from the first port to the last answer.

listen ─► load the model (503 meanwhile) ─► answer ─► first signal: drain ─► end
                                                      second signal: end at once
"""

import asyncio
import copy
import os
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.config import LOGGING_CONFIG

from minivllm.config import EngineConfig
from minivllm.engine.inference_engine import InferenceEngine
from minivllm.errors import ConfigError
from minivllm.factory import create_engine
from minivllm.server.app import create_app
from minivllm.server.connections import BACKLOG, Connection, Listener
from minivllm.server.service import Service
from minivllm.server.settings import ServerSettings

LAST_CONNECTIONS_SECONDS = 3  # for answers that are complete, but not read yet


def run_server(config: EngineConfig, settings: ServerSettings, announce: Callable[[str], None]) -> None:
    """Serve until a signal ends it.

    Args:
        announce: is told, in lines for people, where the server is and what it has reserved.

    Raises:
        ModelError, ConfigError: the model cannot be loaded, or the address cannot be had.
    """
    listener = listen(settings)
    host, port = listener.getsockname()[:2]
    address = f"{settings.scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    announce(f"listening on {address}, loading {config.model} ...")
    if not settings.api_keys and not _is_loopback(host):
        announce("warning: everyone who reaches this address may use it; --api-key asks for a key")
    asyncio.run(_serve(config, settings, listener, announce))


class Server(uvicorn.Server):
    """uvicorn's, which on the first signal answers what it has accepted, and on the second ends at once."""

    def __init__(self, service: Service) -> None:
        settings = service.settings
        super().__init__(
            uvicorn.Config(
                create_app(service),
                http=Connection,
                ws="none",
                backlog=BACKLOG,
                lifespan="off",
                log_config=_log_config(),
                log_level="info" if settings.access_log else "warning",
                access_log=settings.access_log,
                server_header=False,
                timeout_graceful_shutdown=LAST_CONNECTIONS_SECONDS,
                ssl_certfile=settings.ssl_certfile,
                ssl_keyfile=settings.ssl_keyfile,
            )
        )
        self._service = service
        self._draining: asyncio.Future[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if self._service.draining.is_set():
            os._exit(128 + sig)
        self._service.draining.set()
        asyncio.get_running_loop().call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """Refuse what comes, finish what is there, and end."""
        self._draining = asyncio.ensure_future(self._service.drain(self._service.settings.shutdown_timeout))
        self._draining.add_done_callback(lambda _: self.end())

    def end(self) -> None:
        """End now."""
        self.should_exit = True


async def _serve(
    config: EngineConfig,
    settings: ServerSettings,
    listener: socket.socket,
    announce: Callable[[str], None],
) -> None:
    service = Service(settings)
    server = Server(service)
    loaded: asyncio.Future[InferenceEngine] = asyncio.get_running_loop().create_future()

    def start(done: asyncio.Future[InferenceEngine]) -> None:
        if done.exception() is not None:
            server.end()
            return
        service.start(done.result(), config)
        announce(f"{done.result().describe()}\nready: {settings.model_name}")

    loaded.add_done_callback(start)
    _load(config, loaded)
    await server.serve([listener])
    await service.close()
    if not loaded.done():
        os._exit(0)  # nothing can end the loading but the end of the process
    loaded.result()


def _load(config: EngineConfig, loaded: asyncio.Future[InferenceEngine]) -> None:
    """In a thread that dies with the process: nothing can hurry the loading of a model."""
    loop = asyncio.get_running_loop()

    def load() -> None:
        try:
            engine = create_engine(config)
        except Exception as error:
            loop.call_soon_threadsafe(loaded.set_exception, error)
        else:
            loop.call_soon_threadsafe(loaded.set_result, engine)

    threading.Thread(target=load, name="mini-vllm loader", daemon=True).start()


def _log_config() -> dict[str, Any]:
    """uvicorn's, with everything on stderr, and our own loggers beside."""
    config = copy.deepcopy(LOGGING_CONFIG)
    config["handlers"]["access"]["stream"] = "ext://sys.stderr"
    config["loggers"]["minivllm"] = {"handlers": ["default"]}
    return config


def listen(settings: ServerSettings) -> socket.socket:
    """The socket, before anything slow is done."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = Listener(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)  # two that are bound, but do not listen, may have the same address
    except OSError as error:
        raise ConfigError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror}") from None
    return listener


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") or host == "::1"
