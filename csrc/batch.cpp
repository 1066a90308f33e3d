#include "batch.h"

#include <stdexcept>
#include <string>

#include "model.h"

namespace minivllm {

void check_batch(const Batch& b, const ModelConfig& c, const Pool& pool) {
    const auto fail = [](const std::string& what) { throw std::invalid_argument("batch: " + what); };
    const auto number = [](int64_t n) { return std::to_string(n); };
    const int64_t rows = b.token_ids.size, sequences = b.context_lens.size;
    const int64_t num_slots = pool.num_blocks * pool.block_size;
    if (b.positions.size != rows || b.slot_mapping.size != rows) fail("positions and slots are not for every row");
    if (b.query_start.size != sequences + 1) fail("query_start is not for every sequence");
    if (b.block_tables.size != sequences * b.table_width) fail("block_tables is not for every sequence");
    if (b.query_start[0] != 0 || b.query_start[sequences] != rows) fail("query_start does not span the rows");
    for (int64_t s = 0; s < sequences; s++) {
        const int64_t start = b.query_start[s], end = b.query_start[s + 1], context = b.context_lens[s];
        const std::string name = "sequence " + number(s) + ": ";
        if (start > end) fail(name + "query_start descends");
        if (context < end - start) fail(name + "context_lens is less than its rows");
        const int32_t* table = b.block_tables.data + s * b.table_width;
        const int64_t blocks = ceil_div(context, pool.block_size);
        if (blocks > b.table_width) fail(name + "its block table is shorter than its context");
        for (int64_t i = 0; i < blocks; i++)
            if (table[i] < 0 || table[i] >= pool.num_blocks) fail(name + "there is no block " + number(table[i]));
        for (int64_t row = start; row < end; row++) {
            const int64_t position = b.positions[row], slot = b.slot_mapping[row];
            if (position != context - end + row) fail(name + "positions do not lead up to context_lens");
            if (position >= c.max_position && c.rope_inv_freq.empty())
                fail(name + "the model has no position " + number(position));
            if (slot < -1 || slot >= num_slots) fail(name + "there is no slot " + number(slot));
            if (slot >= 0 && slot != table[position / pool.block_size] * pool.block_size + position % pool.block_size)
                fail(name + "slot " + number(slot) + " is not where its block table has position " + number(position));
            if (b.token_ids[row] < 0 || b.token_ids[row] >= c.vocab_size)
                fail(name + "there is no token " + number(b.token_ids[row]));
        }
    }
    for (int64_t i = 0; i < b.logit_rows.size; i++)
        if (b.logit_rows[i] < (i ? b.logit_rows[i - 1] : 0) || b.logit_rows[i] >= rows)
            fail("logit_rows descend, or leave the rows");
    for (int64_t i = 0; i < b.hidden_rows.size; i++)
        if (b.hidden_rows[i] < (i ? b.hidden_rows[i - 1] + 1 : 0) || b.hidden_rows[i] >= rows)
            fail("hidden_rows do not ascend, or leave the rows");
    for (int64_t i = 0; i + 2 < b.block_copies.size; i += 3) {
        const int32_t* copy = b.block_copies.data + i;
        const bool good = copy[0] >= 0 && copy[0] < pool.num_blocks && copy[1] >= 0 && copy[1] < pool.num_blocks &&
                          copy[0] != copy[1] && copy[2] >= 0 && copy[2] <= pool.block_size;
        if (!good)
            fail("no copy of " + number(copy[2]) + " slots from block " + number(copy[0]) + " to " + number(copy[1]));
    }
}

}  // namespace minivllm
