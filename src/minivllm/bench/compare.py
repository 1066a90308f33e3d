"""Other engines beside ours: which are there, their processes, the model in their formats.

Each runs in a process of its own, by the Python that has it (``peer_worker``), and is stopped (SIGSTOP) while
another one is measured. Knows nothing of what is measured.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minivllm.bench.workloads import Prompts, Run, check_counts
from minivllm.errors import ConfigError
from minivllm.models.weights import Checkpoint

PYTHON_VARIABLE = "MINIVLLM_PEERS_PYTHON"
_WORKER = Path(__file__).with_name("peer_worker.py")
#: engine → the module that it is
_MODULES = {
    "llama.cpp": "llama_cpp",
    "openvino": "openvino_genai",
    "vllm": "vllm",
    "transformers": "transformers",
}
#: engine → the types of weights that it can be given; what it gets beside our 16 or 32 bits, int8, int4
_TYPES = {
    "llama.cpp": (("BF16", "F16", "Q8_0", "Q4_0"), ("BF16", "Q8_0", "Q4_0")),
    "openvino": (("F16", "Q8_0", "Q4_0"), ("F16", "Q8_0", "Q4_0")),
    "vllm": (("BF16",), ("BF16", "BF16", "BF16")),
    "transformers": (("BF16",), ("BF16", "BF16", "BF16")),
}


@dataclass(frozen=True)
class PeerSpec:
    """An engine and the type of its weights."""

    engine: str
    weights: str  #: a GGUF type

    def __str__(self) -> str:
        return f"{self.engine} {self.weights}"


def parse_peers(text: str, format: str) -> list[PeerSpec]:
    """From ``llama.cpp,openvino:Q8_0``: each with the type after its colon, or the one nearest to ours.

    Args:
        text: what the user wrote.
        format: of our weights: float32, bfloat16, int8 or int4.

    Raises:
        ConfigError: there is no such engine, or it does not run such weights.
    """
    specs = []
    for item in text.split(",") if text.strip() else ():
        engine, _, weights = item.strip().partition(":")
        if engine not in _TYPES:
            raise ConfigError(f"there is no engine {engine!r} to compare with; there are {', '.join(_TYPES)}")
        possible, nearest = _TYPES[engine]
        weights = weights.upper() or nearest[{"int8": 1, "int4": 2}.get(format, 0)]
        if weights not in possible:
            raise ConfigError(f"{engine} is not run with {weights} weights here; use {', '.join(possible)}")
        specs.append(PeerSpec(engine, weights))
    return specs


class Peer:
    """A running engine. Stopped except while it generates."""

    def __init__(
        self, spec: PeerSpec, python: str, model: Path, threads: int, max_seqs: int, max_len: int
    ) -> None:
        self.spec = spec
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        command = [python, str(_WORKER), spec.engine, str(model), str(threads), str(max_seqs), str(max_len)]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        try:
            self.info: str = self._answer()["info"]
        except BaseException:
            self.close()
            raise
        self._process.send_signal(signal.SIGSTOP)

    def generate(self, prompts: Prompts, output_len: int, shared_len: int) -> Run:
        """Answer the prompts together.

        Raises:
            RuntimeError: the engine failed, or gave another number of tokens.
        """
        assert self._process.stdin is not None
        request = {"prompts": prompts, "output_len": output_len, "shared_len": shared_len}
        self._process.send_signal(signal.SIGCONT)
        with suppress(BrokenPipeError):  # it has ended, which the answer will show
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        answer = self._answer()
        self._process.send_signal(signal.SIGSTOP)
        check_counts(answer["counts"], len(prompts), output_len)
        return Run(answer["seconds"], [])

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._log.seek(0)
            said = self._log.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
            raise RuntimeError(f"its process ended with status {status}: {said[-1]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def running_peers(
    specs: Sequence[PeerSpec],
    checkpoint: Checkpoint,
    threads: int,
    max_seqs: int,
    max_len: int,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[tuple[list[Peer], list[str]]]:
    """Start those of the engines that are installed, on the checkpoint's weights.

    Yields the running ones, and for each other one a line that says why it is not there.
    """
    peers: list[Peer] = []
    absent: list[str] = []
    models: dict[str, Path] = {}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mini-vllm-bench-")))
        for spec in specs:
            python = _python_with(_MODULES[spec.engine])
            if python is None:
                absent.append(
                    f"{spec.engine} is not installed: no module {_MODULES[spec.engine]} in "
                    f"{', '.join(pythons())} (${PYTHON_VARIABLE})"
                )
                continue
            progress(f"starting {spec}")
            try:
                model = _exported(spec, checkpoint, directory, models)
                peer = Peer(spec, python, model, threads, max_seqs, max_len)
            except (RuntimeError, OSError) as error:
                absent.append(f"{spec} does not run: {error}")
                continue
            stack.callback(peer.close)
            peers.append(peer)
        yield peers, absent


def pythons() -> list[str]:
    """Interpreters to look for other engines in: those that the variable names, and ours."""
    named = os.environ.get(PYTHON_VARIABLE, "").split(os.pathsep)
    return [*filter(None, named), sys.executable]


def _python_with(module: str) -> str | None:
    """The first interpreter that has the module."""
    question = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    for python in pythons():
        try:
            if subprocess.run([python, "-c", question], capture_output=True, check=False).returncode == 0:
                return python
        except OSError:
            continue
    return None


def _exported(spec: PeerSpec, checkpoint: Checkpoint, directory: Path, done: dict[str, Path]) -> Path:
    """The checkpoint as the engine reads it; written once for all engines that read the same."""
    from minivllm.bench.export import write_gguf, write_hf

    key = "hf" if spec.engine in ("vllm", "transformers") else spec.weights
    if key not in done:
        path = directory / (key if key == "hf" else f"{key}.gguf")
        if key == "hf":
            path.mkdir()
            write_hf(checkpoint, path)
        else:
            write_gguf(checkpoint, path, key)  # type: ignore[arg-type]  # parse_peers has checked it
        done[key] = path
    return done[key]
