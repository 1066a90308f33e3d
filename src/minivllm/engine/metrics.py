"""What an engine counts, and the snapshot that others may read (a server's metrics, a live page)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineMetrics:
    """Counts at one moment. Totals grow from the engine's start on."""

    num_running: int  #: sequences of the requests that hold blocks; each sample or beam is one
    num_waiting: int  #: sequences of those that hold none
    num_blocks: int  #: physical blocks of the pool
    num_free_blocks: int  #: blocks that no sequence holds
    num_cached_blocks: int  #: of these, blocks that still hold a prefix for whoever begins with it
    steps: int  #: steps carried out
    computed_tokens: int  #: rows that went through the model, recomputed ones included
    generated_tokens: int
    preemptions: int
    queried_tokens: int  #: prompt tokens of the requests admitted
    cached_tokens: int  #: of these, taken from the prefix cache
    finished_requests: int  #: for whatever reason, aborted ones included

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the prompt tokens that were taken from the prefix cache, 0 to 1."""
        return self.cached_tokens / self.queried_tokens if self.queried_tokens else 0.0
