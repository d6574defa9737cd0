"""A GPU without values: CUDA's runtime, driver, cuBLAS and NCCL answer, kernels are not launched, and device memory is
address space of the host.

Everything else is real: dispatch, FSDP2, the caching allocator, streams and events, Inductor, Triton and ptxas. So a
process runs every branch for CUDA and allocates what it would allocate on a GPU, on a machine without one.
"""
