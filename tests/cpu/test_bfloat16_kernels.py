from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.distributed import run_ranks
from tests.train.jobs import read_metrics, run_job, tiny_job
from titan_launch.cpu import bfloat16_kernels
from titan_launch.cpu.bfloat16_kernels import float32_kernels

PRODUCTS: dict[str, Callable[..., Tensor]] = {
    "mm": lambda a, b, c: a @ b,
    "mm of transposed factors": lambda a, b, c: b.t() @ a.t(),
    "addmm": lambda a, b, c: torch.addmm(c, a, b, beta=0.5, alpha=2),
    "bmm": lambda a, b, c: torch.bmm(a.expand(3, -1, -1), b.expand(3, -1, -1)),
    "baddbmm": lambda a, b, c: torch.baddbmm(c, a.expand(3, -1, -1), b.expand(3, -1, -1), beta=0.5, alpha=2),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_rounded_once(name: str) -> None:
    torch.manual_seed(0)
    factors = [torch.randn(shape).bfloat16() for shape in ((40, 200), (200, 24), (40, 24))]
    exact = PRODUCTS[name](*(factor.double() for factor in factors))
    with float32_kernels():
        product = PRODUCTS[name](*factors)
    assert product.dtype == torch.bfloat16
    error = (product.double() - exact).abs()
    assert (error <= 2**-8 * exact.abs() + 1e-4).all(), "half a unit in the last place, and the rounding of the sum"


def test_gradients_go_through_float32_and_other_dtypes_do_not_change() -> None:
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(200, 24).double(), torch.randn(4, 10, 200, dtype=torch.float64)
    results = {}
    for dtype in (torch.bfloat16, torch.float32):
        for is_replaced in (False, True):
            own, given = torch.nn.Linear(200, 24), x.to(dtype, copy=True).requires_grad_()
            own.load_state_dict(linear.state_dict())
            own.to(dtype)
            if is_replaced:
                with float32_kernels(), float32_kernels():
                    own(given).square().sum().backward()
            else:
                own(given).square().sum().backward()
            assert given.grad is not None
            results[dtype, is_replaced] = given.grad
    assert torch.equal(results[torch.float32, False], results[torch.float32, True])
    torch.testing.assert_close(results[torch.bfloat16, False], results[torch.bfloat16, True], rtol=0.05, atol=0.1)


@pytest.mark.parametrize("name", PRODUCTS)
def test_different_dtypes_are_refused_as_by_pytorch(name: str) -> None:
    factors = [torch.ones(40, 20, dtype=torch.bfloat16), torch.ones(20, 24), torch.ones(40, 24, dtype=torch.bfloat16)]
    with pytest.raises(RuntimeError) as plain:
        PRODUCTS[name](*factors)
    with float32_kernels(), pytest.raises(RuntimeError) as own:
        PRODUCTS[name](*factors)
    assert str(own.value) == str(plain.value)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_is_as_exact_as_pytorchs(kv_heads: int) -> None:
    torch.manual_seed(0)
    shapes = ((2, 4, 40, 16), (2, kv_heads, 40, 16), (2, kv_heads, 40, 16))
    inputs = [torch.randn(shape).bfloat16() for shape in shapes]

    def attend(dtype: torch.dtype) -> list[Tensor]:
        q, k, v = (value.to(dtype).requires_grad_() for value in inputs)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]

    exact, plain = attend(torch.float64), attend(torch.bfloat16)
    with float32_kernels():
        found = attend(torch.bfloat16)
    for own, theirs, true in zip(found, plain, exact, strict=True):
        errors = [(value.double() - true).norm() for value in (own, theirs)]
        assert own.dtype == torch.bfloat16 and errors[0] <= 1.1 * errors[1]


def test_pytorchs_kernels_are_back_after_the_block() -> None:
    a, b = torch.randn(40, 200).bfloat16(), torch.randn(200, 24).bfloat16()
    before = a @ b
    with float32_kernels():
        pass
    assert torch.equal(a @ b, before)


def train_with_and_without_float32_kernels(folder: Path) -> list[str]:
    """Run a job in bfloat16, on a CPU with fast bfloat16 products and on one without, and then a job in float32. Return
    the names of the jobs whose products went through float32."""
    patch, used = pytest.MonkeyPatch(), list[str]()  # the process ends with the test
    jobs = (("plain", False, "bfloat16"), ("fast", True, "bfloat16"), ("float32", True, "float32"))
    for name, are_slow, dtype in jobs:

        def replaced(name: str = name) -> AbstractContextManager[None]:
            used.append(name)
            return float32_kernels()

        patch.setattr(bfloat16_kernels, "are_slow", lambda are_slow=are_slow: are_slow)
        patch.setattr(bfloat16_kernels, "float32_kernels", replaced)
        run_job(tiny_job(folder, job={"name": name}, precision={"param_dtype": dtype}))
    return used


def test_a_run_in_bfloat16_has_the_same_losses_up_to_rounding(tmp_path: Path) -> None:
    assert run_ranks(train_with_and_without_float32_kernels, 1, tmp_path) == [["fast"]]
    fast, plain = ([step["train/loss"] for step in read_metrics(tmp_path, name)] for name in ("fast", "plain"))
    assert fast == pytest.approx(plain, rel=2e-2)
