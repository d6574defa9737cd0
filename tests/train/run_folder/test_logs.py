"""Logs of ranks: complete, one file per rank and attempt, closed at exit."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import pytest

from titan_launch.core.errors import RunError
from titan_launch.train.run_folder.logs import console_log, rank_log

LOG = logging.getLogger("titan_launch.somewhere")


def run(path: Path, error: Exception | None, is_rank_0: bool = True, level: str = "INFO") -> None:
    """Log lines before and after the file is known, then raise `error`, if given."""
    with rank_log() as file, console_log(is_rank_0, level):
        LOG.info("early")
        LOG.debug("detail")
        file.open(path)
        LOG.info("later")
        warnings.warn("python warns", UserWarning, stacklevel=1)
        if error is not None:
            raise error


@pytest.mark.parametrize(
    ("is_rank_0", "level", "printed"),
    [
        (True, "INFO", "early\nlater\n"),
        (True, "DEBUG", "early\ndetail\nlater\n"),
        (True, "WARNING", ""),
        (False, "DEBUG", ""),
    ],
)
def test_the_file_of_a_rank_holds_all_lines_and_its_console_the_selected_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_rank_0: bool, level: str, printed: str
) -> None:
    with pytest.warns(UserWarning, match="python warns"):
        run(tmp_path / "logs" / "rank_1.log", None, is_rank_0, level)
    first, detail, second, third, *_ = (tmp_path / "logs" / "rank_1.log").read_text().splitlines()
    assert first.endswith(" INFO titan_launch.somewhere: early") and " DEBUG " in detail and second.endswith(": later")
    assert " WARNING " in third and "UserWarning: python warns" in third
    assert capsys.readouterr().out == printed


@pytest.mark.filterwarnings("ignore")
def test_the_error_that_ends_a_rank_is_in_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("titan_launch")
    before = list(logger.handlers), logger.level, logger.propagate, warnings.showwarning
    for error in (RunError("it cannot go on"), ValueError("a defect")):
        with pytest.raises(type(error)):
            run(tmp_path / f"{type(error).__name__}.log", error)
    text = (tmp_path / "RunError.log").read_text()
    assert text.splitlines()[-1].endswith(" ERROR titan_launch: it cannot go on") and "Traceback" not in text
    text = (tmp_path / "ValueError.log").read_text()
    assert "Traceback" in text and text.endswith("ValueError: a defect\n")
    assert "a defect" not in "".join(capsys.readouterr())
    assert (list(logger.handlers), logger.level, logger.propagate, warnings.showwarning) == before
