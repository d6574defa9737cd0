import pytest

from titan_launch.metrics.tags import TAGS, dashboard_layout, markdown_table, tag_of


def test_names_are_unique_and_grouped() -> None:
    names = [tag.name for tag in TAGS]
    assert len(set(names)) == len(names)
    assert all(name.removesuffix("/<source>").removesuffix("/<layer>").count("/") == 1 for name in names)


def test_dashboard_has_a_group_for_each_question() -> None:
    layout = dashboard_layout()
    assert list(layout) == ["loss", "data", "throughput", "time", "communication", "memory", "batchnorm"]
    assert "experts" in dashboard_layout(["experts/entropy/layers.0.moe"])
    assert layout["loss"]["loss"] == ["train/loss", "train/loss_max", "validation/loss", "validation/ema_loss"]
    assert layout["time"] == {
        "seconds per step": ["time/step_s", "time/data_s"],
        "seconds of a checkpoint": ["time/checkpoint_stall_s"],
    }


@pytest.mark.parametrize(
    ("metric", "tag"),
    [
        ("train/loss", "train/loss"),
        ("validation/loss/a/b", "validation/loss/<source>"),
        ("experts/entropy/layers.0.moe", "experts/entropy/<layer>"),
        ("data/share", None),
    ],
)
def test_a_metric_of_a_source_or_layer_has_a_tag(metric: str, tag: str | None) -> None:
    found = tag_of(metric)
    assert (found and found.name) == tag


def test_the_table_documents_every_tag() -> None:
    lines = markdown_table().splitlines()
    assert len(lines) == len(TAGS) + 2
    assert lines[2].startswith("| `train/loss` | Mean cross-entropy of the step")
    assert all(line.count("|") == 4 for line in lines)


@pytest.mark.parametrize("form", [tag.console for tag in TAGS if tag.console])
def test_console_fields_keep_their_width(form: str) -> None:
    assert len({len(form.format(value)) for value in (0.0, 1e-4, 9.87654, float("nan"), float("-inf"))}) == 1
