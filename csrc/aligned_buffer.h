// AlignedBuffer: zeroed memory on a cache line (large ones: on a huge page), freed with its owner.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace minivllm {

class AlignedBuffer {
public:
    AlignedBuffer() = default;
    explicit AlignedBuffer(int64_t num_bytes) : num_bytes_(num_bytes) {
        if (num_bytes == 0) return;
#if defined(__linux__)
        if (is_mapped()) {
            // Fresh pages are zero, and are not there before they are touched. Huge ones mean fewer TLB misses.
            void* start = mmap(nullptr, mapped_size(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (start == MAP_FAILED) throw std::bad_alloc();
            data_ = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(start) + kHuge - 1) / kHuge * kHuge);
            shift_ = static_cast<char*>(data_) - static_cast<char*>(start);
            madvise(data_, static_cast<size_t>(num_bytes), MADV_HUGEPAGE);
            return;
        }
#endif
        const auto size = static_cast<size_t>((num_bytes + 63) / 64 * 64);
        data_ = std::aligned_alloc(64, size);
        if (!data_) throw std::bad_alloc();
        std::memset(data_, 0, size);
    }
    AlignedBuffer(AlignedBuffer&& other) noexcept { *this = std::move(other); }
    AlignedBuffer& operator=(AlignedBuffer&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(num_bytes_, other.num_bytes_);
        std::swap(shift_, other.shift_);
        return *this;
    }
    ~AlignedBuffer() {
#if defined(__linux__)
        if (is_mapped()) {
            munmap(static_cast<char*>(data_) - shift_, mapped_size());
            return;
        }
#endif
        std::free(data_);
    }

    int64_t num_bytes() const { return num_bytes_; }
    template <class T>
    T* as() {
        return static_cast<T*>(data_);
    }
    template <class T>
    const T* as() const {
        return static_cast<const T*>(data_);
    }

    // At least that many bytes; the contents are lost when it grows.
    void reserve(int64_t num_bytes) {
        if (num_bytes > num_bytes_) *this = AlignedBuffer(num_bytes);
    }

private:
    static constexpr int64_t kHuge = int64_t{1} << 21;

    bool is_mapped() const { return num_bytes_ >= 2 * kHuge; }
    size_t mapped_size() const { return static_cast<size_t>(num_bytes_ + kHuge); }

    void* data_ = nullptr;
    int64_t num_bytes_ = 0;
    int64_t shift_ = 0;  // of data_ in its mapping
};

}  // namespace minivllm
