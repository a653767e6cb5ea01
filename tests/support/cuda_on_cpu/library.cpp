// The library that the tests load: paged_decode.cu, the CPU that runs it, and a stand-in for the
// part of libcuda that driver.py calls.

#include "device.h"

#include "paged_decode.cu"

#include "turns.cpp"

#include <dlfcn.h>

extern "C" {
void on_cpu_set(int lanes_of_a_warp, unsigned order_of_turns)
{
    warpSize = lanes_of_a_warp;
    order = order_of_turns;
}

float on_cpu_half_to_float(unsigned short bits) { return __half2float({bits}); }
unsigned short on_cpu_float_to_half(float x) { return __float2half_rn(x).bits; }

int cuModuleLoadData(void **module, const void *image)
{
    *module = (void *)image;
    return std::strcmp((const char *)image, "paged_decode") ? 200 : 0;  // CUDA_ERROR_INVALID_IMAGE
}

static void *symbol(const char *name)
{
    Dl_info own;
    dladdr((void *)&cuModuleLoadData, &own);
    return dlsym(dlopen(own.dli_fname, RTLD_LAZY), name);
}

int cuModuleGetGlobal_v2(void **place, size_t *bytes, void *, const char *name)
{
    *place = symbol(name);
    *bytes = sizeof paged_decode_about;
    return *place ? 0 : 500;  // CUDA_ERROR_NOT_FOUND
}

int cuMemcpyDtoH_v2(void *to, const void *from, size_t bytes)
{
    std::memcpy(to, from, bytes);
    return 0;
}

int cuModuleGetFunction(void **function, void *, const char *name)
{
    *function = symbol(name);
    return *function ? 0 : 500;
}

int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned,
                   unsigned, unsigned shared_bytes, void *, void **arguments, void **)
{
    const Step step = *(const Step *)arguments[0];
    const auto kernel = (void (*)(const Step))function;
    on_cpu::launch([=] { kernel(step); }, dim3(x, y, z), threads, shared_bytes);
    return cudaGetLastError();
}
}
