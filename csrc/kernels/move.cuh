// Copies inside of device memory, for runs that are too short for the copy engine.
//
// Stands alone: nvcc, NVRTC and, for the CPU tests, a host compiler take it as it is.

#pragma once

#if defined(__CUDACC__)
#define ON_DEVICE __device__ __forceinline__
#else
#define ON_DEVICE inline
#endif

namespace moving {

using u64 = unsigned long long;

constexpr int kThreads = 128;  // a CTA; ops/kernels.py knows it too

struct Move {
    u64 source, target, bytes;
};

#if defined(__CUDACC__)
using Vector = uint4;
#else
struct alignas(16) Vector {
    u64 low, high;
};
#endif

// Every byte is read once and written once: neither needs the caches that the model's work lives in.
template <typename Word>
ON_DEVICE Word load(const Word* from) {
#if defined(__CUDACC__)
    return __ldcs(from);
#else
    return *from;
#endif
}

template <typename Word>
ON_DEVICE void store(Word* to, Word word) {
#if defined(__CUDACC__)
    __stcs(to, word);
#else
    *to = word;
#endif
}

ON_DEVICE void move_bytes(const Move& row, u64 begin, u64 end, unsigned thread, unsigned threads) {
    const auto* from = reinterpret_cast<const unsigned char*>(row.source);
    auto* to = reinterpret_cast<unsigned char*>(row.target);
    for (u64 at = begin + thread; at < end; at += threads) to[at] = from[at];
}

// One thread's part of a row whose source and target are equally far from a multiple of the word.
//
// [0, head)      bytes up to the first whole word
// [head, tail)   words
// [tail, bytes)  bytes
template <typename Word>
ON_DEVICE void move_words(const Move& row, unsigned thread, unsigned threads) {
    const u64 unaligned = (0 - row.target) % sizeof(Word);
    const u64 head = unaligned < row.bytes ? unaligned : row.bytes;
    const u64 words = (row.bytes - head) / sizeof(Word);
    const u64 tail = head + words * sizeof(Word);
    const auto* from = reinterpret_cast<const Word*>(row.source + head);
    auto* to = reinterpret_cast<Word*>(row.target + head);
    const u64 step = threads;

    u64 at = thread;
    for (; at + 3 * step < words; at += 4 * step) {  // four loads in flight a thread
        const Word a = load(from + at), b = load(from + at + step);
        const Word c = load(from + at + 2 * step), d = load(from + at + 3 * step);
        store(to + at, a), store(to + at + step, b);
        store(to + at + 2 * step, c), store(to + at + 3 * step, d);
    }
    for (; at < words; at += step) store(to + at, load(from + at));

    move_bytes(row, 0, head, thread, threads);
    move_bytes(row, tail, row.bytes, thread, threads);
}

// One thread's part of a row: in the widest words that fit source and target at once.
ON_DEVICE void move_row(const Move& row, unsigned thread, unsigned threads) {
    const u64 apart = row.source ^ row.target;
    if (apart % 16 == 0) {
        move_words<Vector>(row, thread, threads);
    } else if (apart % 4 == 0) {
        move_words<unsigned int>(row, thread, threads);
    } else {
        move_words<unsigned char>(row, thread, threads);
    }
}

}  // namespace moving

#if defined(__CUDACC__)
extern "C" __global__ void __launch_bounds__(moving::kThreads) move_runs(const moving::Move* table, int count) {
    // Unsigned: the last step may go past the largest int.
    for (unsigned row = blockIdx.x; row < static_cast<unsigned>(count); row += gridDim.x) {
        moving::move_row(table[row], threadIdx.x, blockDim.x);
    }
}
#endif
