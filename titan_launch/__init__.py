"""A config-driven training launcher for PyTorch. `import titan_launch` does not import torch."""

__version__ = "0.1.0"
