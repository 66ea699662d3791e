// The C interface that lmcache_mp_safe/ops/native.py loads with ctypes. No Python in it: one library serves all
// versions.
//
// Every function that can fail returns 0, or an error whose text the same thread finds in `lmcache_mp_safe_last_error`.

#include "copies.h"
#include "launch.h"
#include "status.h"

#ifndef COMPILED_ARCHITECTURES
#define COMPILED_ARCHITECTURES "unknown"
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

thread_local std::string last_error;

template <typename Body>
int guarded(Body body) noexcept {
    try {
        body();
        return 0;
    } catch (const CudaError& error) {
        last_error = error.what();
        return error.code;
    } catch (const std::exception& error) {
        last_error = error.what();
        return -1;
    }
}

template <typename T>
T* pointer(uint64_t address) {
    return reinterpret_cast<T*>(address);
}

cudaStream_t stream_of(uint64_t handle) { return reinterpret_cast<cudaStream_t>(handle); }

}  // namespace

EXPORT const char* lmcache_mp_safe_last_error() { return last_error.c_str(); }

EXPORT const char* lmcache_mp_safe_architectures() { return COMPILED_ARCHITECTURES; }

EXPORT int lmcache_mp_safe_runtime_version() { return CUDART_VERSION; }

EXPORT int lmcache_mp_safe_has_batch_copy() { return has_batch_copy(); }

EXPORT int lmcache_mp_safe_set_device(int device) {
    return guarded([&] { CHECK(cudaSetDevice(device)); });
}

EXPORT int lmcache_mp_safe_load_kernels() {
    return guarded([] { load_kernels(); });
}

EXPORT int lmcache_mp_safe_register(uint64_t address, uint64_t bytes) {
    return guarded([&] { CHECK(cudaHostRegister(pointer<void>(address), bytes, cudaHostRegisterPortable)); });
}

EXPORT int lmcache_mp_safe_unregister(uint64_t address) {
    return guarded([&] { CHECK(cudaHostUnregister(pointer<void>(address))); });
}

EXPORT int lmcache_mp_safe_copy(const uint64_t (*rows)[3], int64_t count, uint64_t stream, int force_loop) {
    return guarded([&] {
        plan::Copies copies = plan::split(rows, count);
        submit_copies(copies, stream_of(stream), force_loop != 0);
    });
}

EXPORT int lmcache_mp_safe_move(uint64_t table, int64_t count, uint64_t stream) {
    return guarded([&] {
        if (!plan::checked_move(pointer<void>(table), count)) return;
        launch_move(pointer<const moving::Move>(table), static_cast<int>(count), stream_of(stream));
    });
}

EXPORT int lmcache_mp_safe_digest(uint64_t table, int64_t count, uint64_t length, uint64_t digests, uint64_t stream) {
    return guarded([&] {
        if (!plan::checked_digest(pointer<void>(table), count, length, pointer<void>(digests))) return;
        launch_digest(pointer<const digesting::Run>(table), static_cast<int>(count), length,
                      pointer<unsigned long long>(digests), stream_of(stream));
    });
}
