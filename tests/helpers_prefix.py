"""What the tests of the prefix index have in common."""

from collections.abc import Callable
from typing import Any

from minivllm.block_allocator import PublishedBlocks
from minivllm.errors import BlockError

KINDS = ("native", "reference")
Prefix = tuple[bytes, tuple[int, ...]]  # namespace, and all tokens up to a block's last


def outcome(call: Callable[[], Any]) -> tuple[str, Any]:
    """What a call answers or complains about; any other exception than BlockError escapes."""
    try:
        return "answer", call()
    except BlockError as error:
        return "error", str(error)


def prefixes_of(published: PublishedBlocks) -> list[tuple[Prefix, int]]:
    """Every node's whole prefix and its block, sorted; the order of the nodes is checked on the way."""
    prefixes: list[Prefix] = []
    arrays = (published.namespace_index, published.parents, published.token_ids)
    for space, parent, tokens in zip(*(part.tolist() for part in arrays), strict=True):
        assert parent < len(prefixes)
        before = prefixes[parent][1] if parent >= 0 else ()
        prefixes.append((published.namespaces[space], (*before, *tokens)))
        assert parent < 0 or prefixes[parent][0] == prefixes[-1][0]
    assert prefixes == sorted(prefixes, key=lambda prefix: (len(prefix[1]), prefix))
    assert published.namespaces == sorted({space for space, _ in prefixes})
    return sorted(zip(prefixes, published.block_ids.tolist(), strict=True))
