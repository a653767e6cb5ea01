// What a .cu file needs to be compiled as C++ and run on a CPU: included before it. The threads of a
// block take turns, see turns.cpp. Only what paged_decode.cu uses is here.
#pragma once

#include <cmath>
#include <cstring>
#include <functional>

#define DEVICE_TYPE "cpu"
#define __global__
#define __device__
#define __constant__
#define __shared__
#define __launch_bounds__(threads)
#define __align__(bytes) alignas(bytes)

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
extern dim3 threadIdx, blockIdx, gridDim;
extern int warpSize;

// Each names its line, because lanes that meet at two different places have not met.
#define __syncthreads() on_cpu::barrier(__LINE__)
#define __shfl_xor_sync(mask, x, lanes) on_cpu::exchange(mask, x, lanes, __LINE__)

namespace on_cpu {
void barrier(int line);
float exchange(unsigned long long mask, float x, int lanes, int line);
void launch(const std::function<void()> &thread, dim3 grid, int threads, int shared_bytes);
}  // namespace on_cpu

#define LAUNCH(kernel, grid, shared_bytes, stream, step)                                \
    do {                                                                                \
        const auto one_thread = kernel;                                                 \
        const auto given = step;                                                        \
        on_cpu::launch([=] { one_thread(given); }, grid, THREADS, shared_bytes);        \
    } while (0)

typedef int cudaError_t;
enum { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorLaunchFailure = 719 };
cudaError_t cudaGetLastError();
const char *cudaGetErrorString(cudaError_t error);

inline int min(int a, int b) { return a < b ? a : b; }

inline float __uint_as_float(unsigned bits)
{
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

inline unsigned __float_as_uint(float x)
{
    unsigned bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
