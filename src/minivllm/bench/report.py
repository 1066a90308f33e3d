"""What a measurement says: rows of figures beside their limits, for people and as JSON. Measures nothing."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from minivllm.bench.limits import LeastTime
from minivllm.bench.machine import Peak
from minivllm.errors import counted


@dataclass(frozen=True)
class Figure:
    """One quantity, over several runs."""

    name: str
    unit: str  #: "ms", "s": less is better; "tok/s": more is
    runs: list[float]
    limit: float | None = (
        None  #: the best that the machine's limits allow, in the same unit; None: no such limit
    )

    @property
    def value(self) -> float:
        """The median of the runs."""
        return median(self.runs)

    @property
    def share(self) -> float | None:
        """How near the median is to the limit: 1 is at it."""
        if self.limit is None:
            return None
        return self.value / self.limit if self.unit.startswith("tok") else self.limit / self.value


@dataclass(frozen=True)
class PeerFigures:
    """What another engine reached in the same rounds."""

    name: str
    info: str
    figures: list[Figure]


@dataclass(frozen=True)
class Report:
    """A measurement and everything that its figures depend on."""

    workload: str  #: in words
    model: str
    weights: str  #: their format and memory, in words
    engine: str  #: kernels and threads, in words
    processor: str
    peaks: Sequence[Peak]
    bandwidths: list[float]  #: bytes a second, one reading before each round and one after the last
    limit: LeastTime  #: of the whole workload
    figures: list[Figure]
    peers: list[PeerFigures] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)

    def ratios(self, peer: PeerFigures) -> dict[str, float]:
        """How many times better ours is, for each figure that both have: the median over the rounds."""
        ours = {figure.name: figure for figure in self.figures}
        return {
            theirs.name: median(
                (a / b if theirs.unit.startswith("tok") else b / a)
                for a, b in zip(ours[theirs.name].runs, theirs.runs, strict=True)
            )
            for theirs in peer.figures
        }

    def as_json(self) -> dict[str, Any]:
        """Everything, in plain types; medians, shares and ratios included."""

        def figures(of: list[Figure]) -> list[dict[str, Any]]:
            return [asdict(f) | {"value": f.value, "share": f.share} for f in of]

        return asdict(self) | {
            "bandwidth": median(self.bandwidths),
            "limit": asdict(self.limit) | {"seconds": self.limit.seconds},
            "figures": figures(self.figures),
            "peers": [
                {"name": p.name, "info": p.info, "figures": figures(p.figures), "ratios": self.ratios(p)}
                for p in self.peers
            ],
        }

    def as_text(self) -> str:
        """For a terminal."""
        peaks = ", ".join(f"{p.number} {p.operations / 1e9:,.0f} ({p.instruction})" for p in self.peaks)
        low, high = min(self.bandwidths) / 1e9, max(self.bandwidths) / 1e9
        lines = [
            f"machine    {self.processor}",
            f"           reads {median(self.bandwidths) / 1e9:.1f} GB/s ({low:.1f} to {high:.1f})",
            f"           computes, in GOP/s: {peaks}",
            f"model      {self.model}; {self.weights}",
            f"engine     {self.engine}",
            f"workload   {self.workload}; {counted(len(self.bandwidths) - 1, 'run')}",
            f"           at least {self.limit.seconds:.3g} s, "
            f"{self.limit.memory / self.limit.seconds:.0%} of it bound by memory, the rest by arithmetic",
            "",
            f"{'':24}{'median':>11}{'lowest':>11}{'highest':>11}{'limit':>11}{'share':>8}",
        ]
        for figure in self.figures:
            lines.append(f"{figure.name + ', ' + figure.unit:<24}" + _cells(figure))
        if self.peers:
            lines += ["", f"{'beside':<24}{'median':>11}{'lowest':>11}{'highest':>11}   ours is"]
        for peer in self.peers:
            ratios = self.ratios(peer)
            for figure in peer.figures:
                cells = "".join(f"{_number(x):>11}" for x in _spread(figure))
                lines.append(f"{peer.name:<24}{cells}   {ratios[figure.name]:.2f} × ({figure.name})")
        lines += [f"{peer.name}: {peer.info}" for peer in self.peers]
        return "\n".join([*lines, *self.absent])


def _cells(figure: Figure) -> str:
    cells = "".join(f"{_number(x):>11}" for x in _spread(figure))
    if figure.limit is None or figure.share is None:
        return cells
    return cells + f"{_number(figure.limit):>11}{figure.share:>8.0%}"


def _spread(figure: Figure) -> tuple[float, float, float]:
    return figure.value, min(figure.runs), max(figure.runs)


def _number(x: float) -> str:
    return f"{x:,.0f}" if x >= 1000 else f"{x:.3g}" if x < 10 else f"{x:.1f}"
