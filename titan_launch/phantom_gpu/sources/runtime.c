/* The runtime of CUDA without a GPU. Kernels are not launched. Memory is address space of the host, in which a page is zero
 * and takes no memory until it is written. Only copies of at most LARGEST_COPY bytes are made, because control flow depends
 * on them: batches, counts, flags. build.py generates the functions that no file defines: they print their name and
 * return an error, except those of cuBLAS, which return success. */
#define _GNU_SOURCE
#include "phantom.h"
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define LARGEST_COPY ((size_t)4 << 20)
#define ALIGNMENT ((size_t)2 << 20) /* bytes; alignment of large blocks of cudaMalloc on a GPU */

struct device device;
int num_devices = 1;

const char *setting(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value && *value ? value : otherwise;
}

void fail(const char *format, ...) {
    va_list values;
    va_start(values, format);
    fputs("phantom GPU: ", stderr);
    vfprintf(stderr, format, values);
    fputs("\n", stderr);
    va_end(values);
    abort();
}

/* Every function that build.py generates, except those of cuBLAS, calls this one. `status` is the error of its library. */
int phantom_unanswered(const char *name, int status) {
    fprintf(stderr, "phantom GPU: %s is not implemented; it returns the error %d\n", name, status);
    return status;
}

__attribute__((constructor)) static void read_settings(void) {
    struct device *d = &device;
    int fields = sscanf(setting("PHANTOM_DEVICE", ""), "%255[^|]|%zu|%d|%d|%d|%d|%d|%d|%d|%d", d->name, &d->memory, &d->major,
                        &d->minor, &d->processors, &d->threads_per_processor, &d->shared_per_processor, &d->shared_per_block,
                        &d->l2, &d->bus);
    if (fields != 10) fail("PHANTOM_DEVICE does not describe a device; start the command with python -m titan_launch.phantom_gpu");
    num_devices = atoi(setting("PHANTOM_GPUS", "1"));
}

/* Errors */
static __thread cudaError_t last_error;
static cudaError_t raise_error(cudaError_t error) { return last_error = error; }
cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
cudaError_t cudaPeekAtLastError(void) { return last_error; }
const char *cudaGetErrorString(cudaError_t error) {
    switch ((int)error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorNotSupported: return "the phantom GPU does not implement this function";
    default: return "an error of the phantom GPU";
    }
}
const char *cudaGetErrorName(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : error == cudaSuccess ? "cudaSuccess" : "cudaErrorUnknown";
}

/* Memory */
struct range { char *address; size_t bytes; void *mapping; size_t mapped; int is_host; };
static struct range *ranges;
static size_t num_ranges, room, memory_in_use;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void *reserve_address_space(size_t bytes, int is_host) {
    size_t mapped = bytes + ALIGNMENT;
    char *mapping = mmap(0, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) return 0;
    char *address = (char *)(((size_t)mapping + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    pthread_mutex_lock(&lock);
    if (num_ranges == room) ranges = realloc(ranges, (room = 2 * room + 64) * sizeof *ranges);
    ranges[num_ranges++] = (struct range){address, bytes, mapping, mapped, is_host};
    pthread_mutex_unlock(&lock);
    return address;
}

static struct range find(const void *address) {
    struct range found = {0};
    pthread_mutex_lock(&lock);
    for (size_t i = num_ranges; i-- > 0;)
        if ((char *)address >= ranges[i].address && (char *)address < ranges[i].address + ranges[i].bytes) {
            found = ranges[i];
            break;
        }
    pthread_mutex_unlock(&lock);
    return found;
}

void release_address_space(void *address) {
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < num_ranges; i++)
        if (ranges[i].address == address) {
            munmap(ranges[i].mapping, ranges[i].mapped);
            ranges[i] = ranges[--num_ranges];
            break;
        }
    pthread_mutex_unlock(&lock);
}

int take_memory(size_t bytes) {
    pthread_mutex_lock(&lock);
    int fits = memory_in_use + bytes <= device.memory;
    if (fits) memory_in_use += bytes;
    pthread_mutex_unlock(&lock);
    return fits;
}

void give_memory_back(size_t bytes) {
    pthread_mutex_lock(&lock);
    memory_in_use -= bytes;
    pthread_mutex_unlock(&lock);
}

static cudaError_t allocate(void **address, size_t bytes, int is_host) {
    *address = 0;
    if (!bytes) return cudaSuccess;
    if (!is_host && !take_memory(bytes)) return raise_error(cudaErrorMemoryAllocation);
    if (!(*address = reserve_address_space(bytes, is_host))) fail("the host has no address space for %zu bytes", bytes);
    return cudaSuccess;
}
cudaError_t cudaMalloc(void **address, size_t bytes) { return allocate(address, bytes, 0); }
cudaError_t cudaMallocAsync(void **address, size_t bytes, cudaStream_t stream) { return allocate(address, bytes, 0); }
cudaError_t cudaHostAlloc(void **address, size_t bytes, unsigned flags) { return allocate(address, bytes, 1); }
cudaError_t cudaMallocHost(void **address, size_t bytes) { return allocate(address, bytes, 1); }
cudaError_t cudaFree(void *address) {
    struct range range = find(address);
    if (!range.address) return cudaSuccess;
    if (!range.is_host) give_memory_back(range.bytes);
    release_address_space(address);
    return cudaSuccess;
}
cudaError_t cudaFreeAsync(void *address, cudaStream_t stream) { return cudaFree(address); }
cudaError_t cudaFreeHost(void *address) { return cudaFree(address); }
cudaError_t cudaMemGetInfo(size_t *unused, size_t *total) {
    *total = device.memory;
    *unused = device.memory - memory_in_use;
    return cudaSuccess;
}

/* Page-locked memory that the host has allocated itself */
static struct { void *address; size_t bytes; } registered[4096];
cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned flags) {
    for (size_t i = 0; i < sizeof registered / sizeof *registered; i++)
        if (!registered[i].address) {
            registered[i].address = address, registered[i].bytes = bytes;
            return cudaSuccess;
        }
    return raise_error(cudaErrorMemoryAllocation);
}
cudaError_t cudaHostUnregister(void *address) {
    for (size_t i = 0; i < sizeof registered / sizeof *registered; i++)
        if (registered[i].address == address) {
            registered[i].address = 0;
            return cudaSuccess;
        }
    return raise_error(cudaErrorHostMemoryNotRegistered);
}
static int is_registered(const char *address) {
    for (size_t i = 0; i < sizeof registered / sizeof *registered; i++) {
        char *start = registered[i].address;
        if (start && address >= start && address < start + registered[i].bytes) return 1;
    }
    return 0;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
    struct range range = find(address);
    memset(attributes, 0, sizeof *attributes);
    int is_host = range.address ? range.is_host : is_registered(address);
    attributes->type = is_host ? cudaMemoryTypeHost : range.address ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
    if (attributes->type != cudaMemoryTypeUnregistered) attributes->devicePointer = (void *)address;
    if (is_host) attributes->hostPointer = (void *)address;
    return cudaSuccess;
}

static void wait_for(struct stream *stream) {
    while (stream->hangs) usleep(10000);
}
/* A copy to the host that is too large to be made writes zeros, because the host may compute with the target. In memory that
 * this file has mapped, whole pages are given back to the system instead, which makes them zero. */
static void zero(char *address, size_t bytes, int is_mapped) {
    size_t page = 4096, first = ((size_t)address + page - 1) / page * page, last = ((size_t)address + bytes) / page * page;
    if (!is_mapped || madvise((void *)first, last - first, MADV_DONTNEED)) {
        memset(address, 0, bytes);
        return;
    }
    memset(address, 0, first - (size_t)address);
    memset((void *)last, 0, (size_t)address + bytes - last);
}
static void copy(void *to, const void *from, size_t bytes) {
    if (bytes <= LARGEST_COPY) {
        memmove(to, from, bytes);
        return;
    }
    struct range range = find(to);
    if (!range.address || range.is_host) zero(to, bytes, range.is_host);
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    copy(to, from, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    copy(to, from, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void *to, int there, const void *from, int here, size_t bytes, cudaStream_t stream) {
    copy(to, from, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                              enum cudaMemcpyKind kind, cudaStream_t stream) {
    if (width * height <= LARGEST_COPY)
        for (size_t row = 0; row < height; row++) memmove((char *)to + row * to_pitch, (char *)from + row * from_pitch, width);
    return cudaSuccess;
}
cudaError_t cudaMemset(void *address, int value, size_t bytes) {
    if (bytes <= LARGEST_COPY) memset(address, value, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *address, int value, size_t bytes, cudaStream_t stream) { return cudaMemset(address, value, bytes); }

/* Devices */
static __thread int current;
cudaError_t cudaGetDeviceCount(int *count) { return *count = num_devices, cudaSuccess; }
cudaError_t cudaGetDevice(int *number) { return *number = current, cudaSuccess; }
cudaError_t cudaSetDevice(int number) {
    if (number < 0 || number >= num_devices) return raise_error(cudaErrorInvalidDevice);
    return current = number, cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int here, int there) { return *can = 0, cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int number) { return snprintf(text, length, "0000:%02x:00.0", number + 1), cudaSuccess; }
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int number) { return *pool = calloc(1, 64), cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int number) { return *value = device_attribute(attribute), cudaSuccess; }

int device_attribute(int attribute) {
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX:
    case cudaDevAttrMaxPitch: return 2147483647;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
    case cudaDevAttrTotalConstantMemory: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 48 << 10;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrTextureAlignment: return 512;
    case cudaDevAttrMultiProcessorCount: return device.processors;
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrComputePreemptionSupported:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrHostRegisterSupported: return 1;
    case cudaDevAttrClockRate:
    case cudaDevAttrMemoryClockRate: return 1500000;
    case cudaDevAttrGlobalMemoryBusWidth: return device.bus;
    case cudaDevAttrL2CacheSize: return device.l2;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return device.threads_per_processor;
    case cudaDevAttrAsyncEngineCount: return 3;
    case cudaDevAttrComputeCapabilityMajor: return device.major;
    case cudaDevAttrComputeCapabilityMinor: return device.minor;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return device.shared_per_processor;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return device.shared_per_block;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case 102: return 1; /* CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED */
    default: return 0;
    }
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int number) {
    struct cudaDeviceProp *p = properties;
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "%s", device.name);
    p->totalGlobalMem = device.memory, p->totalConstMem = 65536;
    p->major = device.major, p->minor = device.minor;
    p->multiProcessorCount = device.processors, p->maxThreadsPerMultiProcessor = device.threads_per_processor;
    p->sharedMemPerBlock = 48 << 10, p->sharedMemPerBlockOptin = device.shared_per_block;
    p->sharedMemPerMultiprocessor = device.shared_per_processor, p->l2CacheSize = device.l2;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536, p->warpSize = 32;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->textureAlignment = 512, p->memoryBusWidth = device.bus, p->asyncEngineCount = 3;
    p->concurrentKernels = p->unifiedAddressing = p->managedMemory = 1;
    p->pciBusID = number + 1;
    memcpy(&p->uuid, "phantom GPU ", 12);
    ((char *)&p->uuid)[15] = (char)number;
    return cudaSuccess;
}

/* Streams and events */
static struct stream default_stream;
struct stream *stream_of(void *handle) { return (size_t)handle <= 2 ? &default_stream : handle; } /* 1, 2: cudaStreamLegacy, ...PerThread */

struct event { volatile int hangs; double seconds; };
static cudaError_t new_stream(cudaStream_t *stream, int priority) {
    struct stream *made = calloc(1, sizeof *made);
    made->priority = priority;
    return *stream = (cudaStream_t)made, cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return new_stream(stream, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return new_stream(stream, 0); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) { return new_stream(stream, priority); }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { return *priority = stream_of(stream)->priority, cudaSuccess; }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return stream_of(stream)->hangs ? raise_error(cudaErrorNotReady) : cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return wait_for(stream_of(stream)), cudaSuccess; }
cudaError_t cudaDeviceSynchronize(void) { return wait_for(&default_stream), cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) { return *status = cudaStreamCaptureStatusNone, cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes,
#if CUDART_VERSION >= 13000
                                     const cudaGraphEdgeData **edges,
#endif
                                     size_t *count) {
    *status = cudaStreamCaptureStatusNone;
    if (count) *count = 0;
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    if (((struct event *)event)->hangs) stream_of(stream)->hangs = 1;
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { return *event = calloc(1, sizeof(struct event)), cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return free(event), cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
    struct event *event = (struct event *)handle;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    event->seconds = now.tv_sec + 1e-9 * now.tv_nsec;
    event->hangs = stream_of(stream)->hangs;
    return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) { return cudaEventRecord(event, stream); }
cudaError_t cudaEventQuery(cudaEvent_t event) { return ((struct event *)event)->hangs ? raise_error(cudaErrorNotReady) : cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    while (((struct event *)event)->hangs) usleep(10000);
    return cudaSuccess;
}
/* Return the time between the calls that recorded the two events. It is not the time that a GPU would take. */
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) {
    *ms = 1e3 * (((struct event *)end)->seconds - ((struct event *)start)->seconds);
    return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void *data, unsigned flags) { return call(stream, cudaSuccess, data), cudaSuccess; }
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *data) { return call(data), cudaSuccess; }

/* Kernels */
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *kernel) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024, attributes->numRegs = 64, attributes->maxDynamicSharedSizeBytes = device.shared_per_block;
    // PyTorch has no code for compute capability 8.9, so such a GPU runs the code for 8.6. CUB rejects a version without code.
    int version = 10 * device.major + device.minor;
    attributes->binaryVersion = attributes->ptxVersion = version == 89 ? 86 : version;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int threads, size_t shared) { return *blocks = 2, cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel, int threads, size_t shared, unsigned flags) { return *blocks = 2, cudaSuccess; }
cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) { return *address = calloc(1, 4096), cudaSuccess; }

static int not_supported(void) { return cudaErrorNotSupported; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
    *function = dlsym(RTLD_DEFAULT, name);
    if (!*function) *function = (void *)not_supported;
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

static __thread struct { dim3 grid, block; size_t shared; void *stream; } pushed;
void **__cudaRegisterFatBinary(void *binary) {
    static void *handle;
    return &handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterFunction(void **handle, const char *host, char *name, const char *device_name, int threads, void *a, void *b, void *c, void *d, int *e) {}
void __cudaRegisterVar(void **handle, char *host, char *name, const char *device_name, int is_extern, size_t bytes, int is_constant, int is_global) {}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    pushed.grid = grid, pushed.block = block, pushed.shared = shared, pushed.stream = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared, *(void **)stream = pushed.stream;
    return cudaSuccess;
}
cudaError_t __cudaGetKernel(void **kernel, const void *function) { return *kernel = (void *)function, cudaSuccess; }
