"""The examples run, and leave what they say."""

import subprocess
import sys
from pathlib import Path

import pytest

from minivllm import LLM, SamplingParams

ROOT = Path(__file__).parent.parent


@pytest.mark.torch
def test_a_trained_nanogpt_is_a_nanogpt_checkpoint(tmp_path: Path) -> None:
    import torch
    from oracle_nanogpt import NanoGPT

    small = ["--layers", "2", "--heads", "2", "--width", "32", "--context", "48", "--batch-size", "4"]
    done = subprocess.run(
        [
            sys.executable,
            ROOT / "examples/train_nanogpt_char.py",
            "--out",
            tmp_path,
            "--max-iters",
            "60",
            *small,
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "step 60" in done.stdout and "The baker " in done.stdout

    checkpoint = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    assert checkpoint.keys() == {"model", "optimizer", "model_args", "iter_num", "best_val_loss", "config"}
    vocab_size = checkpoint["model_args"]["vocab_size"]
    assert checkpoint["best_val_loss"] < 0.9 * torch.tensor(vocab_size).log()  # it has learned something

    llm = LLM(tmp_path)
    (output,) = llm.generate("The baker ", SamplingParams(temperature=0, max_tokens=30))
    greedy, _ = NanoGPT(checkpoint["model_args"], checkpoint["model"]).greedy(output.prompt_token_ids, 30)
    assert output.outputs[0].token_ids == greedy
