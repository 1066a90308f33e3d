"""Embeddings: what transformers' hidden states give, and bit for bit the same whatever runs beside them."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from fakes import fake_hidden
from helpers_engine import TINY, Setup, assert_idle, run, tiny_checkpoint

from minivllm import LLM, EmbeddingParams, SamplingParams
from minivllm.engine.inference_engine import InferenceEngine
from minivllm.engine.pooling import Pooler
from minivllm.errors import ContextLengthError, ModelError, RequestError
from minivllm.kv_cache.kv_pool import KVGeometry, KVPool

PROMPT = [random.Random(1).randrange(1, 256) for _ in range(40)]
NATIVE = Setup(model="native", eos=())
POOLINGS = ["mean", "last"]
Vector = npt.NDArray[np.float32]


def embedding(engine: InferenceEngine, prompt: Any, pooling: Any = "mean", **more: Any) -> Vector:
    """Of one more request, which is alone in the engine."""
    (request_id,) = engine.add_requests([prompt], [EmbeddingParams(pooling, **more)])
    output = run(engine)[request_id]
    assert output.embedding is not None and output.embedding.dtype == np.float32
    (choice,) = output.outputs
    assert (choice.token_ids, choice.text, choice.finish_reason) == ([], "", "stop")
    return output.embedding


@pytest.fixture(scope="module")
def expected() -> dict[str, Vector]:
    return {pooling: embedding(NATIVE.engine(), PROMPT, pooling) for pooling in POOLINGS}


@pytest.mark.torch
@pytest.mark.parametrize("executor", ["native", "torch"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_are_those_of_transformers(family: str, executor: Any, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    if family == "llama":
        config = transformers.LlamaConfig(
            vocab_size=90, hidden_size=96, intermediate_size=128, num_hidden_layers=2, num_attention_heads=6,
            num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).eval()
    else:
        config = transformers.GPT2Config(
            vocab_size=90,
            n_positions=128,
            n_embd=96,
            n_layer=2,
            n_head=6,
            bos_token_id=None,
            eos_token_id=None,
        )
        model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor += 0.1 * torch.randn_like(tensor)
    model.save_pretrained(tmp_path)
    reference = transformers.AutoModel.from_pretrained(tmp_path).eval()
    prompts = [np.random.default_rng(n).integers(0, 90, n).tolist() for n in (1, 7, 100)]
    llm = LLM(tmp_path, dtype="float32", executor=executor, device="cpu", num_blocks=20,
              max_num_batched_tokens=16)  # fmt: skip
    found = {pooling: llm.embed(prompts, pooling, normalize=False, use_tqdm=False) for pooling in POOLINGS}
    for i, prompt in enumerate(prompts):
        with torch.inference_mode():
            states = reference(torch.tensor([prompt])).last_hidden_state[0].numpy()
        np.testing.assert_allclose(found["mean"][i], states.mean(axis=0), rtol=0, atol=2e-5)
        np.testing.assert_allclose(found["last"][i], states[-1], rtol=0, atol=2e-5)
        scaled = llm.embed(prompt)
        assert scaled.shape == (1, 96) and np.linalg.norm(scaled) == pytest.approx(1, abs=1e-6)
        np.testing.assert_allclose(scaled[0], found["mean"][i] / np.linalg.norm(found["mean"][i]), atol=1e-6)
    assert_idle(llm.engine)


@pytest.mark.parametrize("budget", [1, 7, 64])
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_chunks_blocks_and_the_cache_change_no_bit(
    expected: dict[str, Vector], pooling: str, block_size: int, budget: int
) -> None:
    engine = replace(NATIVE, budget=budget, block_size=block_size, num_blocks=200).engine()
    for _ in range(2):  # the second time its prompt is in the cache
        assert embedding(engine, PROMPT, pooling).tobytes() == expected[pooling].tobytes()


@pytest.mark.parametrize("pooling", POOLINGS)
def test_company_changes_no_bit(expected: dict[str, Vector], pooling: Any) -> None:
    engine = replace(NATIVE, budget=24).engine()
    writers = [engine.add_request([i] * 20, SamplingParams(seed=i, max_tokens=30)) for i in range(4)]
    others = engine.add_requests(
        [PROMPT[:30], PROMPT[5:]], [EmbeddingParams("mean"), EmbeddingParams("last")]
    )
    (ours,) = engine.add_requests([PROMPT], [EmbeddingParams(pooling)])
    outputs = run(engine)
    assert outputs[ours].embedding.tobytes() == expected[pooling].tobytes()  # type: ignore[union-attr]
    assert all(len(outputs[writer].outputs[0].token_ids) == 30 for writer in writers)
    assert all(outputs[other].embedding is not None for other in others)
    alone = Setup(model="native", eos=()).engine()
    writer = alone.add_request([0] * 20, SamplingParams(seed=0, max_tokens=30))
    assert run(alone)[writer].outputs == outputs[writers[0]].outputs


@pytest.mark.parametrize("pooling", POOLINGS)
def test_preempted_it_is_begun_again(expected: dict[str, Vector], pooling: Any) -> None:
    engine = replace(NATIVE, num_blocks=12, block_size=4, budget=5).engine()
    engine.add_request([9] * 10, SamplingParams(max_tokens=30))
    for _ in range(3):
        engine.step()
    engine.scheduler._has_room_to_stay = lambda *_: True  # type: ignore[method-assign]
    (ours,) = engine.add_requests([PROMPT], [EmbeddingParams(pooling)])
    outputs = run(engine)
    assert engine.metrics().preemptions > 0
    assert outputs[ours].embedding.tobytes() == expected[pooling].tobytes()  # type: ignore[union-attr]


def test_a_mean_computes_every_row_and_a_last_state_what_is_not_cached() -> None:
    engine = Setup(budget=16).engine()
    states = np.array([fake_hidden(PROMPT[: n + 1]) for n in range(len(PROMPT))])
    for pooling, wanted, cached in [("mean", states.mean(axis=0), 0), ("last", states[-1], 39),
                                    ("mean", states.mean(axis=0), 0)]:  # fmt: skip
        (request_id,) = engine.add_requests([PROMPT], [EmbeddingParams(pooling, normalize=False)])  # type: ignore[arg-type]
        output = run(engine)[request_id]
        assert output.embedding is not None
        np.testing.assert_allclose(output.embedding, wanted, rtol=1e-6)
        assert output.num_cached_tokens <= cached and bool(output.num_cached_tokens) == bool(cached)
    assert engine.metrics().generated_tokens == 0


def test_what_it_computed_is_there_for_others() -> None:
    engine = Setup().engine()
    embedding(engine, PROMPT)
    request_id = engine.add_request(PROMPT)
    assert run(engine)[request_id].num_cached_tokens == 32


def test_the_executors_agree(expected: dict[str, Vector]) -> None:
    torch_ = pytest.importorskip("minivllm.executors.torch_")
    engine = NATIVE.engine()
    geometry = KVGeometry(TINY.num_layers, 64, TINY.num_kv_heads, 16, TINY.head_dim, "float32")
    engine.executor = torch_.TorchExecutor(tiny_checkpoint(), KVPool.reserve(geometry), "float32")
    for pooling in POOLINGS:
        np.testing.assert_allclose(embedding(engine, PROMPT, pooling), expected[pooling], rtol=0, atol=1e-5)


def test_bfloat16_is_near(expected: dict[str, Vector]) -> None:
    found = embedding(replace(NATIVE, dtype="bfloat16").engine(), PROMPT)
    assert found @ expected["mean"] > 0.99


def test_the_pooler_knows_what_is_no_vector() -> None:
    def pooled(rows: list[list[float]], normalize: bool = True) -> Any:
        pooler = Pooler(EmbeddingParams("mean", normalize))
        for i, row in enumerate(rows):
            pooler.add(np.array([row], np.float32), begins=i == 0)
        found = pooler.embedding()
        return None if found is None else found.tolist()

    assert pooled([[1, 2], [5, 6]], normalize=False) == [3, 4]
    assert pooled([[1, 2], [5, 6]]) == [np.float32(0.6), np.float32(0.8)]
    assert pooled([[0, 0]]) == [0, 0]
    assert pooled([[3e38, 3e38], [3e38, 3e38]], normalize=False) == [np.float32(3e38)] * 2
    assert pooled([[np.nan, 1]]) is pooled([[np.inf, 1]]) is pooled([[np.inf, 1], [-np.inf, 1]]) is None


def test_abort_gives_back_the_blocks() -> None:
    engine = Setup(budget=16).engine()
    (request_id,) = engine.add_requests([PROMPT], [EmbeddingParams()])
    engine.step()
    output = engine.abort(request_id)
    assert output is not None and output.embedding is None and output.outputs[0].finish_reason == "abort"
    assert_idle(engine)


def test_a_broken_model_fails_that_request_only() -> None:
    engine = Setup(eos=()).engine()
    engine.executor.damaged = 7  # type: ignore[attr-defined]
    broken, whole = engine.add_requests([[7, 8], [8, 7]], [EmbeddingParams()] * 2)
    writer = engine.add_request([5], SamplingParams(max_tokens=3))
    outputs = run(engine)
    assert outputs[broken].embedding is None and outputs[broken].outputs[0].finish_reason == "error"
    assert outputs[whole].embedding is not None
    assert outputs[writer].outputs[0].finish_reason == "length"


def test_offline(llm: LLM) -> None:
    assert llm.embed([]).size == 0
    found = llm.embed(["ab", "cd", [97, 98]], "last")
    assert found.shape == (3, TINY.hidden_size) and found.dtype == np.float32
    assert found[0].tobytes() == found[2].tobytes() != found[1].tobytes()
    llm.engine.executor.execute = lambda *_: 1 / 0  # type: ignore[method-assign, assignment]
    with pytest.raises(ZeroDivisionError):
        llm.embed("ab")
    assert_idle(llm.engine)


def test_offline_no_numbers(llm: LLM) -> None:
    engine = Setup().engine()
    engine.executor.damaged = 97  # type: ignore[attr-defined]
    llm.engine = engine
    with pytest.raises(ModelError, match="failed"):
        llm.embed("ab")


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> LLM:
    """An LLM over the tiny model."""
    monkeypatch.setattr("minivllm.llm.create_engine", lambda _: NATIVE.engine())
    return LLM("tiny")


@pytest.mark.parametrize(
    ("prompts", "settings", "param"),
    [
        ("", {}, "prompt"),
        (["a", ""], {}, "prompt"),
        ([[]], {}, "prompt"),
        ([[1, 256]], {}, "prompt"),
        (5, {}, "prompt"),
        ("a", {"pooling": "max"}, "pooling"),
        ("a", {"pooling": ["mean"]}, "pooling"),
        ("a", {"normalize": 1}, "normalize"),
        ("a", {"cache_salt": ""}, "cache_salt"),
    ],
)
def test_what_is_wrong_is_refused(llm: LLM, prompts: Any, settings: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refusal:
        llm.embed(prompts, **settings)
    assert refusal.value.param == param
    assert_idle(llm.engine)


def test_a_prompt_that_is_too_long(llm: LLM) -> None:
    llm.embed("a" * 1023)
    with pytest.raises(ContextLengthError, match="prompt 2 of 2: the prompt has 1,024 tokens"):
        llm.embed(["a", "a" * 1024])


def test_generation_takes_no_such_settings(llm: LLM) -> None:
    with pytest.raises(RequestError, match="generate takes SamplingParams"):
        llm.generate("a", EmbeddingParams())  # type: ignore[arg-type]
