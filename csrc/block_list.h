// BlockList: an ordered set of block ids, everything O(1), removal from the middle too. What the ids stand for it does
// not know. Built and tested with block_allocator.h.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace minivllm {

// Doubly linked list of block ids, its links held in two arrays: everything O(1), removal from the middle too.
//
//   sentinel (index capacity) <-> front <-> ... <-> back <-> sentinel
class BlockList {
public:
    explicit BlockList(int32_t capacity);  // empty; may hold the ids 0 .. capacity - 1, each at most once

    int32_t size() const { return size_; }
    bool contains(int32_t id) const { return next_[id] != kUnlinked; }
    int32_t front() const { return next_[sentinel()]; }  // requires size() > 0
    int32_t after(int32_t id) const { return next_[id]; }  // requires contains(id); past the back: the capacity
    void push_front(int32_t id) { link(id, next_[sentinel()]); }  // requires !contains(id)
    void push_back(int32_t id) { link(id, sentinel()); }          // requires !contains(id)
    void remove(int32_t id);                                      // requires contains(id)

    // What is wrong with the links, as a sentence; empty if nothing is. O(capacity).
    std::string find_defect() const;

private:
    friend struct Saboteur;  // the tests break the links, to see that the defect is found
    static constexpr int32_t kUnlinked = -1;
    int32_t sentinel() const { return static_cast<int32_t>(next_.size()) - 1; }
    void link(int32_t id, int32_t next);  // before `next`

    std::vector<int32_t> prev_;  // [capacity + 1]
    std::vector<int32_t> next_;  // [capacity + 1]
    int32_t size_ = 0;
};

}  // namespace minivllm
