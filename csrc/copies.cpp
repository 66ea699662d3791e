#include "copies.h"

#include <cuda.h>

#include <atomic>

#include "status.h"

#if CUDART_VERSION >= 12080
#include <cudaTypedefs.h>
#endif

namespace {

void loop(const plan::Copies& copies, cudaStream_t stream) {
    for (size_t i = 0; i < copies.count(); i++) {
        CHECK(cudaMemcpyAsync(reinterpret_cast<void*>(copies.targets[i]),
                              reinterpret_cast<const void*>(copies.sources[i]), copies.bytes[i], cudaMemcpyDefault,
                              stream));
    }
}

#if CUDART_VERSION >= 12080

// The runtime's own function changed its arguments in CUDA 13, and is not there in an older driver. The driver's entry
// point of one fixed version is the same in all.
PFN_cuMemcpyBatchAsync_v12080 find_batch() {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuMemcpyBatchAsync", &function, 12080, cudaEnableDefault, &found);
    if (status != cudaSuccess) cudaGetLastError();
    if (status != cudaSuccess || found != cudaDriverEntryPointSuccess) return nullptr;
    return reinterpret_cast<PFN_cuMemcpyBatchAsync_v12080>(function);
}

PFN_cuMemcpyBatchAsync_v12080 batch_function() {
    // Kept once found. That it was not found may be because the driver was not up yet.
    static std::atomic<PFN_cuMemcpyBatchAsync_v12080> known{nullptr};
    PFN_cuMemcpyBatchAsync_v12080 function = known;
    if (function == nullptr) known = function = find_batch();
    return function;
}

void batch(plan::Copies& copies, cudaStream_t stream) {
    static_assert(sizeof(CUdeviceptr) == sizeof(uint64_t));
    CUmemcpyAttributes attributes{};
    attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;  // work before on the stream may write the sources
    size_t first = 0;                                               // the attributes are those of all copies from here
    size_t failed = SIZE_MAX;
    const CUresult status = batch_function()(reinterpret_cast<CUdeviceptr*>(copies.targets.data()),
                                             reinterpret_cast<CUdeviceptr*>(copies.sources.data()), copies.bytes.data(),
                                             copies.count(), &attributes, &first, 1, &failed, stream);
    const std::string call = "cuMemcpyBatchAsync of " + std::to_string(copies.count()) + " copies" +
                             (failed < copies.count() ? ", at copy " + std::to_string(failed) : "");
    check(static_cast<cudaError_t>(status), call.c_str(), __FILE__, __LINE__);
}

#else

constexpr void* batch_function() { return nullptr; }
void batch(plan::Copies& copies, cudaStream_t stream) { loop(copies, stream); }

#endif

// Null and the two handles that stand for default streams.
bool is_default(cudaStream_t stream) { return reinterpret_cast<uintptr_t>(stream) <= 2; }

}  // namespace

bool has_batch_copy() { return batch_function() != nullptr; }

void submit_copies(plan::Copies& copies, cudaStream_t stream, bool force_loop) {
    if (copies.count() == 0) return;
    if (force_loop || is_default(stream) || !has_batch_copy()) {
        loop(copies, stream);
    } else {
        batch(copies, stream);
    }
}
