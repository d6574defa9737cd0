"""Benchmark of the launcher on one GPU, compared with a bare loop and with its own plan: see `benchmarks/gpu.sh`."""
