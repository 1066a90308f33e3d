"""PrefixTree: the reference twin's index of published blocks (csrc/prefix_index.h is the native one).

A tree in block steps: a node is one full block, under the block that it continues; the roots carry a
namespace and stand for no block. The children of a node are two parallel lists in token order, so that
``bisect`` finds one among many, and the one that shares most tokens with a query. Knows nothing of reference
counts or eviction.
"""

from bisect import bisect_left
from dataclasses import dataclass, field

from minivllm.block_allocator.interface import PrefixMatch

Tokens = tuple[int, ...]


@dataclass(eq=False)
class Node:
    """One published block, or a root: then ``parent`` is None, ``block_id`` -1 and ``tokens`` empty."""

    namespace: bytes
    parent: "Node | None" = None
    block_id: int = -1
    tokens: Tokens = ()
    keys: list[Tokens] = field(default_factory=list)  #: the children's tokens, ascending
    children: list["Node"] = field(default_factory=list)  #: in the order of ``keys``

    def child(self, tokens: Tokens) -> "Node | None":
        """The child with exactly these tokens."""
        at = bisect_left(self.keys, tokens)
        return self.children[at] if at < len(self.keys) and self.keys[at] == tokens else None


class PrefixTree:
    """Nodes by block id, and the roots that have any."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.nodes: dict[int, Node] = {}
        self.roots: dict[bytes, Node] = {}

    def match(self, namespace: bytes, token_ids: list[int]) -> PrefixMatch:
        """The blocks that hold the leading tokens: whole ones, then part of one more."""
        node = self.roots.get(namespace, Node(namespace))
        block_ids: list[int] = []
        while True:
            begin = len(block_ids) * self.block_size
            rest = tuple(token_ids[begin : begin + self.block_size])
            child = node.child(rest) if rest else None
            if child is None:
                break
            block_ids.append(child.block_id)
            node = child
        # In token order the neighbours of what follows share most with it. Of all children that share as
        # much, the first one comes right where the shared tokens alone would be.
        at = bisect_left(node.keys, rest)
        longest = max((_shared_run(rest, key) for key in node.keys[max(at - 1, 0) : at + 1]), default=0)
        if longest == 0:
            return PrefixMatch(block_ids, None, 0)
        partial = node.children[bisect_left(node.keys, rest[:longest])]
        return PrefixMatch(block_ids, partial.block_id, longest)

    def insert(self, block_id: int, namespace: bytes, parent: Node | None, tokens: Tokens) -> Node:
        """Add a block as a child of ``parent``, or of the namespace's root."""
        above = parent or self.roots.setdefault(namespace, Node(namespace))
        node = Node(namespace, above, block_id, tokens)
        at = bisect_left(above.keys, tokens)
        above.keys.insert(at, tokens)
        above.children.insert(at, node)
        self.nodes[block_id] = node
        return node

    def remove(self, block_id: int) -> None:
        """Remove a block that has no children; its root too if nothing else is left of it."""
        node = self.nodes.pop(block_id)
        above = node.parent
        assert above is not None and not node.children
        at = bisect_left(above.keys, node.tokens)
        del above.keys[at], above.children[at]
        if above.parent is None and not above.children:
            del self.roots[node.namespace]

    def parent_block(self, block_id: int) -> int | None:
        """The block that this one continues; None if it begins a prefix or is not published."""
        node = self.nodes.get(block_id)
        return node.parent.block_id if node and node.parent and node.parent.parent else None

    def by_level(self) -> list[Node]:
        """All blocks, parents first: level by level, and there by parent, siblings in token order."""
        nodes = [child for namespace in sorted(self.roots) for child in self.roots[namespace].children]
        for node in nodes:  # which grows meanwhile
            nodes += node.children
        return nodes

    def defect(self) -> str | None:
        """What is wrong, as a sentence."""
        nodes = self.by_level()
        if {node.block_id: node for node in nodes} != self.nodes or len(nodes) != len(self.nodes):
            return f"{len(self.nodes)} blocks are published, {len(nodes)} can be reached"
        for node in [*self.roots.values(), *nodes]:
            if node.keys != sorted(set(node.keys)) or node.keys != [child.tokens for child in node.children]:
                return f"the children of {node.block_id} are not in token order"
            if any(child.parent is not node or child.namespace != node.namespace for child in node.children):
                return f"a child of {node.block_id} has another parent"
        for namespace, root in self.roots.items():
            if not root.children or root.namespace != namespace:
                return f"the root of {namespace!r} is unused"
        return None


def _shared_run(a: Tokens, b: Tokens) -> int:
    """How many leading tokens are equal."""
    run = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        run += 1
    return run
