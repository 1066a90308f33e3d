// Which kernels run: the ISAs that were built (MINIVLLM_X86_ISAS: all four) and that this processor has.
#include <stdexcept>

#include "kernels/kernels.h"

namespace minivllm {

extern const Kernels kernels_scalar;
#if defined(MINIVLLM_X86_ISAS)
extern const Kernels kernels_avx2, kernels_avx512, kernels_avx512bf16;
#endif

namespace {

std::vector<const Kernels*> supported() {
    std::vector<const Kernels*> tables;
#if defined(MINIVLLM_X86_ISAS)
    __builtin_cpu_init();
    // These say what processor and operating system (saved registers) both support.
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (avx512 && __builtin_cpu_supports("avx512bf16")) tables.push_back(&kernels_avx512bf16);
    if (avx512) tables.push_back(&kernels_avx512);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) tables.push_back(&kernels_avx2);
#endif
    tables.push_back(&kernels_scalar);
    return tables;
}

}  // namespace

std::vector<std::string> supported_isas() {
    std::vector<std::string> names;
    for (const Kernels* table : supported()) names.push_back(table->isa);
    return names;
}

const Kernels& kernels_for(const std::string& isa) {
    std::string names;
    for (const Kernels* table : supported()) {
        if (isa.empty() || isa == table->isa) return *table;
        names += (names.empty() ? "" : ", ") + std::string(table->isa);
    }
    throw std::invalid_argument("no kernels for the instruction set '" + isa + "'; this build and processor have " +
                                names);
}

int64_t attention_scratch_size(int64_t queries, int64_t head_dim) {
    const int64_t head = padded_head(head_dim);
    return 2 * head * kKeyTile + queries * (head + kKeyTile + 2 * partial_size(head_dim));
}

}  // namespace minivllm
