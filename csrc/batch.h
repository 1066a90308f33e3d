// What a step is asked to compute, as arrays of the caller, and the KV pool that it reads and writes.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"

namespace minivllm {

struct ModelConfig;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class T>
struct Array {
    const T* data;
    int64_t size;
    const T& operator[](int64_t i) const { return data[i]; }
};

// minivllm.batch.Batch: R rows of S sequences, one sequence after the other.
struct Batch {
    Array<int32_t> token_ids, positions, slot_mapping, query_start, context_lens;
    Array<int32_t> block_tables;  // [S, table_width]
    int64_t table_width;
    Array<int32_t> logit_rows;
    Array<int32_t> block_copies;  // [C, 3]
    Array<int32_t> hidden_rows;
};

// minivllm.kv_cache.kv_pool: the memory [layers][blocks][kv_heads][K, V][block_size] cells, owned by the caller.
struct Pool {
    void* data;
    CacheFormat format;
    int64_t num_blocks, block_size;
};

// Throws std::invalid_argument, saying what is wrong, if the batch does not fit the model and the pool.
void check_batch(const Batch& batch, const ModelConfig& config, const Pool& pool);

}  // namespace minivllm
