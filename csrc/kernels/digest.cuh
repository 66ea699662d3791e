// XXH3-64 (seed 0, default secret) of each 16 KiB tile of a payload that lies in runs, zeros behind its end.
// See lmcache_mp_safe/geometry/checksum.py; the algorithm and all constants are from the xxHash specification,
// https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
//
// A tile is 16 blocks of 16 stripes of 64 bytes. XXH3 keeps eight accumulators of 8 bytes, one for each word of a
// stripe; a word also goes into its neighbour's accumulator. So four threads share a tile, and each takes two
// neighbours:
//
//   stripe   | 16 bytes | 16 bytes | 16 bytes | 16 bytes |
//   part     |    0     |    1     |    2     |    3     |     accumulators 2 * part and 2 * part + 1
//
// They meet once, when the tile is over.
//
// Stands alone: nvcc, NVRTC and, for the CPU tests, a host compiler take it as it is.

#pragma once

#if defined(__CUDACC__)
#define ON_DEVICE __device__ __forceinline__
#define TABLE static __constant__ const
#else
#define ON_DEVICE inline
#define TABLE static const
#endif

namespace digesting {

using u64 = unsigned long long;

constexpr int kThreads = 128;  // a CTA; ops/kernels.py knows it too
// Tells the compiler that 128 registers are fine. On its own it saves them, and has 4 loads in flight instead of 16.
constexpr int kCtasPerMultiprocessor = 4;
constexpr int kParts = 4;  // threads a tile
constexpr u64 kTileBytes = 16 << 10;
constexpr u64 kBlockBytes = 1 << 10;
constexpr u64 kStripeBytes = 64;
constexpr u64 kWordBytes = 16;  // what a thread takes of a stripe
constexpr int kBlocks = kTileBytes / kBlockBytes;
constexpr int kStripes = kBlockBytes / kStripeBytes;

constexpr u64 kPrime32_1 = 0x9E3779B1, kPrime32_2 = 0x85EBCA77, kPrime32_3 = 0xC2B2AE3D;
constexpr u64 kPrime64_1 = 0x9E3779B185EBCA87, kPrime64_2 = 0xC2B2AE3D27D4EB4F, kPrime64_3 = 0x165667B19E3779F9;
constexpr u64 kPrime64_4 = 0x85EBCA77C2B2AE63, kPrime64_5 = 0x27D4EB2F165667C5;
constexpr u64 kPrimeMx1 = 0x165667919E3779F9;

TABLE u64 kStart[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3, kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};

// The default secret, as little-endian words: from byte 0; from 121, for the last stripe; from 11, for the merge.
TABLE u64 kSecret[24] = {0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072,
                         0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0,
                         0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
                         0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8,
                         0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
                         0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af};
TABLE u64 kSecretLast[8] = {0xea647378d9c97e9f, 0xc5c3ebd33483acc5, 0x17eb6313faffa081, 0xd349daf0b751dd0d,
                            0x2b9e68d429265516, 0x8ffca1477d58be16, 0x45ce31d07ad1b8f8, 0xaf280416958f3acb};
TABLE u64 kSecretMerge[8] = {0x6dd4de1cad21f72c, 0xa44072db979083e9, 0xe679cb1f67b3b7a4, 0xd05a8278e5c0cc4e,
                             0x4608b82172ffcc7d, 0x9035e08e2443f774, 0x52283c4c263a81e6, 0x65d088cb00c391bb};

struct Run {
    u64 start, address;
};

struct Pair {
    u64 first, second;
};

#if defined(__CUDACC__)
using Vector = ulonglong2;
#else
struct alignas(16) Vector {
    u64 x, y;
};
#endif

ON_DEVICE Vector load(u64 address) {
    const auto* from = reinterpret_cast<const Vector*>(address);
#if defined(__CUDACC__)
    return __ldcs(from);  // nobody reads it again
#else
    return *from;
#endif
}

ON_DEVICE u64 multiply_high(u64 a, u64 b) {
#if defined(__CUDACC__)
    return __umul64hi(a, b);
#else
    return static_cast<u64>(static_cast<unsigned __int128>(a) * b >> 64);
#endif
}

// A payload and the run that a reader is in. Reads only go forward.
class Reader {
  public:
    ON_DEVICE Reader(const Run* runs, int count, u64 length, u64 position)
        : runs_(runs), count_(count), length_(length) {
        int low = 0, high = count;  // the last run that starts at or before the position is in [low, high)
        while (high - low > 1) {
            const int middle = low + (high - low) / 2;
            if (runs[middle].start <= position) {
                low = middle;
            } else {
                high = middle;
            }
        }
        enter(low);
    }

    ON_DEVICE void go(u64 position) {
        while (position >= end_ && run_ + 1 < count_) enter(run_ + 1);
    }

    // Whether these bytes of the payload lie in the current run, ready for wide loads.
    ON_DEVICE bool holds(u64 position, u64 bytes) const {
        return position + bytes <= end_ && address(position) % kWordBytes == 0;
    }

    ON_DEVICE u64 address(u64 position) const { return base_ + position; }

    // 16 bytes from wherever they are.
    ON_DEVICE Vector word(u64 position) {
        go(position);
        if (holds(position, kWordBytes)) return load(address(position));
        Vector word;
        word.x = half(position);
        word.y = half(position + 8);
        return word;
    }

  private:
    ON_DEVICE void enter(int run) {
        run_ = run;
        base_ = runs_[run].address - runs_[run].start;
        end_ = run + 1 < count_ && runs_[run + 1].start < length_ ? runs_[run + 1].start : length_;
    }

    ON_DEVICE u64 half(u64 position) {
        u64 value = 0;
        for (int i = 0; i < 8 && position + i < length_; i++) {
            go(position + i);
            value |= static_cast<u64>(*reinterpret_cast<const unsigned char*>(address(position + i))) << 8 * i;
        }
        return value;
    }

    const Run* runs_;
    int count_;
    u64 length_;
    int run_;
    u64 base_;  // plus a position in the payload: its address, as long as it is in the run
    u64 end_;   // of the run, in the payload
};

ON_DEVICE void accumulate(Pair& sums, Vector data, Pair key) {
    const u64 first = data.x ^ key.first, second = data.y ^ key.second;
    sums.first += data.y + (first & 0xffffffff) * (first >> 32);
    sums.second += data.x + (second & 0xffffffff) * (second >> 32);
}

ON_DEVICE u64 scrambled(u64 sum, u64 key) { return (sum ^ sum >> 47 ^ key) * kPrime32_1; }

// What one part of a tile adds to its digest.
ON_DEVICE u64 digest_part(const Run* runs, int count, u64 length, u64 tile, int part) {
    u64 position = tile * kTileBytes;
    Reader reader(runs, count, length, position);

    const u64* secret = kSecret + 2 * part;
    u64 keys[kStripes + 2];  // in registers: the loops over them are unrolled
#pragma unroll
    for (int i = 0; i < kStripes + 2; i++) keys[i] = secret[i];

    Pair sums = {kStart[2 * part], kStart[2 * part + 1]};
#pragma unroll 1
    for (int block = 0; block < kBlocks; block++, position += kBlockBytes) {
        const bool last = block == kBlocks - 1;
        Pair end_key = {keys[kStripes - 1], keys[kStripes]};
        if (last) end_key = {kSecretLast[2 * part], kSecretLast[2 * part + 1]};

        const u64 mine = position + part * kWordBytes;
        reader.go(position);
        if (reader.holds(position, kBlockBytes)) {
            Vector data[kStripes];  // all loads before the arithmetic: this is what keeps the memory busy
#pragma unroll
            for (int i = 0; i < kStripes; i++) data[i] = load(reader.address(mine) + i * kStripeBytes);
#pragma unroll
            for (int i = 0; i < kStripes - 1; i++) accumulate(sums, data[i], {keys[i], keys[i + 1]});
            accumulate(sums, data[kStripes - 1], end_key);
        } else {
#pragma unroll 1
            for (int i = 0; i < kStripes; i++) {
                const Pair key = i < kStripes - 1 ? Pair{secret[i], secret[i + 1]} : end_key;
                accumulate(sums, reader.word(mine + i * kStripeBytes), key);
            }
        }
        if (!last) {
            sums.first = scrambled(sums.first, keys[kStripes]);
            sums.second = scrambled(sums.second, keys[kStripes + 1]);
        }
    }

    const u64 a = sums.first ^ kSecretMerge[2 * part], b = sums.second ^ kSecretMerge[2 * part + 1];
    return a * b ^ multiply_high(a, b);
}

// The digest of a tile from the sum of its parts.
ON_DEVICE u64 finished(u64 sum) {
    u64 hash = sum + kTileBytes * kPrime64_1;
    hash = (hash ^ hash >> 37) * kPrimeMx1;
    return hash ^ hash >> 32;
}

}  // namespace digesting

#if defined(__CUDACC__)
extern "C" __global__ void __launch_bounds__(digesting::kThreads, digesting::kCtasPerMultiprocessor)
    digest_tiles(const digesting::Run* runs, int count, unsigned long long length, unsigned long long* digests) {
    using namespace digesting;
    const u64 thread = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
    const u64 teams = static_cast<u64>(gridDim.x) * blockDim.x / kParts;
    const int part = thread % kParts;
    const unsigned team = 0xfu << (threadIdx.x & 28);  // the tile's four lanes of the warp: all take the same tiles
    for (u64 tile = thread / kParts; tile * kTileBytes < length; tile += teams) {
        u64 sum = digest_part(runs, count, length, tile, part);
        sum += __shfl_xor_sync(team, sum, 1);
        sum += __shfl_xor_sync(team, sum, 2);
        if (part == 0) digests[tile] = finished(sum);
    }
}
#endif
