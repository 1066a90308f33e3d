"""LLM and the factory, on a tiny checkpoint of the Hugging Face kind, from its files to its text."""

import inspect
import json
import logging
import os
import signal
import threading
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import FakeExecutor
from helpers_models import CONTEXT, HIDDEN, LLAMA_CONFIG, llama_tensors, write_hf
from helpers_text import byte_level_backend, write_hf_directory

from minivllm import LLM, BeamSearchParams, EngineConfig, SamplingParams
from minivllm.errors import ConfigError, ModelError, RequestError

VOCAB = 400
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}bot:{% endif %}"
)
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 400 tokens with a byte-level BPE and a chat template."""
    directory = tmp_path_factory.mktemp("model")
    tensors = llama_tensors()
    embedding = np.random.default_rng(1).standard_normal((VOCAB, HIDDEN)).astype(np.float32)
    tensors = {name: 0.3 * value for name, value in tensors.items()}
    tensors["model.embed_tokens.weight"] = embedding
    write_hf(directory, {**LLAMA_CONFIG, "vocab_size": VOCAB}, tensors)
    return write_hf_directory(directory, chat_template=TEMPLATE, eos_token="<|endoftext|>")


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(model, num_blocks=64, threads=1)


def free_blocks(llm: LLM) -> tuple[int, int]:
    metrics = llm.engine.metrics()
    return metrics.num_free_blocks, metrics.num_running + metrics.num_waiting


def test_settings_are_those_of_the_config() -> None:
    parameters = inspect.signature(LLM).parameters
    assert {name: p.default for name, p in parameters.items() if name != "model"} == {
        field.name: field.default for field in fields(EngineConfig) if field.name != "model"
    }
    assert all(p.kind is p.KEYWORD_ONLY for name, p in parameters.items() if name != "model")
    with pytest.raises(TypeError, match="unexpected keyword argument 'gpu_memory_utilization'"):
        LLM("m", gpu_memory_utilization=0.9)


def test_text_and_its_token_ids_are_answered_alike(llm: LLM) -> None:
    text = "the cat sat on the mat"
    ids = byte_level_backend().encode(text).ids
    (by_text,) = llm.generate(text, GREEDY)
    (by_ids,) = llm.generate(ids, GREEDY)
    assert by_text.prompt_token_ids == by_ids.prompt_token_ids == ids
    assert by_text.outputs == by_ids.outputs
    assert (by_text.prompt, by_ids.prompt) == (text, None)
    completion = by_text.outputs[0]
    assert completion.text == byte_level_backend().decode(completion.token_ids)


def test_several_answers_to_each_prompt(llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=8, seed=1, ignore_eos=True)
    outputs = llm.generate(["the dog", "the cat"], params)
    for output in outputs:
        assert [choice.index for choice in output.outputs] == [0, 1, 2]
        assert len({choice.text for choice in output.outputs}) == 3
        for choice in output.outputs:
            assert choice.text == byte_level_backend().decode(choice.token_ids)
    (chat,) = llm.chat([{"role": "user", "content": "the dog"}], params)
    assert len(chat.outputs) == 3


def test_beam_search_answers_with_the_likeliest(llm: LLM) -> None:
    params = BeamSearchParams(4, max_tokens=6, ignore_eos=True)
    first, second = llm.beam_search(["the dog", [5, 6, 7]], params, use_tqdm=False)
    for output in (first, second):
        logprobs = [choice.cumulative_logprob for choice in output.outputs]
        assert len(logprobs) == 4 and logprobs == sorted(logprobs, reverse=True)
    assert first.outputs[0].text == byte_level_backend().decode(first.outputs[0].token_ids)
    (greedy,) = llm.generate(
        "the dog", SamplingParams(max_tokens=6, temperature=0, logprobs=0, ignore_eos=True)
    )
    assert first.outputs[0].cumulative_logprob >= greedy.outputs[0].cumulative_logprob
    assert free_blocks(llm) == (64, 0)


def test_each_way_takes_its_own_params(llm: LLM) -> None:
    with pytest.raises(RequestError, match="a BeamSearchParams; generate takes SamplingParams"):
        llm.generate("a", BeamSearchParams(2))
    with pytest.raises(RequestError, match="a SamplingParams; beam_search takes BeamSearchParams"):
        llm.beam_search("a", SamplingParams())
    with pytest.raises(
        RequestError, match=r"^params is a list; beam_search takes BeamSearchParams"
    ) as caught:
        llm.beam_search("a", [BeamSearchParams(2)])  # type: ignore[arg-type]
    assert caught.value.param == "params"
    with pytest.raises(RequestError, match=r"^sampling_params is a str; generate") as caught:
        llm.generate("a", "greedy")  # type: ignore[arg-type]
    assert caught.value.param == "sampling_params"


def test_salts_and_reset(llm: LLM) -> None:
    prompt = list(range(100, 140))

    def cached(salt: str | None) -> int:
        return llm.generate(prompt, GREEDY, cache_salt=salt, priority=3)[0].num_cached_tokens

    llm.reset_prefix_cache()
    assert [cached(None), cached("x"), cached("x"), cached(None)] == [0, 0, 32, 32]
    llm.reset_prefix_cache()
    assert cached(None) == 0
    conversation = [{"role": "user", "content": "the dog sat on the mat " * 4}]
    assert llm.chat(conversation, GREEDY, cache_salt="y")[0].num_cached_tokens == 0
    assert llm.chat(conversation, GREEDY, cache_salt="y")[0].num_cached_tokens > 0
    assert llm.chat(conversation, GREEDY, cache_salt="z")[0].num_cached_tokens == 0


def test_results_are_in_the_order_of_the_prompts_each_with_its_own_params(llm: LLM) -> None:
    prompts = ["the dog", [5, 6, 7], "a", (9, 10)]
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (9, 1, 5, 3)]
    outputs = llm.generate(prompts, params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 1, 5, 3]
    for prompt, wish, output in zip(prompts, params, outputs, strict=True):
        assert llm.generate(prompt, wish)[0].outputs == output.outputs
    assert len(llm.generate(np.array([[1, 2], [3, 4]]), GREEDY)) == 2
    assert len(llm.generate(np.array([1, 2, 3, 4]), GREEDY)) == 1
    assert llm.generate([], GREEDY) == []


def test_one_wrong_prompt_and_none_is_run(llm: LLM) -> None:
    before = llm.engine.metrics()
    for prompts, params, message in [
        (["fine", ""], GREEDY, "the prompt is empty"),
        (["fine", [VOCAB]], GREEDY, "token id 400; the vocabulary is 0 to 399"),
        (["fine", [1] * CONTEXT], GREEDY, "leaves no room for an answer: max_model_len is 128"),
        (["fine", "fine"], [GREEDY], "there are 2 prompts but 1 sampling_params"),
        (["fine", "fine"], 3, "sampling_params is a int"),
        (7, GREEDY, "prompts is a int"),
        (
            {"prompt": "x"},
            GREEDY,
            "the prompt is a dict, which is not supported; give the string or the list",
        ),
        ([{"prompt_token_ids": [1]}], GREEDY, "the prompt is a dict, which is not supported"),
        ([{"prompt": "x"}, "y"], GREEDY, "prompt 1 of 2: the prompt is a dict, which is not supported"),
        (["x", {"prompt": "y"}], GREEDY, "prompt 2 of 2: the prompt is a dict, which is not supported"),
        ([[1], {"prompt": "y"}], GREEDY, "prompt 2 of 2: the prompt is a dict, which is not supported"),
        ([1, "x"], GREEDY, "'x' among its token ids"),
        ([None], GREEDY, "None among its token ids"),
        (np.array(5), GREEDY, "the prompt is a int"),
        (np.array("x"), GREEDY, "'x' among its token ids"),
        ([[5], [6], "", [7]], GREEDY, "prompt 3 of 4: the prompt is empty"),
        ([[5], 6], GREEDY, "prompt 2 of 2: the prompt is a int"),
    ]:
        with pytest.raises(RequestError, match=message):
            llm.generate(prompts, params)
    assert llm.engine.metrics() == before and not llm.engine.has_unfinished_requests()


def test_chat_renders_the_template(llm: LLM) -> None:
    hello = [{"role": "user", "content": "the cat"}]
    (output,) = llm.chat(hello, GREEDY)
    assert byte_level_backend().decode(output.prompt_token_ids) == "user: the cat\nbot:"
    begun = [*hello, {"role": "assistant", "content": "the dog"}]
    outputs = llm.chat([hello, begun], GREEDY, add_generation_prompt=False)
    assert [byte_level_backend().decode(o.prompt_token_ids) for o in outputs] == [
        "user: the cat\n",
        "user: the cat\nassistant: the dog\n",
    ]
    (output,) = llm.chat(begun, GREEDY, continue_final_message=True)
    assert byte_level_backend().decode(output.prompt_token_ids) == "user: the cat\nassistant: the dog"
    for wrong in ([], "hello", [{"role": "user"}]):
        with pytest.raises(RequestError):
            llm.chat(wrong, GREEDY)
    with pytest.raises(RequestError, match=r"conversation 2 of 2: messages\[0\] must have a role"):
        llm.chat([hello, [{"content": "x"}]], GREEDY)
    with pytest.raises(RequestError, match=r"text of .* bytes is longer than max_model_len, 128 tokens"):
        llm.chat([{"role": "user", "content": "x" * 10**6}], GREEDY)


def test_progress_of_several_prompts_is_shown_on_stderr(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b", "c"], GREEDY)
    captured = capsys.readouterr()
    assert "3/3" in captured.err and "tokens/s" in captured.err and captured.out == ""
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    llm.generate(["a"], GREEDY)
    assert capsys.readouterr().err == ""


class Interrupting(FakeExecutor):
    """Sends this process a Ctrl-C in its third step."""

    def execute(self, *arguments: Any) -> Any:
        result = super().execute(*arguments)
        if len(self.steps) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return result


def test_ctrl_c_gives_up_the_prompts_and_leaves_the_engine_usable(llm: LLM) -> None:
    expected = llm.generate("the cat", GREEDY)[0].outputs
    executor = llm.engine.executor
    llm.engine.executor = Interrupting(llm.engine.kv_cache.geometry)
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b", "c"], SamplingParams(max_tokens=50, ignore_eos=True))
        assert len(llm.engine.executor.steps) == 3, "the step was finished, and no other begun"
    finally:
        llm.engine.executor = executor
    assert free_blocks(llm) == (64, 0)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert llm.generate("the cat", GREEDY)[0].outputs == expected


def test_failing_step_raises_and_leaves_nothing_behind(llm: LLM) -> None:
    executor = llm.engine.executor
    llm.engine.executor = failing = FakeExecutor(llm.engine.kv_cache.geometry)
    failing.fail_at = 2
    try:
        with pytest.raises(RuntimeError, match="the fake model broke"):
            llm.generate(["a", "b", "c"], GREEDY)
    finally:
        llm.engine.executor = executor
    assert free_blocks(llm) == (64, 0)
    assert len(llm.generate(["a", "b"], GREEDY)) == 2, "outputs of the failed ones are nobody's"


def test_generate_works_outside_the_main_thread(llm: LLM) -> None:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(llm.generate(["a", "b"], GREEDY)))
    thread.start()
    thread.join(timeout=60)
    assert len(results) == 2


def test_threads_share_an_llm(llm: LLM) -> None:
    prompts = [[thread + 5, i + 3] for thread in range(4) for i in range(6)]
    expected = [output.outputs for output in llm.generate(prompts, GREEDY)]
    results: dict[int, Any] = {}

    def generate(thread: int) -> None:
        outputs = llm.generate(prompts[6 * thread : 6 * thread + 6], GREEDY, use_tqdm=False)
        results[thread] = [output.outputs for output in outputs]

    threads = [threading.Thread(target=generate, args=[i]) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert [outputs for i in range(4) for outputs in results[i]] == expected
    assert free_blocks(llm) == (64, 0)


def test_generate_leaves_the_outputs_of_others_to_them(llm: LLM) -> None:
    request_id = llm.engine.add_request([5, 6], GREEDY)
    expected = llm.generate([[5, 6], [7, 8]], GREEDY)[0].outputs
    assert [(output.request_id, output.outputs) for output in llm.engine.step()] == [(request_id, expected)]
    assert not llm.engine.has_unfinished_requests()


# --- the factory ---


def test_engine_says_what_it_reserved(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="minivllm"):
        llm = LLM(model, num_blocks=6, block_size=8, kv_cache_dtype="bfloat16", threads=1)
    assert "KV cache: 6 blocks × 8 tokens = 48 tokens, 0.0 MiB (bfloat16)" in caplog.messages
    assert "native executor on cpu, up to 48 tokens a request" in caplog.messages
    assert llm.engine.kv_cache.geometry.dtype == "bfloat16"


def test_dtypes_follow_the_checkpoint_unless_they_are_given(model: Path) -> None:
    assert LLM(model, num_blocks=4, threads=1).engine.kv_cache.geometry.dtype == "float32"
    assert LLM(model, num_blocks=4, threads=1, dtype="bfloat16").engine.kv_cache.geometry.dtype == "bfloat16"


def test_end_tokens_of_the_checkpoint_end_the_text(model: Path) -> None:
    llm = LLM(model, num_blocks=64, threads=1)
    assert llm.engine.eos_token_ids == (LLAMA_CONFIG["eos_token_id"],)
    always = SamplingParams(max_tokens=50, logit_bias={LLAMA_CONFIG["eos_token_id"]: 100.0}, temperature=0)
    (output,) = llm.generate([5, 6], always)
    assert (output.outputs[0].token_ids, output.outputs[0].text) == ([LLAMA_CONFIG["eos_token_id"]], "")
    assert output.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": CONTEXT + 1}, "max_model_len is 129; the model's context is 128 tokens"),
        ({"block_size": CONTEXT + 1}, "block_size is 129; the model's context is 128 tokens"),
        ({"num_blocks": 2, "max_model_len": 33}, "one sequence of 33 takes 3 blocks"),
        ({"kv_cache_memory": 10}, "one sequence of 2 takes 1 block,"),
        ({"num_blocks": 2**26}, "are available"),
        ({"kv_cache_memory": 2**49}, "kv_cache_memory is 536,870,912.0 MiB, but .* are available"),
    ],
)
def test_settings_that_do_not_fit_the_model(model: Path, settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(model, threads=1, **settings)


def test_budget_is_not_used_beyond_what_the_sequences_could_fill(model: Path) -> None:
    llm = LLM(model, threads=1, kv_cache_memory=2**26, max_num_seqs=2)
    assert llm.engine.kv_cache.geometry.num_blocks == 2 * CONTEXT // 16


def test_models_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no model"):
        LLM("nothing-of-this-name")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        LLM(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "perceptron"}))
    with pytest.raises(ModelError, match="perceptron"):
        LLM(tmp_path)


@pytest.mark.torch
def test_torch_executor_gives_the_same_tokens(model: Path, llm: LLM) -> None:
    prompts = ["the cat sat", [5, 6, 7], list(range(3, 60))]
    other = LLM(model, executor="torch", device="cpu", num_blocks=64)
    assert other.engine.executor.name == "torch"
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
    assert [output.outputs[0].token_ids for output in other.generate(prompts, GREEDY)] == expected
