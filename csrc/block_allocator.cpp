// See block_allocator.h for what this is, and how to build and test it alone.
#include "block_allocator.h"

#include <algorithm>

namespace minivllm {

BlockList::BlockList(int32_t capacity)
    : prev_(static_cast<size_t>(capacity) + 1, kUnlinked), next_(static_cast<size_t>(capacity) + 1, kUnlinked) {
    prev_[capacity] = capacity;
    next_[capacity] = capacity;
}

void BlockList::push_front(int32_t id) {
    const int32_t after = next_[sentinel()];
    prev_[id] = sentinel();
    next_[id] = after;
    prev_[after] = id;
    next_[sentinel()] = id;
    ++size_;
}

void BlockList::remove(int32_t id) {
    next_[prev_[id]] = next_[id];
    prev_[next_[id]] = prev_[id];
    prev_[id] = kUnlinked;
    next_[id] = kUnlinked;
    --size_;
}

std::string BlockList::find_defect() const {
    const int32_t capacity = sentinel();
    int32_t linked = 0;
    for (int32_t id = 0; id < capacity; ++id) {
        if ((next_[id] == kUnlinked) != (prev_[id] == kUnlinked)) {
            return "block " + std::to_string(id) + " is linked in one direction only";
        }
        linked += contains(id) ? 1 : 0;
    }
    if (linked != size_) {
        return std::to_string(linked) + " blocks are linked, but the size is " + std::to_string(size_);
    }
    // size_ is right, so a walk that has not come home after size_ steps is on a ring of its own or runs in circles.
    int32_t at = capacity;
    for (int32_t step = 0; step <= size_; ++step) {
        const int32_t next = next_[at];
        if (next < 0 || next > capacity) {
            return "the link after " + std::to_string(at) + " leads to " + std::to_string(next);
        }
        if (prev_[next] != at) {
            return "the link from " + std::to_string(at) + " to " + std::to_string(next) + " does not lead back";
        }
        at = next;
        if (at == capacity && step < size_) {
            return "the list ends after " + std::to_string(step) + " of " + std::to_string(size_) + " blocks";
        }
    }
    return "";
}

BlockError BlockAllocator::bad_num_blocks(const std::string& shown) {
    return BlockError("cannot manage " + shown + " blocks: the number must be from 1 to " +
                      std::to_string(kMaxBlocks));
}

BlockError BlockAllocator::bad_count(const std::string& shown) {
    return BlockError("cannot allocate " + shown + " blocks: the number must be 0 or more");
}

BlockError BlockAllocator::unknown_block(const std::string& shown) const {
    return BlockError("block " + shown + " is unknown: the ids are 0 to " + std::to_string(num_blocks() - 1));
}

static int32_t checked_num_blocks(int64_t num_blocks) {
    if (num_blocks < 1 || num_blocks > BlockAllocator::kMaxBlocks) {
        throw BlockAllocator::bad_num_blocks(std::to_string(num_blocks));
    }
    return static_cast<int32_t>(num_blocks);
}

BlockAllocator::BlockAllocator(int64_t num_blocks)
    : ref_counts_(static_cast<size_t>(checked_num_blocks(num_blocks)), 0),
      states_(static_cast<size_t>(num_blocks), BlockState::free),
      free_(static_cast<int32_t>(num_blocks)) {
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
    if (count > free_.size()) {
        return false;
    }
    block_ids.resize(static_cast<size_t>(count));
    for (int32_t& id : block_ids) {
        id = free_.front();
        free_.remove(id);
        ref_counts_[id] = 1;
        states_[id] = BlockState::in_use;
    }
    num_references_ += count;
    total_allocated_ += count;
    peak_in_use_ = std::max(peak_in_use_, num_blocks() - free_.size());
    return true;
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
            throw BlockError("block " + std::to_string(id) + " cannot be freed: it is free already");
        }
        const auto times = std::count(block_ids.begin(), block_ids.end(), id);
        throw BlockError("block " + std::to_string(id) + " cannot be freed " + std::to_string(times) +
                         " times in one call: its reference count is " + std::to_string(ref_counts_[id]));
    }

    for (const int32_t id : block_ids) {
        const int32_t left = --ref_counts_[id];
        if (left == 1) {
            --num_shared_;
        } else if (left == 0) {
            states_[id] = BlockState::free;
            free_.push_front(id);
        }
    }
    num_references_ -= static_cast<int64_t>(block_ids.size());
}

void BlockAllocator::fork(const std::vector<int32_t>& block_ids) {
    for (const int32_t id : block_ids) {
        require_known(id);
    }
    size_t done = 0;
    for (; done < block_ids.size(); ++done) {
        int32_t& count = ref_counts_[block_ids[done]];
        if (count == 0 || count == INT32_MAX) {
            break;
        }
        num_shared_ += count == 1 ? 1 : 0;
        ++count;
    }
    if (done < block_ids.size()) {
        const int32_t id = block_ids[done];
        const bool is_free = ref_counts_[id] == 0;
        for (size_t i = 0; i < done; ++i) {
            num_shared_ -= --ref_counts_[block_ids[i]] == 1 ? 1 : 0;
        }
        throw BlockError("block " + std::to_string(id) + " cannot be forked: " +
                         (is_free ? "it is free" : "its reference count would pass " + std::to_string(INT32_MAX)));
    }
    num_references_ += static_cast<int64_t>(block_ids.size());
}

AllocatorStats BlockAllocator::stats() const {
    AllocatorStats stats;
    stats.num_blocks = num_blocks();
    stats.num_free = free_.size();
    stats.num_cached = 0;  // no prefix index yet
    stats.num_in_use = num_blocks() - free_.size();
    stats.num_shared = num_shared_;
    stats.peak_in_use = peak_in_use_;
    stats.num_references = num_references_;
    stats.total_allocated = total_allocated_;
    return stats;
}

void BlockAllocator::check_integrity() const {
    const std::string defect = free_.find_defect();
    if (!defect.empty()) {
        throw BlockError("the free list is broken: " + defect);
    }
    int32_t shared = 0;
    int64_t references = 0;
    for (int32_t id = 0; id < num_blocks(); ++id) {
        const int32_t count = ref_counts_[id];
        const std::string name = "block " + std::to_string(id);
        if (count < 0) {
            throw BlockError(name + " has the reference count " + std::to_string(count));
        }
        if (states_[id] != (count > 0 ? BlockState::in_use : BlockState::free)) {
            throw BlockError(name + " has the reference count " + std::to_string(count) + " but the state " +
                             std::to_string(static_cast<int>(states_[id])));
        }
        if (free_.contains(id) != (count == 0)) {
            throw BlockError(name + " has the reference count " + std::to_string(count) +
                             (count == 0 ? " but is not on the free list" : " but is on the free list"));
        }
        shared += count > 1 ? 1 : 0;
        references += count;
    }
    if (shared != num_shared_) {
        throw BlockError(std::to_string(shared) + " blocks are shared, but " + std::to_string(num_shared_) +
                         " are counted");
    }
    if (references != num_references_) {
        throw BlockError("the reference counts add up to " + std::to_string(references) + ", but " +
                         std::to_string(num_references_) + " are counted");
    }
    const int32_t in_use = num_blocks() - free_.size();
    if (peak_in_use_ < in_use) {
        throw BlockError(std::to_string(in_use) + " blocks are in use, but the peak is " +
                         std::to_string(peak_in_use_));
    }
}

}  // namespace minivllm
