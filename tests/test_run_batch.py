"""Batches: the same answers as the server's, whatever is wrong with a line, and through a kill."""

import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers_engine import Setup
from helpers_models import write_tiny_model
from helpers_server import ENDLESS, MODEL, live_server

from minivllm.config import EngineConfig
from minivllm.engine.async_engine import EngineStoppedError
from minivllm.errors import ConfigError
from minivllm.server import batch_file
from minivllm.server.batch_file import open_batch
from minivllm.server.run_batch import answer_batch
from minivllm.server.service import Service
from minivllm.server.settings import ServerSettings

CHAT, TEXT, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
MINI_VLLM = (sys.executable, "-c", "from minivllm.cli import main; main()")


def line(custom_id: Any, url: Any, body: Any, **more: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body} | more)


def line_of(custom_id: str, url: str, body: Any) -> str:
    """With the body's very text, if it is given as one."""
    if not isinstance(body, str):
        return line(custom_id, url, body)
    return (
        f'{{"body2": {{"body": 1}}, "custom_id": "{custom_id}", "x":[1e999, "}}"] ,"body" : {body},'
        f'"method":"POST","url":"{url}"}}'
    )


def completion(i: int, **more: Any) -> str:
    return line(f"id-{i}", TEXT, {"model": MODEL, "prompt": f"prompt {i}", "max_tokens": 8} | more)


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def run(requests: Path, answers: Path, setup: Setup = ENDLESS, in_flight: int = 8) -> int:
    """The number of errors."""
    with open_batch(requests, answers) as batch:
        done: list[None] = []
        before = batch.num_answered
        num_errors = answer_batch(batch, setup.engine(), MODEL, in_flight, lambda: done.append(None))
        assert batch.num_answered == batch.num_requests == before + len(done)
    return num_errors


def read(answers: Path) -> dict[int, Any]:
    """The answers by the number of their line; no line has two."""
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    found = {int(answer["id"].removeprefix("batch_req_")): answer for answer in lines}
    assert len(found) == len(lines)
    return found


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


BODIES = [
    (CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "seed": 3}),
    (CHAT, {"messages": [{"role": "user", "content": "hi"}], "n": 2, "max_tokens": 4, "logprobs": True}),
    (CHAT, {"messages": []}),
    (TEXT, {"prompt": ["a", "b"], "max_tokens": 9, "temperature": 0.7, "seed": 11, "logprobs": 2}),
    (TEXT, {"prompt": [1, 2, 3], "echo": True, "temperature": 1e-5}),
    (TEXT, {"prompt": "ü “quoted”\u2028\n", "max_tokens": 3}),
    (TEXT, {"prompt": "a", "max_tokens": 10**30}),
    (TEXT, '{"body": {"prompt": "b"}, "prompt": "a", "temperature": 1e999 , "top_p": 1e-999}'),
    (TEXT, '{"prompt": "a", "max_tokens": 2, "temperature": 1e999}'),
    (TEXT, '{ "max_tokens" : 2.0, "prompt": "\\ud83d\\ude00 \\u0041", "temperature": -0.0 , "seed":1E1 }'),
    (TEXT, {"prompt": "a", "model": "another"}),
    (TEXT, {"prompt": "a" * 5000}),
    (TEXT, {"prompt": "a", "nonsense": 1}),
    (EMBEDDINGS, {"input": ["a", "b"], "encoding_format": "base64"}),
    (EMBEDDINGS, {"input": ""}),
]


def test_the_answers_are_the_servers(files: tuple[Path, Path]) -> None:
    setup = replace(ENDLESS, model="native")
    requests, answers = files
    write(requests, *(line_of(f"id-{i}", url, body) for i, (url, body) in enumerate(BODIES)))
    num_errors = run(requests, answers, setup, in_flight=1)
    found, expected_errors = read(answers), 0
    with live_server(setup) as live:
        for i, (url, body) in enumerate(BODIES):
            with live.http as http:
                text = body if isinstance(body, str) else json.dumps(body)
                expected = http.post(url, content=text, headers={"content-type": "application/json"})
            answer = found[i + 1]
            assert answer.keys() == {"id", "custom_id", "response", "error"}
            assert answer["custom_id"] == f"id-{i}" and answer["error"] is None
            assert answer["response"].keys() == {"status_code", "request_id", "body"}
            assert answer["response"]["request_id"].startswith("req-")
            assert answer["response"]["status_code"] == expected.status_code
            assert _lasting(answer["response"]["body"]) == _lasting(expected.json())
            expected_errors += expected.status_code != 200
    assert num_errors == expected_errors >= 5


def _lasting(body: dict[str, Any]) -> dict[str, Any]:
    """Without what is another one in each answer."""
    return {name: value for name, value in body.items() if name not in ("id", "created")}


def test_bad_lines_do_not_stop_the_rest(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_file, "MAX_LINE_BYTES", 5000)
    bad = [
        ("no JSON", None, "not JSON"),
        ('{"custom_id": "twice", "custom_id": "twice"}', None, "not JSON"),
        (
            '{"custom_id": "nan", "method": "POST", "url": "/v1/completions", "body": {"x": NaN}}',
            None,
            "JSON",
        ),
        ("[1]", None, "object"),
        ("\udce9\udcff", None, "not JSON"),  # bytes that are no UTF-8
        ("[" * 3000, None, "not JSON"),
        ('"' + "x" * 20000, None, "longer than the 5,000 bytes"),
        (line(5, TEXT, {}), None, "custom_id is 5"),
        (line("", TEXT, {}), None, "custom_id is ''"),
        (line("get", TEXT, {}, method="GET"), "get", "POST"),
        (line("url", "/metrics", {}), "url", "'/metrics'"),
        (line("list", ["/v1/completions"], {}), "list", "url is"),
        (line("body", TEXT, "prompt"), "body", "object"),
        (line("none", TEXT, None), "none", "body is None"),
        (line("stream", TEXT, {"prompt": "a", "stream": True}), "stream", "no streams"),
    ]
    requests, answers = files
    lines = ["", completion(0), *(text for text, _, _ in bad), "  \t", completion(1)]
    requests.write_bytes("\r\n".join(lines).encode(errors="surrogateescape"))  # and no end of line at the end
    assert run(requests, answers) == len(bad)
    found = read(answers)
    assert found.keys() == set(range(2, 3 + len(bad))) | {len(lines)}
    assert found[2]["response"]["status_code"] == found[len(lines)]["response"]["status_code"] == 200
    for number, (_, custom_id, words) in enumerate(bad, 3):
        assert found[number]["custom_id"] == custom_id and found[number]["response"] is None
        assert found[number]["error"]["code"] == "invalid_line"
        assert words in found[number]["error"]["message"]
        assert found[number]["error"]["message"].startswith(f"line {number}: ")
    before = answers.read_bytes()
    assert run(requests, answers) == 0, "what was an error is answered, too"
    assert answers.read_bytes() == before


def test_a_cut_off_run_goes_on(files: tuple[Path, Path]) -> None:
    requests, answers = files
    lines = ["no JSON", *(completion(i) for i in range(9))]
    write(requests, *lines)
    run(requests, answers)
    whole = answers.read_bytes()
    everything, ends = read(answers), [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    cuts = {0, 1, len(whole) - 1, len(whole), *ends[2:5], ends[3] + 1, ends[3] + 40, ends[4] - 1}
    for cut in sorted(cuts):
        answers.write_bytes(whole[:cut])
        complete = whole[: max((end for end in ends if end <= cut), default=0)]
        run(requests, answers)
        assert answers.read_bytes().startswith(complete), "what was done is kept"
        found = read(answers)
        assert found.keys() == everything.keys()
        for number, answer in found.items():
            assert answer["custom_id"] == everything[number]["custom_id"]
            assert _texts(answer) == _texts(everything[number])
    write(requests, *lines, completion(9))  # the input may grow
    run(requests, answers)
    assert len(read(answers)) == 11


def _texts(answer: dict[str, Any]) -> Any:
    response = answer["response"]
    return response and [choice["text"] for choice in response["body"]["choices"]]


def test_a_kill_and_a_resume(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"max_tokens": 60, "ignore_eos": True, "temperature": 1.0}
    lines = [
        line(f"id-{i}", TEXT, body | {"prompt": "once upon a time"[: 3 + i % 12], "seed": i})
        for i in range(300)
    ]
    write(requests, *lines)
    command = [*MINI_VLLM, "run-batch", str(requests), str(answers), "--model", str(model)]
    command += ["--num-blocks", "64", "--max-num-seqs", "4", "--served-model-name", MODEL]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while not (answers.exists() and answers.read_bytes().count(b"\n") >= 40):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.002)
    finally:
        process.kill()
        process.wait()
    done = answers.read_bytes()
    assert 40 <= done.count(b"\n") < 300, "it was killed in the middle"
    answers.write_bytes(done[: done.rindex(b"\n")])  # torn, as by a full disk
    kept = done[: done.rindex(b"\n", 0, done.rindex(b"\n")) + 1]

    last = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "300 requests answered, " in last.stderr and "0 of this run with an error" in last.stderr
    assert answers.read_bytes().startswith(kept)
    found = read(answers)
    assert found.keys() == set(range(1, 301))
    whole = answers.with_name("whole.jsonl")
    command[len(MINI_VLLM) + 2] = str(whole)
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    assert {n: _texts(a) for n, a in read(whole).items()} == {n: _texts(a) for n, a in found.items()}


def test_what_is_refused_before_any_work(files: tuple[Path, Path], tmp_path: Path) -> None:
    requests, answers = files

    def refused(*words: str) -> None:
        existed = answers.exists()
        before = answers.read_bytes() if existed else b""
        with pytest.raises(ConfigError) as error, open_batch(requests, answers):
            pass
        assert all(word in str(error.value) for word in words), error.value
        assert (answers.read_bytes() if answers.exists() else b"") == before

    refused("cannot be read")
    write(requests, completion(1), "", completion(2), "no JSON", "no JSON", completion(1))
    refused("lines 1 and 6", "same custom_id")
    write(requests, *(completion(i // 3) for i in range(9)))
    refused("lines 1 and 2", "5 more")

    write(requests, completion(1), completion(2))
    run(requests, answers, in_flight=1)
    write(requests, completion(2), completion(1))
    refused("line 1 of", "no answer to a line of this input")
    write(requests, completion(1))
    refused("line 2 of")
    write(requests, completion(1), completion(2))
    for text in ("no JSON", "[]", '{"id": "batch_req_0", "custom_id": null}', "[" * 100_000, '{"id": 5}'):
        answers.write_text(f"{text}\n{completion(1)}\n")
        refused("line 1 of")
    answers.unlink()
    write(answers, completion(1))
    refused(f"line 1 of {answers}")
    answers.unlink()
    write(requests, completion(1), completion(1), completion(1))
    refused("there is one more such line")
    write(requests, completion(1))
    with pytest.raises(ConfigError, match="is the input itself"), open_batch(requests, requests):
        pass
    with pytest.raises(ConfigError, match="cannot be written"), open_batch(requests, tmp_path):
        pass
    with (
        open_batch(requests, answers),
        pytest.raises(ConfigError, match="another run is writing"),
        open_batch(requests, answers),
    ):
        pass


@pytest.mark.parametrize("which", ["in.jsonl", "out.jsonl"])
def test_what_is_no_regular_file_is_refused_before_it_is_opened(files: tuple[Path, Path], which: str) -> None:
    """A pipe would let the opening wait; /dev/full would be read for ever."""
    write(files[0], completion(1))
    path = files[0].with_name(which)
    path.unlink(missing_ok=True)
    os.mkfifo(path.with_name("pipe"))
    path.with_name("folder").mkdir()
    for name in ("pipe", "folder"):
        path.symlink_to(name)
        expected = f"{which} cannot be (read|written): it is no regular file"
        with pytest.raises(ConfigError, match=expected), open_batch(*files):
            pass
        path.unlink()


def test_the_fingerprint_is_the_servers(files: tuple[Path, Path]) -> None:
    requests, answers = files
    write(requests, completion(1))
    engine, config = ENDLESS.engine(), EngineConfig(model="here")
    with open_batch(requests, answers) as batch:
        answer_batch(batch, engine, MODEL, 1, lambda: None, config)
    service = Service(ServerSettings(MODEL))

    async def serve() -> None:
        service.start(engine, config)
        await service.close()

    asyncio.run(serve())
    assert read(answers)[1]["response"]["body"]["system_fingerprint"] == service.fingerprint


def test_lines_are_read_as_they_are_needed(files: tuple[Path, Path]) -> None:
    requests, answers = files
    write(requests, *(completion(i, max_tokens=2) for i in range(400)))
    read_ahead = 0
    with open_batch(requests, answers) as batch:
        unanswered, num_read = batch.unanswered, 0

        def counted() -> Any:
            nonlocal num_read
            for item in unanswered():
                num_read += 1
                yield item

        def progress() -> None:
            nonlocal read_ahead
            read_ahead = max(read_ahead, num_read - batch.num_answered)

        batch.unanswered = counted  # type: ignore[method-assign]
        answer_batch(batch, ENDLESS.engine(), MODEL, 8, progress)
    assert len(read(answers)) == 400
    assert read_ahead < 8


def test_an_engine_that_breaks_leaves_the_rest_for_another_run(files: tuple[Path, Path]) -> None:
    requests, answers = files
    write(requests, *(completion(i) for i in range(50)))
    engine = ENDLESS.engine()
    executor: Any = engine.executor
    execute, num_steps = executor.execute, 0

    def breaking(*arguments: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 20:
            engine.step = None  # type: ignore[method-assign,assignment]  # the next step is no step
        return execute(*arguments)

    executor.execute = breaking
    with open_batch(requests, answers) as batch, pytest.raises(EngineStoppedError, match="run it again"):
        answer_batch(batch, engine, MODEL, 8, lambda: None)
    done = read(answers)
    assert 0 < len(done) < 50
    assert all(answer["response"]["status_code"] == 200 for answer in done.values())
    run(requests, answers)
    assert len(read(answers)) == 50


def test_an_installed_command_says_what_is_wrong(files: tuple[Path, Path]) -> None:
    requests, answers = files
    command = [*MINI_VLLM, "run-batch", str(requests), str(answers), "--model", "nowhere.gguf"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1 and "in.jsonl cannot be read" in result.stderr
    assert "Traceback" not in result.stderr and not answers.exists()
