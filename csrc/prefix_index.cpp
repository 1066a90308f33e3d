// See prefix_index.h for what this is.
#include "prefix_index.h"

#include <algorithm>
#include <cstring>

namespace minivllm {

// How many leading tokens are equal, of `count`.
static int32_t shared_run(const int32_t* a, const int32_t* b, int32_t count) {
    int32_t run = 0;
    while (run < count && a[run] == b[run]) {
        ++run;
    }
    return run;
}

PrefixIndex::PrefixIndex(int32_t num_blocks, int32_t block_size)
    : block_size_(block_size),
      parents_(static_cast<size_t>(num_blocks), kNone),
      roots_of_(static_cast<size_t>(num_blocks), kNone),
      children_(static_cast<size_t>(num_blocks), kNone),
      left_(static_cast<size_t>(num_blocks), kNone),
      right_(static_cast<size_t>(num_blocks), kNone),
      heights_(static_cast<size_t>(num_blocks), 0),
      tokens_(new int32_t[static_cast<size_t>(num_blocks) * static_cast<size_t>(block_size)]) {}

int32_t PrefixIndex::find_root(const std::string& space) const {
    const auto found = root_names_.find(space);
    return found == root_names_.end() ? kNone : found->second;
}

int32_t PrefixIndex::find_child(int32_t node, const int32_t* token_ids) const {
    return search(top_of(node), token_ids, block_size_).found;
}

PrefixIndex::Search PrefixIndex::search(int32_t top, const int32_t* token_ids, int32_t count) const {
    Search result;
    while (top != kNone) {
        const int32_t* here = tokens(top);
        const int32_t run = shared_run(token_ids, here, count);
        if (run > result.longest) {
            result.longest = run;
            result.highest = top;
        }
        if (run == count) {
            result.found = top;
            if (count == block_size_) {
                break;  // no two siblings are equal
            }
        }
        top = run == count || token_ids[run] < here[run] ? left_[top] : right_[top];
    }
    return result;
}

PrefixMatch PrefixIndex::match(const std::string& space, const int32_t* token_ids, int64_t count) const {
    PrefixMatch found;
    int32_t node = find_root(space);
    while (node != kNone && count > 0) {
        const auto rest = static_cast<int32_t>(std::min<int64_t>(count, block_size_));
        const Search child = search(top_of(node), token_ids, rest);
        if (child.longest < block_size_) {
            found.partial_tokens = child.longest;
            found.partial_block = search(child.highest, token_ids, child.longest).found;
            break;
        }
        found.block_ids.push_back(child.found);
        node = child.found;
        token_ids += block_size_;
        count -= block_size_;
    }
    return found;
}

void PrefixIndex::insert(int32_t id, int32_t parent, const int32_t* token_ids) noexcept {
    std::copy_n(token_ids, block_size_, tokens_.get() + static_cast<size_t>(id) * block_size_);
    parents_[id] = parent;
    roots_of_[id] = parent >= 0 ? roots_of_[parent] : parent;
    heights_[id] = 1;
    int32_t& top = top_of(parent);
    top = insert_sibling(top, id);
    ++size_;
}

void PrefixIndex::insert_first(int32_t id, const std::string& space, const int32_t* token_ids) {
    int32_t root = find_root(space);
    if (root == kNone) {
        if (unused_roots_.empty()) {
            unused_roots_.reserve(roots_.size() + 1);  // so that remove() need not allocate
            roots_.emplace_back();
            unused_roots_.push_back(-1 - static_cast<int32_t>(roots_.size()));
        }
        root = unused_roots_.back();
        roots_[slot(root)].space = &root_names_.emplace(space, root).first->first;
        unused_roots_.pop_back();
    }
    insert(id, root, token_ids);
}

void PrefixIndex::remove(int32_t id) {
    const int32_t parent = parents_[id];
    int32_t& top = top_of(parent);
    top = remove_sibling(top, id);
    if (parent < 0 && top == kNone) {
        Root& root = roots_[slot(parent)];
        root_names_.erase(root_names_.find(*root.space));
        root.space = nullptr;
        unused_roots_.push_back(parent);
    }
    parents_[id] = roots_of_[id] = left_[id] = right_[id] = kNone;
    heights_[id] = 0;
    --size_;
}

void PrefixIndex::clear() {
    for (std::vector<int32_t>* links : {&parents_, &roots_of_, &children_, &left_, &right_}) {
        std::fill(links->begin(), links->end(), kNone);
    }
    std::fill(heights_.begin(), heights_.end(), uint8_t{0});
    root_names_.clear();
    roots_.clear();
    unused_roots_.clear();
    size_ = 0;
}

bool PrefixIndex::before(int32_t a, int32_t b) const {
    const int32_t run = shared_run(tokens(a), tokens(b), block_size_);
    return run < block_size_ && tokens(a)[run] < tokens(b)[run];
}

void PrefixIndex::measure(int32_t top) {
    heights_[top] = static_cast<uint8_t>(1 + std::max(height(left_[top]), height(right_[top])));
}

int32_t PrefixIndex::rotate_left(int32_t top) {
    const int32_t up = right_[top];
    right_[top] = left_[up];
    left_[up] = top;
    measure(top);
    measure(up);
    return up;
}

int32_t PrefixIndex::rotate_right(int32_t top) {
    const int32_t up = left_[top];
    left_[top] = right_[up];
    right_[up] = top;
    measure(top);
    measure(up);
    return up;
}

// Both sides are balanced and differ in height by at most 2; afterwards by at most 1.
int32_t PrefixIndex::rebalance(int32_t top) {
    const int32_t lean = height(left_[top]) - height(right_[top]);
    if (lean > 1) {
        const int32_t side = left_[top];
        if (height(left_[side]) < height(right_[side])) {
            left_[top] = rotate_left(side);
        }
        return rotate_right(top);
    }
    if (lean < -1) {
        const int32_t side = right_[top];
        if (height(right_[side]) < height(left_[side])) {
            right_[top] = rotate_right(side);
        }
        return rotate_left(top);
    }
    measure(top);
    return top;
}

int32_t PrefixIndex::insert_sibling(int32_t top, int32_t id) {
    if (top == kNone) {
        return id;
    }
    int32_t& side = before(id, top) ? left_[top] : right_[top];
    side = insert_sibling(side, id);
    return rebalance(top);
}

int32_t PrefixIndex::remove_sibling(int32_t top, int32_t id) {
    if (top != id) {
        int32_t& side = before(id, top) ? left_[top] : right_[top];
        side = remove_sibling(side, id);
        return rebalance(top);
    }
    if (left_[id] == kNone || right_[id] == kNone) {
        return left_[id] == kNone ? right_[id] : left_[id];
    }
    int32_t next = right_[id];  // its successor takes its place
    while (left_[next] != kNone) {
        next = left_[next];
    }
    right_[next] = remove_sibling(right_[id], next);
    left_[next] = left_[id];
    return rebalance(next);
}

void PrefixIndex::append_siblings(int32_t top, std::vector<int32_t>& ids) const {
    if (top != kNone) {
        append_siblings(left_[top], ids);
        ids.push_back(top);
        append_siblings(right_[top], ids);
    }
}

PublishedBlocks PrefixIndex::published() const {
    PublishedBlocks all;
    for (const auto& [space, root] : root_names_) {
        append_siblings(top_of(root), all.block_ids);
        all.namespace_index.resize(all.block_ids.size(), static_cast<int32_t>(all.namespaces.size()));
        all.namespaces.push_back(space);
    }
    all.parents.resize(all.block_ids.size(), kNone);
    for (size_t i = 0; i < all.block_ids.size(); ++i) {
        append_siblings(children_[all.block_ids[i]], all.block_ids);
        all.namespace_index.resize(all.block_ids.size(), all.namespace_index[i]);
        all.parents.resize(all.block_ids.size(), static_cast<int32_t>(i));
    }
    return all;
}

// Of the search tree with this top, whose blocks are children of `node`. A side is entered only if it is lower than the
// top, so that links in a circle end the search, too.
std::string PrefixIndex::find_sibling_defect(int32_t top, int32_t node) const {
    const std::string name = "block " + std::to_string(top);
    if (parents_[top] != node) {
        return name + " is among the children of " + std::to_string(node) + ", but its parent is " +
               std::to_string(parents_[top]);
    }
    if (roots_of_[top] != (node >= 0 ? roots_of_[node] : node)) {
        return name + " has another root than its parent";
    }
    for (const int32_t side : {left_[top], right_[top]}) {
        if (side < kNone || side >= static_cast<int32_t>(parents_.size())) {
            return name + " is linked to the sibling " + std::to_string(side);
        }
        if (side != kNone && heights_[side] >= heights_[top]) {
            return name + " is not higher than its sibling " + std::to_string(side) + " below";
        }
        if (side != kNone && (side == left_[top] ? !before(side, top) : !before(top, side))) {
            return name + " and its sibling " + std::to_string(side) + " are not in token order";
        }
    }
    const int32_t higher = std::max(height(left_[top]), height(right_[top]));
    const int32_t lower = std::min(height(left_[top]), height(right_[top]));
    if (heights_[top] != higher + 1 || higher - lower > 1) {
        return name + " has the height " + std::to_string(heights_[top]) + " over siblings of " +
               std::to_string(height(left_[top])) + " and " + std::to_string(height(right_[top]));
    }
    for (const int32_t side : {left_[top], right_[top]}) {
        const std::string defect = side == kNone ? "" : find_sibling_defect(side, node);
        if (!defect.empty()) {
            return defect;
        }
    }
    return "";
}

std::string PrefixIndex::find_defect() const {
    std::vector<int32_t> reached;  // from the roots, by level
    const auto enter = [&](int32_t node) -> std::string {
        const int32_t top = top_of(node);
        if (top < kNone || top >= static_cast<int32_t>(parents_.size())) {
            return "the children of " + std::to_string(node) + " begin with " + std::to_string(top);
        }
        const std::string defect = top == kNone ? "" : find_sibling_defect(top, node);
        if (!defect.empty()) {
            return defect;
        }
        const size_t first = reached.size();
        append_siblings(top, reached);
        for (size_t i = first + 1; i < reached.size(); ++i) {
            if (!before(reached[i - 1], reached[i])) {
                return "the siblings " + std::to_string(reached[i - 1]) + " and " + std::to_string(reached[i]) +
                       " are not in token order";
            }
        }
        return reached.size() > parents_.size() ? "some blocks are reached twice" : "";
    };

    for (const auto& [space, root] : root_names_) {
        if (roots_[slot(root)].space != &space || roots_[slot(root)].children == kNone) {
            return "the root " + std::to_string(root) + " is unused, but its namespace is known";
        }
        const std::string defect = enter(root);
        if (!defect.empty()) {
            return defect;
        }
    }
    if (root_names_.size() + unused_roots_.size() != roots_.size()) {
        return std::to_string(roots_.size()) + " roots are not " + std::to_string(root_names_.size()) + " used and " +
               std::to_string(unused_roots_.size()) + " unused ones";
    }
    for (size_t i = 0; i < reached.size(); ++i) {
        const std::string defect = enter(reached[i]);
        if (!defect.empty()) {
            return defect;
        }
    }
    int32_t published = 0;
    for (int32_t id = 0; id < static_cast<int32_t>(parents_.size()); ++id) {
        published += contains(id) ? 1 : 0;
        if (!contains(id) && (children_[id] != kNone || left_[id] != kNone || right_[id] != kNone)) {
            return "block " + std::to_string(id) + " is not published, but has links";
        }
    }
    if (static_cast<size_t>(published) != reached.size() || published != size_) {
        return std::to_string(published) + " blocks are published, " + std::to_string(reached.size()) +
               " can be reached, " + std::to_string(size_) + " are counted";
    }
    return "";
}

}  // namespace minivllm
