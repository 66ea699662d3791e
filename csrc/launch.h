// Launches of the two kernels. All pointers are to device memory; see `Device` in lmcache_mp_safe/ops/device.py.

#pragma once

#include <cuda_runtime_api.h>

#include "plan.h"

// Load both kernels now, on the current device. Otherwise the first launch does it, and may wait for the device.
void load_kernels();

void launch_move(const moving::Move* table, int count, cudaStream_t stream);
void launch_digest(const digesting::Run* runs, int count, uint64_t length, unsigned long long* digests,
                   cudaStream_t stream);
