#include "thread_pool.h"

#include <unistd.h>

#include <chrono>
#include <stdexcept>
#include <utility>

namespace minivllm {
namespace {

void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Spins until done() or for about the given time. True if done.
template <class Done>
bool spin(std::chrono::microseconds limit, const Done& done) {
    const auto end = std::chrono::steady_clock::now() + limit;
    do {
        for (int i = 0; i < 32; i++) {
            if (done()) return true;
            pause_briefly();
        }
    } while (std::chrono::steady_clock::now() < end);
    return done();
}

// A helper bridges the time between two steps of one sequence, about 100 µs, so that it is there at once. The
// caller sleeps earlier: the system may then move a helper that waits for its core to the caller's.
constexpr std::chrono::microseconds kHelperSpin{200}, kCallerSpin{50};

}  // namespace

ThreadPool::ThreadPool(int num_threads) : process_(static_cast<int>(getpid())) {
    if (num_threads < 1) throw std::invalid_argument("a thread pool needs at least one thread");
    unclaimed_ = std::vector<Share>(static_cast<size_t>(num_threads));
    try {
        for (int thread = 1; thread < num_threads; thread++)
            helpers_.emplace_back([this, thread] { help(thread); });
    } catch (...) {  // the system gives no more threads: those that run must end before we throw
        stop();
        throw;
    }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
    if (process_ != getpid()) {  // a forked child: nobody to join, and destroying the signals would wait for them
        for (auto& helper : helpers_) helper.detach();
        signals_.release();
        return;
    }
    {
        std::lock_guard<std::mutex> lock(signals_->mutex);
        stop_.store(true);
    }
    signals_->job_arrived.notify_all();
    for (auto& helper : helpers_) helper.join();
}

void ThreadPool::run_erased(int64_t num_pieces, Function function, const void* context) {
    if (num_pieces <= 1 || helpers_.empty()) {
        for (int64_t piece = 0; piece < num_pieces; piece++) function(context, piece, 0);
        return;
    }
    function_ = function;
    context_ = context;
    num_pieces_ = num_pieces;
    unfinished_.store(num_pieces, std::memory_order_relaxed);
    // Sequentially consistent, here and in help(): either the helper sees its pieces, or we see it asleep.
    for (int thread = 0; thread < num_threads(); thread++)
        unclaimed_[static_cast<size_t>(thread)].pieces.store(share_of(thread));
    if (sleeping_helpers_.load() > 0) {
        { std::lock_guard<std::mutex> lock(signals_->mutex); }
        signals_->job_arrived.notify_all();
    }
    work(0);
    const auto finished = [this] { return unfinished_.load() == 0; };
    if (!finished() && !spin(kCallerSpin, finished)) {
        // A helper has lost its core in the middle of a piece: let the system have ours.
        std::unique_lock<std::mutex> lock(signals_->mutex);
        caller_sleeps_.store(true);
        signals_->job_finished.wait(lock, finished);
        caller_sleeps_.store(false);
    }
    if (signals_->error) std::rethrow_exception(std::exchange(signals_->error, nullptr));
}

// How many of 0 … num_pieces − 1 are thread, thread + num_threads, …
int64_t ThreadPool::share_of(int thread) const {
    const int64_t threads = num_threads();
    return num_pieces_ <= thread ? 0 : (num_pieces_ - thread - 1) / threads + 1;
}

// Runs what is left of a thread's share. Returns the number of pieces.
int64_t ThreadPool::run_share(int owner, int thread) {
    std::atomic<int64_t>& share = unclaimed_[static_cast<size_t>(owner)].pieces;
    int64_t count = 0, unclaimed = share.load();
    while (unclaimed > 0) {
        if (!share.compare_exchange_weak(unclaimed, unclaimed - 1)) continue;
        // The job cannot end before this piece does, so its fields hold still from here on.
        try {
            function_(context_, owner + (share_of(owner) - unclaimed) * num_threads(), thread);
        } catch (...) {
            std::lock_guard<std::mutex> lock(signals_->mutex);
            if (!signals_->error) signals_->error = std::current_exception();
        }
        count++;
        unclaimed = share.load();
    }
    return count;
}

// Claims and runs pieces until none is left: its own, then those that other threads have not come to.
void ThreadPool::work(int thread) {
    int64_t count = 0;
    for (int i = 0; i < num_threads(); i++) count += run_share((thread + i) % num_threads(), thread);
    if (count > 0 && unfinished_.fetch_sub(count) == count && caller_sleeps_.load()) {
        { std::lock_guard<std::mutex> lock(signals_->mutex); }
        signals_->job_finished.notify_one();
    }
}

void ThreadPool::help(int thread) {
    const auto called = [&] { return unclaimed_[static_cast<size_t>(thread)].pieces.load() > 0 || stop_.load(); };
    while (!stop_.load()) {
        if (!spin(kHelperSpin, called)) {
            std::unique_lock<std::mutex> lock(signals_->mutex);
            sleeping_helpers_.fetch_add(1);
            signals_->job_arrived.wait(lock, called);
            sleeping_helpers_.fetch_sub(1);
        }
        work(thread);
    }
}

}  // namespace minivllm
