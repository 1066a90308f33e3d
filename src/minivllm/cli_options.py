"""The options that commands share, as dataclasses, and ``spread``, which makes command lines of them."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_type_hints

import typer

from minivllm.config import Dtype, EngineConfig, ExecutorName, KVCacheDtype, QuantizationName
from minivllm.errors import ConfigError
from minivllm.sampling_params import SamplingParams


def _engine(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Engine")


def _sampling(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Sampling")


@dataclass(frozen=True)
class EngineOptions:
    """Settings of the engine: ``EngineConfig`` on the command line."""

    dtype: Annotated[Dtype, _engine("--dtype", help="Of the weights; auto: the checkpoint's.")] = "auto"
    quantization: Annotated[
        QuantizationName,
        _engine("--quantization", help="none; auto: the checkpoint's, unless --dtype is given; int8; int4."),
    ] = "auto"
    kv_cache_dtype: Annotated[
        KVCacheDtype, _engine("--kv-cache-dtype", help="auto: as --dtype; int8: half of bfloat16's memory.")
    ] = "auto"
    block_size: Annotated[int, _engine("--block-size", help="Tokens in a KV block.")] = 16
    num_blocks: Annotated[int | None, _engine("--num-blocks", help="KV blocks; default: by memory.")] = None
    kv_cache_memory: Annotated[
        float | None,
        _engine("--kv-cache-memory", help="MiB for the KV cache; default: a share of what is free."),
    ] = None
    max_num_batched_tokens: Annotated[
        int, _engine("--max-num-batched-tokens", help="Tokens computed in one step, at most.")
    ] = 512
    max_model_len: Annotated[
        int | None, _engine("--max-model-len", help="Context length; default: what model and cache allow.")
    ] = None
    executor: Annotated[ExecutorName, _engine("--executor", help="native: C++; torch: the reference.")] = (
        "native"
    )
    device: Annotated[str, _engine("--device", help="auto, cpu, or cuda (torch executor).")] = "auto"
    threads: Annotated[int | None, _engine("--threads", help="Default: the cores this process may use.")] = (
        None
    )

    def config(self, model: str) -> EngineConfig:
        """The engine's configuration for this model, with every value checked."""
        megabytes = self.kv_cache_memory
        if megabytes is not None and not 1e-6 <= megabytes <= 2**30:  # a byte, and as EngineConfig's
            raise ConfigError(
                f"kv_cache_memory is {megabytes} MiB; it must be from 0.000001 to {2**30:,} MiB"
            )
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["kv_cache_memory"] = None if megabytes is None else int(megabytes * 2**20)
        values["quantization"] = None if self.quantization == "none" else self.quantization
        return EngineConfig(model=model, **values)


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen: ``SamplingParams`` on the command line."""

    temperature: Annotated[float, _sampling("--temperature", "-t", help="0: always the likeliest token.")] = (
        1.0
    )
    top_k: Annotated[int, _sampling("--top-k", help="Keep the K likeliest tokens; 0: all.")] = 0
    top_p: Annotated[
        float, _sampling("--top-p", help="Keep the likeliest tokens up to this probability.")
    ] = 1.0
    min_p: Annotated[
        float, _sampling("--min-p", help="Keep tokens at least this likely, beside the likeliest.")
    ] = 0.0
    repetition_penalty: Annotated[float, _sampling("--repetition-penalty", help="1: none.")] = 1.0
    presence_penalty: Annotated[float, _sampling("--presence-penalty", help="0: none.")] = 0.0
    frequency_penalty: Annotated[float, _sampling("--frequency-penalty", help="0: none.")] = 0.0
    seed: Annotated[
        int | None, _sampling("--seed", help="Same seed, same text; default: another one in each run.")
    ] = None
    stop: Annotated[
        list[str] | None, _sampling("--stop", help="A string that ends the text; may be repeated.")
    ] = None
    min_tokens: Annotated[int, _sampling("--min-tokens", help="Nothing ends the text before this many.")] = 0
    ignore_eos: Annotated[bool, _sampling("--ignore-eos", help="Go on after the model's end token.")] = False

    def params(self, max_tokens: int | None, logprobs: int | None = None) -> SamplingParams:
        """Sampling parameters, with every value checked."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["stop"] = tuple(self.stop or ())
        return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **values)


@dataclass(frozen=True)
class ChatSamplingOptions(SamplingOptions):
    """The same, with the defaults of a conversation."""

    temperature: Annotated[float, _sampling("--temperature", "-t", help="0: always the likeliest token.")] = (
        0.7
    )
    top_p: Annotated[
        float, _sampling("--top-p", help="Keep the likeliest tokens up to this probability.")
    ] = 0.95


def spread(**groups: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command each field of these dataclasses as an option of its own.

    The command takes one parameter for each group, by its name, and gets the dataclass made of the options.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            for name, group in groups.items():
                values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
            command(**values)

        hints = get_type_hints(command, include_extras=True)
        parameters = [p for name, p in inspect.signature(command).parameters.items() if name not in groups]
        for group in groups.values():
            hints |= get_type_hints(group, include_extras=True)
            parameters += [
                inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default)
                for field in fields(group)
            ]
        parameters = [p.replace(kind=p.KEYWORD_ONLY, annotation=hints[p.name]) for p in parameters]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate
