"""The phantom GPU: a simulated GPU that runs no kernels. It replaces CUDA's runtime and driver, cuBLAS and NCCL. Its
memory is address space of the host. Operators on small tensors are computed on the host, and the results of other
operators have no meaning (`phantom_gpu.operators`).

Everything else is real: dispatch, FSDP2, the caching allocator, streams and events, Inductor, Triton and ptxas. So on a
machine without a GPU, a process runs every branch for CUDA. It allocates the same memory as on a GPU, except the
workspaces of cuDNN.
"""
