"""The tests marked `gpu` that compare no values also pass on a phantom GPU."""

from __future__ import annotations

import pytest

from benchmarks.gpu.gpu_tests import WITHOUT_VALUES
from tests.phantom_gpu.conftest import Phantom


@pytest.mark.phantom
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tests_of_a_gpu_pass_on_a_phantom(phantom: Phantom) -> None:
    ended = phantom.run("-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", *WITHOUT_VALUES, timeout=880)
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert "skipped" not in ended.stdout.splitlines()[-1], ended.stdout
