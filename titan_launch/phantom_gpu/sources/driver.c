/* The driver of CUDA (libcuda.so.1) without a GPU: the functions that PyTorch's allocator, Triton and NVRTC's loader call. */
#define _GNU_SOURCE
#include "phantom.h"
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static int context;

CUresult cuDriverGetVersion(int *version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { return *count = num_devices, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *handle, int number) { return *handle = number, CUDA_SUCCESS; }
CUresult cuDeviceGetName(char *text, int length, CUdevice number) { return snprintf(text, length, "%s", device.name), CUDA_SUCCESS; }
CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice number) { return *bytes = device.memory, CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice number) { return *value = device_attribute(attribute), CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice number, unsigned *flags, int *is_active) { return *flags = 0, *is_active = 1, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *made, CUdevice number) { return *made = (CUcontext)&context, CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *now) { return *now = (CUcontext)&context, CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *number) { return *number = 0, CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return *value = 0, CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) { return *status = CU_STREAM_CAPTURE_STATUS_NONE, CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char **text) { return *text = error ? "an error of the phantom GPU" : "no error", CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult error, const char **text) { return *text = error ? "CUDA_ERROR_UNKNOWN" : "CUDA_SUCCESS", CUDA_SUCCESS; }
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) { return *(CUdeviceptr *)value = address, CUDA_SUCCESS; }
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
    if (bytes <= 65536) memcpy((void *)to, from, bytes);
    return CUDA_SUCCESS;
}
CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream) {
    for (size_t i = 0; count <= 1 << 20 && i < count; i++) ((unsigned *)to)[i] = value;
    return CUDA_SUCCESS;
}

/* Modules. Triton loads its compiled kernels as modules. */
CUresult cuModuleLoadData(CUmodule *module, const void *image) { return *module = calloc(1, 64), CUDA_SUCCESS; }
CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count, CUjit_option *options, void **values) { return *module = calloc(1, 64), CUDA_SUCCESS; }
CUresult cuModuleLoad(CUmodule *module, const char *file) { return *module = calloc(1, 64), CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) { return *function = calloc(1, 64), CUDA_SUCCESS; }
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) { return *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0, CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads, size_t shared) { return *blocks = 2, CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) { return *clusters = device.processors / 2, CUDA_SUCCESS; }

/* Mapped memory, for PYTORCH_ALLOC_CONF=expandable_segments:True: a handle of physical memory is its number of bytes. */
CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *properties, CUmemAllocationGranularity_flags flags) { return *bytes = (size_t)2 << 20, CUDA_SUCCESS; }
CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr wish, unsigned long long flags) {
    *address = (CUdeviceptr)reserve_address_space(bytes, 0);
    return *address ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) { return release_address_space((void *)address), CUDA_SUCCESS; }
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties, unsigned long long flags) {
    if (!take_memory(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    return *handle = bytes, CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) { return give_memory_back(handle), CUDA_SUCCESS; }
CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) { return CUDA_SUCCESS; }
CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) { return madvise((void *)address, bytes, MADV_DONTNEED), CUDA_SUCCESS; }

/* NVRTC asks for tables that are not public, and works without them. */
CUresult cuGetExportTable(const void **table, const CUuuid *id) { return *table = 0, CUDA_ERROR_NOT_FOUND; }
