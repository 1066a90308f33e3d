"""What cannot be answered now is an error in OpenAI's shape too: a full queue, a broken or unloaded model."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from helpers_server import HI, MODEL, TEXT, error_of, eventually, live_server, with_setup


def test_a_full_queue_is_429() -> None:
    with live_server(with_setup(max_num_seqs=1), max_queue=2) as live, ThreadPoolExecutor(3) as pool:
        live.gate.close()
        accepted = [pool.submit(live.post, TEXT, {"prompt": "a"})]
        eventually(lambda: live.engine.metrics().num_running == 1)
        accepted += [pool.submit(live.post, TEXT, {"prompt": "a", "stream": s}) for s in (False, True)]
        eventually(lambda: live.service.num_open == 3 and live.num_waiting == 2)
        for stream in (False, True):
            response = live.post(TEXT, {"prompt": "a", "stream": stream})
            error = error_of(response, 429)
            assert error["type"] == "rate_limit_error" and int(response.headers["retry-after"]) > 0
        with pytest.raises(openai.RateLimitError):
            live.client.chat.completions.create(model=MODEL, messages=HI)
        live.gate.open()
        assert all(answer.result().status_code == 200 for answer in accepted)
        live.wait_until_idle()
        assert live.post(TEXT, {"prompt": "a"}).status_code == 200


def test_a_burst_fills_the_queue_and_no_more() -> None:
    """Though all of it comes while the prompts are still being made."""
    with live_server(with_setup(max_num_seqs=2), max_queue=3) as live, ThreadPoolExecutor(20) as pool:
        live.gate.close()
        first = [pool.submit(live.post, TEXT, {"prompt": "a"})]
        eventually(lambda: live.gate.held)
        first.append(pool.submit(live.post, TEXT, {"prompt": "a"}))
        eventually(lambda: live.num_waiting == 1)
        live.gate.step()
        eventually(lambda: live.engine.metrics().num_running == 2 and live.num_waiting == 0)
        burst = [pool.submit(live.post, TEXT, {"prompt": "a"}) for _ in range(18)]
        eventually(lambda: sum(answer.done() for answer in burst) == 15)
        assert live.num_waiting == 3
        live.gate.open()
        assert sorted(answer.result().status_code for answer in first + burst) == [200] * 5 + [429] * 15
        live.wait_until_idle()


def test_every_prompt_of_a_request_has_its_place_in_the_queue() -> None:
    with live_server(with_setup(max_num_seqs=1), max_queue=4) as live, ThreadPoolExecutor(3) as pool:

        def prompts(count: int) -> dict[str, Any]:
            return {"prompt": [f"{count} {i}" for i in range(count)], "max_tokens": 2}

        assert live.post(TEXT, prompts(9)).status_code == 200  # nobody waits
        live.gate.close()
        accepted = [pool.submit(live.post, TEXT, {"prompt": "a"})]
        eventually(lambda: live.engine.metrics().num_running == 1 and live.num_waiting == 0)
        accepted.append(pool.submit(live.post, TEXT, prompts(2)))
        eventually(lambda: live.num_waiting == 2)
        assert "2 prompts are waiting" in error_of(live.post(TEXT, prompts(3)), 429)["message"]
        accepted.append(pool.submit(live.post, TEXT, prompts(2)))
        eventually(lambda: live.num_waiting == 4)
        error_of(live.post(TEXT, prompts(1)), 429)
        live.gate.open()
        assert all(answer.result().status_code == 200 for answer in accepted)
        live.wait_until_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long(stream: bool) -> None:
    with live_server(request_timeout=0.3) as live:
        live.gate.close()
        response = live.post(TEXT, {"prompt": "a", "stream": stream})
        if stream:
            assert response.status_code == 200
            name, data = response.text.strip().split("\n")
            assert name == "event: error"
            assert json.loads(data.removeprefix("data: "))["error"]["code"] == "timeout"
            with pytest.raises(openai.APIError, match=r"0\.3 seconds"):
                list(live.client.completions.create(model=MODEL, prompt="a", stream=True))
        else:
            assert error_of(response, 408)["code"] == "timeout"
        live.gate.open()
        live.wait_until_idle()


def test_a_model_that_fails_in_the_middle() -> None:
    with live_server() as live:
        live.gate.close()
        executor: Any = live.engine.executor
        with live.http as http, http.stream("POST", TEXT, json={"prompt": "a", "stream": True}) as stream:
            live.gate.step(4)
            eventually(lambda: live.gate.num_steps == 4)
            executor.fail_at = len(executor.steps) + 1
            live.gate.open()
            text = stream.read().decode()
        assert text.count("event: error") == 1 and "[DONE]" not in text
        assert error_of(live.post(TEXT, {"prompt": "a"}), 500)["type"] == "server_error"
        executor.fail_at = None
        assert live.post(TEXT, {"prompt": "a"}).status_code == 200
        live.wait_until_idle()


def test_a_broken_engine_is_503_and_not_healthy() -> None:
    with live_server() as live:

        def broken() -> Any:
            raise RuntimeError("a bug")

        live.engine.scheduler.schedule = broken  # type: ignore[method-assign]
        assert error_of(live.post(TEXT, {"prompt": "a"}), 503)["code"] == "engine_stopped"
        assert error_of(live.post(TEXT, {"prompt": "a"}), 503)["code"] == "engine_stopped"
        with live.http as http:
            error_of(http.get("/health"), 503)


def test_our_own_bugs_are_500_in_the_same_shape(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with live_server() as live, live.http as http:
        monkeypatch.setattr(live.service.metrics, "text", lambda: 1 / 0)
        error = error_of(http.get("/metrics"), 500)
        assert error["type"] == "server_error" and "division" not in error["message"]
    assert caplog.text.count("Traceback (most recent call last)") == 1


def test_while_the_model_is_loaded() -> None:
    with live_server(load=False) as live:
        with live.http as http:
            for response in (
                http.get("/health"),
                http.get("/v1/models"),
                http.post(TEXT, json={"prompt": "a"}),
            ):
                assert error_of(response, 503)["code"] == "loading" and response.headers["retry-after"]
            assert http.get("/metrics").status_code == 200
        live.loop.call_soon_threadsafe(live.service.start, live.engine)
        eventually(lambda: live.post(TEXT, {"prompt": "a"}).status_code == 200)
