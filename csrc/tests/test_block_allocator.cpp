// Unit tests of csrc/block_allocator.h; built and run as that file says. With --bench it also measures, and tries the
// limit of a reference count (2^31 forks, some seconds).
#include "block_allocator.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>

#include "check.h"

namespace minivllm {

// Breaks what no public call can break.
struct Saboteur {
    static std::vector<int32_t>& next(BlockList& list) { return list.next_; }
    static std::vector<int32_t>& prev(BlockList& list) { return list.prev_; }
    static int32_t& size(BlockList& list) { return list.size_; }
    static BlockList& free_list(BlockAllocator& a) { return a.free_; }
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
        if (at == expected.end()) {
            list.push_front(id);
            expected.insert(expected.begin(), id);
        } else {
            list.remove(id);
            expected.erase(at);
        }
        CHECK(list.find_defect().empty());
        CHECK(order(list) == expected);
    }
}

static void test_order_of_ids() {
    BlockAllocator allocator(6);
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
    BlockAllocator allocator(3);
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
    BlockAllocator allocator(4);
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
    BlockAllocator allocator(4);
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
    CHECK_THROWS(BlockError, std::string("cannot manage 0") + range, BlockAllocator(0));
    CHECK_THROWS(BlockError, std::string("cannot manage -5") + range, BlockAllocator(-5));
    CHECK_THROWS(BlockError, std::string("cannot manage 2147483647") + range, BlockAllocator(INT32_MAX));
}

template <typename Break>
static void check_found(const char* message, Break break_it) {
    BlockAllocator allocator(5);
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

// Random tables that are grown, forked and released; what they hold is counted afresh after each step.
static void test_random_tables() {
    std::mt19937 random(2);
    BlockAllocator allocator(24);
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

static void bench() {
    using Clock = std::chrono::steady_clock;
    const auto seconds_since = [](Clock::time_point start) {
        return std::chrono::duration<double>(Clock::now() - start).count();
    };
    BlockAllocator allocator(1 << 16);
    Ids ids;
    const int pairs = 20'000'000;
    auto start = Clock::now();
    for (int i = 0; i < pairs; ++i) {
        allocator.allocate(1, ids);
        allocator.free(ids);
    }
    std::printf("allocate(1) + free, the same block again:   %6.1f million a second\n",
                pairs / seconds_since(start) / 1e6);

    // A full pool in which every free and allocate hits another, random block.
    std::mt19937 random(3);
    Ids held = allocate(allocator, 1 << 16);
    std::shuffle(held.begin(), held.end(), random);
    Ids one(1);
    start = Clock::now();
    for (int i = 0; i < pairs; ++i) {
        one[0] = held[static_cast<size_t>(i) & 0xffff];
        allocator.free(one);
        allocator.allocate(1, one);
    }
    std::printf("free + allocate(1), 65,536 blocks at random: %6.1f million a second\n",
                pairs / seconds_since(start) / 1e6);
    allocator.check_integrity();
}

static void test_reference_count_limit() {
    BlockAllocator allocator(1);
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
    test_random_tables();
    if (argc > 1 && std::strcmp(argv[1], "--bench") == 0) {
        test_reference_count_limit();
        bench();
    }
    return check::report();
}
