// Tests of the thread pool: every piece runs exactly once, however jobs, sizes and sleeps follow each other.
#include "thread_pool.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <thread>

#include "check.h"

using minivllm::ThreadPool;

static void every_piece_runs_once(int num_threads) {
    ThreadPool pool(num_threads);
    CHECK(pool.num_threads() == num_threads);
    for (int job = 0; job < 3000; job++) {
        const int64_t pieces = job * 7 % 41;
        std::vector<std::atomic<int>> runs(41), inside(static_cast<size_t>(num_threads));
        bool threads_differ = true;
        pool.run(pieces, [&](int64_t piece, int thread) {
            if (inside[static_cast<size_t>(thread)].fetch_add(1) != 0) threads_differ = false;
            runs[static_cast<size_t>(piece)]++;
            inside[static_cast<size_t>(thread)]--;
        });
        CHECK(threads_differ);
        for (int64_t piece = 0; piece < 41; piece++) CHECK(runs[static_cast<size_t>(piece)] == (piece < pieces));
        // Now and then long enough for the helpers to fall asleep.
        if (job % 500 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
}

static void a_slow_piece_is_waited_for() {
    ThreadPool pool(2);
    std::atomic<int> done{0};
    pool.run(2, [&](int64_t, int thread) {
        // The caller is through at once; the helper, if it got a piece, keeps it for longer than the caller spins.
        if (thread != 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
        done++;
    });
    CHECK(done == 2);
}

static void what_a_piece_throws_is_thrown_to_the_caller() {
    ThreadPool pool(2);
    for (int64_t bad : {0, 7, 99}) {
        std::atomic<int> ran{0};
        const auto body = [&](int64_t piece, int) {
            ran++;
            if (piece == bad) throw std::runtime_error("piece");
        };
        CHECK_THROWS(std::runtime_error, "piece", pool.run(100, body));
        CHECK(ran == 100);
        pool.run(100, [&](int64_t, int) { ran++; });  // and it works on
        CHECK(ran == 200);
    }
}

static void a_forked_child_works_and_ends() {
    auto pool = std::make_unique<ThreadPool>(3);
    pool->run(10, [](int64_t, int) {});
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the helpers sleep
    const pid_t child = fork();
    if (child == 0) {
        alarm(10);  // rather than hang
        std::atomic<int> ran{0};
        pool->run(100, [&](int64_t, int) { ran++; });
        pool.reset();
        _exit(ran == 100 ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK(status == 0);
}

int main() {
    what_a_piece_throws_is_thrown_to_the_caller();
    a_forked_child_works_and_ends();
    for (int threads : {1, 2, 3, 8}) every_piece_runs_once(threads);
    for (int i = 0; i < 20; i++) a_slow_piece_is_waited_for();
    CHECK_THROWS(std::invalid_argument, "a thread pool needs at least one thread", ThreadPool(0));
    return check::report();
}
