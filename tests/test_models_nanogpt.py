"""NanoGPT's ckpt.pt: values as torch saved them, vocabularies, files that would run code or are damaged."""

import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_models import (
    assert_prefixes_refused,
    assert_refused,
    assert_same,
    load_or_refuse,
    loaded,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.errors import ModelError
from minivllm.models.pickle_data import MAX_BYTES, read_pickle
from minivllm.models.registry import load_checkpoint

WIDTH, LAYERS, HEADS, ROWS, CONTEXT = 24, 2, 3, 37, 16
ARGUMENTS = {
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_embd": WIDTH,
    "block_size": CONTEXT,
    "bias": True,
    "vocab_size": ROWS,
    "dropout": 0.1,
}


def nanogpt_state(rows: int = ROWS, bias: bool = True) -> Any:
    """A state dict as torch's modules give it: an OrderedDict with _metadata, the head tied."""
    import torch

    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (rows, WIDTH), "wpe.weight": (CONTEXT, WIDTH)}
    linears = {"attn.c_attn": 3 * WIDTH, "attn.c_proj": WIDTH, "mlp.c_fc": 4 * WIDTH, "mlp.c_proj": WIDTH}
    for i in range(LAYERS):
        for name, outputs in linears.items():
            shapes[f"h.{i}.{name}.weight"] = (outputs, 4 * WIDTH if name == "mlp.c_proj" else WIDTH)
            shapes[f"h.{i}.{name}.bias"] = (outputs,)
        shapes |= {
            f"h.{i}.{norm}.{part}": (WIDTH,) for norm in ("ln_1", "ln_2") for part in ("weight", "bias")
        }
    shapes |= {"ln_f.weight": (WIDTH,), "ln_f.bias": (WIDTH,)}
    generator = torch.Generator().manual_seed(0)
    state = OrderedDict(
        (f"transformer.{name}", torch.randn(shape, generator=generator))
        for name, shape in shapes.items()
        if bias or not name.endswith("bias")
    )
    state["lm_head.weight"] = state["transformer.wte.weight"]
    state._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    return state


def save(path: Path, state: Any, more: dict[str, Any] | None = None, **arguments: Any) -> Path:
    """ckpt.pt with all that train.py puts into it, the optimizer's state included."""
    import torch

    parameters = [torch.nn.Parameter(value.clone()) for value in state.values()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    path.mkdir(parents=True, exist_ok=True)
    checkpoint = {
        "model": state,
        "optimizer": optimizer.state_dict(),
        "model_args": {**ARGUMENTS, **arguments},
        "iter_num": 2000,
        "best_val_loss": torch.tensor(1.5),
        "config": {"dataset": "letters", "learning_rate": 1e-3, "compile": True, "device": "cuda"},
        **(more or {}),
    }
    torch.save(checkpoint, path / "ckpt.pt")
    return path / "ckpt.pt"


def expected_values(state: Any, rows: int | None = None) -> dict[str, Any]:
    """Canonical names, written out by hand."""
    result = {}
    for full_name, tensor in state.items():
        name, value = full_name.removeprefix("transformer."), tensor.float().numpy()
        if name == "lm_head.weight":
            continue
        if name == "wte.weight":
            result["embed.weight"] = value[:rows]
        elif ".attn.c_attn." in name:
            layer, part = name.split(".")[1], name.split(".")[-1]
            for third, x in zip(np.split(value, 3), "qkv", strict=True):
                result[f"layers.{layer}.{x}.{part}"] = third
        else:
            for theirs, ours in (
                ("wpe", "pos_embed"),
                ("ln_f", "final_norm"),
                ("h.", "layers."),
                ("attn.c_proj", "o"),
                ("mlp.c_fc", "up"),
                ("mlp.c_proj", "down"),
                ("ln_1", "attn_norm"),
                ("ln_2", "mlp_norm"),
            ):
                name = name.replace(theirs, ours)
            result[name] = value
    return result


@pytest.mark.torch
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_values_and_config(tmp_path: Path, bias: bool, prefix: str) -> None:
    state = nanogpt_state(bias=bias)
    path = save(tmp_path, {f"{prefix}{name}": value for name, value in state.items()}, bias=bias)
    assert_same(loaded(path), expected_values(state))
    checkpoint = load_checkpoint(tmp_path)  # the directory will do
    config = checkpoint.config
    assert (config.kind, config.activation, config.norm, config.norm_eps) == (
        "nanogpt",
        "gelu",
        "layernorm",
        1e-5,
    )
    assert (config.norm_bias, config.qkv_bias, config.out_bias, config.mlp_bias) == (bias,) * 4
    assert (config.max_position, config.head_dim, config.intermediate_size) == (CONTEXT, 8, 4 * WIDTH)
    assert config.tied_head and checkpoint.dtype == "float32"
    assert checkpoint.tokenizer is None and checkpoint.eos_token_ids == ()


@pytest.mark.torch
def test_ordered_dicts_masks_half_precision_and_strides(tmp_path: Path) -> None:
    import torch

    state = nanogpt_state()
    state["transformer.h.0.attn.bias"] = torch.tril(torch.ones(1, 1, CONTEXT, CONTEXT))
    state["transformer.h.1.attn.bias"] = torch.ones(1, 1, CONTEXT, CONTEXT, dtype=torch.bool)
    state["transformer.wpe.weight"] = state["transformer.wpe.weight"].half()
    state["transformer.ln_f.weight"] = torch.nn.Parameter(state["transformer.ln_f.weight"].bfloat16())
    state["transformer.h.0.mlp.c_fc.weight"] = torch.randn(WIDTH, 4 * WIDTH).T  # not contiguous
    state["transformer.h.1.ln_1.weight"] = torch.randn(3 * WIDTH)[
        WIDTH : 2 * WIDTH
    ]  # within a larger storage
    path = save(tmp_path, {"x": torch.zeros(1)}, more={"model": state})
    with torch.no_grad():
        expected = {
            k: v
            for k, v in expected_values({k: v.detach() for k, v in state.items()}).items()
            if "attn.bias" not in k
        }
    assert_same(loaded(path), expected)
    assert load_checkpoint(path).dtype == "bfloat16"


def write_meta(path: Path, itos: Any, protocol: int | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    stoi = {character: i for i, character in itos.items()} if isinstance(itos, dict) else {}
    path.write_bytes(pickle.dumps({"vocab_size": len(itos), "itos": itos, "stoi": stoi}, protocol))


@pytest.mark.torch
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("where", ["run/meta.pkl", "data/letters/meta.pkl"])
def test_characters(tmp_path: Path, where: str, protocol: int) -> None:
    state = nanogpt_state()
    path = save(tmp_path / "run", state)
    letters = [chr(0x3B1 + i) for i in range(ROWS - 4)]
    write_meta(tmp_path / where, dict(enumerate(letters)), protocol)
    checkpoint = load_checkpoint(path)
    assert checkpoint.tokenizer is not None and checkpoint.tokenizer.kind == "chars"
    assert checkpoint.tokenizer.data == {"itos": letters}
    assert checkpoint.config.vocab_size == ROWS - 4
    assert_same(loaded(path), expected_values(state, ROWS - 4))


@pytest.mark.torch
@pytest.mark.parametrize(
    "itos", [{0: "a", 2: "b"}, {0: "a", 1: 3}, {0: ""}, {}, ["a"], dict.fromkeys(range(ROWS + 1), "a")]
)
def test_bad_vocabularies(tmp_path: Path, itos: Any) -> None:
    path = save(tmp_path, nanogpt_state())
    write_meta(tmp_path / "meta.pkl", itos)
    assert_refused(path)


@pytest.mark.torch
@pytest.mark.parametrize("rows", [50257, 50304])
def test_the_padded_gpt2_vocabulary_is_cut(tmp_path: Path, rows: int) -> None:
    import torch

    state = nanogpt_state(rows)
    path = save(tmp_path, {"x": torch.zeros(1)}, more={"model": state}, vocab_size=rows)
    checkpoint = load_checkpoint(path)
    assert checkpoint.config.vocab_size == 50257 and checkpoint.eos_token_ids == (50256,)
    assert checkpoint.tokenizer is not None
    assert (checkpoint.tokenizer.kind, checkpoint.tokenizer.path) == ("gpt2", tmp_path)
    embed = next(tensor for tensor in checkpoint.tensors() if tensor.name == "embed.weight")
    np.testing.assert_array_equal(embed.data, state["transformer.wte.weight"][:50257].numpy())


@pytest.mark.torch
@pytest.mark.parametrize(
    "arguments",
    [
        {"n_layer": LAYERS + 1},
        {"n_layer": LAYERS - 1},
        {"n_layer": 10**12},
        {"n_layer": True},
        {"n_head": 5},
        {"n_head": 0},
        {"n_embd": WIDTH * 2},
        {"block_size": CONTEXT + 1},
        {"vocab_size": ROWS + 1},
        {"vocab_size": ROWS - 1},
        {"vocab_size": None},
        {"bias": False},
        {"bias": "yes"},
    ],
)
def test_arguments_that_contradict_the_tensors(tmp_path: Path, arguments: dict[str, Any]) -> None:
    assert_refused(save(tmp_path, nanogpt_state(), **arguments))


@pytest.mark.torch
def test_tensors_that_are_not_nanogpts(tmp_path: Path) -> None:
    import torch

    state = nanogpt_state()
    missing = {name: value for name, value in state.items() if "h.1.mlp.c_fc.bias" not in name}
    assert_refused(save(tmp_path, missing), "layers.1.up.bias", "missing")
    assert_refused(save(tmp_path, {**state, "extra.weight": torch.ones(2)}), "extra.weight")
    assert_refused(save(tmp_path, {**state, "lm_head.weight": torch.ones(ROWS, WIDTH)}), "tied")
    doubles = {**state, "transformer.ln_f.bias": torch.ones(WIDTH, dtype=torch.float64)}
    assert_refused(save(tmp_path, doubles), "transformer.ln_f.bias", "DoubleStorage")
    fused = {**state, "transformer.h.0.attn.c_attn.weight": torch.ones(2 * WIDTH, WIDTH)}
    assert_refused(save(tmp_path, fused), "c_attn", str(3 * WIDTH))


@pytest.mark.torch
def test_other_things_that_torch_saves(tmp_path: Path) -> None:
    import torch

    path = tmp_path / "ckpt.pt"
    for value in ({"model": {}}, [1, 2], torch.ones(3), {"model": [], "model_args": {}}):
        torch.save(value, path)
        assert_refused(path, "NanoGPT")
    torch.save(torch.nn.Linear(2, 2), path)
    assert_refused(path, "torch.nn")
    torch.save({"model": {}}, path, _use_new_zipfile_serialization=False)
    assert_refused(path, "zip")


# --- pickles that are not data


class Runs:
    """Unpickled by pickle, it would create a file."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.parts = function, arguments

    def __reduce__(self) -> Any:
        return self.parts


def torch_zip(path: Path, described: bytes, members: dict[str, bytes] | None = None, **settings: Any) -> Path:
    with zipfile.ZipFile(path, "w", **settings) as archive:
        archive.writestr("archive/data.pkl", described)
        for name, content in (members or {}).items():
            archive.writestr(f"archive/{name}", content)
    return path


def attacks(target: Path) -> dict[str, bytes]:
    """Pickles that create ``target`` when pickle loads them."""
    source = f"open({str(target)!r}, 'w').close()"
    make = f"touch {target}"
    plain = {
        "system": Runs(os.system, make),
        "exec": Runs(exec, source),
        "in a list": [1, {"model": Runs(exec, source)}],
        "in a tuple": (Runs(exec, source),),
        "open": Runs(open, str(target), "w"),
    }
    result = {name: pickle.dumps({"model": value, "model_args": {}}, 2) for name, value in plain.items()}
    result |= {f"{name}, protocol 4": pickle.dumps(value, 4) for name, value in plain.items()}
    call = b"X" + struct.pack("<I", len(source)) + source.encode()
    result["INST"] = b"(" + call + b"ibuiltins\nexec\n."
    result["OBJ"] = b"(cbuiltins\nexec\n" + call + b"o."
    result["NEWOBJ"] = b"\x80\x02cbuiltins\nexec\n" + call + b"\x85\x81."
    result["text opcodes"] = b"cbuiltins\nexec\n(V" + source.encode() + b"\ntR."
    result["an allowed function changed"] = (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x0c\x00\x00\x00__defaults__N\x85sb0"
        + result["exec"][2:]
    )
    result["an attribute of an allowed module"] = (
        b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.__init__\x93)R."
    )
    result["an extension"] = b"\x80\x02\x82\x01."
    return result


ATTACKS = list(attacks(Path("x")))


@pytest.mark.parametrize("name", ATTACKS)
def test_no_pickle_runs(tmp_path: Path, name: str) -> None:
    target = tmp_path / "touched"
    described = attacks(target)[name]
    path = torch_zip(tmp_path / "ckpt.pt", described)
    assert_refused(path, "nothing of it was run")
    with pytest.raises(ModelError, match="nothing of it was run"):
        read_pickle(described, "meta.pkl", {})
    assert not target.exists()


@pytest.mark.parametrize("name", ["system", "exec", "open", "exec, protocol 4", "INST", "text opcodes"])
def test_the_attacks_would_work_on_pickle(tmp_path: Path, name: str) -> None:
    target = tmp_path / "touched"
    pickle.loads(attacks(target)[name])
    assert target.exists()


@pytest.mark.torch
def test_a_malicious_meta_pkl_does_not_run(tmp_path: Path) -> None:
    path = save(tmp_path, nanogpt_state())
    (tmp_path / "meta.pkl").write_bytes(attacks(tmp_path / "touched")["system"])
    assert_refused(path, "meta.pkl", "system")
    assert not (tmp_path / "touched").exists()


def nested_tuple(depth: int) -> bytes:
    return b"\x80\x02N" + b"\x85" * depth


@pytest.mark.parametrize(
    "described",
    [
        b"",
        b".",
        b"\x80\x02",
        b"N",
        b"NN.",
        b"0.",
        b"(.",
        b"\x80\x02h\x05.",  # a memo entry that does not exist
        b"\x80\x02q\x05.",  # nothing to remember
        b"\x80\x02}N.",
        b"\x80\x02}(Nu.",  # a key without a value
        b"\x80\x02]}a}Ns.",
        b"\x80\x02}NNs.",  # None as a key
        b"\x80\x02}" + nested_tuple(100_000)[2:] + b"Ns.",  # hashing it would overflow the stack
        nested_tuple(200_000) + b".",
        b"\x80\x02\x8b\xff\xff\xff\x7f.",  # an integer of 2 GB
        b"\x80\x04\x8d" + b"\xff" * 8 + b".",  # a string of 2**64 bytes
        b"L" + b"9" * 100_000 + b"L\n.",
        b"N" * (MAX_BYTES + 1),
        b"\x80\x02(" * 1000 + b".",
        b"\x80\x02U\x03\xff\xfe\xfd.",
        b"\x80\x02X\x02\x00\x00\x00\xff\xff.",  # not UTF-8
        b"\x80\x02ccollections\nOrderedDict\nK\x01\x85R.",  # an argument too many
        b"\x80\x02ctorch\nFloatStorage\n)R.",  # a class that is not for calling
        b"\x80\x02)Q.",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(NNNNNNtR.",
    ],
)
def test_damaged_pickles(tmp_path: Path, described: bytes) -> None:
    path = torch_zip(tmp_path / "ckpt.pt", described)
    message = assert_refused(path)
    assert "ckpt.pt" in message


def test_deep_data_is_read_without_recursion() -> None:
    value = read_pickle(nested_tuple(100_000) + b".", "it", {})
    assert type(value) is tuple and len(value) == 1


# --- files that are not as torch writes them


def storage_pickle(
    kind: str, key: str, count: int, offset: int, shape: Any, strides: Any, **changes: int
) -> bytes:
    """{"model": {"transformer.wte.weight": tensor}, "model_args": …} of one tensor, said as torch says it."""

    def plain(value: Any) -> bytes:
        return pickle.dumps(value, 2)[2:-1]

    storage = (
        b"("
        + plain("storage")
        + b"ctorch\n"
        + kind.encode()
        + b"\n"
        + plain(key)
        + plain("cpu")
        + plain(count)
        + b"tQ"
    )
    parts = storage + plain(offset) + plain(shape) + plain(strides) + b"\x89N"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + parts + b"tR"
    model = b"}" + plain("transformer.wte.weight") + tensor + b"s"
    arguments = {"n_layer": 1, "n_head": 1, "n_embd": 2, "block_size": 4, "vocab_size": 3, **changes}
    return b"\x80\x02}(" + plain("model") + model + plain("model_args") + plain(arguments) + b"u."


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ["pos_embed.weight", "missing"]),  # as it should be: the first error is about the next tensor
        ({"count": 7}, ["transformer.wte.weight", "7"]),
        ({"count": 2**62}, ["transformer.wte.weight"]),
        ({"count": -6}, ["damaged"]),
        ({"key": "1"}, ["data/1"]),
        ({"key": "../data.pkl"}, ["missing"]),
        ({"kind": "UntypedStorage"}, ["UntypedStorage"]),
        ({"kind": "LongStorage"}, ["LongStorage"]),
        ({"kind": "HalfStorage"}, ["transformer.wte.weight"]),
        ({"offset": 1}, ["storage"]),
        ({"offset": -1}, ["damaged"]),
        ({"offset": 2**70}, ["damaged"]),
        ({"shape": (3, 3)}, ["storage"]),
        ({"shape": (2**40, 2**40), "strides": (0, 0)}, ["storage"]),
        ({"shape": (3, -2)}, ["damaged"]),
        ({"shape": (3, 0)}, ["storage"]),
        ({"shape": (3, 2.0)}, ["damaged"]),
        ({"shape": [3, 2]}, ["damaged"]),
        ({"strides": (2, -1)}, ["damaged"]),
        ({"strides": (3, 1)}, ["storage"]),
        ({"strides": (2,)}, ["damaged"]),
        ({"shape": (), "strides": ()}, ["wte.weight"]),
        # Too long to print: Python's str() would refuse them with a message of its own.
        ({"count": 10**5000}, ["persistent id"]),
        ({"shape": (10**5000, 2)}, ["63 bits"]),
        ({"strides": (10**5000, 1)}, ["63 bits"]),
        ({"offset": 10**5000}, ["63 bits"]),
        ({"n_embd": 10**5000}, ["n_embd is a number of 16610 bits"]),
        ({"n_layer": 10**5000}, ["n_layer is a number"]),
        ({"n_head": 10**5000}, ["n_head is a number"]),
        ({"vocab_size": 10**5000}, ["vocab_size is a number"]),
        ({"block_size": -(10**5000)}, ["block_size is a number"]),
        ({"bias": 10**5000}, ["bias is a number"]),
    ],
)
def test_lying_tensors(tmp_path: Path, change: dict[str, Any], words: list[str]) -> None:
    tensor = {"kind": "FloatStorage", "key": "0", "count": 6, "offset": 0, "shape": (3, 2), "strides": (2, 1)}
    described = storage_pickle(**{**tensor, **change})
    assert_refused(torch_zip(tmp_path / "ckpt.pt", described, {"data/0": bytes(24)}), *words)


@pytest.mark.parametrize(
    ("write", "word"),
    [
        (lambda path: path.write_bytes(b""), "empty"),
        (lambda path: path.write_bytes(b"PK\3\4 no"), "zip"),
        (lambda path: torch_zip(path, b"N.", compression=zipfile.ZIP_DEFLATED), "compressed"),
        (lambda path: torch_zip(path, b"N.", {"byteorder": b"big"}), "big-endian"),
        (lambda path: torch_zip(path, b"N.", {"x/data.pkl": b"N."}), "NanoGPT"),
        (lambda path: zipfile.ZipFile(path, "w").close(), "zip"),
        (
            lambda path: path.write_bytes(
                torch_zip(path, b"N.").read_bytes().replace(b"data.pkl", b"data.pxl")
            ),
            "data.pkl",
        ),
    ],
)
def test_other_zip_files(tmp_path: Path, write: Callable[[Path], object], word: str) -> None:
    path = tmp_path / "ckpt.pt"
    write(path)
    assert_refused(path, word)


def test_a_zip_of_several_disks(tmp_path: Path) -> None:
    path = torch_zip(tmp_path / "ckpt.pt", b"N.")
    content = path.read_bytes()
    end = content.rindex(b"PK\5\6")
    locator = b"PK\6\7" + struct.pack("<LQL", 1, 0, 2)
    path.write_bytes(content[:end] + locator + content[end:])
    assert_refused(path, "disks")


@pytest.mark.torch
def test_truncated_anywhere(tmp_path: Path) -> None:
    path = save(tmp_path, nanogpt_state())
    assert_prefixes_refused(path, 4096, lambda: load_checkpoint(path))
    write_meta(tmp_path / "meta.pkl", {0: "a", 1: "b"})
    load_checkpoint(path)
    assert_prefixes_refused(tmp_path / "meta.pkl", 100, lambda: load_checkpoint(path))


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, list[int]]:
    """A file, its bytes, and the positions that say something: all but those of the storages."""
    path = save(tmp_path_factory.mktemp("nanogpt"), nanogpt_state())
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        storages = [
            (info.header_offset + 128, info.file_size - 128)
            for info in archive.infolist()
            if "/data/" in info.filename
        ]
    skipped = {start + i for start, size in storages for i in range(size)}
    return path, content, [i for i in range(len(content)) if i not in skipped]


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:invalid escape sequence")  # pickletools, on some bytes
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_flipped_bits_give_a_model_or_a_model_error(
    damaged: tuple[Path, bytes, list[int]], data: st.DataObject
) -> None:
    path, whole, positions = damaged
    broken = bytearray(whole)
    bits = st.tuples(st.sampled_from(positions), st.integers(0, 7))
    for position, bit in data.draw(st.lists(bits, min_size=1, max_size=4)):
        broken[position] ^= 1 << bit
    path.write_bytes(broken)
    load_or_refuse(lambda: loaded(path))


@pytest.mark.filterwarnings("ignore:invalid escape sequence")
@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_arbitrary_pickles(data: bytes) -> None:
    load_or_refuse(lambda: read_pickle(b"\x80\x02" + data + b".", "it", {"collections.OrderedDict": dict}))
