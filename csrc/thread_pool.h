// ThreadPool: runs the pieces of one job on the calling thread and on helpers.
//
// Made for jobs of some microseconds, thousands of times a second, on cores that other processes use too:
// - each thread has its share of the pieces, the same for every job of that size (so that weights can be fetched in
//   time), and takes from the others' when it is through; pieces are claimed one by one, so a thread that loses its
//   core delays nothing but the piece it holds, and a helper that has not woken up yet is not waited for;
// - helpers spin for about 200 µs after their last piece, then sleep; an idle pool takes no processor time.
// Which thread runs a piece is up to chance, so a piece's result must not depend on it.
// In a forked child there are no helpers: the pool works on there, on the calling thread alone.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace minivllm {

class ThreadPool {
public:
    // num_threads counts the calling thread; at least 1.
    explicit ThreadPool(int num_threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int num_threads() const { return static_cast<int>(unclaimed_.size()); }

    // Calls body(piece, thread) once for each piece in 0 … num_pieces − 1, roughly in that order, with thread in
    // 0 … num_threads − 1 (two calls at one time never have the same). Returns when all have returned, and throws
    // what one of them has thrown, if any. The body must not call run. Only one thread may call run at a time.
    template <class Body>
    void run(int64_t num_pieces, const Body& body) {
        run_erased(
            num_pieces,
            [](const void* context, int64_t piece, int thread) {
                (*static_cast<const Body*>(context))(piece, thread);
            },
            &body);
    }

private:
    using Function = void (*)(const void* context, int64_t piece, int thread);

    void run_erased(int64_t num_pieces, Function function, const void* context);
    void help(int thread);
    void work(int thread);
    int64_t share_of(int thread) const;
    int64_t run_share(int owner, int thread);
    void stop();

    // The job. Written while no piece is unclaimed or unfinished; read only after a successful claim.
    Function function_ = nullptr;
    const void* context_ = nullptr;
    int64_t num_pieces_ = 0;

    // How many pieces of its share a thread has left, in ascending order.
    struct alignas(64) Share {
        std::atomic<int64_t> pieces{0};
    };
    std::vector<Share> unclaimed_;  // for each thread
    alignas(64) std::atomic<int64_t> unfinished_{0};
    alignas(64) std::atomic<int> sleeping_helpers_{0};
    std::atomic<bool> caller_sleeps_{false};
    std::atomic<bool> stop_{false};
    struct Signals {
        std::mutex mutex;
        std::condition_variable job_arrived, job_finished;
        std::exception_ptr error;  // the first that a piece of this job has thrown
    };
    std::unique_ptr<Signals> signals_ = std::make_unique<Signals>();
    std::vector<std::thread> helpers_;
    const int process_;  // that has the helpers
};

}  // namespace minivllm
