"""Train a small NanoGPT on characters, save it as NanoGPT does, and let the engine write with it.

    python examples/train_nanogpt_char.py                        a minute or two; writes out-nanogpt-char/
    mini-vllm generate out-nanogpt-char "The baker " --seed 1
    python benchmark.py --model out-nanogpt-char/ckpt.pt --prompt "The baker " --new-tokens 80

The text is made by a small grammar below, so that nothing has to be downloaded and anybody may use it.
Model and files follow github.com/karpathy/nanoGPT: model.py, train.py, data/shakespeare_char/prepare.py.
Needs torch.
"""

import argparse
import math
import pickle
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm import LLM, SamplingParams

# fmt: off
WHO = ["the baker", "the old gardener", "a young sailor", "the clockmaker", "my aunt", "a grey cat"]
WHERE = ["by the river", "in the narrow street", "under the bridge", "near the harbour", "behind the mill"]
WHEN = ["at dawn", "in the evening", "on market days", "when it rains", "before the bells ring", "all winter"]
DOES = [
    ("counts", "count"), ("remembers", "remember"), ("looks for", "look for"), ("paints", "paint"),
    ("gives away", "give away"), ("sings about", "sing about"), ("dreams of", "dream of"),
]
WHAT = ["warm bread", "small boats", "old letters", "blue lanterns", "the first snow", "quiet songs"]
WHY = ["because nobody else will", "and nobody knows why", "for there is time", "as it has always been"]
# fmt: on


def make_text(sentences: int, seed: int) -> str:
    """Sentences such as "At dawn the baker counts small boats by the river, and nobody knows why."."""
    pick = random.Random(seed).choice
    lines = []
    for _ in range(sentences):
        does, do = pick(DOES)
        line = pick(
            [
                f"{pick(WHO)} {does} {pick(WHAT)} {pick(WHERE)}.",
                f"{pick(WHEN)} {pick(WHO)} {does} {pick(WHAT)}, {pick(WHY)}.",
                f"{pick(WHO)} does not {do} {pick(WHAT)} {pick(WHEN)}.",
                f"who will {do} {pick(WHAT)} {pick(WHERE)} {pick(WHEN)}?",
                f"{pick(WHERE)} {pick(WHO)} and {pick(WHO)} {do} {pick(WHAT)}.",
            ]
        )
        lines.append(line[0].upper() + line[1:])
    return "\n".join(lines) + "\n"


class CausalSelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [batch, heads, tokens, head_dim]
        return self.c_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width)
        self.c_proj = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width, heads)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """NanoGPT's model without dropout; its modules have NanoGPT's names, so its state dict has them too."""

    def __init__(self, model_args: dict) -> None:
        super().__init__()
        width, vocab_size = model_args["n_embd"], model_args["vocab_size"]
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab_size, width),
                "wpe": nn.Embedding(model_args["block_size"], width),
                "h": nn.ModuleList(Block(width, model_args["n_head"]) for _ in range(model_args["n_layer"])),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = (2 * model_args["n_layer"]) ** -0.5 if name.endswith("c_proj.weight") else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, token_ids: Tensor) -> Tensor:
        """[batch, tokens] → logits [batch, tokens, vocabulary]."""
        parts = self.transformer
        x = parts.wte(token_ids) + parts.wpe(torch.arange(token_ids.shape[1]))
        for block in parts.h:
            x = block(x)
        return self.lm_head(parts.ln_f(x))


def train(model: GPT, data: Tensor, options: argparse.Namespace) -> tuple[torch.optim.Optimizer, float]:
    """AdamW with warm-up and a cosine, on random stretches of the text. Gives the last loss on its end."""
    train_data, held_out = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
    context = options.context

    def batch(source: Tensor) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(source) - context, (options.batch_size,)).tolist()
        rows = torch.stack([source[start : start + context + 1] for start in starts])
        return rows[:, :-1], rows[:, 1:]

    def loss_of(source: Tensor) -> Tensor:
        x, y = batch(source)
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.learning_rate, betas=(0.9, 0.99), weight_decay=0.1
    )
    held_out_loss, started = math.inf, time.perf_counter()
    for step in range(1, options.max_iters + 1):
        warmup = min(1.0, step / max(1, options.max_iters // 20))
        cosine = 0.55 + 0.45 * math.cos(math.pi * step / options.max_iters)
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * warmup * cosine
        loss = loss_of(train_data)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % max(1, options.max_iters // 10) == 0:
            with torch.no_grad():
                held_out_loss = sum(float(loss_of(held_out)) for _ in range(4)) / 4
            seconds = time.perf_counter() - started
            print(
                f"step {step}: loss {loss.item():.3f}, on held-out text {held_out_loss:.3f}, {seconds:.0f} s"
            )
    return optimizer, held_out_loss


def main() -> None:
    """Make the text, train, save, and sample."""
    parser = argparse.ArgumentParser(description="Train a small char-level NanoGPT and let mini-vllm run it.")
    parser.add_argument(
        "--out", type=Path, default=Path("out-nanogpt-char"), help="directory of the checkpoint"
    )
    parser.add_argument("--max-iters", type=int, default=1200)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--context", type=int, default=96, help="tokens; NanoGPT calls it block_size")
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1337)
    options = parser.parse_args()
    torch.manual_seed(options.seed)

    text = make_text(10_000, options.seed)
    characters = sorted(set(text))
    stoi = {character: i for i, character in enumerate(characters)}
    data = torch.tensor([stoi[character] for character in text])
    print(f"{len(text):,} characters, {len(characters)} different ones")

    model_args = {
        "n_layer": options.layers, "n_head": options.heads, "n_embd": options.width,
        "block_size": options.context, "bias": True, "vocab_size": len(characters), "dropout": 0.0,
    }  # fmt: skip
    model = GPT(model_args)
    optimizer, loss = train(model, data, options)

    options.out.mkdir(parents=True, exist_ok=True)
    meta = {"vocab_size": len(characters), "itos": dict(enumerate(characters)), "stoi": stoi}
    (options.out / "meta.pkl").write_bytes(pickle.dumps(meta))
    checkpoint = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "model_args": model_args,
        "iter_num": options.max_iters,
        "best_val_loss": torch.tensor(loss),
        "config": {"dataset": "grammar_char", "seed": options.seed, "max_iters": options.max_iters},
    }
    torch.save(checkpoint, options.out / "ckpt.pt")
    print(f"saved {options.out}/ckpt.pt and meta.pkl\n")

    llm = LLM(options.out)
    params = SamplingParams(max_tokens=options.context - 16, temperature=0.7, seed=options.seed)
    for output in llm.generate(["The baker ", "Who will "], params):
        print(output.prompt + output.outputs[0].text, end="\n\n")


if __name__ == "__main__":
    main()
