"""The torch executor: one step of the decoder over a paged KV cache, in plain PyTorch, on CPU or CUDA.

Read this file to learn what paged attention computes. It is written to be clear and exact, not fast: it
attends one sequence after the other, and is what the native executor is compared with. Knows nothing of
requests or text; which block belongs to whom is in the Batch. The only file of the engine that imports torch.

Letters in the comments of shapes:
    T   token rows of the step, those of all sequences end to end          S   sequences
    R   rows that yield a token                                            N   rows of one sequence
    C   context: tokens of one sequence in the cache, this step's included
    H   query heads      Hkv   key/value heads      G = H / Hkv   query heads that share one
    D   head_dim
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from minivllm.batch import NO_SLOT, Batch, IntArray, SamplingBatch, StepResult
from minivllm.errors import ConfigError
from minivllm.kv_cache.kv_pool import KVGeometry, KVPool
from minivllm.models.weights import Checkpoint, WeightDtype, WeightTensor
from minivllm.sampler import empty_result, sample_rows

try:
    import torch
    import torch.nn.functional as F
    from torch import Tensor
except ImportError as error:
    raise ConfigError("the torch executor needs PyTorch: pip install torch") from error

HEAD_ROWS = 32  # rows whose logits exist at once: 32 × 50,000 × 4 bytes = 6.4 MB

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


class TorchExecutor:
    """Owner of the weights, and of the pool's memory or a view of it. See ``executors.base.Executor``.

    All arithmetic is float32. With ``dtype`` bfloat16, matrices are stored rounded, and what enters a matrix
    product is rounded to match; norms, biases and learned positions stay float32. K and V are attended as
    the pool holds them, in its own dtype, the rows of this very step included.
    """

    name = "torch"

    def __init__(
        self,
        checkpoint: Checkpoint,
        pool: KVPool | KVGeometry,
        dtype: WeightDtype,
        device: str = "cpu",
    ) -> None:
        """Load the weights.

        Args:
            checkpoint: the model.
            pool: host memory, which the executor then works in (CPU only); or a geometry, for which it
                reserves memory on its own device.
            dtype: of matrices and of what they are multiplied with.
            device: "cpu", "cuda" or "cuda:<index>".

        Raises:
            ConfigError: there is no such device, or it has too little memory.
        """
        self.config = checkpoint.config
        self.device = device
        self._dtype = dtype
        self._checkpoint = checkpoint  # for its fingerprint; its weights stay in their file
        _check_device(device)
        try:
            self.pool = _pool_tensor(pool, device)  # [layers, blocks, Hkv, 2 (K, V), block_size, D]
            self.weights: dict[str, Tensor] = {}
            for tensor in checkpoint.tensors():
                is_matrix = len(tensor.shape) == 2 and tensor.name != "pos_embed.weight"
                stored_as = _DTYPES[dtype] if is_matrix else torch.float32
                self.weights[tensor.name] = _weight(tensor, stored_as, device)
        except torch.cuda.OutOfMemoryError as error:
            raise ConfigError(
                f"the weights and the KV cache do not fit on {device}; use a smaller kv_cache_memory"
            ) from error
        head = "embed.weight" if self.config.tied_head else "head.weight"
        self.weights["head.weight"] = self.weights[head]
        self.block_size = self.pool.shape[4]
        if self.config.rope_inv_freq is not None:
            self.inv_freq = torch.tensor(self.config.rope_inv_freq, dtype=torch.float32, device=device)

    def execute(
        self,
        batch: Batch,
        sampling: SamplingBatch,
        before_sampling: Callable[[], object] | None = None,
    ) -> StepResult:
        """One step: see ``executors.base.Executor``."""
        with torch.inference_mode():
            for source, destination, slots in batch.block_copies.tolist():
                self.pool[:, destination, ..., :slots, :] = self.pool[:, source, ..., :slots, :]
            x = self._residual(batch)  # [T, hidden]
            hidden = self._norm(x[self._indices(batch.hidden_rows)], "final_norm")  # [E, hidden]
            x = self._norm(x[self._indices(batch.logit_rows)], "final_norm")  # [R, hidden]

            # Never all rows × vocabulary at once: each slice of logits becomes tokens before the next is
            # made. They are sampled on the host, by the definition itself; a faster executor samples where
            # the logits are.
            if before_sampling is not None:
                before_sampling()
            result = replace(empty_result(sampling), hidden=hidden.cpu().numpy())
            for first in range(0, len(x), HEAD_ROWS):
                logits = self._linear(x[first : first + HEAD_ROWS], "head")  # [≤ HEAD_ROWS, vocabulary]
                sample_rows(logits.cpu().numpy(), first, sampling, result)
            return result

    def identity(self) -> dict[str, str]:
        """Model, executor, dtype, and what computes: torch's versions and devices differ in rounding."""
        return {
            "model": self._checkpoint.fingerprint,
            "executor": f"{self.name} {torch.__version__} on {self.device.partition(':')[0]}",
            "dtype": self._dtype,
        }

    def read_blocks(self, block_ids: IntArray) -> npt.NDArray[np.uint8]:
        """K and V of these blocks, [n, bytes of a block], in the order of the pool's axes."""
        blocks = self.pool[:, self._indices(block_ids)].transpose(0, 1).flatten(1).contiguous()
        values: npt.NDArray[np.uint8] = blocks.view(torch.uint8).cpu().numpy()
        return values

    def write_blocks(self, block_ids: IntArray, values: npt.NDArray[np.uint8]) -> None:
        """Put K and V, as ``read_blocks`` gives them, into these blocks."""
        blocks = torch.from_numpy(values).to(self.device).view(self.pool.dtype)
        layers, _, *rest = self.pool.shape
        self.pool[:, self._indices(block_ids)] = blocks.view(-1, layers, *rest).transpose(0, 1)

    def _residual(self, batch: Batch) -> Tensor:
        """Embeddings, then every layer: [T, hidden] before the last norm."""
        config = self.config
        positions = self._indices(batch.positions)
        x = self.weights["embed.weight"][self._indices(batch.token_ids)].float()  # [T, hidden]
        # K and V of row new_rows[i] go to slot slots[i]; those of the others are in the cache already.
        new_rows = self._indices(np.flatnonzero(batch.slot_mapping != NO_SLOT).astype(np.int32))
        slots = self._indices(batch.slot_mapping)[new_rows]
        blocks, offsets = slots // self.block_size, slots % self.block_size
        rotation = None
        if config.rope_inv_freq is None:
            x = x + self.weights["pos_embed.weight"][positions]
        else:
            angles = positions[:, None].float() * self.inv_freq  # [T, D / 2]
            rotation = angles.cos()[:, None], angles.sin()[:, None]  # [T, 1, D / 2] each, for all heads

        for i in range(config.num_layers):
            layer = f"layers.{i}"
            h = self._norm(x, f"{layer}.attn_norm")
            q = self._linear(h, f"{layer}.q").unflatten(1, (config.num_heads, config.head_dim))  # [T, H, D]
            k = self._linear(h, f"{layer}.k").unflatten(1, (config.num_kv_heads, config.head_dim))
            v = self._linear(h, f"{layer}.v").unflatten(1, (config.num_kv_heads, config.head_dim))
            if rotation is not None:
                q, k = _rotated(q, *rotation), _rotated(k, *rotation)
            keys, values = self.pool[i].unbind(2)  # [blocks, Hkv, block_size, D] each
            keys[blocks, :, offsets] = k[new_rows].to(keys.dtype)
            values[blocks, :, offsets] = v[new_rows].to(values.dtype)
            x = x + self._linear(self._attention(q, keys, values, batch).flatten(1), f"{layer}.o")

            h = self._norm(x, f"{layer}.mlp_norm")
            activation = _ACTIVATIONS[config.activation]
            if config.gated_mlp:
                h = activation(self._linear(h, f"{layer}.gate")) * self._linear(h, f"{layer}.up")
            else:
                h = activation(self._linear(h, f"{layer}.up"))
            x = x + self._linear(h, f"{layer}.down")
        return x

    def _attention(self, q: Tensor, keys: Tensor, values: Tensor, batch: Batch) -> Tensor:
        """Causal attention of every row over its own sequence's blocks: [T, H, D] → [T, H, D].

        A sequence's tokens lie in its blocks in order, wherever in the pool those are:

            block_tables[s]  =  [ 7, 2, 9 ]                  block_size 4, context 10

            pool  ... │ 2: t4 t5 t6 t7 │ ... │ 7: t0 t1 t2 t3 │ ... │ 9: t8 t9  ·  · │ ...

        so gathering them by the table gives t0 … t9 and the unused end of the last block, which is cut off.
        """
        output = torch.empty_like(q)
        for s, context in enumerate(batch.context_lens.tolist()):
            start, end = batch.query_start[s : s + 2].tolist()
            table = self._indices(batch.block_tables[s, : -(-context // self.block_size)])

            # [blocks of s, Hkv, block_size, D] → [Hkv, 1, C, D]: contiguous in time, one for each KV head
            k = keys[table].transpose(0, 1).flatten(1, 2)[:, None, :context].float()
            v = values[table].transpose(0, 1).flatten(1, 2)[:, None, :context].float()
            # [N, H, D] → [Hkv, G, N, D]: query head i reads KV head i // G
            rows = q[start:end].unflatten(1, (self.config.num_kv_heads, -1)).permute(1, 2, 0, 3)

            scores = rows @ k.transpose(2, 3) * self.config.head_dim**-0.5  # [Hkv, G, N, C]
            # A row sees the tokens up to its own position; those after it in this chunk are hidden.
            positions = self._indices(batch.positions[start:end])
            hidden = torch.arange(context, device=q.device) > positions[:, None]  # [N, C]
            probabilities = scores.masked_fill(hidden, -torch.inf).softmax(dim=3)
            output[start:end] = (probabilities @ v).permute(2, 0, 1, 3).flatten(1, 2)  # [N, H, D]
        return output

    def _norm(self, x: Tensor, name: str) -> Tensor:
        """LayerNorm, or RMSNorm, over the last dimension, in float32."""
        weight, eps = self.weights[f"{name}.weight"], self.config.norm_eps
        if self.config.norm == "rmsnorm":
            return x * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + eps) * weight
        return F.layer_norm(x, weight.shape, weight, self.weights.get(f"{name}.bias"), eps)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        """x @ W.T + b: [rows, inputs] → [rows, outputs]."""
        weight = self.weights[f"{name}.weight"]
        x = x.to(weight.dtype).float()  # with bfloat16: rounded to it; the products are exact in float32
        return F.linear(x, weight.float(), self.weights.get(f"{name}.bias"))

    def _indices(self, array: IntArray) -> Tensor:
        return torch.tensor(array, dtype=torch.int64, device=self.device)


def default_device() -> str:
    """What ``device="auto"`` means here: "cuda" where there is one, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def free_cuda_memory(device: str) -> int:
    """Bytes that are free on a CUDA device.

    Raises:
        ConfigError: there is no such device.
    """
    _check_device(device)
    return int(torch.cuda.mem_get_info(device)[0])


def _check_device(device: str) -> None:
    kind, _, index = device.partition(":")
    if kind == "cpu" and not index:
        return
    if kind != "cuda" or (index and not index.isdecimal()):
        raise ConfigError(f'the torch executor runs on "cpu", "cuda" or "cuda:<index>", not on {device!r}')
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device {device!r} was asked for, but torch {torch.__version__} finds no CUDA device"
        )
    if int(index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"there is no device {device!r}: torch finds {torch.cuda.device_count()} of them")


def _pool_tensor(pool: KVPool | KVGeometry, device: str) -> Tensor:
    """The pool as a tensor of its geometry's shape: a view of host memory, or memory of the device."""
    if isinstance(pool, KVGeometry):
        return torch.zeros(pool.shape, dtype=_DTYPES[pool.dtype], device=device)
    if device != "cpu":
        raise ConfigError(f"a pool in host memory serves only the cpu, not {device!r}: give its geometry")
    return torch.from_numpy(pool.data).view(_DTYPES[pool.geometry.dtype])  # uint16 bit patterns → bfloat16


def _weight(tensor: WeightTensor, dtype: Any, device: str) -> Tensor:
    """The tensor on the device, in its own memory; bfloat16 bits are taken as they are."""
    if tensor.dtype == "bfloat16":
        values = torch.from_numpy(tensor.data.copy()).view(torch.bfloat16)
    else:
        values = torch.from_numpy(np.array(tensor.to_float32()))
    return values.to(device, dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding by halves: the pair (x[i], x[i + D / 2]) is turned by angle i.

    x: [T, heads, D]. Su et al., "RoFormer", 2021; the pairing is GPT-NeoX's.
    """
    a, b = x.chunk(2, dim=2)  # [T, heads, D / 2] each
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=2)
