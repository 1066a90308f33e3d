// See block_list.h for what this is.
#include "block_list.h"

namespace minivllm {

BlockList::BlockList(int32_t capacity)
    : prev_(static_cast<size_t>(capacity) + 1, kUnlinked), next_(static_cast<size_t>(capacity) + 1, kUnlinked) {
    prev_[capacity] = capacity;
    next_[capacity] = capacity;
}

void BlockList::link(int32_t id, int32_t next) {
    const int32_t prev = prev_[next];
    prev_[id] = prev;
    next_[id] = next;
    next_[prev] = id;
    prev_[next] = id;
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

}  // namespace minivllm
