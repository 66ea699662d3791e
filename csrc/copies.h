// Copies on the copy engine, between any two kinds of memory.

#pragma once

#include <cuda_runtime_api.h>

#include "plan.h"

// Whether the driver takes many copies in one call (CUDA 12.8 and later).
bool has_batch_copy();

// Submit them all: in one call where that exists and the stream is no default stream, which that call refuses; in a
// loop otherwise, or where `force_loop` says so.
void submit_copies(plan::Copies& copies, cudaStream_t stream, bool force_loop);
