// What is decided on the host and needs no device: arguments, sizes of grids, arrays. Tested without a GPU.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/digest.cuh"
#include "kernels/move.cuh"

namespace plan {

// Enough CTAs to hide the latency of short rows, few enough to leave room for the model's own.
constexpr int kMoveCtasPerMultiprocessor = 8;
// Digests have as long as the copies beside them, and those are bound by the bus: half of the multiprocessors never see one.
constexpr int kMultiprocessorsPerDigestCta = 2;

inline void require(bool holds, const std::string& what) {
    if (!holds) throw std::invalid_argument(what);
}

// Whether there is anything to do.
inline bool checked_move(const void* table, int64_t count) {
    require(count >= 0 && count <= INT32_MAX, "move: " + std::to_string(count) + " rows");
    require(table != nullptr || count == 0, "move: no table");
    return count > 0;
}

inline bool checked_digest(const void* table, int64_t count, uint64_t length, const void* digests) {
    require(count >= 0 && count <= INT32_MAX, "digest: " + std::to_string(count) + " runs");
    if (length == 0) return false;
    require(count > 0 && table != nullptr, "digest: no runs for " + std::to_string(length) + " bytes");
    require(digests != nullptr, "digest: no place for the digests");
    return true;
}

inline unsigned move_grid(int64_t count, int multiprocessors) {
    return static_cast<unsigned>(std::min<int64_t>(count, int64_t{kMoveCtasPerMultiprocessor} * multiprocessors));
}

inline unsigned digest_grid(uint64_t length, int multiprocessors) {
    const uint64_t tiles = (length + digesting::kTileBytes - 1) / digesting::kTileBytes;
    const uint64_t tiles_per_cta = digesting::kThreads / digesting::kParts;
    const uint64_t most = std::max(multiprocessors / kMultiprocessorsPerDigestCta, 1);
    return static_cast<unsigned>(std::min((tiles + tiles_per_cta - 1) / tiles_per_cta, most));
}

// Copies as the batch call takes them. Empty ones are left out.
struct Copies {
    std::vector<uint64_t> sources, targets;
    std::vector<size_t> bytes;

    size_t count() const { return bytes.size(); }
};

inline Copies split(const uint64_t (*rows)[3], int64_t count) {
    require(count >= 0, "copy: " + std::to_string(count) + " rows");
    require(rows != nullptr || count == 0, "copy: no rows");
    Copies copies;
    copies.sources.reserve(count), copies.targets.reserve(count), copies.bytes.reserve(count);
    for (int64_t i = 0; i < count; i++) {
        const auto [source, target, bytes] = rows[i];
        if (bytes == 0) continue;
        copies.sources.push_back(source), copies.targets.push_back(target), copies.bytes.push_back(bytes);
    }
    return copies;
}

}  // namespace plan
