/* NVML (libnvidia-ml.so.1), which PyTorch asks for the number of GPUs and for their fabric. */
#include "phantom.h"
#include <cuda_runtime_api.h>

enum { NVML_SUCCESS = 0, NVML_ERROR_NOT_SUPPORTED = 3 };

int nvmlInit(void) { return NVML_SUCCESS; }
int nvmlInit_v2(void) { return NVML_SUCCESS; }
int nvmlShutdown(void) { return NVML_SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *count) { return *count = num_devices, NVML_SUCCESS; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **handle) { return *handle = &device, NVML_SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = CUDART_VERSION, NVML_SUCCESS; }
int nvmlDeviceGetGpuFabricInfoV(void *handle, void *information) { return NVML_SUCCESS; } /* PyTorch has set the result to "not supported" before the call */
int nvmlDeviceGetNvLinkRemoteDeviceType(void *handle, unsigned link, int *type) { return NVML_ERROR_NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *handle, unsigned link, void *information) { return NVML_ERROR_NOT_SUPPORTED; }
int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *count, void *processes) { return *count = 0, NVML_SUCCESS; }
