// The kernels of one ISA. CMake compiles this file once for each, with MINIVLLM_ISA naming it.
//
// Nothing inline from the standard library may be used here: the linker keeps one copy of such a function for the
// whole program, and it could be the one compiled for a processor that we do not run on.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // gcc 12's own intrinsics
#endif
#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "kernels/kernels.h"

#define MINIVLLM_CONCAT(a, b) a##b
#define MINIVLLM_TABLE(isa) MINIVLLM_CONCAT(kernels_, isa)
#define MINIVLLM_STRING(x) #x
#define MINIVLLM_NAME(isa) MINIVLLM_STRING(isa)

namespace minivllm {
namespace {

#include "kernels/simd.inl"
// One after the other: each uses the ones before.
#include "kernels/rowwise.inl"
#include "kernels/prepare.inl"
#include "kernels/matmul.inl"
#include "kernels/matmul_int.inl"
#if defined(__AMX_BF16__)
#include "kernels/matmul_amx.inl"
#endif
#include "kernels/matmul_table.inl"
#include "kernels/attention_tile.inl"
#include "kernels/attention_products.inl"
#if defined(__AMX_BF16__)
#include "kernels/attention_amx.inl"
#endif
#include "kernels/attention.inl"

}  // namespace

extern const Kernels MINIVLLM_TABLE(MINIVLLM_ISA);
const Kernels MINIVLLM_TABLE(MINIVLLM_ISA) = {
    MINIVLLM_NAME(MINIVLLM_ISA),
    kTiled,
    kGroup * kQuantBytes + kScaleBytes,
    prepare,
    matmul,
    matmul_rows,
    norm,
    rope_and_store,
    attend,
    attend_split,
    merge_splits,
    argmax,
    relative,
    exp_double,
    exp_sums,
    find_from,
    activate_all,
};

}  // namespace minivllm
