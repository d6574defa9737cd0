"""A config-driven training launcher for PyTorch. Importing it does not import torch."""

__version__ = "0.1.0"
