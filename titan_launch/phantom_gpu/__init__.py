"""The phantom GPU: a simulated GPU without values. It answers calls to CUDA's runtime and driver, to cuBLAS and to
NCCL, but runs no kernels. Its memory is address space of the host.

Everything else is real: dispatch, FSDP2, the caching allocator, streams and events, Inductor, Triton and ptxas. So a
process runs every branch for CUDA and allocates what it would allocate on a GPU, on a machine without one.
"""
