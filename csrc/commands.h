// Work as rows of numbers, so that many pieces of it cost the caller one call.

#pragma once

#include <cstdint>

constexpr int kCommandWords = 6;

// The first word of a row; the second one is the stream. See `Command` in lmcache_mp_safe/ops/device.py.
enum class Command : uint64_t {
    record,  // event
    wait,    // event
    copy,    // rows of three words (source, target, bytes), their count
    move,    // table, its rows
    digest,  // table, its rows, bytes of the payload, where the digests go
};

// Addresses come as numbers.
template <typename T>
T* pointer(uint64_t address) {
    return reinterpret_cast<T*>(address);
}

void submit_command(const uint64_t row[kCommandWords], bool force_loop);
