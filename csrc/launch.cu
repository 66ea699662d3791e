#include "launch.h"

#include "status.h"

namespace {

int multiprocessors() {
    int device = 0, count = 0;
    CHECK(cudaGetDevice(&device));
    CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    return count;
}

}  // namespace

void load_kernels() {
    cudaFuncAttributes attributes;
    CHECK(cudaFuncGetAttributes(&attributes, move_runs));
    CHECK(cudaFuncGetAttributes(&attributes, digest_tiles));
}

void launch_move(const moving::Move* table, int count, cudaStream_t stream) {
    move_runs<<<plan::move_grid(count, multiprocessors()), moving::kThreads, 0, stream>>>(table, count);
    CHECK(cudaGetLastError());
}

void launch_digest(const digesting::Run* runs, int count, uint64_t length, unsigned long long* digests,
                   cudaStream_t stream) {
    digest_tiles<<<plan::digest_grid(length, multiprocessors()), digesting::kThreads, 0, stream>>>(runs, count, length,
                                                                                                   digests);
    CHECK(cudaGetLastError());
}
