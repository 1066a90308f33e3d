"""A model with random weights, for measuring speed: a shape is all that speed depends on.

    python benchmarks/make_random_model.py llama-1.1b /tmp/llama-1.1b              safetensors, bfloat16
    python benchmarks/make_random_model.py llama-1.1b /tmp/llama-1.1b-q4.gguf --type Q4_0

Its text is noise: prompts are token ids, as ``mini-vllm bench`` makes them. Equal seeds, equal weights.
"""

import argparse
import sys
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from minivllm.errors import ConfigError
from minivllm.models.config import ModelConfig, tensor_shapes
from minivllm.models.rope import as_config_field, inverse_frequencies
from minivllm.models.weights import Checkpoint, StoredTensor

#: name → vocab_size, hidden_size, intermediate_size, layers, heads, kv_heads, head_dim, context, tied head
SHAPES = {
    "llama-1.1b": (32000, 2048, 5632, 22, 32, 4, 64, 2048, False),  # TinyLlama's
    "llama-135m": (49152, 576, 1536, 30, 9, 3, 64, 8192, True),  # SmolLM2-135M's
    "llama-tiny": (512, 64, 192, 2, 4, 2, 16, 512, True),
}


def random_checkpoint(shape: str, seed: int) -> Checkpoint:
    """The shape's checkpoint; a tensor's weights are drawn when they are read."""
    vocab, hidden, inner, layers, heads, kv_heads, head_dim, context, tied = SHAPES[shape]
    config = ModelConfig(
        kind="llama", vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, num_layers=layers,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, max_position=context, norm="rmsnorm",
        norm_eps=1e-5, norm_bias=False, activation="silu", gated_mlp=True, qkv_bias=False, out_bias=False,
        mlp_bias=False, tied_head=tied, rope_inv_freq=as_config_field(inverse_frequencies(head_dim, 10000.0)),
    )  # fmt: skip

    def draw(name: str, size: tuple[int, ...]) -> npt.NDArray[np.float32]:
        if len(size) == 1:
            return np.ones(size, np.float32)
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        # Variance 1 / inputs: activations neither grow nor vanish.
        return rng.standard_normal(size, np.float32) * np.float32(size[1] ** -0.5)

    stored = {
        name: StoredTensor(size, "float32", lambda name=name, size=size: draw(name, size))  # type: ignore[misc]
        for name, size in tensor_shapes(config).items()
    }
    return Checkpoint(config, "bfloat16", Path(shape), (), None, stored)


def main() -> None:
    """Write what the command line asks for."""
    parser = argparse.ArgumentParser(description="Write a model with random weights, for measuring speed.")
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("out", type=Path, help="a directory (safetensors), or a file that ends in .gguf")
    parser.add_argument("--type", default="BF16", choices=["F16", "BF16", "Q8_0", "Q4_0"], help="of a GGUF")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    try:
        from minivllm.bench.export import write_gguf, write_hf
    except ConfigError as error:  # no gguf package
        sys.exit(f"make_random_model.py: {error}")
    checkpoint = random_checkpoint(arguments.shape, arguments.seed)
    if arguments.out.suffix == ".gguf":
        write_gguf(checkpoint, arguments.out, arguments.type)
    else:
        arguments.out.mkdir(parents=True, exist_ok=True)
        write_hf(checkpoint, arguments.out)


if __name__ == "__main__":
    main()
