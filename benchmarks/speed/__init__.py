"""Speed of the launcher, compared with a bare loop and other tools: see `docs/verification/benchmarks.md`."""
