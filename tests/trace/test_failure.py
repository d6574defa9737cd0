"""Models that cannot be traced."""

from __future__ import annotations

import pytest

from tests.trace.traces import a_job
from titan_launch.core.errors import ConfigError
from titan_launch.trace.engine import trace_engine


def reason(does: str) -> str:
    """Return the error of a model whose forward does this (see `tests.trace.models`)."""
    config, layout, choice = a_job(2, model={"name": "tests.trace.models:Chain", "args": {"n_layers": 1, "does": does}})
    with pytest.raises(ConfigError) as caught:
        trace_engine(config, layout, "cuda")(choice)
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == (("model", "name"), "tests.trace.models:Chain")
    return problem.reason


@pytest.mark.parametrize(
    ("does", "operation", "line"),
    [
        ("item", "aten._local_scalar_dense (tensor.item(), a tensor as a number or condition)", '"item": '),
        ("numpy", "tensor.numpy()", '"numpy": '),
        ("condition", "aten._local_scalar_dense", '"condition": '),
        ("nonzero", "aten.nonzero", '"nonzero": '),
        ("mask", "aten.nonzero (torch.nonzero, or a mask as an index)", '"mask": '),
    ],
)
def test_an_operation_that_needs_values_is_named_with_its_place(does: str, operation: str, line: str) -> None:
    printed = reason(does)
    assert printed.startswith(f"cannot be traced: {operation}")
    location = printed.split(" at ")[1].split(" needs ")[0]
    file, number = location.rsplit(":", 1)
    with open(file) as stream:
        assert line in stream.readlines()[int(number) - 1]


def test_another_error_comes_with_its_traceback() -> None:
    printed = reason("shape")
    assert printed.startswith("failed in a trace, on tensors")
    assert "tests/trace/models.py" in printed and "must have same reduction dim" in printed
