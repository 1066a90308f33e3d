// Times the packed matmuls of SmolLM2-135M (its 30 layers, so that weights come from memory), for each format and
// number of rows, and prints what share of the machine's read bandwidth they take and the arithmetic they do.
//   cmake -S . -B build/native -DMINIVLLM_TESTS=ON -DMINIVLLM_PYTHON=OFF && cmake --build build/native &&
//   build/native/bench_matmul [threads] [isa] [formats] [rows …]      e.g.  bench_matmul 2 amx bf16,int8 1 16 512
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>

#include "machine.h"
#include "packed_matrix.h"
#include "thread_pool.h"

using namespace minivllm;

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Shape {
    int64_t outputs, k;
    Epilogue epilogue;
};
constexpr Shape kShapes[] = {{960, 576, Epilogue::store},
                             {576, 576, Epilogue::add},
                             {3072, 576, Epilogue::activate_gated},
                             {576, 1536, Epilogue::add}};
constexpr int kLayers = 30;

void bench(const Kernels& kernels, ThreadPool& pool, Format format, const char* name, const std::vector<int64_t>& rows_list) {
    std::vector<PackedMatrix> matrices;
    int64_t bytes = 0;
    double weights = 0;
    std::mt19937 generator(1);
    std::vector<float> source(3072 * 576 + 1536);
    for (float& x : source) x = static_cast<float>(generator() % 2001) * 1e-5f - .01f;
    AlignedBuffer memory(kLayers * int64_t{3540 << 10} * (format == Format::f32 ? 4 : 2));
    for (int layer = 0; layer < kLayers; layer++)
        for (const Shape& s : kShapes) {
            PackedMatrix m(format, kernels.bf16_tiles, s.outputs / kPanel, s.k);
            m.place(memory.as<char>() + bytes);
            if (layer == 0)
                pool.run(m.num_panels, [&](int64_t p, int) {
                    m.pack(Stored::f32, reinterpret_cast<const char*>(source.data() + p * kPanel * s.k), p, 0, kPanel);
                });
            else
                std::memcpy(memory.as<char>() + bytes, matrices[matrices.size() - 4].panels(),
                            static_cast<size_t>(m.num_bytes()));
            bytes += m.num_bytes();
            weights += static_cast<double>(s.outputs * s.k);
            matrices.push_back(std::move(m));
        }
    const Number number = format == Format::f32 ? Number::f32 : Number::bf16;
    Machine machine(pool.num_threads(), 256 << 20);
    for (int64_t rows : rows_list) {
        AlignedBuffer x(rows * 1536 * 4), prepared((rows + 15) * 1536 * 4), out(rows * 3072 * 4);
        std::vector<AlignedBuffer> scratch;
        for (int t = 0; t < pool.num_threads(); t++) scratch.emplace_back(matmul_scratch_size(1536));
        std::vector<double> times;
        double bandwidth = machine.read_bandwidth();
        for (int round = 0; round < (rows > 200 ? 7 : 15); round++) {
            const double start = now();
            for (size_t i = 0; i < matrices.size(); i++) {
                const PackedMatrix& m = matrices[i];
                const Shape& s = kShapes[i % 4];
                const Input input = input_of(format);
                const int64_t row_bytes = input_bytes(input, m.k, kernels.group_bytes);
                const Prepare prepare{number, x.as<char>(), m.k, m.k, input, prepared.as<char>(), row_bytes};
                if (input == Input::groups) {
                    if (rows < 8)
                        kernels.prepare(prepare, 0, rows);
                    else
                        pool.run((rows + 7) / 8, [&](int64_t p, int) { kernels.prepare(prepare, 8 * p, std::min(rows, 8 * p + 8)); });
                }
                const int64_t units = m.num_panels / (s.epilogue == Epilogue::activate_gated ? 2 : 1);
                const int64_t most = kernels.matmul_rows(format, m.k), row_pieces = (rows + most - 1) / most;
                const int64_t row_grain = (rows + row_pieces - 1) / row_pieces;
                const int64_t unit_grain = std::max<int64_t>(1, units * row_pieces / (16 * pool.num_threads()));
                const Matmul job{format,     input == Input::groups ? prepared.as<char>() : x.as<char>(), row_bytes,
                                 m.panels(), m.k, nullptr, s.epilogue, Activation::silu, number, out.as<char>(),
                                 s.outputs, units, std::max<int64_t>(1, pool.num_threads() * unit_grain / row_pieces)};
                pool.run(row_pieces * ((units + unit_grain - 1) / unit_grain), [&](int64_t piece, int thread) {
                    const int64_t row = piece % row_pieces * row_grain, unit = piece / row_pieces * unit_grain;
                    kernels.matmul(job, row, std::min(rows, row + row_grain), unit, std::min(units, unit + unit_grain),
                                   scratch[static_cast<size_t>(thread)].as<char>());
                });
            }
            times.push_back(now() - start);
        }
        bandwidth = (bandwidth + machine.read_bandwidth()) / 2;
        std::sort(times.begin(), times.end());
        const double median = times[times.size() / 2], best = times[0];
        std::printf("%-10s %-5s %4d rows: %7.2f ms (best %7.2f)  %5.1f GB/s, %3.0f %% of %.1f (best %3.0f %%)  %6.0f GFLOP/s\n",
                    kernels.isa, name, static_cast<int>(rows), median * 1e3, best * 1e3, bytes / median / 1e9,
                    100 * bytes / median / bandwidth, bandwidth / 1e9, 100 * bytes / best / bandwidth,
                    2 * weights * static_cast<double>(rows) / best / 1e9);
        std::fflush(stdout);
    }
}

}  // namespace

int main(int count, char** arguments) {
    ThreadPool pool(count > 1 ? std::atoi(arguments[1]) : 2);
    const Kernels& kernels = kernels_for(count > 2 ? arguments[2] : "");
    const std::string formats = count > 3 ? arguments[3] : "f32,bf16,int8,int4";
    std::vector<int64_t> rows;
    for (int i = 4; i < count; i++) rows.push_back(std::atoi(arguments[i]));
    if (rows.empty()) rows = {1, 4, 16, 64, 256, 1024};
    const std::pair<const char*, Format> all[] = {
        {"f32", Format::f32}, {"bf16", Format::bf16}, {"int8", Format::int8}, {"int4", Format::int4}};
    for (const auto& [name, format] : all)
        if (formats.find(name) != std::string::npos) bench(kernels, pool, format, name, rows);
}
