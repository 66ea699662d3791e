// The kernels' arithmetic and the host's decisions, on a CPU: what test_kernels_on_cpu.py calls. One thread plays all
// of a device's in turn.

#include "plan.h"

namespace {

template <typename Body>
int refused(Body body) {
    try {
        body();
        return 0;
    } catch (const std::invalid_argument&) {
        return 1;
    }
}

}  // namespace

extern "C" {

void digest(const digesting::Run* runs, int count, uint64_t length, uint64_t* digests) {
    for (uint64_t tile = 0; tile * digesting::kTileBytes < length; tile++) {
        uint64_t sum = 0;
        for (int part = 0; part < digesting::kParts; part++) {
            sum += digesting::digest_part(runs, count, length, tile, part);
        }
        digests[tile] = digesting::finished(sum);
    }
}

void move(const moving::Move* rows, int count, unsigned threads) {
    for (int row = 0; row < count; row++) {
        for (unsigned thread = 0; thread < threads; thread++) moving::move_row(rows[row], thread, threads);
    }
}

unsigned move_grid(int64_t count, int multiprocessors) { return plan::move_grid(count, multiprocessors); }
unsigned digest_grid(uint64_t length, int multiprocessors) { return plan::digest_grid(length, multiprocessors); }

int threads() { return moving::kThreads == digesting::kThreads ? moving::kThreads : 0; }
int parts() { return digesting::kParts; }

int move_is_refused(uint64_t table, int64_t count) {
    return refused([&] { plan::checked_move(reinterpret_cast<void*>(table), count); });
}

int digest_is_refused(uint64_t table, int64_t count, uint64_t length, uint64_t digests) {
    return refused(
        [&] { plan::checked_digest(reinterpret_cast<void*>(table), count, length, reinterpret_cast<void*>(digests)); });
}

int split_is_refused(const uint64_t (*rows)[3], int64_t count) {
    return refused([&] { plan::split(rows, count); });
}

// Writes the columns, returns how many rows are left.
int64_t split(const uint64_t (*rows)[3], int64_t count, uint64_t* sources, uint64_t* targets, uint64_t* bytes) {
    const plan::Copies copies = plan::split(rows, count);
    std::copy(copies.sources.begin(), copies.sources.end(), sources);
    std::copy(copies.targets.begin(), copies.targets.end(), targets);
    std::copy(copies.bytes.begin(), copies.bytes.end(), bytes);
    return static_cast<int64_t>(copies.count());
}
}
