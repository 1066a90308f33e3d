"""Who may ask what from where; and settings that cannot be are refused at the start."""

import socket
import subprocess
from pathlib import Path
from typing import Any

import openai
import pytest
from helpers_server import CHAT, error_of, live_server
from typer.testing import CliRunner

from minivllm.cli import app
from minivllm.errors import ConfigError
from minivllm.server.run import listen
from minivllm.server.settings import ServerSettings, read_api_keys


def test_keys_guard_every_route_but_health() -> None:
    with live_server(api_keys=("first", "second"), cors_origins=("https://page.example",)) as live:
        with live.http as http:
            assert http.get("/health").status_code == 200
            routes = [*http.get("/openapi.json", headers={"authorization": "Bearer first"}).json()["paths"]]
            assert len(routes) >= 8
            for path in [
                *routes,
                "/docs",
                "/redoc",
                "/openapi.json",
                "/v1/no/such",
                "/",
                "/health/",
                "//health",
            ]:
                for method in ("GET", "POST"):
                    for headers in (
                        {},
                        {"authorization": "Bearer third"},
                        {"authorization": "first"},
                        {"authorization": "Basic first"},
                        {"authorization": b"Bearer \xff"},
                    ):
                        if path == "/health":
                            continue
                        response = http.request(method, path, headers=headers)
                        assert error_of(response, 401)["code"] == "invalid_api_key", path
            for key in ("first", "second"):
                assert http.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200
            # A browser asks for permission without the key.
            asked = {"origin": "https://page.example", "access-control-request-method": "POST"}
            allowed = http.options(CHAT, headers=asked)
            assert allowed.status_code == 200
            assert allowed.headers["access-control-allow-origin"] == "https://page.example"
            for foreign in (
                {"origin": "https://other.example"},
                {"access-control-request-method": "PUT"},
            ):
                assert "Disallowed CORS" in error_of(http.options(CHAT, headers=asked | foreign))["message"]
            refused = http.get("/v1/models", headers={"origin": "https://page.example"})
            assert refused.status_code == 401 and "access-control-allow-origin" in refused.headers
        with pytest.raises(openai.AuthenticationError):
            live.client.models.list()


def test_other_origins_are_not_let_in_unless_asked() -> None:
    with live_server() as live, live.http as http:
        response = http.get("/health", headers={"origin": "https://page.example"})
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 70000}, {"max_queue": 0}, {"max_body_size": 5}, {"shutdown_timeout": -1}, {"model_name": ""},
        {"shutdown_timeout": float("nan")}, {"request_timeout": 0}, {"api_keys": ("",)}, {"api_keys": ("ä",)},
        {"ssl_keyfile": "key.pem"},
        *({"cors_origins": (origin,)} for origin in ("", "nonsense", "page.example", "https://", "*.example",
            "https://page.example/", "https://a, https://b", "https://u@page.example", "HTTPS://page.example")),
    ],
)  # fmt: skip
def test_settings_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServerSettings(**{"model_name": "m"} | wrong)


def test_origins_that_can_be() -> None:
    origins = (
        "*",
        "null",
        "https://page.example",
        "http://127.0.0.1:3000",
        "http://[::1]:80",
        "app://obsidian",
    )
    assert ServerSettings("m", cors_origins=origins).cors_origins == origins


@pytest.mark.parametrize("option", ["--max-body-size", "--request-timeout", "--shutdown-timeout"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e400", "-1", "1e300"])
def test_numbers_that_are_none(option: str, value: str) -> None:
    result = CliRunner().invoke(app, ["serve", "no.gguf", f"{option}={value}"])
    assert isinstance(result.exception, ConfigError)
    assert option[2:].replace("-", "_") in str(result.exception)


def test_limits_are_told_in_full() -> None:
    with pytest.raises(ConfigError, match=r"from 1 to 1,048,576$"):
        ServerSettings("m", max_queue=0)


def test_tls_files_that_cannot_be_used(tmp_path: Path) -> None:
    made = {}
    for name, more in (("a", ("-nodes",)), ("b", ("-nodes",)), ("locked", ("-passout", "pass:x"))):
        made[name] = subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
                *("-keyout", f"{tmp_path}/{name}.key", "-out", f"{tmp_path}/{name}.pem"),
                *("-subj", "/CN=localhost", *more),
            ],
            capture_output=True,
            check=False,
        ).returncode
    if any(made.values()):
        pytest.skip("openssl is not here to make certificates")
    (tmp_path / "text").write_text("nonsense")
    (tmp_path / "empty").write_text("")
    (tmp_path / "both.pem").write_text((tmp_path / "a.pem").read_text() + (tmp_path / "a.key").read_text())

    def settings(certificate: str, key: str | None) -> ServerSettings:
        keyfile = None if key is None else tmp_path / key
        return ServerSettings("m", ssl_certfile=tmp_path / certificate, ssl_keyfile=keyfile)

    assert settings("a.pem", "a.key").scheme == settings("both.pem", None).scheme == "https"
    for certificate, key, words in (
        ("text", "a.key", "text has no certificate"),
        ("empty", "a.key", "empty has no certificate"),
        ("a.key", "a.key", "a.key has no certificate"),
        ("a.pem", "text", "ssl_keyfile .*text has no private key"),
        ("a.pem", "a.pem", "ssl_keyfile .*a.pem has no private key"),
        ("a.pem", None, "ssl_certfile .*a.pem has no private key"),
        ("a.pem", "b.key", "b.key is not the one of the certificate in .*a.pem"),
        ("locked.pem", "locked.key", "locked.key has no private key .* without a passphrase"),
        ("none.pem", "a.key", "there is no file .*none.pem"),
    ):
        with pytest.raises(ConfigError, match=words):
            settings(certificate, key)


def test_key_files(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n one \n\ntwo\n")
    assert read_api_keys(file) == ("one", "two")
    for text in ("", "# none\n"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="no API key"):
            read_api_keys(file)
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_api_keys(path)


def test_addresses_that_cannot_be_had() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for host, port in (("127.0.0.1", taken.getsockname()[1]), ("no.such.host.invalid", 0)):
            with pytest.raises(ConfigError, match="cannot listen on"):
                listen(ServerSettings(model_name="m", host=host, port=port))
