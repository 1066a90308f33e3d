// Unit tests of csrc/block_allocator.h; built and run as that file says. With --bench it also measures, and tries the
// limit of a reference count (2^31 forks, some seconds).
#include "block_allocator.h"

#include <algorithm>
#include <cstring>
#include <ctime>
#include <random>

#include "check.h"

namespace minivllm {

// Breaks what no public call can break.
struct Saboteur {
    static std::vector<int32_t>& next(BlockList& list) { return list.next_; }
    static std::vector<int32_t>& prev(BlockList& list) { return list.prev_; }
    static int32_t& size(BlockList& list) { return list.size_; }
    static BlockList& free_list(BlockAllocator& a) { return a.free_; }
    static BlockList& cached_list(BlockAllocator& a) { return a.cached_; }
    static PrefixIndex& index(BlockAllocator& a) { return a.index_; }
    static std::vector<int32_t>& continued(BlockAllocator& a) { return a.continued_; }
    static std::vector<int32_t>& ref_counts(BlockAllocator& a) { return a.ref_counts_; }
    static std::vector<BlockState>& states(BlockAllocator& a) { return a.states_; }
    static int32_t& num_shared(BlockAllocator& a) { return a.num_shared_; }
    static int64_t& num_references(BlockAllocator& a) { return a.num_references_; }
    static int32_t& peak_in_use(BlockAllocator& a) { return a.peak_in_use_; }
};

}  // namespace minivllm

using minivllm::AllocatorStats;
using minivllm::BlockAllocator;
using minivllm::BlockError;
using minivllm::BlockList;
using minivllm::BlockState;
using minivllm::PrefixIndex;
using minivllm::Saboteur;
using Ids = std::vector<int32_t>;

static Ids allocate(BlockAllocator& allocator, int64_t count) {
    Ids ids;
    CHECK(allocator.allocate(count, ids));
    return ids;
}

// Front to back, by emptying a copy.
static Ids order(BlockList list) {
    Ids ids;
    while (list.size() > 0) {
        ids.push_back(list.front());
        list.remove(list.front());
    }
    return ids;
}

static void test_list_removes_from_anywhere() {
    BlockList list(5);
    CHECK(list.size() == 0 && list.find_defect().empty());
    for (int32_t id = 4; id >= 0; --id) list.push_front(id);
    CHECK(order(list) == (Ids{0, 1, 2, 3, 4}));
    list.remove(2);  // middle
    CHECK(!list.contains(2) && list.contains(1) && order(list) == (Ids{0, 1, 3, 4}));
    list.remove(0);  // front
    list.remove(4);  // back
    CHECK(order(list) == (Ids{1, 3}) && list.find_defect().empty());
    list.push_front(2);
    CHECK(order(list) == (Ids{2, 1, 3}) && list.find_defect().empty());
    for (int32_t id : {1, 3, 2}) list.remove(id);
    CHECK(list.size() == 0 && list.find_defect().empty());
}

static void test_list_against_vector() {
    std::mt19937 random(1);
    BlockList list(17);
    Ids expected;
    for (int step = 0; step < 5000; ++step) {
        const auto id = static_cast<int32_t>(random() % 17);
        const auto at = std::find(expected.begin(), expected.end(), id);
        CHECK(list.contains(id) == (at != expected.end()));
        if (at == expected.end() && random() % 2 == 0) {
            list.push_front(id);
            expected.insert(expected.begin(), id);
        } else if (at == expected.end()) {
            list.push_back(id);
            expected.push_back(id);
        } else {
            list.remove(id);
            expected.erase(at);
        }
        CHECK(list.find_defect().empty());
        CHECK(order(list) == expected);
    }
}

static void test_order_of_ids() {
    BlockAllocator allocator(6, 4);
    CHECK(allocate(allocator, 0).empty());
    CHECK(allocate(allocator, 2) == (Ids{0, 1}));
    CHECK(allocate(allocator, 3) == (Ids{2, 3, 4}));
    allocator.free({3, 0, 4});
    CHECK(allocate(allocator, 4) == (Ids{4, 0, 3, 5}));  // last freed first, then the untouched one
    allocator.free({5, 4, 3, 2, 1, 0});                  // a table released tail first comes back in its order
    CHECK(allocate(allocator, 6) == (Ids{0, 1, 2, 3, 4, 5}));
    allocator.check_integrity();
}

static void test_all_or_nothing() {
    BlockAllocator allocator(3, 4);
    allocate(allocator, 1);
    Ids ids{7, 7};
    CHECK(!allocator.allocate(3, ids));
    CHECK(!allocator.allocate(INT64_MAX, ids));
    CHECK(ids == (Ids{7, 7}) && allocator.num_free_blocks() == 2 && allocator.stats().total_allocated == 1);
    CHECK(allocate(allocator, 2) == (Ids{1, 2}));
    CHECK_THROWS(BlockError, "cannot allocate -1 blocks: the number must be 0 or more", allocator.allocate(-1, ids));
    allocator.check_integrity();
}

static void test_references() {
    BlockAllocator allocator(4, 4);
    allocate(allocator, 3);
    allocator.fork({0, 1, 0});
    CHECK(allocator.ref_count(0) == 3 && allocator.ref_count(1) == 2 && allocator.ref_count(2) == 1);
    CHECK(allocator.is_shared(1) && !allocator.is_shared(2) && !allocator.is_shared(3));
    AllocatorStats stats = allocator.stats();
    CHECK(stats.num_blocks == 4 && stats.num_free == 1 && stats.num_in_use == 3 && stats.num_cached == 0);
    CHECK(stats.num_shared == 2 && stats.num_references == 6 && stats.peak_in_use == 3 && stats.total_allocated == 3);
    allocator.free({0, 1, 2, 0, 1, 0});  // reach zero in the order 2, 1, 0
    CHECK(allocate(allocator, 4) == (Ids{0, 1, 2, 3}));
    stats = allocator.stats();
    CHECK(stats.num_shared == 0 && stats.num_references == 4 && stats.peak_in_use == 4 && stats.total_allocated == 7);
    CHECK(allocator.states() == std::vector<BlockState>(4, BlockState::in_use));
    allocator.free({0, 1, 2});
    allocate(allocator, 1);
    CHECK(allocator.stats().peak_in_use == 4 && allocator.stats().num_in_use == 2);
    allocator.check_integrity();
}

static void test_misuse_changes_nothing() {
    BlockAllocator allocator(4, 4);
    allocate(allocator, 3);
    allocator.fork({1});
    const Ids counts = allocator.ref_counts();
    CHECK_THROWS(BlockError, "block 3 cannot be freed: it is free already", allocator.free({0, 3}));
    CHECK_THROWS(BlockError, "block 1 cannot be freed 3 times in one call: its reference count is 2",
                 allocator.free({0, 1, 1, 2, 1}));
    CHECK_THROWS(BlockError, "block 4 is unknown: the ids are 0 to 3", allocator.free({0, 4}));
    CHECK_THROWS(BlockError, "block -1 is unknown: the ids are 0 to 3", allocator.free({-1}));
    CHECK_THROWS(BlockError, "block 3 cannot be forked: it is free", allocator.fork({0, 1, 0, 3}));
    CHECK_THROWS(BlockError, "block 4 is unknown: the ids are 0 to 3", allocator.fork({0, 4}));
    CHECK_THROWS(BlockError, "block 9 is unknown: the ids are 0 to 3", allocator.ref_count(9));
    CHECK_THROWS(BlockError, "block 4294967296 is unknown: the ids are 0 to 3", allocator.is_shared(int64_t{1} << 32));
    allocator.check_integrity();
    CHECK(allocator.ref_counts() == counts);
    CHECK(allocator.stats().num_shared == 1 && allocator.stats().num_references == 4);
    CHECK(allocate(allocator, 1) == (Ids{3}));
    const char* range = " blocks: the number must be from 1 to 2147483646";
    CHECK_THROWS(BlockError, std::string("cannot manage 0") + range, BlockAllocator(0, 4));
    CHECK_THROWS(BlockError, std::string("cannot manage -5") + range, BlockAllocator(-5, 4));
    CHECK_THROWS(BlockError, std::string("cannot manage 2147483647") + range, BlockAllocator(INT32_MAX, 4));
}

static Ids publish(BlockAllocator& allocator, int32_t parent, const Ids& tokens, const Ids& ids,
                   const char* space = "") {
    return allocator.publish(space, parent, tokens.data(), static_cast<int64_t>(tokens.size()), ids);
}

static Ids match(const BlockAllocator& allocator, const Ids& tokens) {
    return allocator.match_prefix("", tokens.data(), static_cast<int64_t>(tokens.size())).block_ids;
}

// Eight blocks of two tokens. 0 [1 2] and behind it 1 [3 4] are in use, 2 [3 5] is cached, 3 in use and not published.
static BlockAllocator published_example() {
    BlockAllocator allocator(8, 2);
    allocate(allocator, 4);
    CHECK(publish(allocator, BlockAllocator::kNone, {1, 2, 3, 4}, {0, 1}) == (Ids{0, 1}));
    CHECK(publish(allocator, 0, {3, 5}, {2}) == (Ids{2}));
    allocator.free({2});
    allocator.check_integrity();
    return allocator;
}

static void test_publish_and_match() {
    BlockAllocator allocator = published_example();
    CHECK(allocator.num_free_blocks() == 5 && allocator.stats().num_cached == 1);
    CHECK(match(allocator, {1, 2, 3, 5, 6}) == (Ids{0, 2}));
    CHECK(allocate(allocator, 3) == (Ids{4, 5, 6}));
    allocator.fork({4});
    // 4 and 5 give way to 0 and 2, which comes back into use; 4 has another holder, 6 is new.
    CHECK(publish(allocator, BlockAllocator::kNone, {1, 2, 3, 5, 7, 7}, {4, 5, 6}) == (Ids{0, 2, 6}));
    allocator.check_integrity();
    CHECK(allocator.ref_counts() == (Ids{2, 1, 1, 1, 1, 0, 1, 0}));
    CHECK(publish(allocator, BlockAllocator::kNone, {1, 2, 3, 5, 7, 7}, {0, 2, 6}) == (Ids{0, 2, 6}));
    CHECK(publish(allocator, 2, {}, {}).empty());
    CHECK(match(allocator, {1, 2, 3, 5, 7, 7}) == (Ids{0, 2, 6}));
    CHECK(allocator.stats().num_published == 4 && allocator.stats().num_shared == 1);
    CHECK(allocate(allocator, 2) == (Ids{5, 7}));
    allocator.check_integrity();
}

static void test_eviction() {
    BlockAllocator allocator = published_example();
    allocator.free({0});  // head first: 1 keeps it in use
    CHECK(allocator.states()[0] == BlockState::in_use && allocator.ref_count(0) == 0);
    CHECK_THROWS(BlockError, "block 0 cannot be freed: nobody holds it", allocator.free({0}));
    allocator.free({1});
    CHECK(allocator.states()[0] == BlockState::cached && allocator.num_free_blocks() == 7);
    allocator.check_integrity();
    allocator.fork({1});
    CHECK(allocator.states()[0] == BlockState::in_use && allocator.stats().num_cached == 1);
    allocator.check_integrity();
    allocator.free({1});
    CHECK(allocate(allocator, 5) == (Ids{4, 5, 6, 7, 2}));
    CHECK(match(allocator, {1, 2, 3, 5}) == (Ids{0}) && match(allocator, {1, 2, 3, 4}) == (Ids{0, 1}));
    CHECK(allocate(allocator, 2) == (Ids{1, 0}) && match(allocator, {1, 2}).empty());
    CHECK(allocator.stats().total_evicted == 3 && allocator.num_free_blocks() == 0);
    allocator.check_integrity();
}

static void test_reset() {
    BlockAllocator allocator = published_example();
    allocator.free({0});
    allocator.reset_prefix_cache();
    allocator.check_integrity();
    CHECK(allocator.ref_counts() == (Ids{0, 1, 0, 1, 0, 0, 0, 0}) && allocator.stats().num_published == 0);
    CHECK(match(allocator, {1, 2}).empty());
    CHECK(allocate(allocator, 2) == (Ids{0, 2}));
    CHECK_THROWS(BlockError, "block 1 cannot be continued: it is not published", publish(allocator, 1, {5, 5}, {3}));
}

static void test_publish_misuse_changes_nothing() {
    const int32_t none = BlockAllocator::kNone;
    BlockAllocator allocator = published_example();
    const auto refused = [&](const char* message, int32_t parent, const Ids& tokens, const Ids& ids,
                             const char* space = "") {
        CHECK_THROWS(BlockError, message, publish(allocator, parent, tokens, ids, space));
        allocator.check_integrity();
        CHECK(allocator.ref_counts() == (Ids{1, 1, 0, 1, 0, 0, 0, 0}) && allocator.stats().num_published == 3);
    };
    refused("block 4 cannot be published: nobody holds it", none, {1, 2}, {4});
    refused("block 4 cannot be published: nobody holds it", none, {1, 2, 3, 4}, {3, 4});
    refused("block 2 cannot be published: nobody holds it", 0, {3, 5}, {2});
    refused("block 3 cannot be published: it occurs more often than its reference count", none, {1, 2, 3, 4}, {3, 3});
    refused("block 3 cannot be published: it occurs more often than its reference count", none, {1, 2, 9, 9}, {3, 3});
    refused("block 3 cannot be published: it is published for other tokens", none, {9, 9, 9, 9}, {3, 3});
    refused("block 1 cannot be published: it is published for other tokens", none, {9, 9, 3, 4}, {3, 1});
    refused("block 0 cannot be published: it is published for other tokens", none, {1, 2}, {0}, "x");
    refused("block 3 cannot be continued: it is not published", 3, {9, 9}, {3});
    refused("block 2 cannot be continued: nobody holds it", 2, {9, 9}, {3});
    refused("block 1 cannot be continued: it is published in another namespace", 1, {9, 9}, {3}, "x");
    refused("block 8 is unknown: the ids are 0 to 7", 8, {9, 9}, {3});
    refused("block 8 is unknown: the ids are 0 to 7", 1, {9, 9}, {8});
    refused("2 blocks of 2 tokens hold 4 tokens, not 3", 1, {9, 9, 9}, {3, 3});
    CHECK_THROWS(BlockError, "cannot manage blocks of 0 tokens: the number must be from 1 to 2147483647",
                 BlockAllocator(1, 0));
}

template <typename Break>
static void check_published_found(const char* message, Break break_it) {
    BlockAllocator allocator = published_example();
    break_it(allocator);
    CHECK_THROWS(BlockError, message, allocator.check_integrity());
}

static void test_integrity_check_finds_in_the_index() {
    check_published_found("block 0 is continued by 1 blocks in use, but 2 are counted",
                          [](BlockAllocator& a) { Saboteur::continued(a)[0] = 2; });
    check_published_found("block 2 has the reference count 0 but the state 0",
                          [](BlockAllocator& a) { Saboteur::states(a)[2] = BlockState::free; });
    check_published_found("block 2 has the reference count 0 but is not on the list of cached blocks",
                          [](BlockAllocator& a) { Saboteur::cached_list(a).remove(2); });
    check_published_found("block 1 has the reference count 1 but is on the list of cached blocks",
                          [](BlockAllocator& a) { Saboteur::cached_list(a).push_back(1); });
    check_published_found("the list of cached blocks is broken: 1 blocks are linked, but the size is 2",
                          [](BlockAllocator& a) { Saboteur::size(Saboteur::cached_list(a)) = 2; });
    check_published_found("block 2 has the reference count 0 but the state 1",
                          [](BlockAllocator& a) { Saboteur::index(a).remove(2); });
    check_published_found("block 0 would be evicted before block 2, which continues it", [](BlockAllocator& a) {
        a.free({1, 0});
        Saboteur::cached_list(a).remove(2);
        Saboteur::cached_list(a).push_back(2);
    });
}

template <typename Break>
static void check_found(const char* message, Break break_it) {
    BlockAllocator allocator(5, 4);
    allocate(allocator, 2);  // 2, 3, 4 stay free
    allocator.fork({1});
    allocator.check_integrity();
    break_it(allocator);
    CHECK_THROWS(BlockError, message, allocator.check_integrity());
}

static void test_integrity_check_finds() {
    const auto list = [](BlockAllocator& a) -> BlockList& { return Saboteur::free_list(a); };
    check_found("the free list is broken: block 3 is linked in one direction only",
                [&](BlockAllocator& a) { Saboteur::prev(list(a))[3] = -1; });
    check_found("the free list is broken: 3 blocks are linked, but the size is 2",
                [&](BlockAllocator& a) { Saboteur::size(list(a)) = 2; });
    check_found("the free list is broken: the link after 3 leads to 99",
                [&](BlockAllocator& a) { Saboteur::next(list(a))[3] = 99; });
    check_found("the free list is broken: the link from 2 to 4 does not lead back",
                [&](BlockAllocator& a) { Saboteur::next(list(a))[2] = 4; });
    check_found("the free list is broken: the list ends after 1 of 3 blocks", [&](BlockAllocator& a) {
        Saboteur::next(list(a))[2] = 5;  // 3 and 4 become a ring of their own
        Saboteur::prev(list(a))[5] = 2;
        Saboteur::next(list(a))[4] = 3;
        Saboteur::prev(list(a))[3] = 4;
    });
    check_found("block 0 has the reference count -1", [](BlockAllocator& a) { Saboteur::ref_counts(a)[0] = -1; });
    check_found("block 0 has the reference count 0 but the state 2",
                [](BlockAllocator& a) { Saboteur::ref_counts(a)[0] = 0; });
    check_found("block 2 has the reference count 0 but the state 1",
                [](BlockAllocator& a) { Saboteur::states(a)[2] = BlockState::cached; });
    check_found("block 3 has the reference count 0 but is not on the free list",
                [&](BlockAllocator& a) { list(a).remove(3); });
    check_found("block 0 has the reference count 1 but is on the free list",
                [&](BlockAllocator& a) { list(a).push_front(0); });
    check_found("1 blocks are shared, but 2 are counted", [](BlockAllocator& a) { Saboteur::num_shared(a) = 2; });
    check_found("the reference counts add up to 3, but 4 are counted",
                [](BlockAllocator& a) { Saboteur::num_references(a) = 4; });
    check_found("2 blocks are in use, but the peak is 1", [](BlockAllocator& a) { Saboteur::peak_in_use(a) = 1; });
}

// Sequences over a small alphabet come, take what is cached, publish, and go; the tables are counted afresh each step.
static void test_random_sequences() {
    std::mt19937 random(6);
    BlockAllocator allocator(24, 2);
    struct Sequence {
        Ids tokens, table;
        int32_t published;
    };
    std::vector<Sequence> sequences;
    const auto size = [](const Ids& ids) { return static_cast<std::ptrdiff_t>(ids.size()); };
    for (int step = 0; step < 6000; ++step) {
        const auto pick = static_cast<std::ptrdiff_t>(sequences.empty() ? 0 : random() % sequences.size());
        const auto action = random() % 4;
        if (action == 0) {
            Sequence sequence;
            sequence.tokens.resize(2 * (random() % 7));
            for (int32_t& token : sequence.tokens) token = static_cast<int32_t>(random() % 2);
            sequence.table = match(allocator, sequence.tokens);
            sequence.published = static_cast<int32_t>(sequence.table.size());
            allocator.fork(sequence.table);
            Ids own;
            if (allocator.allocate(size(sequence.tokens) / 2 - sequence.published, own)) {
                sequence.table.insert(sequence.table.end(), own.begin(), own.end());
                sequences.push_back(sequence);
            } else {
                std::reverse(sequence.table.begin(), sequence.table.end());
                allocator.free(sequence.table);
            }
        } else if (action == 1 && !sequences.empty()) {
            Sequence& s = sequences[static_cast<size_t>(pick)];
            const auto last = s.published + static_cast<int32_t>(random() % (s.table.size() + 1 - s.published));
            const Ids now =
                publish(allocator, s.published == 0 ? BlockAllocator::kNone : s.table[s.published - 1],
                        Ids(s.tokens.begin() + 2 * s.published, s.tokens.begin() + 2 * last),
                        Ids(s.table.begin() + s.published, s.table.begin() + last));
            std::copy(now.begin(), now.end(), s.table.begin() + s.published);
            s.published = last;
            CHECK(match(allocator, Ids(s.tokens.begin(), s.tokens.begin() + 2 * last)) ==
                  Ids(s.table.begin(), s.table.begin() + last));
        } else if (action == 2 && !sequences.empty() && sequences.size() < 20) {
            allocator.fork(sequences[static_cast<size_t>(pick)].table);
            sequences.push_back(Sequence(sequences[static_cast<size_t>(pick)]));
        } else if (!sequences.empty()) {
            Ids& table = sequences[static_cast<size_t>(pick)].table;
            if (random() % 2 == 0) std::reverse(table.begin(), table.end());
            allocator.free(table);
            sequences.erase(sequences.begin() + pick);
        }
        if (random() % 500 == 0) {
            allocator.reset_prefix_cache();
            for (Sequence& s : sequences) s.published = 0;
        }
        allocator.check_integrity();
        Ids counts(24, 0);
        for (const Sequence& s : sequences) {
            for (const int32_t id : s.table) ++counts[id];
        }
        CHECK(allocator.ref_counts() == counts);
    }
    CHECK(allocator.stats().total_evicted > 100);
}

// Random tables that are grown, forked and released; what they hold is counted afresh after each step.
static void test_random_tables() {
    std::mt19937 random(2);
    BlockAllocator allocator(24, 4);
    std::vector<Ids> tables;
    for (int step = 0; step < 4000; ++step) {
        const auto pick = tables.empty() ? 0 : random() % tables.size();
        const auto action = random() % 4;
        if (action < 2) {
            Ids ids;
            const auto wanted = static_cast<int64_t>(random() % 8);
            const int32_t before = allocator.num_free_blocks();
            const bool given = allocator.allocate(wanted, ids);
            CHECK(given == (wanted <= before));
            if (given) tables.push_back(ids);
        } else if (action == 2 && !tables.empty() && tables.size() < 20) {
            allocator.fork(tables[pick]);
            tables.push_back(tables[pick]);
        } else if (!tables.empty()) {
            std::reverse(tables[pick].begin(), tables[pick].end());
            allocator.free(tables[pick]);
            tables.erase(tables.begin() + static_cast<std::ptrdiff_t>(pick));
        }
        allocator.check_integrity();
        Ids counts(24, 0);
        for (const Ids& table : tables) {
            for (const int32_t id : table) ++counts[id];
        }
        CHECK(allocator.ref_counts() == counts);
    }
}

// Processor time, so that other processes do not count.
class Stopwatch {
public:
    double seconds() const { return static_cast<double>(std::clock() - start_) / CLOCKS_PER_SEC; }

private:
    std::clock_t start_ = std::clock();
};

static void bench_allocate() {
    BlockAllocator allocator(1 << 16, 16);
    Ids ids;
    const int pairs = 20'000'000;
    const Stopwatch same;
    for (int i = 0; i < pairs; ++i) {
        allocator.allocate(1, ids);
        allocator.free(ids);
    }
    std::printf("allocate(1) + free, the same block again:    %6.1f million a second\n", pairs / same.seconds() / 1e6);

    // A full pool in which every free and allocate hits another, random block.
    std::mt19937 random(3);
    Ids held = allocate(allocator, 1 << 16);
    std::shuffle(held.begin(), held.end(), random);
    Ids one(1);
    const Stopwatch other;
    for (int i = 0; i < pairs; ++i) {
        one[0] = held[static_cast<size_t>(i) & 0xffff];
        allocator.free(one);
        allocator.allocate(1, one);
    }
    std::printf("free + allocate(1), 65,536 blocks at random: %6.1f million a second\n", pairs / other.seconds() / 1e6);
    allocator.check_integrity();
}

// Chains of 2,048 blocks of 16 tokens (32k tokens) in a pool of 64 chains; each step publishes a new one in blocks
// that are evicted for it, and matches one that was published 32 steps ago, out of the processor's nearest caches.
static void bench_chains() {
    const int32_t length = 2048, size = 16, kept = 32, steps = 512;
    BlockAllocator allocator(64 * length, size);
    std::mt19937 random(7);
    Ids tokens(static_cast<size_t>(length) * size);
    for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 50000);
    double publishing = 0, matching = 0, slowest = 0;
    size_t found = 0;
    for (int32_t step = 0; step < steps; ++step) {
        Ids ids = allocate(allocator, length);
        tokens[0] = step;
        const Stopwatch publish_watch;
        publish(allocator, BlockAllocator::kNone, tokens, ids);
        publishing += publish_watch.seconds();
        std::reverse(ids.begin(), ids.end());
        allocator.free(ids);
        tokens[0] = std::max(0, step - kept);
        const Stopwatch match_watch;
        found += match(allocator, tokens).size();
        matching += match_watch.seconds();
        slowest = std::max(slowest, match_watch.seconds());
    }
    CHECK(found == static_cast<size_t>(length) * steps);
    std::printf("chain of 2,048 blocks: publish %.0f us, match %.0f us (the slowest one %.0f us)\n",
                publishing / steps * 1e6, matching / steps * 1e6, slowest * 1e6);
}

// A system prompt of 21 blocks (336 tokens) with ever more continuations of one block; whole and partial matches.
static void bench_continuations() {
    const int32_t size = 16, prompt = 21, matches = 20000;
    BlockAllocator allocator(1 << 17, size);
    Ids tokens((prompt + 1) * size, 1);
    publish(allocator, BlockAllocator::kNone, Ids(prompt * size, 1), allocate(allocator, prompt));
    std::mt19937 random(8);
    Ids kinds;
    for (int32_t count : {1, 1000, 100'000}) {
        while (static_cast<int32_t>(kinds.size()) < count) {
            kinds.push_back(static_cast<int32_t>(random()));
            publish(allocator, prompt - 1, Ids(size, kinds.back()), allocate(allocator, 1));
        }
        for (const bool whole : {true, false}) {
            size_t found = 0;
            const Stopwatch watch;
            for (int32_t i = 0; i < matches; ++i) {
                std::fill(tokens.end() - size, tokens.end() - 1, kinds[random() % kinds.size()]);
                tokens.back() = whole ? tokens[tokens.size() - 2] : 0;
                found += match(allocator, tokens).size();
            }
            CHECK(found == (whole ? prompt + 1u : prompt) * size_t{matches});
            std::printf("match of 336 tokens and one of %6d continuations, %s: %.2f us\n", count,
                        whole ? "wholly   " : "partially", watch.seconds() / matches * 1e6);
        }
    }
}

static void test_reference_count_limit() {
    BlockAllocator allocator(2, 4);
    allocate(allocator, 1);
    const Ids many(1 << 20, 0);
    for (int i = 0; i < 2047; ++i) allocator.fork(many);
    allocator.fork(Ids((1 << 20) - 2, 0));
    CHECK(allocator.ref_count(0) == INT32_MAX);
    CHECK_THROWS(BlockError, "block 0 cannot be forked: its reference count would pass 2147483647",
                 allocator.fork({0}));
    allocator.free({0});
    CHECK_THROWS(BlockError, "block 0 cannot be forked: its reference count would pass 2147483647",
                 allocator.fork({0, 0}));
    CHECK(allocator.ref_count(0) == INT32_MAX - 1);
    publish(allocator, BlockAllocator::kNone, {1, 2, 3, 4}, {0});
    allocator.fork({0});
    allocate(allocator, 1);
    CHECK_THROWS(BlockError,
                 "block 1 cannot be published: the reference count of block 0, published for the same tokens, "
                 "would pass 2147483647",
                 publish(allocator, BlockAllocator::kNone, {1, 2, 3, 4}, {1}));
    CHECK(allocator.ref_count(0) == INT32_MAX && allocator.ref_count(1) == 1);
    allocator.check_integrity();
}

int main(int argc, char** argv) {
    test_list_removes_from_anywhere();
    test_list_against_vector();
    test_order_of_ids();
    test_all_or_nothing();
    test_references();
    test_misuse_changes_nothing();
    test_integrity_check_finds();
    test_publish_and_match();
    test_eviction();
    test_reset();
    test_publish_misuse_changes_nothing();
    test_integrity_check_finds_in_the_index();
    test_random_tables();
    test_random_sequences();
    if (argc > 1 && std::strcmp(argv[1], "--bench") == 0) {
        test_reference_count_limit();
        bench_allocate();
        bench_chains();
        bench_continuations();
    }
    return check::report();
}
