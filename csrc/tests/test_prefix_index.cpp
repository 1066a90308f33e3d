// Unit tests of csrc/prefix_index.h; built and run as that file says.
#include "prefix_index.h"

#include <algorithm>
#include <climits>
#include <random>

#include "check.h"

namespace minivllm {

// Breaks what no public call can break.
struct Saboteur {
    static std::vector<int32_t>& parents(PrefixIndex& i) { return i.parents_; }
    static std::vector<int32_t>& roots_of(PrefixIndex& i) { return i.roots_of_; }
    static std::vector<int32_t>& children(PrefixIndex& i) { return i.children_; }
    static std::vector<int32_t>& left(PrefixIndex& i) { return i.left_; }
    static std::vector<int32_t>& right(PrefixIndex& i) { return i.right_; }
    static std::vector<uint8_t>& heights(PrefixIndex& i) { return i.heights_; }
    static int32_t* tokens(PrefixIndex& i) { return i.tokens_.get(); }
    static int32_t& size(PrefixIndex& i) { return i.size_; }
    static std::vector<int32_t>& unused_roots(PrefixIndex& i) { return i.unused_roots_; }
    static size_t num_roots(const PrefixIndex& i) { return i.roots_.size(); }
};

}  // namespace minivllm

using minivllm::PrefixIndex;
using minivllm::PrefixMatch;
using minivllm::PublishedBlocks;
using minivllm::Saboteur;
using Ids = std::vector<int32_t>;

static constexpr int32_t kNone = PrefixIndex::kNone;

static bool matches(const PrefixIndex& index, const char* space, const Ids& tokens, const Ids& ids, int32_t partial,
                    int32_t partial_tokens) {
    const PrefixMatch match = index.match(space, tokens.data(), static_cast<int64_t>(tokens.size()));
    return match.block_ids == ids && match.partial_block == partial && match.partial_tokens == partial_tokens;
}

// 7 [17 4 9 2] ─┬─ 12 [6 0 0 1] ── 1 [2 2 7 3]
//               └─  3 [6 0 1 1]
static PrefixIndex example() {
    PrefixIndex index(16, 4);
    index.insert_first(7, "", Ids{17, 4, 9, 2}.data());
    index.insert(3, 7, Ids{6, 0, 1, 1}.data());
    index.insert(12, 7, Ids{6, 0, 0, 1}.data());
    index.insert(1, 12, Ids{2, 2, 7, 3}.data());
    return index;
}

static void test_match() {
    const PrefixIndex index = example();
    CHECK(index.find_defect().empty() && index.size() == 4 && index.block_size() == 4);
    CHECK(matches(index, "", {17, 4, 9, 2, 6, 0, 0, 1, 2, 2, 7, 3, 5}, {7, 12, 1}, kNone, 0));
    CHECK(matches(index, "", {17, 4, 9, 2, 6, 0, 0, 1, 2, 2, 7, 4}, {7, 12}, 1, 3));
    CHECK(matches(index, "", {17, 4, 9, 2, 6, 0}, {7}, 12, 2));         // both share two: the first in order
    CHECK(matches(index, "", {17, 4, 9, 2, 6, 0, 1}, {7}, 3, 3));       // the longest
    CHECK(matches(index, "", {17, 4, 9, 2, 6, 1, 0, 0}, {7}, 12, 1));   // behind both: still the first
    CHECK(matches(index, "", {17, 4, 9, 2, 7}, {7}, kNone, 0));
    CHECK(matches(index, "", {17, 4, 9}, {}, 7, 3));
    CHECK(matches(index, "", {}, {}, kNone, 0));
    CHECK(matches(index, "other", {17, 4, 9, 2}, {}, kNone, 0));
    CHECK(index.parent_block(7) == kNone && index.parent_block(1) == 12 && index.parent_block(0) == kNone);
    CHECK(index.root_of(1) == index.find_root("") && index.find_root("other") == kNone);
    CHECK(index.has_children(12) && !index.has_children(1));
}

static void test_namespaces() {
    PrefixIndex index(4, 1);
    const std::string zero("\0", 1);
    const int32_t extremes[] = {INT32_MIN, INT32_MAX};
    index.insert_first(0, "\xff", &extremes[0]);
    index.insert_first(1, zero, &extremes[0]);
    index.insert_first(2, "", &extremes[1]);
    index.insert_first(3, "", &extremes[0]);
    CHECK(index.find_defect().empty());
    CHECK(matches(index, "\xff", {INT32_MIN}, {0}, kNone, 0) && matches(index, "", {INT32_MIN}, {3}, kNone, 0));
    CHECK(index.match(zero, &extremes[0], 1).block_ids == (Ids{1}));
    const PublishedBlocks all = index.published();
    CHECK(all.namespaces == (std::vector<std::string>{"", zero, "\xff"}));
    CHECK(all.block_ids == (Ids{3, 2, 1, 0}) && all.namespace_index == (Ids{0, 0, 1, 2}));
    CHECK(all.parents == Ids(4, kNone));
    for (int32_t id : {3, 2, 1, 0}) index.remove(id);
    CHECK(index.size() == 0 && index.find_root("") == kNone && index.find_defect().empty());
    for (int i = 0; i < 100; ++i) {  // tenants that come and go use the same roots again
        index.insert_first(0, std::to_string(i), &extremes[0]);
        index.insert_first(1, std::to_string(i) + "b", &extremes[0]);
        index.remove(0);
        index.remove(1);
    }
    CHECK(Saboteur::num_roots(index) == 3 && index.find_defect().empty());
    index.insert_first(0, "x", &extremes[0]);
    index.clear();
    CHECK(index.size() == 0 && !index.contains(0) && index.find_defect().empty());
    CHECK(matches(index, "x", {INT32_MIN}, {}, kNone, 0));
}

static void test_published() {
    const PublishedBlocks all = example().published();
    CHECK(all.block_ids == (Ids{7, 12, 3, 1}) && all.parents == (Ids{kNone, 0, 0, 1}));
}

// Siblings that come in ascending, descending and random order, and go in random order: the search tree stays low.
static void test_siblings() {
    std::mt19937 random(4);
    const int32_t count = 3000;
    for (int order = 0; order < 3; ++order) {
        Ids values(count);
        for (int32_t i = 0; i < count; ++i) values[i] = order == 1 ? -i : i;
        if (order == 2) std::shuffle(values.begin(), values.end(), random);
        PrefixIndex index(count, 2);
        for (int32_t id = 0; id < count; ++id) {
            index.insert_first(id, "", Ids{values[id] / 7, values[id] % 7}.data());
        }
        CHECK(index.find_defect().empty());
        const auto& heights = Saboteur::heights(index);
        CHECK(*std::max_element(heights.begin(), heights.end()) <= 16);  // 1.44 log2(3000) = 16.6
        Ids ids(count);
        for (int32_t id = 0; id < count; ++id) ids[id] = id;
        std::shuffle(ids.begin(), ids.end(), random);
        for (int32_t i = 0; i < count; ++i) {
            index.remove(ids[i]);
            if (i % 100 == 0) {
                CHECK(index.find_defect().empty());
                const int32_t kept = ids[count - 1];
                CHECK(matches(index, "", {values[kept] / 7, values[kept] % 7}, {kept}, kNone, 0) || i == count - 1);
            }
        }
        CHECK(index.size() == 0 && index.find_defect().empty());
    }
}

// Random trees against all prefixes in a map, the partial match found by looking at each of them.
static void test_against_map() {
    std::mt19937 random(5);
    const int32_t capacity = 40, size = 3;
    PrefixIndex index(capacity, size);
    std::map<Ids, int32_t> known;  // whole prefix -> block
    for (int step = 0; step < 6000; ++step) {
        const auto id = static_cast<int32_t>(random() % capacity);
        if (index.contains(id)) {
            if (!index.has_children(id)) {
                index.remove(id);
                known.erase(std::find_if(known.begin(), known.end(), [&](const auto& k) { return k.second == id; }));
            }
        } else {
            Ids prefix;
            int32_t parent = kNone;
            if (!known.empty() && random() % 3 != 0) {
                const auto above = std::next(known.begin(), static_cast<std::ptrdiff_t>(random() % known.size()));
                prefix = above->first;
                parent = above->second;
            }
            for (int i = 0; i < size; ++i) prefix.push_back(static_cast<int32_t>(random() % 3) - 1);
            const int32_t* tokens = prefix.data() + prefix.size() - size;
            const int32_t node = parent == kNone ? index.find_root("") : parent;
            const auto there = known.find(prefix);
            CHECK((node == kNone ? kNone : index.find_child(node, tokens)) ==
                  (there == known.end() ? kNone : there->second));
            if (there == known.end()) {
                parent == kNone ? index.insert_first(id, "", tokens) : index.insert(id, parent, tokens);
                known[prefix] = id;
            }
        }
        CHECK(index.find_defect().empty() && index.size() == static_cast<int32_t>(known.size()));

        Ids query(random() % 12);
        for (int32_t& token : query) token = static_cast<int32_t>(random() % 3) - 1;
        Ids whole;
        size_t begin = 0;
        while (begin + size <= query.size()) {
            const auto next = known.find(Ids(query.begin(), query.begin() + static_cast<std::ptrdiff_t>(begin) + size));
            if (next == known.end()) break;
            whole.push_back(next->second);
            begin += size;
        }
        int32_t partial = kNone, longest = 0;
        for (const auto& [prefix, block] : known) {  // in token order, so the first of several comes first
            const auto diverges = std::mismatch(prefix.begin(), prefix.end(), query.begin(), query.end()).first;
            if (prefix.size() != begin + size || static_cast<size_t>(diverges - prefix.begin()) < begin) continue;
            int32_t run = 0;
            while (begin + run < query.size() && run < size && query[begin + run] == prefix[begin + run]) ++run;
            if (run > longest) {
                longest = run;
                partial = block;
            }
        }
        CHECK(matches(index, "", query, whole, partial, longest));
    }
}

template <typename Break>
static void check_found(const char* message, Break break_it) {
    PrefixIndex index = example();
    break_it(index);
    CHECK(index.find_defect() == message);
    if (index.find_defect() != message) std::fprintf(stderr, "  it says: %s\n", index.find_defect().c_str());
}

static void test_finds_defects() {
    // The search tree of 7's children: 3 at the top, 12 to its left.
    check_found("block 12 is among the children of 7, but its parent is 3",
                [](PrefixIndex& i) { Saboteur::parents(i)[12] = 3; });
    check_found("block 1 has another root than its parent", [](PrefixIndex& i) { Saboteur::roots_of(i)[1] = -3; });
    check_found("block 3 is linked to the sibling 16", [](PrefixIndex& i) { Saboteur::right(i)[3] = 16; });
    check_found("block 3 is not higher than its sibling 12 below",
                [](PrefixIndex& i) { Saboteur::heights(i)[12] = 2; });
    check_found("block 3 is not higher than its sibling 3 below", [](PrefixIndex& i) { Saboteur::right(i)[3] = 3; });
    check_found("block 3 and its sibling 12 are not in token order",
                [](PrefixIndex& i) { std::swap(Saboteur::left(i)[3], Saboteur::right(i)[3]); });
    check_found("block 3 and its sibling 12 are not in token order",
                [](PrefixIndex& i) { Saboteur::tokens(i)[12 * 4] = 7; });
    check_found("block 3 has the height 3 over siblings of 1 and 0",
                [](PrefixIndex& i) { Saboteur::heights(i)[3] = 3; });
    check_found("the children of 12 begin with 16", [](PrefixIndex& i) { Saboteur::children(i)[12] = 16; });
    check_found("4 blocks are published, 3 can be reached, 4 are counted",
                [](PrefixIndex& i) { Saboteur::children(i)[12] = kNone; });
    check_found("4 blocks are published, 4 can be reached, 5 are counted", [](PrefixIndex& i) { Saboteur::size(i) = 5; });
    check_found("block 5 is not published, but has links", [](PrefixIndex& i) { Saboteur::left(i)[5] = 1; });
    check_found("1 roots are not 1 used and 1 unused ones",
                [](PrefixIndex& i) { Saboteur::unused_roots(i).push_back(-2); });

    // Three siblings in a row whose outer two are each in order with the middle one's parent only.
    PrefixIndex index(8, 1);
    for (int32_t id = 0; id < 7; ++id) index.insert_first(id, "", &id);  // 3 at the top, 1 and 5 below
    CHECK(index.find_defect().empty());
    Saboteur::tokens(index)[2] = 4;  // right of 1, but behind 3
    CHECK(index.find_defect() == "the siblings 2 and 3 are not in token order");
}

int main() {
    test_match();
    test_namespaces();
    test_published();
    test_siblings();
    test_against_map();
    test_finds_defects();
    return check::report();
}
