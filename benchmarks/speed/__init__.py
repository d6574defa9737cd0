"""How fast the launcher is, beside a bare loop and other tools: see `docs/verification/benchmarks.md`."""
