// The C interface that lmcache_mp_safe/ops/native.py loads with ctypes. No Python in it: one library serves all
// versions.
//
// Every function that can fail returns 0, or an error whose text the same thread finds in `lmcache_mp_safe_last_error`.

#include "commands.h"
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

EXPORT int lmcache_mp_safe_submit(const uint64_t (*rows)[kCommandWords], int64_t count, int force_loop) {
    return guarded([&] {
        for (int64_t i = 0; i < count; i++) submit_command(rows[i], force_loop != 0);
    });
}
