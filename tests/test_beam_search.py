"""Beam search against transformers, on tiny random models; beams share blocks, and give them back."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers_engine import TINY, Setup, answer, assert_idle, run, tiny_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.engine.inference_engine import InferenceEngine
from minivllm.engine.outputs import RequestOutput
from minivllm.errors import ModelError, RequestError
from minivllm.sampling_params import BeamSearchParams, SamplingParams

PROMPT = [random.Random(1).randrange(1, 256) for _ in range(40)]


def search(engine: InferenceEngine, prompt: list[int], params: BeamSearchParams) -> RequestOutput:
    (request_id,) = engine.add_requests([prompt], [params])
    return run(engine)[request_id]


def found(output: RequestOutput) -> list[tuple[list[int], float | None, str | None]]:
    return [(o.token_ids, o.cumulative_logprob, o.finish_reason) for o in output.outputs]


# --- against transformers ---


@pytest.fixture(scope="module")
def reference() -> Any:
    """The tiny model of helpers_engine, as transformers runs it."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=TINY.vocab_size,
        hidden_size=TINY.hidden_size,
        intermediate_size=TINY.intermediate_size,
        num_hidden_layers=TINY.num_layers,
        num_attention_heads=TINY.num_heads,
        num_key_value_heads=TINY.num_kv_heads,
        head_dim=TINY.head_dim,
        max_position_embeddings=TINY.max_position,
        rms_norm_eps=TINY.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    names = {"embed": "model.embed_tokens", "final_norm": "model.norm"}
    parts = {
        "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "q": "self_attn.q_proj",
        "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj", "gate": "mlp.gate_proj",
        "up": "mlp.up_proj", "down": "mlp.down_proj",
    }  # fmt: skip
    state = {}
    for tensor in tiny_checkpoint().tensors():
        name = tensor.name.removesuffix(".weight")
        if name.startswith("layers."):
            _, layer, part = name.split(".")
            name = f"model.layers.{layer}.{parts[part]}"
        else:
            name = names[name]
        state[f"{name}.weight"] = torch.from_numpy(np.array(tensor.to_float32()))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model


def expected(
    model: Any, prompt: list[int], params: BeamSearchParams, eos: list[int]
) -> list[tuple[list[int], float]]:
    """Output tokens and scores of transformers' beams, the best first."""
    import torch

    with torch.no_grad():
        result = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            eos_token_id=None if params.ignore_eos else eos,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    texts = []
    for sequence, score in zip(result.sequences.tolist(), result.sequences_scores.tolist(), strict=True):
        output = sequence[len(prompt) :]
        ends = [] if params.ignore_eos else [i for i, token_id in enumerate(output) if token_id in eos]
        texts.append((output[: ends[0] + 1] if ends else output, score))
    return texts


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize(("width", "length_penalty"), [(2, 1.0), (3, 0.0), (4, 2.0), (8, -1.0), (5, 1.0)])
def test_finds_what_transformers_finds(
    reference: Any, width: int, length_penalty: float, early_stopping: Any
) -> None:
    rng = random.Random(width)
    ended = 0
    for eos in ([7], list(range(30))):
        setup = Setup(model="native", eos=tuple(eos), block_size=4, num_blocks=300)
        prompt = [rng.randrange(1, 256) for _ in range(rng.randrange(1, 30))]
        params = BeamSearchParams(width, 12, length_penalty, early_stopping)
        got = search(setup.engine(), prompt, params).outputs
        want = expected(reference, prompt, params, eos)
        assert [choice.token_ids for choice in got] == [tokens for tokens, _ in want]
        for choice, (tokens, score) in zip(got, want, strict=True):
            assert choice.cumulative_logprob is not None
            np.testing.assert_allclose(
                choice.cumulative_logprob / len(tokens) ** length_penalty, score, rtol=1e-4, atol=1e-5
            )
            assert choice.finish_reason == ("stop" if tokens[-1] in eos else "length")
            ended += choice.finish_reason == "stop"
    assert ended or length_penalty > 1  # which favours the longest


def test_ignores_end_tokens_when_asked(reference: Any) -> None:
    params = BeamSearchParams(4, 10, ignore_eos=True)
    got = search(Setup(model="native", eos=tuple(range(100))).engine(), PROMPT, params).outputs
    assert [o.token_ids for o in got] == [t for t, _ in expected(reference, PROMPT, params, [])]
    assert {o.finish_reason for o in got} == {"length"}


# --- in the engine ---


def held_blocks(engine: InferenceEngine) -> int:
    return engine.metrics().num_blocks - engine.metrics().num_free_blocks


def test_beams_share_their_blocks_and_compute_the_prompt_once() -> None:
    engine = Setup(model="native", num_blocks=256, budget=600).engine()
    prompt = [random.Random(2).randrange(1, 256) for _ in range(512)]
    engine.add_requests([prompt], [BeamSearchParams(8, 64, ignore_eos=True)])
    most = 0
    while engine.has_unfinished_requests():
        engine.step()
        engine.kv_cache.check_integrity()
        most = max(most, held_blocks(engine))
    assert engine.metrics().computed_tokens == 512 + 8 * 63
    assert most < 32 + 8 * 4, "beams have tokens in common, besides the prompt"
    assert_idle(engine)


@pytest.mark.parametrize(
    ("block_size", "num_blocks", "budget"), [(16, 24, 64), (1, 235, 40), (5, 51, 40), (4, 62, 64)]
)
@pytest.mark.parametrize("caching", [True, False])
def test_nothing_changes_what_is_found(block_size: int, num_blocks: int, budget: int, caching: bool) -> None:
    rng = random.Random(block_size)
    stem = [rng.randrange(1, 256) for _ in range(50)]
    prompts = [stem[: rng.randrange(1, 50)] for _ in range(5)] + [stem[:32]] * 2
    params = [BeamSearchParams(rng.randrange(1, 6), 40, ignore_eos=i % 2 == 0) for i in range(len(prompts))]
    setup = Setup(model="native", eos=(3, 4))
    want = [found(search(setup.engine(), *request)) for request in zip(prompts, params, strict=True)]
    sampled = SamplingParams(n=2, max_tokens=30, temperature=0.8, seed=3, ignore_eos=True)
    wanted_samples = [o.token_ids for o in answer(setup.engine(), stem, sampled).outputs]
    engine = replace(
        setup, block_size=block_size, num_blocks=num_blocks, budget=budget, prefix_caching=caching
    ).engine()
    for _ in range(2):
        ids = engine.add_requests(prompts, params)
        other = engine.add_request(stem, sampled)
        outputs = run(engine)
        assert [found(outputs[i]) for i in ids] == want
        assert [o.token_ids for o in outputs[other].outputs] == wanted_samples
    assert engine.metrics().preemptions > 0


def test_a_stream_has_the_answers_at_the_end() -> None:
    engine = Setup(model="native").engine()
    engine.add_requests([PROMPT], [BeamSearchParams(3, 5)], ["r"], stream=True)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    (output,) = outputs
    assert output.finished and len(output.outputs) == 3
    assert [o.index for o in output.outputs] == [0, 1, 2]


def test_text_is_without_the_end_token() -> None:
    engine = Setup(model="native", eos=tuple(range(128, 160))).engine()
    output = search(engine, [1, 2, 3], BeamSearchParams(2, 30))
    for choice in output.outputs:
        tokens = choice.token_ids[: -1 if choice.finish_reason == "stop" else None]
        assert (
            choice.text == bytes(tokens).decode(errors="replace").rstrip("\ufffd") or "\ufffd" in choice.text
        )
    assert "stop" in {choice.finish_reason for choice in output.outputs}


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_abort_gives_the_beams_as_they_are(steps: int) -> None:
    engine = Setup(model="native").engine()
    (request_id,) = engine.add_requests([PROMPT], [BeamSearchParams(3, 50, ignore_eos=True)])
    for _ in range(steps):
        engine.step()
    output = engine.abort(request_id)
    assert output is not None and output.finished
    assert [len(choice.token_ids) for choice in output.outputs] == [steps] * (3 if steps else 1)
    assert {choice.finish_reason for choice in output.outputs} == {"abort"}
    run(engine)


def test_damaged_logits_end_the_search() -> None:
    engine = Setup().engine()
    engine.executor.damaged = 9
    (request_id,) = engine.add_requests([[9, 1]], [BeamSearchParams(2)])
    with pytest.raises(ModelError, match=f"request '{request_id}'"):
        engine.step()
    assert [o.finish_reason for o in run(engine)[request_id].outputs] == ["error"]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_no_block_is_lost(data: st.DataObject) -> None:
    block_size = data.draw(st.sampled_from([1, 2, 4, 7]))
    engine = Setup(
        num_blocks=-(-90 // block_size) + data.draw(st.integers(0, 20)),
        block_size=block_size,
        budget=data.draw(st.sampled_from([6, 64])),
        eos=(1, 2),
    ).engine()
    ids = []
    for _ in range(data.draw(st.integers(1, 6))):
        prompt = data.draw(st.lists(st.integers(1, 2), min_size=1, max_size=20))
        params = BeamSearchParams(data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12)))
        ids += engine.add_requests([prompt], [params])
        for _ in range(data.draw(st.integers(0, 4))):
            engine.step()
            engine.kv_cache.check_integrity()
        if data.draw(st.integers(0, 5)) == 0:
            engine.abort(data.draw(st.sampled_from(ids)))
            engine.kv_cache.check_integrity()
    run(engine)


# --- refusals ---


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"beam_width": 0}, "beam_width must be an integer from 1 to 64, not 0"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens must be an integer from 1 to"),
        ({"beam_width": 2, "length_penalty": float("nan")}, "length_penalty must be a number from -5 to 5"),
        ({"beam_width": 2, "early_stopping": "always"}, "early_stopping must be true, false or 'never'"),
        ({"beam_width": 2, "early_stopping": 1}, "early_stopping must be true, false or 'never', not 1"),
        ({"beam_width": 2, "ignore_eos": None}, "ignore_eos must be true or false"),
    ],
)
def test_settings_are_checked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError) as caught:
        BeamSearchParams(**options)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("setup", "params", "said"),
    [
        (Setup(max_num_seqs=3), BeamSearchParams(4), "beam_width is 4, but they all run at once"),
        (Setup(num_blocks=4), BeamSearchParams(4), "4 times 16 tokens after a prompt of 40 take 10 blocks"),
        (Setup(eos=tuple(range(100))), BeamSearchParams(3), "takes 303 tokens to choose from"),
    ],
)
def test_what_cannot_run_is_refused(setup: Setup, params: BeamSearchParams, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        setup.engine().add_requests([PROMPT], [params])
    assert said in str(caught.value) and caught.value.param == "beam_width"
