// One exception for every status of the CUDA runtime and driver that is not success.

#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

class CudaError : public std::runtime_error {
  public:
    CudaError(cudaError_t code, const char* call, const char* file, int line)
        : std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + call + ": " +
                             cudaGetErrorName(code) + ", " + cudaGetErrorString(code)),
          code(code) {}

    const cudaError_t code;
};

inline void check(cudaError_t code, const char* call, const char* file, int line) {
    if (code == cudaSuccess) return;
    cudaGetLastError();  // forget it: the check behind the next kernel launch would report it once more
    throw CudaError(code, call, file, line);
}

// The driver's codes are the runtime's, where both have one. The argument is evaluated once.
#define CHECK(call) check(static_cast<cudaError_t>(call), #call, __FILE__, __LINE__)
