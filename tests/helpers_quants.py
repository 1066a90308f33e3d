"""ggml's blocks of any type: as the ``gguf`` package quantises, or random where it only dequantises."""

import zlib
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q

#: Where a block has its float16s, and how large each is against the first in a block of typical weights
HALVES: dict[Q, dict[int, float]] = {
    Q.Q4_0: {0: 1},
    Q.Q4_1: {0: 1, 2: -7.5},
    Q.Q5_0: {0: 1},
    Q.Q5_1: {0: 1, 2: -15.5},
    Q.Q8_0: {0: 1},
    Q.Q2_K: {80: 1, 82: 1.5},
    Q.Q3_K: {108: 1},
    Q.Q4_K: {0: 1, 2: 7.5},
    Q.Q5_K: {0: 1, 2: 15.5},
    Q.Q6_K: {208: 1},
    Q.IQ4_NL: {0: 1},
    Q.IQ4_XS: {0: 1},
}
QUANTIZABLE = (Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0)  #: by the package

Array = np.ndarray[Any, Any]


def random_blocks(rng: np.random.Generator, kind: Q, shape: tuple[int, int], deviation: float = 1) -> Array:
    """Random bits, and scales that make the weights' standard deviation about ``deviation``.

    Returns:
        uint8 [rows, bytes of a row]; ``shape`` is that of the weights.
    """
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // weights, size), dtype=np.uint8)
    scales = rng.uniform(0.7, 1.3, (len(blocks), 1))

    def with_scale(scale: float) -> Array:
        for start, factor in HALVES[kind].items():
            blocks[:, start : start + 2] = (scale * factor * scales).astype("<f2").view(np.uint8)
        return blocks.reshape(shape[0], -1)

    return with_scale(deviation / float(gguf.quants.dequantize(with_scale(1), kind).std()))


def quantized(x: Array, kind: Q) -> Array:
    """``x`` in blocks; of a type that the package does not quantise to, random weights of x's size."""
    if kind in QUANTIZABLE or kind in (Q.F16, Q.BF16):
        return gguf.quants.quantize(x, kind)
    rng = np.random.default_rng(zlib.crc32(x.tobytes()))
    return random_blocks(rng, kind, x.shape, float(x.std()))
