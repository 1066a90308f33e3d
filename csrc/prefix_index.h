// PrefixIndex: which published KV block stands for which tokens behind which others.
//
// A tree in block steps. A node is one full block; its key is (the block it continues, its own token ids). The roots
// carry a namespace (opaque bytes) and stand for no block. Everything is compared exactly, nothing is hashed: two
// different prefixes never meet in one node.
//
//   namespace "" ── [17 4 9 2] ─┬─ [5 5 1 8]            block_size 4; children in token order
//     (a root)       block 7    │   block 3
//                               └─ [6 0 0 1] ── [2 2 7 3]
//                                   block 12     block 1
//
// The children of a node are a balanced search tree of their own (AVL), its links in arrays by block id: to find,
// insert or remove one among n takes O(log n) comparisons whatever the tokens are, and no memory is allocated.
//
// Owns the nodes. It does not know reference counts, who holds a block, or when one is evicted: BlockAllocator does.
// Nothing here checks its arguments: what a function requires, its caller sees to.
//
// Build and test it alone, from the project's root:
//   cd csrc && g++ -std=c++17 -O2 -Wall -Wextra -I. prefix_index.cpp tests/test_prefix_index.cpp -o /tmp/test_prefix_index
//   /tmp/test_prefix_index               the unit tests (add -fsanitize=address,undefined above)
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace minivllm {

// The published blocks that hold the leading tokens of a query.
struct PrefixMatch {
    std::vector<int32_t> block_ids;  // whole blocks, in order
    // The child of the last of them (of the namespace, if there is none) that shares the longest run of leading tokens
    // with what follows; of several, the one whose tokens come first in order. -1 if none shares any.
    int32_t partial_block = -1;
    int32_t partial_tokens = 0;  // length of that run, < block_size
};

// All nodes, by level: a parent comes before its children.
struct PublishedBlocks {
    std::vector<std::string> namespaces;    // in order of their bytes
    std::vector<int32_t> namespace_index;   // [n] into namespaces
    std::vector<int32_t> parents;           // [n] into these arrays; -1 at the beginning of a prefix
    std::vector<int32_t> block_ids;         // [n]
};

class PrefixIndex {
public:
    // A node is named by its block id (>= 0); a root by a number below kNone, which is good until the root's last
    // child is removed.
    static constexpr int32_t kNone = -1;

    PrefixIndex(int32_t num_blocks, int32_t block_size);  // empty

    int32_t block_size() const { return block_size_; }
    int32_t size() const { return size_; }
    bool contains(int32_t id) const { return parents_[id] != kNone; }
    // The block that `id` continues; kNone if it begins a prefix or is not here.
    int32_t parent_block(int32_t id) const { return parents_[id] >= 0 ? parents_[id] : kNone; }
    bool has_children(int32_t id) const { return children_[id] != kNone; }
    const int32_t* tokens(int32_t id) const { return tokens_.get() + static_cast<size_t>(id) * block_size_; }

    int32_t find_root(const std::string& space) const;  // kNone if it has no nodes
    int32_t root_of(int32_t id) const { return roots_of_[id]; }  // requires contains(id)
    // The child of `node` that holds exactly these block_size tokens, or kNone.
    int32_t find_child(int32_t node, const int32_t* token_ids) const;
    PrefixMatch match(const std::string& space, const int32_t* token_ids, int64_t count) const;

    // Requires !contains(id), find_child(parent, token_ids) == kNone, and a parent that is a node or root here.
    void insert(int32_t id, int32_t parent, const int32_t* token_ids) noexcept;
    // As a root's child; the root is made if it is missing. Nothing has changed if it throws std::bad_alloc.
    void insert_first(int32_t id, const std::string& space, const int32_t* token_ids);
    void remove(int32_t id);  // requires contains(id) && !has_children(id)
    void clear();

    PublishedBlocks published() const;

    // What is wrong, as a sentence; empty if nothing is. O(blocks).
    std::string find_defect() const;

private:
    friend struct Saboteur;

    struct Root {
        const std::string* space = nullptr;  // key in root_names_; null: this slot is unused
        int32_t children = kNone;
    };
    static size_t slot(int32_t root) { return static_cast<size_t>(-2 - root); }
    int32_t top_of(int32_t node) const { return node >= 0 ? children_[node] : roots_[slot(node)].children; }
    int32_t& top_of(int32_t node) { return node >= 0 ? children_[node] : roots_[slot(node)].children; }

    struct Search {
        int32_t found = kNone;    // of the siblings that begin with the tokens sought, the first in token order
        int32_t longest = 0;      // the longest run of leading tokens that any sibling shares with them
        int32_t highest = kNone;  // the siblings that share as many lie at or below this one; kNone if longest is 0
    };
    // Among the siblings at and below `top`; 1 <= count <= block_size. In token order the neighbours of what is sought
    // share most with it, and the way down passes both.
    Search search(int32_t top, const int32_t* token_ids, int32_t count) const;
    int32_t height(int32_t id) const { return id == kNone ? 0 : heights_[id]; }
    bool before(int32_t a, int32_t b) const;  // in token order
    void measure(int32_t top);                // sets its height from those below
    // Each returns the search tree's new top.
    int32_t rotate_left(int32_t top);
    int32_t rotate_right(int32_t top);
    int32_t rebalance(int32_t top);
    int32_t insert_sibling(int32_t top, int32_t id);
    int32_t remove_sibling(int32_t top, int32_t id);
    void append_siblings(int32_t top, std::vector<int32_t>& ids) const;  // in token order
    std::string find_sibling_defect(int32_t top, int32_t node) const;

    int32_t block_size_;
    int32_t size_ = 0;
    std::vector<int32_t> parents_;   // [num_blocks] a block or root; kNone: not published
    std::vector<int32_t> roots_of_;  // [num_blocks]
    std::vector<int32_t> children_;  // [num_blocks] top of the children's search tree
    std::vector<int32_t> left_;      // [num_blocks] in the search tree of the block's siblings
    std::vector<int32_t> right_;     // [num_blocks]
    std::vector<uint8_t> heights_;   // [num_blocks] 1 at the leaves
    std::unique_ptr<int32_t[]> tokens_;  // [num_blocks, block_size]; not touched before it is written
    std::map<std::string, int32_t> root_names_;
    std::vector<Root> roots_;
    std::vector<int32_t> unused_roots_;
};

}  // namespace minivllm
