"""MaskedSteps: which tokens a step's rows may draw is found out by another thread, while the model runs.

    engine thread   ──┬──► [ layers of the model, in C++ ········ ] wait ──► [ drawing ]
    mask thread       └──► [ mask ][ mask ][ mask ] ─────────────────┘

Knows nothing of requests.
"""

from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np

from minivllm.batch import Batch, StepResult
from minivllm.executors.base import Executor
from minivllm.sampler import sampling_batch
from minivllm.sequence import Sequence
from minivllm.text.grammar import Mask, Matcher


class MaskedSteps:
    """Owner of the thread that writes masks."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "mini-vllm masks")  # begins with the first mask

    def execute(
        self,
        executor: Executor,
        batch: Batch,
        rows: Seq[Sequence],
        positions: Seq[int],
        matchers: Seq[Matcher | None],
    ) -> StepResult:
        """One step of the executor.

        Args:
            rows: see ``sampler.sampling_batch``, and so are ``positions``.
            matchers: of each row; None: it may draw every token.
        """
        present = [matcher for matcher in matchers if matcher is not None]
        if not present:
            return executor.execute(batch, sampling_batch(rows, positions))
        has_mask = np.array([matcher is not None for matcher in matchers])
        mask_row = np.where(has_mask, has_mask.cumsum() - 1, -1).astype(np.int32)
        masks = np.empty((len(present), present[0].num_words), np.uint32)
        written = self._thread.submit(_write, present, masks)
        try:
            sampling = sampling_batch(rows, positions, (mask_row, masks))
            return executor.execute(batch, sampling, written.result)
        finally:
            wait([written])  # a step that failed may not have come so far


def _write(matchers: Seq[Matcher], masks: Mask) -> None:
    for matcher, mask in zip(matchers, masks, strict=True):
        matcher.write_mask(mask)
