// Which kernels run: the ISAs that were built (MINIVLLM_X86_ISAS: those of x86-64) and that this processor has.
#include <stdexcept>
#if defined(MINIVLLM_X86_ISAS)
#include <cpuid.h>
#endif
#if defined(MINIVLLM_AMX) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels/kernels.h"

namespace minivllm {

extern const Kernels kernels_scalar;
#if defined(MINIVLLM_X86_ISAS)
extern const Kernels kernels_avx2, kernels_avx512, kernels_avx512vnni, kernels_avx512bf16;
#endif
#if defined(MINIVLLM_AVXVNNI)
extern const Kernels kernels_avxvnni;
#endif
#if defined(MINIVLLM_AMX)
extern const Kernels kernels_amx;
#endif

namespace {

#if defined(MINIVLLM_X86_ISAS)

struct CpuId {
    uint32_t a = 0, b = 0, c = 0, d = 0;
    CpuId(uint32_t leaf, uint32_t subleaf) { __get_cpuid_count(leaf, subleaf, &a, &b, &c, &d); }
};

bool is_intel() {
    const CpuId id(0, 0);
    return id.b == signature_INTEL_ebx && id.c == signature_INTEL_ecx && id.d == signature_INTEL_edx;
}

// Tiles are large, so that the operating system saves them only for a process that has asked for them.
bool may_use_tiles() {
#if defined(MINIVLLM_AMX) && defined(__linux__)
    const uint32_t features = CpuId(7, 0).d;
    const bool has = (features >> 22 & 1) && (features >> 24 & 3) == 3;  // AMX-BF16, AMX-TILE, AMX-INT8
    constexpr int request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool granted = has && syscall(SYS_arch_prctl, request, tile_data) == 0;
    return granted;
#else
    return false;
#endif
}

#endif

std::vector<const Kernels*> supported() {
    std::vector<const Kernels*> tables;
#if defined(MINIVLLM_X86_ISAS)
    __builtin_cpu_init();
    // These say what processor and operating system (saved registers) both support.
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
    const bool bf16 = vnni && __builtin_cpu_supports("avx512bf16");
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && (CpuId(1, 0).c >> 29 & 1);  // F16C
#if defined(MINIVLLM_AMX)
    if (bf16 && may_use_tiles()) tables.push_back(&kernels_amx);
#endif
    // vdpbf16ps does four operations a lane. AMD runs two of them a clock, and so twice what fma does; Intel one
    // every second clock (half of what widening and fma do), so there it comes last among its kind.
    if (bf16 && !is_intel()) tables.push_back(&kernels_avx512bf16);
    if (vnni) tables.push_back(&kernels_avx512vnni);
    if (bf16 && is_intel()) tables.push_back(&kernels_avx512bf16);
    if (avx512) tables.push_back(&kernels_avx512);
#if defined(MINIVLLM_AVXVNNI)
    if (avx2 && (CpuId(7, 1).a >> 4 & 1)) tables.push_back(&kernels_avxvnni);
#endif
    if (avx2) tables.push_back(&kernels_avx2);
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

int64_t panel_bytes(Format format, int64_t k, bool bf16_tiles) {
    const int64_t groups = (k + kGroup - 1) / kGroup;
    switch (format) {
        case Format::f32: return k * kPanel * 4;
        case Format::bf16: return (bf16_tiles ? groups * kGroup : (k + 1) / 2 * 2) * kPanel * 2;
        case Format::int8: return groups * kPanel * (kGroup + 2);
        case Format::int4: return groups * kPanel * (kGroup / 2 + 4);
    }
    return 0;
}

int64_t input_bytes(Input input, int64_t k, int64_t group_bytes, int64_t planes) {
    const int64_t groups = (k + kGroup - 1) / kGroup;
    const int64_t bytes = groups * (input == Input::groups ? planes * group_bytes : kGroup * (input == Input::f32 ? 4 : 2));
    return (bytes + 63) / 64 * 64;
}

int64_t matmul_scratch_size(int64_t k) {
    // matmul_amx.inl: the gate outputs of a slab of rows, and an unpacked panel.
    return 512 * kPanel * 4 + (k + kGroup - 1) / kGroup * kGroup * kPanel;
}

int64_t attention_scratch_size(int64_t queries, int64_t head_dim) {
    // In floats, what AttentionScratch<float> lays out; for bfloat16 it is less.
    const int64_t head = padded_head(head_dim), room = (queries + kGroupQueries - 1) / kGroupQueries * kGroupQueries;
    const int64_t tile = 2 * head * kKeyTile + 3 * kGroupQueries * kKeyTile + head_dim * kKeyTile / 2;
    return tile + room * (head + 16 + 1) + 2 * room * partial_size(head_dim);
}

}  // namespace minivllm
