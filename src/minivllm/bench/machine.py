"""What this machine can do at most, measured: the face of ``_core.Machine``. Knows nothing of models."""

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from minivllm._core import Machine as NativeMachine
from minivllm.bench.limits import MachineRates, Number
from minivllm.kv_cache.memory import available_memory

_LEAST_BUFFER = 256 << 20  # bytes; beyond the caches of most processors
_MOST_BUFFER = 2 << 30


@dataclass(frozen=True)
class Peak:
    """The arithmetic of one instruction, all threads together."""

    number: Number  #: what it multiplies
    instruction: str
    operations: float  #: a second; a multiplication and an addition are two


class Machine:
    """Measures the machine's limits with so many threads. A reading takes a small part of a second."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.processor = processor_name()
        self._native = NativeMachine(threads, buffer_bytes())
        self._native.read_bandwidth()  # the first one finds pages that no TLB knows
        #: Of every instruction that multiplies matrices and that the processor has
        self.peaks: tuple[Peak, ...] = tuple(Peak(*row) for row in self._native.peaks())

    def read_bandwidth(self) -> float:
        """Bytes a second, now. On a machine that is shared with others it drifts."""
        return float(self._native.read_bandwidth())

    def rates(self, bandwidth: float, isa: str) -> MachineRates:
        """With this bandwidth, and the best instruction that kernels of that instruction set could use."""
        return MachineRates(bandwidth, best_peaks(self.peaks, isa))


def best_peaks(peaks: tuple[Peak, ...], isa: str) -> Mapping[Number, float]:
    """The highest peak for each kind of number.

    float32 arithmetic can stand in for bfloat16 (a bfloat16 number is a float32 number), and either for int8.
    Tile instructions (AMX) count only for kernels that are built on them.
    """
    usable = [p for p in peaks if not p.instruction.startswith("tdp") or "amx" in isa]
    best: dict[Number, float] = {}
    reached = 0.0
    numbers: tuple[Number, ...] = ("float32", "bfloat16", "int8")
    for number in numbers:
        reached = max([reached, *(p.operations for p in usable if p.number == number)])
        best[number] = reached
    return best


def buffer_bytes() -> int:
    """Of the memory to read: twice the largest cache, within what is free."""
    wanted = min(
        max(_LEAST_BUFFER, 2 * largest_cache(Path("/sys/devices/system/cpu/cpu0/cache"))), _MOST_BUFFER
    )
    return max(min(wanted, available_memory() // 4), 1 << 20)


def largest_cache(directory: Path) -> int:
    """Bytes of the largest cache that Linux lists there; 0 where it lists none."""
    sizes = [0]
    for file in directory.glob("index*/size"):
        if match := re.fullmatch(r"(\d+)([KM]?)", file.read_text().strip()):
            sizes.append(int(match[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[match[2]])
    return max(sizes)


def processor_name() -> str:
    """As the system calls it."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1] if match else platform.machine()
