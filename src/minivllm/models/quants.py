"""ggml's quantised blocks and bfloat16, expanded to float32 with numpy. Knows nothing of files or models.

A quantised row is a run of blocks, each of a fixed number of weights along the inputs. Layouts are those
of ggml (github.com/ggml-org/ggml, ggml-common.h, ``block_q4_0`` and so on), little-endian, d and m float16:

    Q4_0   d | 16 bytes of nibbles               w = d * (q - 8)
    Q4_1   d | m | 16 bytes of nibbles           w = d * q + m
    Q8_0   d | 32 int8                           w = d * q
    Q6_K   128 bytes of low nibbles | 64 bytes of high bit pairs | 16 int8 scales | d    256 weights
                                                 w = d * scale * (q - 32)

In a block of 32 nibbles, byte i holds weight i (low half) and weight i + 16 (high half).
"""

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

#: ggml type → (weights in a block, bytes of a block)
BLOCKS = {"q4_0": (32, 18), "q4_1": (32, 20), "q8_0": (32, 34), "q6_k": (256, 210)}


def bfloat16_to_float32(bits: npt.NDArray[np.uint16]) -> Floats:
    """Bit patterns of bfloat16, of any shape, to the same values in float32 (exact)."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


@np.errstate(all="ignore")  # a damaged file's infinite scales make NaN; where they matter the logits show it
def dequantize(data: Bytes, dtype: str) -> Floats:
    """Rows of blocks: uint8 [rows, blocks * block bytes] → float32 [rows, blocks * block weights]."""
    _, block_bytes = BLOCKS[dtype]
    blocks = np.ascontiguousarray(data).reshape(-1, block_bytes)
    return _EXPAND[dtype](blocks).reshape(data.shape[0], -1)


def _half(blocks: Bytes, start: int) -> Floats:
    """The float16 at byte ``start`` of every block, as float32 [blocks, 1]."""
    return blocks[:, start : start + 2].copy().view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """[blocks, 16] → [blocks, 32]: all low halves, then all high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _q4_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - np.float32(8))


def _q4_1(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q6_k(blocks: Bytes) -> Floats:
    # Two halves of 128 weights; each has 64 bytes of low nibbles and 32 of high pairs. Quarter j (32 weights)
    # of a half takes the low nibble (j < 2) or the high one (j >= 2) of bytes 32 * (j % 2) …, and bits
    # 2j, 2j + 1 of the pairs' bytes.
    low = blocks[:, :128].reshape(-1, 2, 2, 32)  # [blocks, half, j % 2, 32]
    low = np.stack([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)  # [blocks, half, j, 32]
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    quants = (low | (high << 4)).astype(np.float32) - np.float32(32)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)  # one for 16 weights
    return scales[:, :, None] * quants.reshape(-1, 16, 16)


_EXPAND = {"q4_0": _q4_0, "q4_1": _q4_1, "q8_0": _q8_0, "q6_k": _q6_k}
