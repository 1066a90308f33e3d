// What this machine can do at most: how fast it reads memory, and how many operations it does a second.
//
// The limits that the kernels are held against. Each probe is the plainest loop that nothing but its own limit
// slows down; it takes a small part of a second. Knows nothing of models or kernels.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "aligned_buffer.h"
#include "thread_pool.h"

namespace minivllm {

// The arithmetic of one instruction, all threads together. A multiplication and an addition are two operations.
struct Peak {
    std::string number;       // "float32", "bfloat16", "int8": what is multiplied
    std::string instruction;  // "vfmadd231ps/512", "tdpbf16ps" ...
    double operations;        // a second
};

class Machine {
public:
    // num_threads ≥ 1 counts the calling one. buffer_bytes ≥ 1 MiB is what read_bandwidth reads; for a limit of
    // memory it must be larger than the caches.
    Machine(int num_threads, int64_t buffer_bytes);

    // Bytes a second that the threads read together, over the whole buffer: the best of several passes.
    double read_bandwidth();
    // The peak of every instruction that this processor and this build know. Instructions of narrower vectors are
    // left out where wider ones are there.
    std::vector<Peak> peaks();

    int num_threads() const { return pool_.num_threads(); }

private:
    ThreadPool pool_;
    AlignedBuffer buffer_;
};

}  // namespace minivllm
