// See block_allocator.h for what this is, and how to build and test it alone.
#include "block_allocator.h"

#include <algorithm>

namespace minivllm {

BlockError BlockAllocator::bad_num_blocks(const std::string& shown) {
    return BlockError("cannot manage " + shown + " blocks: the number must be from 1 to " +
                      std::to_string(kMaxBlocks));
}

BlockError BlockAllocator::bad_block_size(const std::string& shown) {
    return BlockError("cannot manage blocks of " + shown + " tokens: the number must be from 1 to " +
                      std::to_string(kMaxBlockSize));
}

BlockError BlockAllocator::bad_count(const std::string& shown) {
    return BlockError("cannot allocate " + shown + " blocks: the number must be 0 or more");
}

BlockError BlockAllocator::unknown_block(const std::string& shown) const {
    return BlockError("block " + shown + " is unknown: the ids are 0 to " + std::to_string(num_blocks() - 1));
}

int32_t BlockAllocator::require_num_blocks(int64_t num_blocks) {
    if (num_blocks < 1 || num_blocks > kMaxBlocks) {
        throw bad_num_blocks(std::to_string(num_blocks));
    }
    return static_cast<int32_t>(num_blocks);
}

int32_t BlockAllocator::require_block_size(int64_t block_size) {
    if (block_size < 1 || block_size > kMaxBlockSize) {
        throw bad_block_size(std::to_string(block_size));
    }
    return static_cast<int32_t>(block_size);
}

BlockAllocator::BlockAllocator(int64_t num_blocks, int64_t block_size)
    : ref_counts_(static_cast<size_t>(require_num_blocks(num_blocks)), 0),
      states_(static_cast<size_t>(num_blocks), BlockState::free),
      continued_(static_cast<size_t>(num_blocks), 0),
      index_(static_cast<int32_t>(num_blocks), require_block_size(block_size)),
      free_(static_cast<int32_t>(num_blocks)),
      cached_(static_cast<int32_t>(num_blocks)) {
    // Pushed from the last on, so that a fresh pool is handed out as 0, 1, 2, ...
    for (int32_t id = this->num_blocks() - 1; id >= 0; --id) {
        free_.push_front(id);
    }
}

int32_t BlockAllocator::require_known(int64_t id) const {
    if (id < 0 || id >= num_blocks()) {
        throw unknown_block(std::to_string(id));
    }
    return static_cast<int32_t>(id);
}

bool BlockAllocator::allocate(int64_t count, std::vector<int32_t>& block_ids) {
    if (count < 0) {
        throw bad_count(std::to_string(count));
    }
    if (count > num_free_blocks()) {
        return false;
    }
    block_ids.resize(static_cast<size_t>(count));
    for (int32_t& id : block_ids) {
        if (free_.size() == 0) {
            evict();
        }
        id = free_.front();
        free_.remove(id);
        ref_counts_[id] = 1;
        states_[id] = BlockState::in_use;
    }
    num_references_ += count;
    total_allocated_ += count;
    peak_in_use_ = std::max(peak_in_use_, num_in_use());
    return true;
}

void BlockAllocator::evict() {
    const int32_t id = cached_.front();
    cached_.remove(id);
    index_.remove(id);
    states_[id] = BlockState::free;
    free_.push_front(id);
    ++total_evicted_;
}

void BlockAllocator::drop_reference(int32_t id) {
    --num_references_;
    const int32_t left = --ref_counts_[id];
    if (left == 1) {
        --num_shared_;
    } else if (left == 0) {
        leave_use(id);
    }
}

void BlockAllocator::leave_use(int32_t id) {
    while (id != kNone && ref_counts_[id] == 0 && continued_[id] == 0) {
        if (!index_.contains(id)) {
            states_[id] = BlockState::free;
            free_.push_front(id);
            return;
        }
        states_[id] = BlockState::cached;
        cached_.push_back(id);
        id = index_.parent_block(id);
        if (id != kNone) {
            --continued_[id];
        }
    }
}

void BlockAllocator::return_to_use(int32_t id) {
    while (id != kNone && states_[id] == BlockState::cached) {
        cached_.remove(id);
        states_[id] = BlockState::in_use;
        id = index_.parent_block(id);
        if (id != kNone) {
            ++continued_[id];
        }
    }
}

void BlockAllocator::free(const std::vector<int32_t>& block_ids) {
    for (const int32_t id : block_ids) {
        require_known(id);
    }
    // A trial run on the counts themselves: ids that occur several times are counted without further memory.
    size_t tried = 0;
    while (tried < block_ids.size() && ref_counts_[block_ids[tried]] > 0) {
        --ref_counts_[block_ids[tried]];
        ++tried;
    }
    for (size_t i = 0; i < tried; ++i) {
        ++ref_counts_[block_ids[i]];
    }
    if (tried < block_ids.size()) {
        const int32_t id = block_ids[tried];
        if (ref_counts_[id] == 0) {
            throw BlockError("block " + std::to_string(id) + " cannot be freed: " +
                             (states_[id] == BlockState::free ? "it is free already" : "nobody holds it"));
        }
        const auto times = std::count(block_ids.begin(), block_ids.end(), id);
        throw BlockError("block " + std::to_string(id) + " cannot be freed " + std::to_string(times) +
                         " times in one call: its reference count is " + std::to_string(ref_counts_[id]));
    }

    for (const int32_t id : block_ids) {
        drop_reference(id);
    }
}

void BlockAllocator::fork(const std::vector<int32_t>& block_ids) {
    for (const int32_t id : block_ids) {
        require_known(id);
    }
    size_t done = 0;
    for (; done < block_ids.size(); ++done) {
        int32_t& count = ref_counts_[block_ids[done]];
        if (states_[block_ids[done]] == BlockState::free || count == INT32_MAX) {
            break;
        }
        num_shared_ += count == 1 ? 1 : 0;
        ++count;
    }
    if (done < block_ids.size()) {
        const int32_t id = block_ids[done];
        const bool is_free = states_[id] == BlockState::free;
        for (size_t i = 0; i < done; ++i) {
            num_shared_ -= --ref_counts_[block_ids[i]] == 1 ? 1 : 0;
        }
        throw BlockError("block " + std::to_string(id) + " cannot be forked: " +
                         (is_free ? "it is free" : "its reference count would pass " + std::to_string(INT32_MAX)));
    }
    for (const int32_t id : block_ids) {
        return_to_use(id);
    }
    num_references_ += static_cast<int64_t>(block_ids.size());
    peak_in_use_ = std::max(peak_in_use_, num_in_use());
}

std::vector<int32_t> BlockAllocator::publish(const std::string& space, int32_t parent, const int32_t* token_ids,
                                             int64_t count, const std::vector<int32_t>& block_ids) {
    const auto cannot = [](int32_t id, const char* what, const std::string& why) {
        return BlockError("block " + std::to_string(id) + " cannot be " + what + ": " + why);
    };
    for (const int32_t id : block_ids) {
        require_known(id);
    }
    const auto held = static_cast<int64_t>(block_ids.size()) * block_size();
    if (count != held) {
        throw BlockError(std::to_string(block_ids.size()) + " blocks of " + std::to_string(block_size()) +
                         " tokens hold " + std::to_string(held) + " tokens, not " + std::to_string(count));
    }
    int32_t node = index_.find_root(space);
    if (parent != kNone) {
        require_known(parent);
        if (ref_counts_[parent] == 0) {
            throw cannot(parent, "continued", "nobody holds it");
        }
        if (!index_.contains(parent)) {
            throw cannot(parent, "continued", "it is not published");
        }
        if (index_.root_of(parent) != node) {
            throw cannot(parent, "continued", "it is published in another namespace");
        }
        node = parent;
    }

    // A trial run that can be taken back: references are dropped from the blocks that give way to published ones
    // (so that one which occurs several times is held as often), and the others become nodes.
    std::vector<int32_t> table(block_ids);
    const auto tokens_of = [&](size_t i) { return token_ids + i * static_cast<size_t>(block_size()); };
    std::string defect;
    size_t at = 0;
    size_t num_old = 0;  // leading blocks whose tokens are published already: those behind a new node are all new
    for (; at < table.size(); ++at) {
        const int32_t id = block_ids[at];
        const int32_t old =
            at == num_old && node != kNone ? index_.find_child(node, tokens_of(at)) : kNone;
        if (ref_counts_[id] == 0) {
            defect = "nobody holds it";
            for (size_t i = 0; i < at; ++i) {
                if (block_ids[i] == id) defect = "it occurs more often than its reference count";
            }
        } else if (old != id && index_.contains(id)) {
            defect = "it is published for other tokens";
        } else if (old != kNone && old != id && ref_counts_[old] == INT32_MAX) {
            defect = "the reference count of block " + std::to_string(old) + ", published for the same tokens, " +
                     "would pass " + std::to_string(INT32_MAX);
        }
        if (!defect.empty()) {
            break;
        }
        if (old != kNone) {
            ref_counts_[id] -= old != id ? 1 : 0;
            table[at] = old;
            ++num_old;
        } else if (node == kNone) {
            index_.insert_first(id, space, tokens_of(at));
        } else {
            index_.insert(id, node, tokens_of(at));
        }
        node = table[at];
    }
    for (size_t i = 0; i < num_old; ++i) {
        ref_counts_[block_ids[i]] += table[i] != block_ids[i] ? 1 : 0;
    }
    if (!defect.empty()) {
        for (size_t i = at; i-- > num_old;) {
            index_.remove(block_ids[i]);
        }
        throw cannot(block_ids[at], "published", defect);
    }

    for (size_t i = 0; i < num_old; ++i) {
        if (table[i] != block_ids[i]) {
            num_shared_ += ++ref_counts_[table[i]] == 2 ? 1 : 0;
            ++num_references_;
            return_to_use(table[i]);
        }
    }
    for (size_t i = num_old; i < table.size(); ++i) {
        const int32_t before = index_.parent_block(table[i]);
        if (before != kNone) {
            ++continued_[before];
        }
    }
    for (size_t i = num_old; i-- > 0;) {
        if (table[i] != block_ids[i]) {
            drop_reference(block_ids[i]);
        }
    }
    peak_in_use_ = std::max(peak_in_use_, num_in_use());
    return table;
}

void BlockAllocator::reset_prefix_cache() {
    while (cached_.size() > 0) {  // the most recently used one is then the first to be allocated
        const int32_t id = cached_.front();
        cached_.remove(id);
        states_[id] = BlockState::free;
        free_.push_front(id);
    }
    index_.clear();
    std::fill(continued_.begin(), continued_.end(), 0);
    for (int32_t id = 0; id < num_blocks(); ++id) {
        if (states_[id] == BlockState::in_use) {
            leave_use(id);  // if only a block that continued it kept it
        }
    }
}

AllocatorStats BlockAllocator::stats() const {
    AllocatorStats stats;
    stats.num_blocks = num_blocks();
    stats.num_free = free_.size();
    stats.num_cached = cached_.size();
    stats.num_in_use = num_in_use();
    stats.num_shared = num_shared_;
    stats.num_published = index_.size();
    stats.peak_in_use = peak_in_use_;
    stats.num_references = num_references_;
    stats.total_allocated = total_allocated_;
    stats.total_evicted = total_evicted_;
    return stats;
}

// `continued`: how many blocks in use continue this one, counted afresh.
std::string BlockAllocator::find_block_defect(int32_t id, int32_t continued) const {
    const int32_t count = ref_counts_[id];
    if (count < 0) {
        return "has the reference count " + std::to_string(count);
    }
    if (continued_[id] != continued) {
        return "is continued by " + std::to_string(continued) + " blocks in use, but " +
               std::to_string(continued_[id]) + " are counted";
    }
    const bool in_use = count > 0 || continued > 0;
    if ((states_[id] == BlockState::in_use) != in_use || (states_[id] == BlockState::cached && !index_.contains(id)) ||
        (states_[id] == BlockState::free && index_.contains(id))) {
        return "has the reference count " + std::to_string(count) + " but the state " +
               std::to_string(static_cast<int>(states_[id]));
    }
    if (free_.contains(id) != (states_[id] == BlockState::free)) {
        return "has the reference count " + std::to_string(count) +
               (free_.contains(id) ? " but is on the free list" : " but is not on the free list");
    }
    if (cached_.contains(id) != (states_[id] == BlockState::cached)) {
        return "has the reference count " + std::to_string(count) +
               (cached_.contains(id) ? " but is on the list of cached blocks" : " but is not on the list of cached blocks");
    }
    return "";
}

// The least recently used block is evicted alone, so none that continues it may lie behind it.
std::string BlockAllocator::find_cached_order_defect() const {
    std::vector<int32_t> place(ref_counts_.size(), 0);
    for (int32_t id = cached_.front(), i = 1; i <= cached_.size(); id = cached_.after(id), ++i) {
        place[id] = i;
    }
    for (int32_t id = 0; id < num_blocks(); ++id) {
        const int32_t parent = index_.parent_block(id);
        if (parent != kNone && place[parent] != 0 && place[parent] < place[id]) {
            return "block " + std::to_string(parent) + " would be evicted before block " + std::to_string(id) +
                   ", which continues it";
        }
    }
    return "";
}

void BlockAllocator::check_integrity() const {
    const std::string free_defect = free_.find_defect();
    if (!free_defect.empty()) {
        throw BlockError("the free list is broken: " + free_defect);
    }
    const std::string cached_defect = cached_.find_defect();
    if (!cached_defect.empty()) {
        throw BlockError("the list of cached blocks is broken: " + cached_defect);
    }
    const std::string index_defect = index_.find_defect();
    if (!index_defect.empty()) {
        throw BlockError("the prefix index is broken: " + index_defect);
    }
    std::vector<int32_t> continued(ref_counts_.size(), 0);
    for (int32_t id = 0; id < num_blocks(); ++id) {
        if (states_[id] == BlockState::in_use && index_.parent_block(id) != kNone) {
            ++continued[index_.parent_block(id)];
        }
    }
    int32_t shared = 0;
    int64_t references = 0;
    for (int32_t id = 0; id < num_blocks(); ++id) {
        const std::string defect = find_block_defect(id, continued[id]);
        if (!defect.empty()) {
            throw BlockError("block " + std::to_string(id) + " " + defect);
        }
        shared += ref_counts_[id] > 1 ? 1 : 0;
        references += ref_counts_[id];
    }
    const std::string order_defect = find_cached_order_defect();
    if (!order_defect.empty()) {
        throw BlockError(order_defect);
    }
    if (shared != num_shared_) {
        throw BlockError(std::to_string(shared) + " blocks are shared, but " + std::to_string(num_shared_) +
                         " are counted");
    }
    if (references != num_references_) {
        throw BlockError("the reference counts add up to " + std::to_string(references) + ", but " +
                         std::to_string(num_references_) + " are counted");
    }
    if (peak_in_use_ < num_in_use()) {
        throw BlockError(std::to_string(num_in_use()) + " blocks are in use, but the peak is " +
                         std::to_string(peak_in_use_));
    }
}

}  // namespace minivllm
