// The probes. Those of x86 name their instruction set by the function attribute `target`, so that this file is
// compiled once, for any processor; each runs only where the processor says that it has the instruction.
#include "machine.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <utility>

#if defined(MINIVLLM_X86_ISAS)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // gcc 12's own intrinsics
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <cpuid.h>
#include <immintrin.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace minivllm {
namespace {

constexpr int64_t kPiece = 1 << 20;    // bytes that a thread reads between two claims
constexpr double kReadSeconds = 0.15;  // a reading of the bandwidth
constexpr double kPeakSeconds = 0.03;  // a peak, after a first round that wakes the threads and their units

double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// A probe of arithmetic: so many rounds, each of `operations` operations, none waiting for another.
struct Probe {
    const char* number;
    const char* instruction;
    int64_t operations;
    void (*run)(int64_t rounds);
};

// Sums up a piece, in a way that the compiler cannot skip.
using Reader = uint64_t (*)(const void* from, int64_t bytes);

uint64_t read_plain(const void* from, int64_t bytes) {
    typedef uint64_t v2 __attribute__((vector_size(16)));
    const v2* at = static_cast<const v2*>(from);
    v2 a{}, b{}, c{}, d{};
    for (int64_t i = 0; i < bytes / 16; i += 4) a ^= at[i], b ^= at[i + 1], c ^= at[i + 2], d ^= at[i + 3];
    a ^= b ^ c ^ d;
    return a[0] ^ a[1];
}

// Without any instruction of its own: what the compiler makes of 32 chains of float32, four to a vector.
void multiply_plain(int64_t rounds) {
    typedef float v4 __attribute__((vector_size(16)));
    v4 sums[8] = {};
    v4 x = {0.5f, 0.5f, 0.5f, 0.5f};
    for (int64_t i = 0; i < rounds; i++) {
        __asm__ volatile("" : "+m"(x));  // nothing is known of x, so nothing can be computed ahead
        const v4 factor = x;
        for (v4& sum : sums) sum += factor * factor;
    }
    for (v4& sum : sums) __asm__ volatile("" : : "m"(sum));
}

#if defined(MINIVLLM_X86_ISAS)

#define TARGET(isa) __attribute__((target(isa)))
#define TWELVE(each) each(0) each(1) each(2) each(3) each(4) each(5) each(6) each(7) each(8) each(9) each(10) each(11)

// Twelve accumulators are more than the latency of any of these instructions (up to 6 cycles) times two units can
// keep busy; the assembler's own names keep the compiler from removing what it sees to be useless.
#define DECLARE_ZMM(i) __m512 sum##i = _mm512_set1_ps(i);
#define DECLARE_YMM(i) __m256 sum##i = _mm256_set1_ps(i);
#define PROBE(name, isa, vector, set, declare, one) \
    TARGET(isa) void name(int64_t rounds) {         \
        vector x = set(0x3c), y = set(0x3d);        \
        TWELVE(declare)                             \
        for (int64_t i = 0; i < rounds; i++) { TWELVE(one) } \
    }
#define STEP(instruction, i) __asm__ volatile(instruction " %2, %1, %0" : "+v"(sum##i) : "v"(x), "v"(y));

#define FMA(i) STEP("vfmadd231ps", i)
#define DOT_BF16(i) STEP("vdpbf16ps", i)
#define DOT_INT8(i) STEP("vpdpbusd", i)
#define DOT_INT8_VEX(i) STEP("%{vex%} vpdpbusd", i)  // else the assembler takes AVX-512's form
PROBE(fma_avx2, "avx2,fma", __m256i, _mm256_set1_epi8, DECLARE_YMM, FMA)
PROBE(fma_avx512, "avx512f", __m512i, _mm512_set1_epi8, DECLARE_ZMM, FMA)
PROBE(dot_bf16_avx512, "avx512f", __m512i, _mm512_set1_epi8, DECLARE_ZMM, DOT_BF16)
PROBE(dot_int8_avx512, "avx512f", __m512i, _mm512_set1_epi8, DECLARE_ZMM, DOT_INT8)
PROBE(dot_int8_avx_vnni, "avx2", __m256i, _mm256_set1_epi8, DECLARE_YMM, DOT_INT8_VEX)

// Without VNNI a product of 8-bit numbers takes three instructions: pairs to 16 bits, pairs to 32, the sum.
#define DOT_INT8_THREE(i)                                                            \
    __asm__ volatile(                                                                \
        "vpmaddubsw %2, %1, %%ymm15\n vpmaddwd %2, %%ymm15, %%ymm15\n vpaddd %%ymm15, %0, %0" \
        : "+x"(sum##i) : "x"(x), "x"(y) : "ymm15");
PROBE(dot_int8_avx2, "avx2", __m256i, _mm256_set1_epi8, DECLARE_YMM, DOT_INT8_THREE)

template <class Vector>
TARGET("avx512f") inline uint64_t fold(Vector sum) {
    uint64_t parts[8];
    _mm512_storeu_si512(parts, sum);
    return parts[0] ^ parts[1] ^ parts[2] ^ parts[3] ^ parts[4] ^ parts[5] ^ parts[6] ^ parts[7];
}

TARGET("avx512f") uint64_t read_avx512(const void* from, int64_t bytes) {
    const char* at = static_cast<const char*>(from);
    __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
    for (int64_t i = 0; i < bytes; i += 256) {
        a = _mm512_xor_si512(a, _mm512_load_si512(at + i));
        b = _mm512_xor_si512(b, _mm512_load_si512(at + i + 64));
        c = _mm512_xor_si512(c, _mm512_load_si512(at + i + 128));
        d = _mm512_xor_si512(d, _mm512_load_si512(at + i + 192));
    }
    return fold(_mm512_xor_si512(_mm512_xor_si512(a, b), _mm512_xor_si512(c, d)));
}

TARGET("avx2") uint64_t read_avx2(const void* from, int64_t bytes) {
    const __m256i* at = static_cast<const __m256i*>(from);
    __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
    for (int64_t i = 0; i < bytes / 32; i += 4) {
        a = _mm256_xor_si256(a, _mm256_load_si256(at + i));
        b = _mm256_xor_si256(b, _mm256_load_si256(at + i + 1));
        c = _mm256_xor_si256(c, _mm256_load_si256(at + i + 2));
        d = _mm256_xor_si256(d, _mm256_load_si256(at + i + 3));
    }
    uint64_t parts[4];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(parts),
                        _mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_xor_si256(c, d)));
    return parts[0] ^ parts[1] ^ parts[2] ^ parts[3];
}

bool has_amx() {
#if defined(__linux__) && defined(SYS_arch_prctl)
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const bool tiles = (d >> 24) & 1, bf16 = (d >> 22) & 1, int8 = (d >> 25) & 1;
    // The kernel grants the tiles' large register state only to a process that asks for it: ARCH_REQ_XCOMP_PERM,
    // XFEATURE_XTILEDATA (Linux, Documentation/arch/x86/xstate.rst).
    return tiles && bf16 && int8 && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
    return false;
#endif
}

// ldtilecfg's operand (Intel SDM 3, "Tile configuration"): all eight tiles 16 rows of 64 bytes.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t columns[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Four accumulators (tmm0 to tmm3) and two factors on each side: the tiling that a matmul uses.
#define AMX_PROBE(name, instruction)                                           \
    void name(int64_t rounds) {                                                \
        const TileConfig config;                                               \
        __asm__ volatile("ldtilecfg %0\n tilezero %%tmm0\n tilezero %%tmm1\n tilezero %%tmm2\n tilezero %%tmm3\n" \
                         "tilezero %%tmm4\n tilezero %%tmm5\n tilezero %%tmm6\n tilezero %%tmm7" : : "m"(config)); \
        for (int64_t i = 0; i < rounds; i++)                                   \
            __asm__ volatile(instruction " %tmm6, %tmm4, %tmm0\n" instruction " %tmm7, %tmm4, %tmm1\n" \
                             instruction " %tmm6, %tmm5, %tmm2\n" instruction " %tmm7, %tmm5, %tmm3"); \
        __asm__ volatile("tilerelease");                                       \
    }
AMX_PROBE(amx_bf16, "tdpbf16ps")
AMX_PROBE(amx_int8, "tdpbusd")

// The rounds' operations: twelve vectors, each lane of 32 bits a sum of 1, 2 or 4 products.
constexpr int64_t vectors(int64_t bytes, int64_t products) { return 12 * bytes / 4 * products * 2; }
constexpr int64_t tiles(int64_t products) { return 4 * 16 * 16 * 16 * products * 2; }

Reader reader() {
    if (__builtin_cpu_supports("avx512f")) return read_avx512;
    if (__builtin_cpu_supports("avx2")) return read_avx2;
    return read_plain;
}

bool has_avx_vnni() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __builtin_cpu_supports("avx2") && __get_cpuid_count(7, 1, &a, &b, &c, &d) && ((a >> 4) & 1);
}

std::vector<Probe> probes() {
    const bool avx512 = __builtin_cpu_supports("avx512f");
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    std::vector<Probe> found;
    if (avx512)
        found.push_back({"float32", "vfmadd231ps/512", vectors(64, 1), fma_avx512});
    else if (avx2)
        found.push_back({"float32", "vfmadd231ps/256", vectors(32, 1), fma_avx2});
    else
        found.push_back({"float32", "mulps, addps", 8 * 4 * 2, multiply_plain});
    if (avx512 && __builtin_cpu_supports("avx512bf16"))
        found.push_back({"bfloat16", "vdpbf16ps", vectors(64, 2), dot_bf16_avx512});
    if (avx512 && __builtin_cpu_supports("avx512vnni"))
        found.push_back({"int8", "vpdpbusd/512", vectors(64, 4), dot_int8_avx512});
    else if (has_avx_vnni())
        found.push_back({"int8", "vpdpbusd/256", vectors(32, 4), dot_int8_avx_vnni});
    else if (avx2)
        found.push_back({"int8", "vpmaddubsw, vpmaddwd, vpaddd", vectors(32, 4), dot_int8_avx2});
    if (has_amx()) {
        found.push_back({"bfloat16", "tdpbf16ps", tiles(2), amx_bf16});
        found.push_back({"int8", "tdpbusd", tiles(4), amx_int8});
    }
    return found;
}

#else

Reader reader() { return read_plain; }
std::vector<Probe> probes() { return {{"float32", "multiply, add", 8 * 4 * 2, multiply_plain}}; }

#endif

// Operations a second, all threads together.
double measure(ThreadPool& pool, const Probe& probe) {
    // Pieces of about 100 µs, so that a thread that comes late misses little.
    int64_t rounds = 1000;
    double piece = 0;
    while (piece < 1e-4) {
        const double start = seconds();
        probe.run(rounds);
        piece = seconds() - start;
        if (piece < 1e-4) rounds *= 2;
    }
    const int64_t pieces = static_cast<int64_t>(kPeakSeconds / piece) * pool.num_threads();
    double best = 0;
    for (int pass = 0; pass < 3; pass++) {
        const double start = seconds();
        pool.run(pieces, [&](int64_t, int) { probe.run(rounds); });
        const double operations = static_cast<double>(pieces) * static_cast<double>(rounds * probe.operations);
        best = std::max(best, operations / (seconds() - start));
    }
    return best;
}

}  // namespace

Machine::Machine(int num_threads, int64_t buffer_bytes)
    : pool_(num_threads), buffer_(std::max(buffer_bytes, kPiece) / kPiece * kPiece) {
    if (buffer_bytes < kPiece) throw std::invalid_argument("the buffer to read must have at least 1 MiB");
    // Memory that was never written is one page of zeros, again and again, which the caches hold.
    pool_.run(buffer_.num_bytes() / kPiece, [&](int64_t piece, int) {
        std::memset(buffer_.as<char>() + piece * kPiece, static_cast<int>(piece % 251) + 1, kPiece);
    });
}

double Machine::read_bandwidth() {
    const Reader read = reader();
    const char* from = buffer_.as<const char>();
    const int64_t pieces = buffer_.num_bytes() / kPiece;
    std::vector<uint64_t> sums(static_cast<size_t>(pieces));
    double best = 0;
    const double end = seconds() + kReadSeconds;
    do {
        const double start = seconds();
        pool_.run(pieces, [&](int64_t piece, int) {
            sums[static_cast<size_t>(piece)] = read(from + piece * kPiece, kPiece);
        });
        best = std::max(best, static_cast<double>(buffer_.num_bytes()) / (seconds() - start));
    } while (seconds() < end);
    return best;
}

std::vector<Peak> Machine::peaks() {
    std::vector<Peak> found;
    for (const Probe& probe : probes()) found.push_back({probe.number, probe.instruction, measure(pool_, probe)});
    return found;
}

}  // namespace minivllm
