// BlockAllocator: which physical KV blocks are free, how many references each other one has, and which can be shared
// because their tokens are known.
//
// Owns block ids, reference counts, states, the free list, the prefix index, and the order in which cached blocks are
// evicted; integers only. It does not know the keys and values in a block, or who holds the references; it knows no
// Python, tensors or requests.
// minivllm/block_allocator/reference.py is its specification; both give the same answers, ids, errors and statistics.
//
// Not thread-safe: the caller serialises (from Python, the GIL does).
//
// Build and test it alone, from the project's root:
//   cd csrc && g++ -std=c++17 -O2 -Wall -Wextra -I. block_*.cpp prefix_index.cpp tests/test_block_allocator.cpp -o /tmp/test_block_allocator
//   /tmp/test_block_allocator            the unit tests (add -fsanitize=address,undefined above)
//   /tmp/test_block_allocator --bench    and how many blocks a second it allocates, frees, matches and publishes
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "block_list.h"
#include "prefix_index.h"

namespace minivllm {

// The caller's mistake, in one sentence that names the id or number.
class BlockError : public std::invalid_argument {
public:
    using std::invalid_argument::invalid_argument;
};

enum class BlockState : uint8_t {
    free = 0,    // holds nothing
    cached = 1,  // published, but not in use: its contents are kept until allocate needs the block
    in_use = 2,  // has one reference or more, or a published block that continues it is in use
};

// Fields as in AllocatorStats of minivllm/block_allocator/interface.py, where they are explained.
struct AllocatorStats {
    int32_t num_blocks;
    int32_t num_free;
    int32_t num_cached;
    int32_t num_in_use;
    int32_t num_shared;
    int32_t num_published;
    int32_t peak_in_use;
    int64_t num_references;
    int64_t total_allocated;
    int64_t total_evicted;
};

class BlockAllocator {
public:
    static constexpr int32_t kMaxBlocks = INT32_MAX - 1;  // one more index is the list's sentinel

    static constexpr int32_t kMaxBlockSize = INT32_MAX;
    static constexpr int32_t kNone = PrefixIndex::kNone;

    // All blocks are free. `block_size` is the number of tokens in a block. Throws BlockError unless
    // 1 <= num_blocks <= kMaxBlocks and 1 <= block_size <= kMaxBlockSize.
    BlockAllocator(int64_t num_blocks, int64_t block_size);

    // Takes `count` blocks, each with one reference; `block_ids` becomes their ids. They come from the front of the
    // free list, and when that is empty from the cached blocks, least recently used first, which are forgotten by the
    // prefix index. False if there are too few of both; then nothing has changed. Throws BlockError if count < 0.
    bool allocate(int64_t count, std::vector<int32_t>& block_ids);

    // Drops one reference for each entry, in order. A block that is not in use any more goes to the front of the free
    // list, or, if it is published, to the back of the cached ones. Throws BlockError, with nothing changed, if an id
    // is unknown or dropped more often than it is held.
    void free(const std::vector<int32_t>& block_ids);

    // Adds one reference for each entry; cached blocks come back into use. Throws BlockError, with nothing changed, if
    // an id is unknown or free, or if its count would not fit an int32.
    void fork(const std::vector<int32_t>& block_ids);

    // The published blocks that hold the leading ones of `count` tokens. Changes nothing.
    PrefixMatch match_prefix(const std::string& space, const int32_t* token_ids, int64_t count) const {
        return index_.match(space, token_ids, count);
    }

    // Publishes `block_ids`, consecutive full blocks of one table, whose K and V are computed and belong to these
    // `count` = block_ids.size() * block_size() tokens. They continue the published block `parent` of the same table; kNone at
    // the beginning of a prefix. Answers the blocks that the table has from now on: where the same tokens are
    // published already, the caller's reference has moved to that block, and its own one is dropped (the last one
    // first). Throws BlockError, with nothing changed, if a block is not held, or is published for something
    // else, or if the numbers do not fit.
    std::vector<int32_t> publish(const std::string& space, int32_t parent, const int32_t* token_ids, int64_t count,
                                 const std::vector<int32_t>& block_ids);

    // Forgets all published blocks. Cached ones are free; those in use are held on as if never published.
    void reset_prefix_cache();

    PublishedBlocks published() const { return index_.published(); }
    const int32_t* token_ids(int32_t id) const { return index_.tokens(id); }  // requires a published block

    int32_t ref_count(int64_t id) const { return ref_counts_[require_known(id)]; }
    bool is_shared(int64_t id) const { return ref_count(id) > 1; }
    int32_t num_blocks() const { return static_cast<int32_t>(ref_counts_.size()); }
    int32_t block_size() const { return index_.block_size(); }
    int32_t num_free_blocks() const { return free_.size() + cached_.size(); }  // what allocate can give

    AllocatorStats stats() const;                                            // O(1)
    const std::vector<int32_t>& ref_counts() const { return ref_counts_; }   // [num_blocks]
    const std::vector<BlockState>& states() const { return states_; }        // [num_blocks]

    // Throws BlockError with the first invariant found broken. O(num_blocks), and each token of the index once or twice.
    void check_integrity() const;

    // The id, narrowed. Throws BlockError unless 0 <= id < num_blocks().
    int32_t require_known(int64_t id) const;

    // The constructor's arguments, narrowed. They throw BlockError as it does.
    static int32_t require_num_blocks(int64_t num_blocks);
    static int32_t require_block_size(int64_t block_size);

    // The errors for numbers that may not even fit an int64; `shown` is the number as text.
    static BlockError bad_num_blocks(const std::string& shown);
    static BlockError bad_block_size(const std::string& shown);
    static BlockError bad_count(const std::string& shown);
    BlockError unknown_block(const std::string& shown) const;

private:
    friend struct Saboteur;

    int32_t num_in_use() const { return num_blocks() - num_free_blocks(); }
    void drop_reference(int32_t id);  // requires ref_counts_[id] > 0
    void leave_use(int32_t id);       // if nothing keeps it in use: to its list, and so on with the block it continues
    void return_to_use(int32_t id);   // requires a cached block; the ones that it continues return with it
    void evict();                     // requires a cached block: the least recently used one becomes free
    std::string find_block_defect(int32_t id, int32_t continued) const;
    std::string find_cached_order_defect() const;

    std::vector<int32_t> ref_counts_;
    std::vector<BlockState> states_;
    // A block in use keeps the one that it continues in use, whoever holds that one: so it is never evicted before.
    std::vector<int32_t> continued_;  // [num_blocks] how many blocks in use continue this one
    PrefixIndex index_;
    // Last in, first out: the block freed last is the likeliest to be still in the processor's caches, and a pool that
    // is never full keeps to few blocks, so that the rest of its (lazily backed) memory is never touched.
    BlockList free_;
    // Least recently used at the front. A block comes to the back when the last one that continues it has left use:
    // children lie before their parents, and the front one has none.
    BlockList cached_;
    int32_t num_shared_ = 0;
    int32_t peak_in_use_ = 0;
    int64_t num_references_ = 0;
    int64_t total_allocated_ = 0;
    int64_t total_evicted_ = 0;
};

}  // namespace minivllm
