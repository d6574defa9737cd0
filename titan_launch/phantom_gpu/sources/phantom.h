/* Declarations that the C files of the phantom GPU share. */
#pragma once
#include <stddef.h>

/* The device, as environment.py describes it in the environment variable PHANTOM_DEVICE. */
struct device {
    char name[256];
    size_t memory; /* bytes */
    int major, minor, processors, threads_per_processor, shared_per_processor, shared_per_block, l2, bus;
};
extern struct device device;
extern int num_devices;

/* A stream without a queue: each operation is complete when its call returns. `hangs`: a collective never ends, so nothing after it does. */
struct stream {
    int priority;
    volatile int hangs;
};
struct stream *stream_of(void *handle);

/* Device memory is address space that the host can read and write. A page takes memory only after the first write to it. */
void *reserve_address_space(size_t bytes, int is_host);
void release_address_space(void *address);
int take_memory(size_t bytes); /* 0 if the device has no more */
void give_memory_back(size_t bytes);

int device_attribute(int attribute);
const char *setting(const char *name, const char *otherwise);
_Noreturn void fail(const char *format, ...);
