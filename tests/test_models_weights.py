"""Checkpoint: tensors come from a mapped file one at a time, and do not stay in memory behind the reader."""

import dataclasses
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers_shapes import SMALL_LLAMA
from helpers_step import make_checkpoint, random_tensors

from minivllm.models.weights import StoredTensor, map_file


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_what_was_read_is_not_kept_in_memory(tmp_path: Path) -> None:
    embedding_rows = 2**22 // SMALL_LLAMA.hidden_size  # 16 MiB
    config = dataclasses.replace(SMALL_LLAMA, vocab_size=embedding_rows)
    tensors = random_tensors(config)
    embedding = tensors["embed.weight"]
    file = tmp_path / "weights"
    file.write_bytes(bytes(100) + embedding.tobytes())  # not at the beginning of a page
    raw = map_file(file)[100:]
    checkpoint = make_checkpoint(config, tensors)
    stored = {
        **checkpoint.stored,
        "embed.weight": StoredTensor(
            embedding.shape, "float32", lambda: raw.view(np.float32).reshape(embedding.shape), mapped=raw
        ),
    }
    checkpoint = dataclasses.replace(checkpoint, stored=stored)
    before = mapped_megabytes()
    while_read = []
    for tensor in checkpoint.tensors():
        if tensor.name == "embed.weight":
            assert tensor.data.sum() == embedding.sum()
            while_read.append(mapped_megabytes())
    assert while_read[0] - before > 12
    assert mapped_megabytes() - before < 4
    np.testing.assert_array_equal(stored["embed.weight"].read(), embedding)  # still there


def mapped_megabytes() -> float:
    """Memory of this process that mirrors files."""
    status = Path("/proc/self/status").read_text()
    match = re.search(r"RssFile:\s+(\d+) kB", status)
    assert match is not None
    return int(match[1]) / 1024
