/* CUDA's headers include a file with this name, which only NVIDIA's compiler package has. A C compiler needs only these macros. */
#pragma once
#define __host__
#define __device__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __no_return__ __attribute__((noreturn))
#define __noinline__ __attribute__((noinline))
#define __forceinline__ __inline__ __attribute__((always_inline))
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __specialization_static static
#define CUDARTAPI
#define CUDARTAPI_CDECL
