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
    explicit AlignedBuffer(int64_t num_bytes) {
        constexpr int64_t huge = int64_t{1} << 21;
        const int64_t alignment = num_bytes >= 2 * huge ? huge : 64;
        num_bytes_ = num_bytes;
        if (num_bytes == 0) return;
        const auto size = static_cast<size_t>((num_bytes + alignment - 1) / alignment * alignment);
        data_ = std::aligned_alloc(static_cast<size_t>(alignment), size);
        if (!data_) throw std::bad_alloc();
#if defined(__linux__)
        if (alignment == huge) madvise(data_, size, MADV_HUGEPAGE);  // fewer TLB misses; not needed for right answers
#endif
        std::memset(data_, 0, size);
    }
    AlignedBuffer(AlignedBuffer&& other) noexcept { *this = std::move(other); }
    AlignedBuffer& operator=(AlignedBuffer&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(num_bytes_, other.num_bytes_);
        return *this;
    }
    ~AlignedBuffer() { std::free(data_); }

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
    void* data_ = nullptr;
    int64_t num_bytes_ = 0;
};

}  // namespace minivllm
