"""``mini-vllm serve`` as a process, and real text from SmolLM2 through OpenAI's package."""

import signal
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from conftest import find_real_model
from helpers_models import write_tiny_model
from helpers_server import MODEL, SERVE, eventually, start_server

QUESTION: Any = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def refused(*arguments: str) -> str:
    result = subprocess.run([*SERVE, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1 and "Traceback" not in result.stderr, result.stderr
    return result.stderr.strip().splitlines()[-1]


def test_an_error_is_one_line(tiny_model: Path, tmp_path: Path) -> None:
    assert "no/such/model" in refused("no/such/model", "--port", "0")
    assert "port is 99999" in refused(str(tiny_model), "--port", "99999")
    assert "none.pem" in refused(str(tiny_model), "--api-key-file", str(tmp_path / "none.pem"))


def test_keys_from_file_and_environment(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").write_text("# of the team\nfrom-file\n\n")
    monkeypatch.setenv("MINIVLLM_API_KEY", "env-1 env-2")
    process, url = start_server(tiny_model, "--api-key-file", str(tmp_path / "keys"))
    try:
        for key, status in (("from-file", 200), ("env-1", 200), ("env-2", 200), ("other", 401)):
            answer = httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == status
    finally:
        process.kill()
        process.wait()


def test_sigterm_ends_it_and_a_taken_port_is_an_error(tiny_model: Path) -> None:
    process, url = start_server(tiny_model, "--api-key", "secret")
    try:
        assert httpx.get(f"{url}/v1/models").status_code == 401
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)
        assert client.completions.create(model=MODEL, prompt="hi", max_tokens=4).choices[0].text
        second = subprocess.run(
            [*SERVE, str(tiny_model), "--port", url.rsplit(":", 1)[1]],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert second.returncode == 1 and "cannot listen on 127.0.0.1" in second.stderr
        assert "Traceback" not in second.stderr
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stderr is not None and "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()


@pytest.mark.real_model
@pytest.mark.parametrize("twice", [False, True])
def test_sigterm_under_load(twice: bool) -> None:
    model = find_real_model()
    assert model is not None
    process, url = start_server(model, "--shutdown-timeout", "60" if twice else "0.5")
    try:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=30)
        streams = [
            client.completions.create(
                model=MODEL, prompt="Once", max_tokens=240, stream=True, extra_body={"ignore_eos": True}
            )
            for _ in range(4)
        ]
        for stream in streams:
            next(stream)
        process.send_signal(signal.SIGTERM)
        if twice:
            eventually(lambda: httpx.get(f"{url}/health").status_code == 503)
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 128 + signal.SIGTERM
        else:
            for stream in streams:
                with pytest.raises(openai.APIError, match="the server ended"):
                    list(stream)
            assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


def test_tls(tiny_model: Path, tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-nodes", "-keyout", str(key), "-out", str(certificate), "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        capture_output=True,
        check=False,
    )
    if made.returncode != 0:
        pytest.skip("openssl is not here to make a certificate")
    process, url = start_server(tiny_model, "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
    try:
        assert url.startswith("https://")
        trusted = ssl.create_default_context(cafile=str(certificate))
        assert httpx.get(f"{url}/health", verify=trusted).status_code == 200
    finally:
        process.kill()
        process.wait()


def test_logs_have_no_text(tiny_model: Path) -> None:
    process, url = start_server(tiny_model, "--access-log")
    try:
        httpx.post(f"{url}/v1/completions", json={"prompt": "xyzzy", "max_tokens": 2})
        httpx.post(f"{url}/v1/completions", json={"prompt": "xyzzy", "temperature": "xyzzy"})
        httpx.post(f"{url}/v1/completions", content=b"xyzzy")
    finally:
        process.terminate()
        process.wait(20)
    assert process.stderr is not None and process.stdout is None
    log = process.stderr.read()
    assert "/v1/completions" in log and "xyzzy" not in log


@pytest.fixture(scope="module")
def smollm() -> Iterator[openai.OpenAI]:
    model = find_real_model()
    assert model is not None
    process, url = start_server(model)
    yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    process.kill()
    process.wait()


@pytest.mark.real_model
def test_smollm_answers(smollm: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "messages": QUESTION, "max_tokens": 40, "temperature": 0}
    whole = smollm.chat.completions.create(**options)
    assert "Paris" in (whole.choices[0].message.content or "")
    assert whole.choices[0].finish_reason == "stop"
    stream = smollm.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options)
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == (
        whole.choices[0].message.content
    )
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens  # type: ignore[truthy-bool]


@pytest.mark.real_model
def test_smollm_stops_and_continues(smollm: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "prompt": "1, 2, 3, 4,", "max_tokens": 20, "temperature": 0}
    free = smollm.completions.create(**options).choices[0].text
    assert free.startswith(" 5, 6, 7")
    stopped = smollm.completions.create(stop=["6, 7", "nothing"], **options).choices[0]
    assert (stopped.text, stopped.finish_reason) == (" 5, ", "stop")
    pieces = smollm.completions.create(stop="6, 7", stream=True, **options)
    assert "".join(piece.choices[0].text for piece in pieces) == " 5, "
    messages: Any = [*QUESTION, {"role": "assistant", "content": "The capital of France is"}]
    going_on = smollm.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=5,
        temperature=0,
        extra_body={"continue_final_message": True},
    )
    assert (going_on.choices[0].message.content or "").startswith(" Paris")


@pytest.mark.real_model
def test_smollm_logprobs_spell_the_text(smollm: openai.OpenAI) -> None:
    answer = smollm.completions.create(
        model=MODEL, prompt="Grüße, 漢字: ", max_tokens=24, seed=1, echo=True, logprobs=3
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None and choice.logprobs.tokens and choice.logprobs.text_offset
    assert choice.text.startswith("Grüße, 漢字: ")
    for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        if not token.startswith("bytes:"):
            assert choice.text[offset : offset + len(token)] == token


@pytest.mark.real_model
def test_the_seed_and_the_fingerprint(smollm: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "messages": QUESTION, "max_tokens": 12, "seed": 5, "n": 3}
    first, second = (smollm.chat.completions.create(**options) for _ in range(2))
    assert [c.message.content for c in first.choices] == [c.message.content for c in second.choices]
    assert len({c.message.content for c in first.choices}) > 1
    assert first.system_fingerprint == second.system_fingerprint
