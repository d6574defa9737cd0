"""The launcher on one GPU, against a bare loop and against its own plan: see `benchmarks/gpu.sh`."""
