"""Values that packages which do not import each other agree on."""

IGNORED_TARGET = -100
"""The target of a position that has none: padding. It counts neither in the loss nor as a token (PyTorch's own default
for `ignore_index`)."""

UNWATCHED_GROUPS = ("checkpoint",)
"""Descriptions of process groups without timeout and hang detection. While one rank writes its part of a checkpoint,
the others wait long."""
