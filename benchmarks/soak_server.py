"""Many clients on one server for a long time: does it stay right, give everything back, and not grow?

    python benchmarks/soak_server.py smollm2-135m                              64 clients, ten minutes
    python benchmarks/soak_server.py smollm2-135m --clients 16 --seconds 60

It starts a server of its own. Requests are of all kinds and sizes; some clients leave at a random moment,
some ask what must be refused, and some ask what all others of that kind ask, greedily, and must get the same
text. In the end: no error but the clients' own, every KV block free, no open files left, resident memory of
the last third as of the first. Exits with 1 if anything of that is not so.
"""

import argparse
import asyncio
import json
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from minivllm.bench.serving.workload import words

SERVE = (sys.executable, "-c", "from minivllm.cli import main; main()", "serve")
BLOCK_SIZE = 16
SETTLING = 0.1  # of the time, before memory counts
GROWTH = 0.02, 8 * 2**20  # what resident memory may grow: a share, and bytes
SYSTEM = "You are a patient assistant. " + words(0, 120)
CANARY = {"prompt": "The capital of France is", "max_tokens": 24, "temperature": 0}
REFUSED = (
    {"prompt": "a", "max_tokens": -1},
    {"prompt": "a", "temperature": 1e9},
    {"prompt": "a", "n": 5_000_000},
    {"prompt": [-1]},
    {"prompt": "a", "nonsense": True},
)


@dataclass
class Server:
    """A server's process and its address."""

    process: "subprocess.Popen[str]"
    url: str
    log: list[str]

    @property
    def resident(self) -> int:
        """Bytes."""
        fields = Path(f"/proc/{self.process.pid}/statm").read_text().split()
        return int(fields[1]) * 4096

    @property
    def open_files(self) -> int:
        """How many."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))


@contextmanager
def running_server(model: str, num_blocks: int) -> Iterator[Server]:
    """Start one and wait until it is ready; kill it in the end if it is still there."""
    sizes = ("--num-blocks", str(num_blocks), "--block-size", str(BLOCK_SIZE))
    command = [*SERVE, model, "--port", "0", *sizes]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    log: list[str] = []
    ready = threading.Event()

    def read(lines: Any) -> None:
        for line in lines:
            log.append(line)
            if line.startswith("ready"):
                ready.set()
        ready.set()

    threading.Thread(target=read, args=(process.stderr,), daemon=True).start()
    try:
        ready.wait()
        if process.poll() is not None or not log[-1].startswith("ready"):
            sys.exit(f"the server did not start:\n{''.join(log)}")
        yield Server(process, log[0].partition("listening on ")[2].partition(",")[0], log)
    finally:
        process.kill()
        process.wait()


@dataclass
class Soak:
    """The clients and what they saw."""

    http: httpx.AsyncClient
    drop: float
    until: float
    counts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    canary: str | None = None

    async def client(self, rng: random.Random) -> None:
        """One request after another until the time is up."""
        while time.monotonic() < self.until:
            kind = rng.random()
            try:
                if kind < 0.03:
                    await self._refused(rng)
                elif kind < 0.08:
                    await self._canary()
                elif rng.random() < self.drop:
                    await self._dropped(rng)
                else:
                    await self._answered(rng)
            except (httpx.HTTPError, AssertionError, KeyError, ValueError) as error:
                self.errors[f"{type(error).__name__}: {str(error)[:200]}"] += 1
                await asyncio.sleep(0.1)

    async def _answered(self, rng: random.Random) -> None:
        path, body = random_request(rng)
        num_choices = body.get("n", 1)
        reasons: dict[int, str] = {}
        if body["stream"]:
            done = False
            async with self.http.stream("POST", path, json=body) as response:
                assert response.status_code == 200, f"{response.status_code} {await response.aread()!r}"
                async for line in response.aiter_lines():
                    assert not done or not line, "events after [DONE]"
                    assert line == "" or line.startswith("data: "), line
                    done = done or line == "data: [DONE]"
                    if line and not done:
                        for choice in json.loads(line.removeprefix("data: "))["choices"]:
                            assert choice["index"] not in reasons, "a choice went on after its end"
                            if choice["finish_reason"]:
                                reasons[choice["index"]] = choice["finish_reason"]
            assert done, "a stream without [DONE]"
        else:
            response = await self.http.post(path, json=body)
            assert response.status_code == 200, f"{response.status_code} {response.text}"
            answer = response.json()
            reasons = {choice["index"]: choice["finish_reason"] for choice in answer["choices"]}
            assert answer["usage"]["completion_tokens"] <= num_choices * body["max_tokens"]
        assert reasons.keys() == set(range(num_choices)), f"choices {sorted(reasons)} of {num_choices}"
        assert set(reasons.values()) <= {"stop", "length"}, reasons
        self.counts["answered"] += 1

    async def _dropped(self, rng: random.Random) -> None:
        """Leave after a while, wherever the answer is by then."""
        path, body = random_request(rng)
        work = asyncio.ensure_future(self._read(path, body | {"stream": rng.random() < 0.5}))
        await asyncio.wait({work}, timeout=rng.choice((0.0, 0.05, 0.5, 2.0, 5.0)) * rng.random())
        self.counts["answered before they would leave" if work.done() else "dropped"] += 1
        work.cancel()
        await asyncio.wait({work})
        if not work.cancelled():
            work.result()

    async def _read(self, path: str, body: dict[str, Any]) -> None:
        async with self.http.stream("POST", path, json=body) as response:
            assert response.status_code == 200, f"{response.status_code} {await response.aread()!r}"
            async for _ in response.aiter_bytes():
                pass

    async def _refused(self, rng: random.Random) -> None:
        response = await self.http.post("/v1/completions", json=rng.choice(REFUSED))
        assert response.status_code == 400, f"{response.status_code} for what must be refused"
        self.counts["refused"] += 1

    async def _canary(self) -> None:
        response = await self.http.post("/v1/completions", json=CANARY)
        assert response.status_code == 200, f"{response.status_code} {response.text}"
        text = response.json()["choices"][0]["text"]
        self.canary = text if self.canary is None else self.canary
        assert text == self.canary, f"the same request gave {text!r}, earlier {self.canary!r}"
        self.counts["asked the same"] += 1


def random_request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a body: short and long, alone and in company, with and without options."""
    length = min(700, int(rng.lognormvariate(4.0, 1.0)) + 1)
    prompt = words(rng.randrange(2**31), length)
    body: dict[str, Any] = {"max_tokens": rng.choice((1, 4, 16, 32, 64, 96)), "stream": rng.random() < 0.6}
    if rng.random() < 0.2:
        body["n"] = rng.randint(2, 4)
    if rng.random() < 0.5:
        body |= {"temperature": rng.uniform(0.0, 1.5), "top_p": rng.uniform(0.5, 1.0)}
    if rng.random() < 0.3:
        body |= {"seed": rng.randrange(1000), "stop": ["\n\n", "the end"]}
    if rng.random() < 0.2:
        body |= {"presence_penalty": 0.5, "min_p": 0.05, "ignore_eos": True}
    if rng.random() < 0.5:
        if rng.random() < 0.2:
            body["logprobs"] = 5
        return "/v1/completions", body | {"prompt": prompt}
    if rng.random() < 0.2:
        body |= {"logprobs": True, "top_logprobs": 3}
    system = [{"role": "system", "content": SYSTEM}] if rng.random() < 0.5 else []
    return "/v1/chat/completions", body | {"messages": [*system, {"role": "user", "content": prompt}]}


async def touch_pool(http: httpx.AsyncClient, num_blocks: int) -> None:
    """Have every block written once: the system gives the pool its memory only then."""
    room = asyncio.Semaphore(8)

    async def fill(seed: int) -> None:
        async with room:
            body = {"prompt": words(seed, 600), "max_tokens": 1}
            (await http.post("/v1/completions", json=body)).raise_for_status()

    await asyncio.gather(*(fill(i) for i in range(num_blocks * BLOCK_SIZE // 600 + 2)))


async def watched(server: Server, samples: list[tuple[float, int]]) -> None:
    """Note the resident memory every second."""
    while True:
        samples.append((time.monotonic(), server.resident))
        await asyncio.sleep(1.0)


async def soak(
    server: Server, num_blocks: int, clients: int, seconds: float, drop: float, seed: int
) -> list[str]:
    """Do it and print what was seen. What is wrong, in sentences."""
    wrong = []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as http:
        await touch_pool(http, num_blocks)
        start, files = time.monotonic(), server.open_files
        run = Soak(http, drop, until=start + seconds)
        samples: list[tuple[float, int]] = []
        watch = asyncio.ensure_future(watched(server, samples))
        await asyncio.gather(*(run.client(random.Random(f"{seed} {i}")) for i in range(clients)))
        watch.cancel()
        print(f"{clients} clients, {time.monotonic() - start:.0f} s:", dict(run.counts))
        wrong += [f"{count} × {error}" for error, count in run.errors.most_common(20)]

        gauges = await settled(http)
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            if gauges[f"mini_vllm:{name}"] != 0:
                wrong.append(f"{name} is {gauges[f'mini_vllm:{name}']} when nobody asks")
        for name, value in sorted(gauges.items()):
            if "request_success_total" in name or name.endswith(("_tokens_total", "preemptions_total")):
                print(f"  {name} {value:,.0f}")
            if 'finished_reason="error"' in name and value:
                wrong.append(f"{value:.0f} requests ended with an error of the model")
        if (await http.get("/health")).status_code != 200:
            wrong.append("the server says that it is not healthy")
    wrong += flat([rss for at, rss in samples if at >= start + SETTLING * seconds])
    await asyncio.sleep(0.5)
    print(f"  open files: {files} before, {server.open_files} after")
    if server.open_files > files:
        wrong.append(f"{server.open_files - files} more files are open than before")
    return wrong


async def settled(http: httpx.AsyncClient) -> dict[str, float]:
    """The metrics, once nothing runs or after ten seconds."""
    for _ in range(100):
        lines = (await http.get("/metrics")).text.splitlines()
        metrics = {}
        for line in lines:
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                plain, _, labels = name.partition("{")
                reason = [label for label in labels.rstrip("}").split(",") if label.startswith("finished")]
                metrics[plain + "".join(f"{{{label}}}" for label in reason)] = float(value)
        if metrics["mini_vllm:num_requests_running"] == metrics["mini_vllm:num_requests_waiting"] == 0:
            break
        await asyncio.sleep(0.1)
    return metrics


def flat(resident: Sequence[int]) -> list[str]:
    """Whether memory has grown from the first third to the last."""
    third = max(1, len(resident) // 3)
    first, last = statistics.median(resident[:third]), statistics.median(resident[-third:])
    print(f"  resident memory: {first / 2**20:.1f} MiB in the first third, {last / 2**20:.1f} in the last")
    if last - first > GROWTH[0] * first + GROWTH[1]:
        return [f"resident memory has grown by {(last - first) / 2**20:.1f} MiB"]
    return []


def main() -> None:
    """Parse the command line, do it, and exit with 1 if anything is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="as for `mini-vllm serve`")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--drop", type=float, default=0.2, help="share of the requests whose client leaves")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-blocks", type=int, default=512, help="of the server's KV cache")
    given = parser.parse_args()
    with running_server(given.model, given.num_blocks) as server:
        wrong = asyncio.run(
            soak(server, given.num_blocks, given.clients, given.seconds, given.drop, given.seed)
        )
        server.process.send_signal(signal.SIGTERM)
        try:
            code = server.process.wait(30)
            if code != 0:
                wrong.append(f"the server ended with {code} when it was told to")
        except subprocess.TimeoutExpired:
            wrong.append("the server did not end when it was told to")
        if "Traceback" in "".join(server.log):
            wrong.append(f"the server's log has an exception:\n{''.join(server.log)[-3000:]}")
    for sentence in wrong:
        print(f"WRONG: {sentence}")
    print(f"{len(wrong)} things are wrong" if wrong else "nothing is wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
