"""Another engine, in a process of its own: started as a script by the Python that has it installed.

    python peer_worker.py ENGINE MODEL THREADS MAX_SEQS MAX_LEN

It first writes a line of JSON {"info": "what and which version"} to stdout, then answers each line
{"prompts": [[token ids]], "output_len": n, "shared_len": s} with {"seconds": t, "counts": [of tokens]}.
Greedy, end tokens ignored. What the engine itself prints goes to stderr. Uses nothing of minivllm.
"""

import json
import os
import sys
import time
from typing import Any, Protocol

Prompts = list[list[int]]


class Engine(Protocol):
    """What is measured."""

    info: str

    def generate(self, prompts: Prompts, output_len: int, shared_len: int) -> list[int]:
        """Answer the prompts together; returns the number of tokens generated for each."""
        ...


class OpenVINO:
    """openvino-genai's continuous batching, straight from a GGUF file."""

    def __init__(self, model: str, threads: int, max_seqs: int, max_len: int) -> None:
        import openvino
        import openvino_genai

        self._openvino, self._genai = openvino, openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 4  # GB
        scheduler.max_num_seqs = max_seqs
        scheduler.max_num_batched_tokens = 2048
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", settings)
        self.info = f"openvino-genai {openvino_genai.__version__}"

    def generate(self, prompts: Prompts, output_len: int, shared_len: int) -> list[int]:
        """See ``Engine``."""
        import numpy

        config = self._genai.GenerationConfig()
        config.max_new_tokens = output_len
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        inputs = [self._openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in prompts]
        results = self._pipeline.generate(inputs, [config] * len(inputs))
        return [len(result.m_generation_ids[0]) for result in results]


class VLLM:
    """vLLM's CPU build, from a directory as Hugging Face has it."""

    def __init__(self, model: str, threads: int, max_seqs: int, max_len: int) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        import vllm

        self._vllm = vllm
        self._llm = vllm.LLM(
            model=model,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=max_len,
            max_num_seqs=max_seqs,
            max_num_batched_tokens=2048,
            enable_prefix_caching=True,
            seed=0,
        )
        self.info = f"vllm {vllm.__version__}"

    def generate(self, prompts: Prompts, output_len: int, shared_len: int) -> list[int]:
        """See ``Engine``."""
        params = self._vllm.SamplingParams(
            temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        results = self._llm.generate(inputs, params, use_tqdm=False)
        return [len(result.outputs[0].token_ids) for result in results]


class Transformers:
    """transformers' ``generate`` over a static batch, from a directory as Hugging Face has it."""

    def __init__(self, model: str, threads: int, max_seqs: int, max_len: int) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        self._torch = torch
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        self._model.generation_config.eos_token_id = None
        self._max_seqs = max_seqs
        self.info = f"transformers {transformers.__version__}, torch {torch.__version__}"

    def generate(self, prompts: Prompts, output_len: int, shared_len: int) -> list[int]:
        """See ``Engine``."""
        return [
            count
            for start in range(0, len(prompts), self._max_seqs)
            for count in self._generate(prompts[start : start + self._max_seqs], output_len)
        ]

    def _generate(self, prompts: Prompts, output_len: int) -> list[int]:
        ids = self._torch.tensor(prompts)
        with self._torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                max_new_tokens=output_len,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return [int(output.shape[1] - ids.shape[1])] * len(prompts)


class LlamaCpp:
    """libllama by way of llama-cpp-python's C interface, driven as llama.cpp's own batched-bench drives it.

    That tool draws no tokens (any will do for the next step), so neither does this: a little in its favour. A
    shared beginning is computed once, and the sequences share its cells, which its tools do not do.
    """

    _STEP = 2048  # tokens in a call, as n_batch

    def __init__(self, model: str, threads: int, max_seqs: int, max_len: int) -> None:
        import llama_cpp

        self._lib = lib = llama_cpp
        self._max_seqs = max_seqs
        lib.llama_backend_init()
        self._silent = lib.llama_log_callback(lambda level, text, data: None)
        lib.llama_log_set(self._silent, None)
        self._model = lib.llama_model_load_from_file(model.encode(), lib.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        params = lib.llama_context_default_params()
        params.n_ctx = max_seqs * max_len
        params.n_batch, params.n_ubatch = self._STEP, 512
        params.n_seq_max = max_seqs
        params.kv_unified = True
        params.n_threads = params.n_threads_batch = threads
        self._context = lib.llama_init_from_model(self._model, params)
        self._memory = lib.llama_get_memory(self._context)
        self._batch = lib.llama_batch_init(self._STEP, 0, 1)
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self.info = f"llama.cpp of llama-cpp-python {llama_cpp.__version__}"

    def generate(self, prompts: Prompts, output_len: int, shared_len: int) -> list[int]:
        """See ``Engine``."""
        for start in range(0, len(prompts), self._max_seqs):
            self._generate(prompts[start : start + self._max_seqs], output_len, shared_len)
        return [output_len] * len(prompts)

    def _generate(self, prompts: Prompts, output_len: int, shared_len: int) -> None:
        lib = self._lib
        lib.llama_memory_clear(self._memory, True)
        self._compute([(token, i, 0, False) for i, token in enumerate(prompts[0][:shared_len])])
        for sequence in range(1, len(prompts) if shared_len else 0):
            lib.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)
        self._compute(
            [
                (token, i, sequence, i == len(prompt) - 1)
                for sequence, prompt in enumerate(prompts)
                for i, token in enumerate(prompt)
                if i >= shared_len
            ]
        )
        for generated in range(1, output_len):
            self._compute(
                [
                    ((prompt[-1] + generated) % self._vocab_size, len(prompt) + generated - 1, sequence, True)
                    for sequence, prompt in enumerate(prompts)
                ]
            )

    def _compute(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Rows of (token, position, sequence, whether its logits are wanted)."""
        batch = self._batch
        for start in range(0, len(rows), self._STEP):
            part = rows[start : start + self._STEP]
            batch.n_tokens = len(part)
            for i, (token, position, sequence, logits) in enumerate(part):
                batch.token[i], batch.pos[i] = token, position
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
                batch.logits[i] = logits
            if code := self._lib.llama_decode(self._context, batch):
                raise RuntimeError(f"llama_decode gave {code}")
            self._lib.llama_synchronize(self._context)


ENGINES: dict[str, Any] = {
    "llama.cpp": LlamaCpp,
    "openvino": OpenVINO,
    "vllm": VLLM,
    "transformers": Transformers,
}


def main() -> None:
    """Start the engine, then answer until stdin ends."""
    name, model, threads, max_seqs, max_len = sys.argv[1:6]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to stdout
    engine: Engine = ENGINES[name](model, int(threads), int(max_seqs), int(max_len))

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    answer({"info": engine.info})
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter()
        counts = engine.generate(request["prompts"], request["output_len"], request["shared_len"])
        answer({"seconds": time.perf_counter() - start, "counts": counts})


if __name__ == "__main__":
    main()
