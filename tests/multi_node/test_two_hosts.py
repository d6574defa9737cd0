"""Two hosts, as network namespaces: training, the loss of one, its return. The script says what happens in detail."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
CANNOT = 77


@pytest.mark.multi_node
@pytest.mark.timeout(900)
def test_a_run_loses_a_host_and_takes_it_back(tmp_path: Path) -> None:
    """Every step has the loss of an undisturbed run on one host."""
    script = [str(REPO / "scripts" / "two_hosts.sh"), str(tmp_path)]
    result = subprocess.run(script, capture_output=True, text=True)
    if result.returncode == CANNOT:
        pytest.skip(result.stderr.strip())
    assert result.returncode == 0, result.stdout + result.stderr
    ranks = re.findall(r"^  ranks: (\d)", result.stdout, flags=re.MULTILINE)
    assert ranks == ["2", "1", "2"], result.stdout
    assert "starting all ranks again: restart 1" in result.stdout and "they differ by" in result.stdout
