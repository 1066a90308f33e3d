"""mini-vllm: a small LLM inference engine with a paged KV cache.

Names are resolved when they are first used, so that ``import minivllm`` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minivllm.config import EngineConfig
    from minivllm.engine.inference_engine import InferenceEngine
    from minivllm.llm import LLM
    from minivllm.sampling_params import BeamSearchParams, EmbeddingParams, SamplingParams
    from minivllm.structured_outputs import StructuredOutputsParams

__all__ = [
    "LLM",
    "BeamSearchParams",
    "EmbeddingParams",
    "EngineConfig",
    "InferenceEngine",
    "SamplingParams",
    "StructuredOutputsParams",
]
__version__ = "0.1.0"

_HOMES = {
    "LLM": "minivllm.llm",
    "SamplingParams": "minivllm.sampling_params",
    "BeamSearchParams": "minivllm.sampling_params",
    "EmbeddingParams": "minivllm.sampling_params",
    "StructuredOutputsParams": "minivllm.structured_outputs",
    "InferenceEngine": "minivllm.engine.inference_engine",
    "EngineConfig": "minivllm.config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # found directly from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
