"""ServerSettings: what an operator decides about the server, checked on construction."""

import math
import re
import ssl
from dataclasses import dataclass
from pathlib import Path

from minivllm.errors import ConfigError, shown

_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^\s/?#@,*]+")


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the HTTP server; the engine's are ``EngineConfig``'s.

    Raises:
        ConfigError: a value cannot be used.
    """

    model_name: str  #: the name that clients ask for
    host: str = "127.0.0.1"
    port: int = 8000  #: 0: any that is free
    api_keys: tuple[str, ...] = ()  #: one of these opens every route; none: everyone may
    max_queue: int = 256  #: waiting requests at which more are refused, with 429
    max_body_size: float = 2 * 2**20  #: bytes
    request_timeout: float | None = None  #: seconds for an answer; None: any time
    shutdown_timeout: float = 30.0  #: seconds that running answers get when the server is told to end
    cors_origins: tuple[str, ...] = ()  #: web pages that may use the server from a browser; "*": all
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    access_log: bool = False

    def __post_init__(self) -> None:
        """Check every value."""
        if not self.model_name:
            raise ConfigError("the model's name is empty; give it one by which clients can ask for it")
        _within("port", self.port, 0, 65535)
        _within("max_queue", self.max_queue, 1, 2**20)
        _within("max_body_size", self.max_body_size, 1024, 2**32)
        _within("shutdown_timeout", self.shutdown_timeout, 0, 86400)
        if self.request_timeout is not None:
            _within("request_timeout", self.request_timeout, 0.001, 86400)
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError("an API key is empty, or has other than visible ASCII characters")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile is given, but no ssl_certfile; TLS needs both")
        for path in (self.ssl_certfile, self.ssl_keyfile):
            if path is not None and not path.is_file():
                raise ConfigError(f"there is no file {path}; ssl_certfile and ssl_keyfile are PEM files")

        if self.ssl_certfile is not None:
            _check_tls(self.ssl_certfile, self.ssl_keyfile)
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors_origins has {shown(origin)}; an origin is as in https://page.example, with a port "
                    "if need be and no path, or * for all"
                )

    @property
    def scheme(self) -> str:
        """Of the server's address: "http" or "https"."""
        return "http" if self.ssl_certfile is None else "https"


def read_api_keys(path: Path) -> tuple[str, ...]:
    """The API keys in a file: one a line; empty lines and those that begin with # do not count.

    Raises:
        ConfigError: it cannot be read, or has none.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the API keys cannot be read from {path}: {error}") from None
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"{path} has no API key in it; write one on each line")
    return keys


def _within(name: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise ConfigError(f"{name} is {shown(value)}; it must be from {_number(low)} to {_number(high)}")


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _check_tls(certificate: Path, key: Path | None) -> None:
    """Load both as the server will.

    Args:
        key: None: it is in the certificate's file.

    Raises:
        ConfigError: one of them, or both together, cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(certificate)
    except OSError as error:
        raise ConfigError(
            f"ssl_certfile {certificate} has no certificate that can be read ({_reason(error)}); "
            "it is a PEM file that begins with the server's own"
        ) from None
    try:
        context.load_cert_chain(certificate, key, password="")  # else it asks at the terminal
    except OSError as error:
        if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
            message = f"the key in {key or certificate} is not the one of the certificate in {certificate}"
            raise ConfigError(f"{message}; give those that belong together") from None
        name = "ssl_certfile" if key is None else "ssl_keyfile"
        raise ConfigError(
            f"{name} {key or certificate} has no private key that can be used ({_reason(error)}); "
            "the key is in PEM, without a passphrase"
        ) from None


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return str(error.reason or "not PEM").replace("_", " ").lower()
    return error.strerror or str(error)
