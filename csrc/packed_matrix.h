// PackedMatrix: weights [outputs, k] in the layout that the matmul kernels read (kernels.h, Format). Knows nothing of
// models.
#pragma once

#include <cstdint>

#include "aligned_buffer.h"
#include "kernels/kernels.h"
#include "stored.h"

namespace minivllm {

class PackedMatrix {
public:
    PackedMatrix() = default;
    PackedMatrix(Format format, bool bf16_tiles, int64_t num_panels, int64_t k);

    // The memory of the panels: num_bytes() bytes, zeroed, aligned to 64, and owned by the caller. (One mapping holds all
    // matrices of a model, in huge pages.)
    void place(void* panels) { panels_ = static_cast<char*>(panels); }

    // Takes over row-major rows, as lanes [lane, lane + count) of a panel. Q5_0, Q8_0, IQ4_NL and IQ4_XS in int8, and Q4_0,
    // Q4_1 and Q4_K in int4, keep their steps, and their scales and minimums up to float16 (IQ4_XS and Q4_K have finer
    // ones). Other values are rounded to nearest: int8 has 127 steps up to the largest of a group, int4 the scale and
    // minimum of least squared error among a few.
    void pack(Stored stored, const char* rows, int64_t panel, int64_t lane, int64_t count);

    // Row `output` as float32 [k], exactly.
    void read_row(int64_t output, float* to) const;

    int64_t num_bytes() const { return num_panels * panel_bytes_; }
    const void* panels() const { return panels_; }

    Format format = Format::f32;
    int64_t k = 0, num_panels = 0;
    int64_t planes = 1;  // of 8-bit activations, if the weights are quantised (kernels.h, Input)
    AlignedBuffer bias;  // float32 [padded outputs], or empty

private:
    char* panel_at(int64_t panel) const { return panels_ + panel * panel_bytes_; }
    int64_t half_index(int64_t lane, int64_t i) const;

    char* panels_ = nullptr;
    int64_t panel_bytes_ = 0;
    bool bf16_tiles_ = false;
};

}  // namespace minivllm
