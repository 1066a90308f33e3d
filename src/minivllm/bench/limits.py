"""The least time that a workload can take on a machine: arithmetic over a model's shape, nothing measured.

A step of the model reads its packed weights once and the cache of every sequence once, and does two
operations for each weight and token. Its least time is the longer of the two: bytes over the read bandwidth,
operations over the arithmetic peak. A workload is the steps that no schedule can do without: all prompts in
one step (a shared beginning once), then one step for each further token. Knows nothing of engines or clocks.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from minivllm.models.config import ModelConfig, tensor_shapes

Number = Literal["float32", "bfloat16", "int8"]
Format = Literal["float32", "bfloat16", "int8", "int4"]

#: Bits of a weight in memory, its share of a group's scale (and minimum) included
WEIGHT_BITS: dict[Format, float] = {"float32": 32, "bfloat16": 16, "int8": 8.5, "int4": 5}
#: What is multiplied: quantised weights meet 8-bit activations
_ARITHMETIC: dict[Format, Number] = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "int8": "int8",
    "int4": "int8",
}


@dataclass(frozen=True)
class MachineRates:
    """What the machine does at most, all threads together."""

    bandwidth: float  #: bytes read a second
    peak: Mapping[Number, float]  #: operations a second; a multiplication and an addition are two


@dataclass(frozen=True)
class ModelCosts:
    """What a step costs, by what it depends on."""

    step_bytes: int  #: packed weights that every step reads: all but an embedding that is not also the head
    token_weights: Mapping[Number, int]  #: weights that every token is multiplied by, those of the layers
    logit_weights: Mapping[Number, int]  #: weights that a row with logits is multiplied by: the head's
    kv_bytes: int  #: of one token in the cache, keys and values of all layers
    pair_operations: int  #: for one query token and one key that it sees, in all layers
    attention: Number  #: what attention multiplies: the cache's dtype, or bfloat16 with an int8 cache

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        formats: Mapping[str, Format],
        model_bytes: int,
        kv_dtype: Literal["float32", "bfloat16"],
        kv_bytes: int,
    ) -> "ModelCosts":
        """The costs of a model.

        Args:
            config: its shape.
            formats: of each matrix, by canonical name.
            model_bytes: memory of all packed weights.
            kv_dtype: what attention multiplies.
            kv_bytes: bytes of one token in the cache, over all layers.
        """
        shapes = {name: shape for name, shape in tensor_shapes(config).items() if name in formats}
        bits = {name: math.prod(shape) * WEIGHT_BITS[formats[name]] for name, shape in shapes.items()}
        only_looked_up = 0 if config.tied_head else bits["embed.weight"] / 8
        head = "embed.weight" if config.tied_head else "head.weight"
        layers: dict[Number, int] = {}
        for name, shape in shapes.items():
            if name.startswith("layers."):
                number = _ARITHMETIC[formats[name]]
                layers[number] = layers.get(number, 0) + math.prod(shape)
        return cls(
            step_bytes=int(model_bytes - only_looked_up),
            token_weights=layers,
            logit_weights={_ARITHMETIC[formats[head]]: math.prod(shapes[head])},
            kv_bytes=kv_bytes,
            # one product for the score and one for the weighted value, each of head_dim pairs
            pair_operations=4 * config.num_layers * config.num_heads * config.head_dim,
            attention=kv_dtype,
        )


@dataclass(frozen=True)
class Step:
    """One step of a workload. Counts of all its sequences together."""

    tokens: int  #: rows computed
    logit_rows: int
    pairs: int  #: (query token, key) pairs: how many keys each row sees, summed up
    cached_tokens: int  #: tokens of the cache that are read or written, a shared one once


@dataclass(frozen=True)
class LeastTime:
    """Seconds that something takes at least, and what bounds it."""

    memory: float  #: summed over the steps that memory bounds
    arithmetic: float  #: summed over the steps that arithmetic bounds

    @property
    def seconds(self) -> float:
        """Both together: the steps follow each other."""
        return self.memory + self.arithmetic

    def __add__(self, other: "LeastTime") -> "LeastTime":
        return LeastTime(self.memory + other.memory, self.arithmetic + other.arithmetic)


def step_time(step: Step, costs: ModelCosts, rates: MachineRates) -> LeastTime:
    """The longer of the times that the step's bytes and its operations take."""
    memory = (costs.step_bytes + step.cached_tokens * costs.kv_bytes) / rates.bandwidth
    arithmetic = step.pairs * costs.pair_operations / rates.peak[costs.attention]
    for rows, matrices in ((step.tokens, costs.token_weights), (step.logit_rows, costs.logit_weights)):
        arithmetic += sum(2 * rows * count / rates.peak[number] for number, count in matrices.items())
    return LeastTime(memory, 0.0) if memory >= arithmetic else LeastTime(0.0, arithmetic)


@dataclass(frozen=True)
class Shape:
    """So many requests at once, all alike."""

    requests: int
    prompt_len: int  #: tokens of a prompt, the shared ones included
    output_len: int
    shared_len: int = 0  #: tokens at the beginning that all prompts have in common

    def prefill(self) -> Step:
        """All prompts; the last row of each yields a token."""
        own = self.prompt_len - self.shared_len
        tokens = self.shared_len + self.requests * own
        pairs = _triangle(self.shared_len) + self.requests * (own * self.shared_len + _triangle(own))
        return Step(tokens, self.requests, pairs, tokens)

    def decode(self) -> Iterator[Step]:
        """One step for each token after the first."""
        for generated in range(1, self.output_len):
            context = self.prompt_len + generated
            cached = self.shared_len + self.requests * (context - self.shared_len)
            yield Step(self.requests, self.requests, self.requests * context, cached)


def prefill_time(shape: Shape, costs: ModelCosts, rates: MachineRates) -> LeastTime:
    """Until all requests have their first token."""
    return step_time(shape.prefill(), costs, rates)


def decode_time(shape: Shape, costs: ModelCosts, rates: MachineRates) -> LeastTime:
    """From the first token to the last."""
    steps = (step_time(step, costs, rates) for step in shape.decode())
    return sum(steps, start=LeastTime(0.0, 0.0))


def workload_time(shape: Shape, costs: ModelCosts, rates: MachineRates) -> LeastTime:
    """The whole workload, prompts included."""
    return prefill_time(shape, costs, rates) + decode_time(shape, costs, rates)


def _triangle(n: int) -> int:
    """Pairs among n tokens, each of which sees itself and those before it."""
    return n * (n + 1) // 2
