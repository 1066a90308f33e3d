"""ggml's quantised blocks and bfloat16, expanded to float32 with numpy. Knows nothing of files or models.

A quantised row is a run of blocks, each of a fixed number of weights along the inputs. Layouts are those
of ggml (github.com/ggml-org/ggml, ggml-common.h, ``block_q4_0`` and so on), little-endian; d, m and dmin are
float16, s and t scales of a few bits. Of 32 weights:

    Q4_0    d | 16 bytes of nibbles                                       w = d * (q - 8)
    Q4_1    d | m | 16 bytes of nibbles                                   w = d * q + m
    Q5_0    d | 32 fifth bits | 16 bytes of nibbles                       w = d * (q - 16)
    Q5_1    d | m | 32 fifth bits | 16 bytes of nibbles                   w = d * q + m
    Q8_0    d | 32 int8                                                   w = d * q
    IQ4_NL  d | 16 bytes of nibbles                                       w = d * UNEVEN[q]

of 256, each 16 (Q2_K, Q3_K, Q6_K) or 32 (the others) with a scale:

    Q2_K    16 bytes of s, t | 64 bytes of pairs | d | dmin               w = d * s * q - dmin * t
    Q3_K    256 third bits | 64 bytes of pairs | 12 bytes of s | d        w = d * (s - 32) * (q - 4)
    Q4_K    d | dmin | 12 bytes of s, t | 128 bytes of nibbles            w = d * s * q - dmin * t
    Q5_K    d | dmin | 12 bytes of s, t | 256 fifth bits | 128 of nibbles w = d * s * q - dmin * t
    Q6_K    128 bytes of nibbles | 64 bytes of pairs | 16 int8 s | d      w = d * s * (q - 32)
    IQ4_XS  d | 8 pairs | 8 nibbles | 128 bytes of nibbles                w = d * (s - 32) * UNEVEN[q]

Where 16 bytes have the nibbles of 32 weights, byte i has weight i (low half) and weight i + 16 (high half).
Longer runs go in lines of 32 bytes: 32 weights take the lowest bits of each, the next 32 the bits above them.
"""

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

BlockType = Literal[
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs"
]
#: ggml type → (weights in a block, bytes of a block)
BLOCKS: dict[BlockType, tuple[int, int]] = {
    "q4_0": (32, 18), "q4_1": (32, 20), "q5_0": (32, 22), "q5_1": (32, 24), "q8_0": (32, 34),
    "q2_k": (256, 84), "q3_k": (256, 110), "q4_k": (256, 144), "q5_k": (256, 176), "q6_k": (256, 210),
    "iq4_nl": (32, 18), "iq4_xs": (256, 136),
}  # fmt: skip

#: The steps of IQ4_NL and IQ4_XS: finer where weights are many
UNEVEN = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32
)


def bfloat16_to_float32(bits: npt.NDArray[np.uint16]) -> Floats:
    """Bit patterns of bfloat16, of any shape, to the same values in float32 (exact)."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


@np.errstate(all="ignore")  # a damaged file's infinite scales make NaN; where they matter the logits show it
def dequantize(data: Bytes, dtype: BlockType) -> Floats:
    """Rows of blocks: uint8 [rows, blocks * block bytes] → float32 [rows, blocks * block weights]."""
    _, block_bytes = BLOCKS[dtype]
    blocks = np.ascontiguousarray(data).reshape(-1, block_bytes)
    return _EXPAND[dtype](blocks).reshape(data.shape[0], -1)


def _half(blocks: Bytes, start: int) -> Floats:
    """The float16 at byte ``start`` of every block, as float32 [blocks, 1]."""
    return blocks[:, start : start + 2].copy().view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """[blocks, n] → [blocks, 2n]: all low halves, then all high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _lines(packed: Bytes, bits: int, width: int = 32) -> Bytes:
    """Fields of lines of bytes, lowest first: [blocks, n * width] → [blocks, n, 8 / bits, width]."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(-1, 1)
    return (packed.reshape(-1, packed.shape[1] // width, 1, width) >> shifts) & np.uint8(2**bits - 1)


def _scaled(scales: Floats, quants: npt.NDArray[Any], offset: int = 0) -> Floats:
    """scale * (q - offset): scales [blocks, n], quants of the same blocks in any shape → [blocks, n, …]."""
    steps = quants.reshape(*scales.shape, -1).astype(np.float32)
    return scales[:, :, None] * (steps - np.float32(offset))


def _q4_0(blocks: Bytes) -> Floats:
    return _scaled(_half(blocks, 0), _nibbles(blocks[:, 2:]), 8)


def _q4_1(blocks: Bytes) -> Floats:
    return _scaled(_half(blocks, 0), _nibbles(blocks[:, 4:])) + _half(blocks, 2)[:, :, None]


def _fifth_bits(packed: Bytes) -> Bytes:
    """[blocks, 4] → [blocks, 32]: 16 where weight i's bit is set."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _q5_0(blocks: Bytes) -> Floats:
    return _scaled(_half(blocks, 0), _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), 16)


def _q5_1(blocks: Bytes) -> Floats:
    quants = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _scaled(_half(blocks, 0), quants) + _half(blocks, 2)[:, :, None]


def _q8_0(blocks: Bytes) -> Floats:
    return _scaled(_half(blocks, 0), blocks[:, 2:].view(np.int8))


def _q2_k(blocks: Bytes) -> Floats:
    scales = _half(blocks, 80) * (blocks[:, :16] & 15).astype(np.float32)
    minimums = _half(blocks, 82) * (blocks[:, :16] >> 4).astype(np.float32)
    return _scaled(scales, _lines(blocks[:, 16:80], 2)) - minimums[:, :, None]


def _q3_k(blocks: Bytes) -> Floats:
    # 16 scales: nibbles of 8 bytes, and above them the pairs of 4.
    scales = _nibbles(blocks[:, 96:104]) | _lines(blocks[:, 104:108], 2, width=4).reshape(-1, 16) << 4
    quants = _lines(blocks[:, 32:96], 2).reshape(-1, 8, 32) | _lines(blocks[:, :32], 1)[:, 0] << 2
    return _scaled(_half(blocks, 108) * (scales.astype(np.float32) - np.float32(32)), quants, 4)


def _scaled_q45_k(blocks: Bytes, quants: Bytes) -> Floats:
    """Q4_K and Q5_K: d * s * q - dmin * t, quants [blocks, …]."""
    # s and t of the first four groups have six bits in a byte each. In the upper two bits of these bytes, and
    # in the nibbles of the last four, are those of the other groups.
    s, t, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([s & 63, rest & 15 | s >> 6 << 4], axis=1)
    minimums = np.concatenate([t & 63, rest >> 4 | t >> 6 << 4], axis=1)
    below = _half(blocks, 2) * minimums.astype(np.float32)
    return _scaled(_half(blocks, 0) * scales.astype(np.float32), quants) - below[:, :, None]


def _q4_k(blocks: Bytes) -> Floats:
    return _scaled_q45_k(blocks, _lines(blocks[:, 16:], 4))


def _q5_k(blocks: Bytes) -> Floats:
    nibbles = _lines(blocks[:, 48:], 4).reshape(-1, 8, 32)
    return _scaled_q45_k(blocks, nibbles | _lines(blocks[:, 16:48], 1)[:, 0] << np.uint8(4))


def _q6_k(blocks: Bytes) -> Floats:
    nibbles = _lines(blocks[:, :128], 4, width=64).reshape(-1, 8, 32)
    quants = nibbles | _lines(blocks[:, 128:192], 2).reshape(-1, 8, 32) << 4
    return _scaled(_half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32), quants, 32)


def _iq4_nl(blocks: Bytes) -> Floats:
    return _scaled(_half(blocks, 0), UNEVEN[_nibbles(blocks[:, 2:])])


def _iq4_xs(blocks: Bytes) -> Floats:
    # 8 scales: the nibbles of 4 bytes, each byte's low one first, and above them the pairs of 2.
    low = _lines(blocks[:, 4:8], 4, width=1).reshape(-1, 8)
    scales = low | _lines(blocks[:, 2:4], 2, width=1).reshape(-1, 8) << 4
    quants = UNEVEN[_nibbles(blocks[:, 8:].reshape(-1, 16))]
    return _scaled(_half(blocks, 0) * (scales.astype(np.float32) - np.float32(32)), quants)


_EXPAND = {
    "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q8_0": _q8_0,
    "q2_k": _q2_k, "q3_k": _q3_k, "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k,
    "iq4_nl": _iq4_nl, "iq4_xs": _iq4_xs,
}  # fmt: skip
