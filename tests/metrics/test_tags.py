import pytest

from titan_launch.metrics.tags import TAGS, dashboard_layout, markdown_table


def test_names_are_unique_and_grouped() -> None:
    names = [tag.name for tag in TAGS]
    assert len(set(names)) == len(names)
    assert all(name.removesuffix("/<source>").count("/") == 1 for name in names)


def test_dashboard_has_a_group_for_each_question() -> None:
    layout = dashboard_layout()
    assert list(layout) == ["loss", "data", "throughput", "time", "communication", "memory", "batchnorm"]
    assert layout["loss"]["loss"] == ["train/loss", "train/loss_max", "validation/loss", "validation/ema_loss"]
    assert layout["time"] == {
        "seconds per step": ["time/step_s", "time/data_s"],
        "seconds of a checkpoint": ["time/checkpoint_stall_s"],
    }


def test_the_table_documents_every_tag() -> None:
    lines = markdown_table().splitlines()
    assert len(lines) == len(TAGS) + 2
    assert lines[2].startswith("| `train/loss` | Mean cross-entropy of the step")
    assert all(line.count("|") == 4 for line in lines)


@pytest.mark.parametrize("form", [tag.console for tag in TAGS if tag.console])
def test_console_fields_keep_their_width(form: str) -> None:
    assert len({len(form.format(value)) for value in (0.0, 1e-4, 9.87654, float("nan"), float("-inf"))}) == 1
