// BlockAllocator: which physical KV blocks are free, and how many references each other one has.
//
// Owns block ids, reference counts, states and the free list; integers only. It does not know what lies in a block,
// how large one is, or who holds the references; it knows no Python, tensors or requests.
// minivllm/block_allocator/reference.py is its specification; both give the same answers, ids, errors and statistics.
//
// Not thread-safe: the caller serialises (from Python, the GIL does).
//
// Build and test it alone, from the project's root:
//   g++ -std=c++17 -O2 -Wall -Wextra -Icsrc csrc/block_allocator.cpp csrc/tests/test_block_allocator.cpp -o /tmp/test_block_allocator
//   /tmp/test_block_allocator            the unit tests (add -fsanitize=address,undefined above)
//   /tmp/test_block_allocator --bench    and how many blocks a second it allocates and frees
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace minivllm {

// The caller's mistake, in one sentence that names the id or number.
class BlockError : public std::invalid_argument {
public:
    using std::invalid_argument::invalid_argument;
};

enum class BlockState : uint8_t {
    free = 0,    // holds nothing
    cached = 1,  // no references, contents kept for the prefix index; can be allocated like a free one
    in_use = 2,  // one reference or more
};

// Doubly linked list of block ids, its links held in two arrays: everything O(1), removal from the middle too.
//
//   sentinel (index capacity) <-> front <-> ... <-> back <-> sentinel
class BlockList {
public:
    explicit BlockList(int32_t capacity);  // empty; may hold the ids 0 .. capacity - 1, each at most once

    int32_t size() const { return size_; }
    bool contains(int32_t id) const { return next_[id] != kUnlinked; }
    int32_t front() const { return next_[sentinel()]; }  // requires size() > 0
    void push_front(int32_t id);                         // requires !contains(id)
    void remove(int32_t id);                             // requires contains(id)

    // What is wrong with the links, as a sentence; empty if nothing is. O(capacity).
    std::string find_defect() const;

private:
    friend struct Saboteur;  // the tests break the links, to see that the defect is found
    static constexpr int32_t kUnlinked = -1;
    int32_t sentinel() const { return static_cast<int32_t>(next_.size()) - 1; }

    std::vector<int32_t> prev_;  // [capacity + 1]
    std::vector<int32_t> next_;  // [capacity + 1]
    int32_t size_ = 0;
};

// Fields as in AllocatorStats of minivllm/block_allocator/interface.py, where they are explained.
struct AllocatorStats {
    int32_t num_blocks;
    int32_t num_free;
    int32_t num_cached;
    int32_t num_in_use;
    int32_t num_shared;
    int32_t peak_in_use;
    int64_t num_references;
    int64_t total_allocated;
};

class BlockAllocator {
public:
    static constexpr int32_t kMaxBlocks = INT32_MAX - 1;  // one more index is the list's sentinel

    // All blocks are free. Throws BlockError unless 1 <= num_blocks <= kMaxBlocks.
    explicit BlockAllocator(int64_t num_blocks);

    // Takes `count` blocks from the front of the free list, in its order, each with one reference; `block_ids` becomes
    // their ids. False if fewer are free; then nothing has changed. Throws BlockError if count < 0.
    bool allocate(int64_t count, std::vector<int32_t>& block_ids);

    // Drops one reference for each entry, in order. A block without references goes to the front of the free list.
    // Throws BlockError, with nothing changed, if an id is unknown or dropped more often than it is held.
    void free(const std::vector<int32_t>& block_ids);

    // Adds one reference for each entry. Throws BlockError, with nothing changed, if an id is unknown or not in use,
    // or if its count would not fit an int32.
    void fork(const std::vector<int32_t>& block_ids);

    int32_t ref_count(int64_t id) const { return ref_counts_[require_known(id)]; }
    bool is_shared(int64_t id) const { return ref_count(id) > 1; }
    int32_t num_blocks() const { return static_cast<int32_t>(ref_counts_.size()); }
    int32_t num_free_blocks() const { return free_.size(); }  // what allocate can give

    AllocatorStats stats() const;                                            // O(1)
    const std::vector<int32_t>& ref_counts() const { return ref_counts_; }   // [num_blocks]
    const std::vector<BlockState>& states() const { return states_; }        // [num_blocks]

    // Throws BlockError with the first invariant found broken. O(num_blocks).
    void check_integrity() const;

    // The id, narrowed. Throws BlockError unless 0 <= id < num_blocks().
    int32_t require_known(int64_t id) const;

    // The errors for numbers that may not even fit an int64; `shown` is the number as text.
    static BlockError bad_num_blocks(const std::string& shown);
    static BlockError bad_count(const std::string& shown);
    BlockError unknown_block(const std::string& shown) const;

private:
    friend struct Saboteur;

    std::vector<int32_t> ref_counts_;
    std::vector<BlockState> states_;
    // Last in, first out: the block freed last is the likeliest to be still in the processor's caches, and a pool that
    // is never full keeps to few blocks, so that the rest of its (lazily backed) memory is never touched.
    BlockList free_;
    int32_t num_shared_ = 0;
    int32_t peak_in_use_ = 0;
    int64_t num_references_ = 0;
    int64_t total_allocated_ = 0;
};

}  // namespace minivllm
