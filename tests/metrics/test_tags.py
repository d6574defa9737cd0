import re

import pytest

from titan_launch.metrics.tags import PAGES, PAUSES, STEP_PARTS, TAGS, dashboard_layout, markdown_table, tag_of


def test_names_are_unique_and_grouped() -> None:
    names = [tag.name for tag in TAGS]
    assert len(set(names)) == len(names)
    assert all(re.sub("/<.*>$", "", name).count("/") == 1 for name in names)


def test_the_dashboard_has_a_page_for_each_question_that_the_run_answers() -> None:
    layout = dashboard_layout([tag.name for tag in TAGS])
    assert tuple(layout) == PAGES
    validation = ["validation/loss", "validation/best_loss", "validation/ema_loss"]
    assert layout["Learning"]["loss"] == ["train/loss", "train/loss_max", *validation]
    parts = [f"time/{part}_s" for part in (*STEP_PARTS, "other", *PAUSES)]
    assert layout["Speed"]["where the time of a step goes (s)"] == parts
    assert dashboard_layout(["train/loss", "experts/entropy/layers.0.moe", "train/samples_seen"]) == {
        "Learning": {"loss": ["train/loss"]},
        "Experts": {"entropy of the load (0 to 1)": ["experts/entropy/<layer>"]},
    }


UNITS = {
    "_s": r"\((s|s per \w+)\)",
    "_gib": "GiB",
    "_percent": "%",
    "_per_second": "per second",
    "_per_second_per_device": "per second per device",
    "accuracy": r"\(0 to 1\)",
}
"""End of a metric's name, and its unit in the title of a chart."""


def test_the_title_of_a_chart_has_the_unit_of_its_metrics() -> None:
    """TensorBoard's axes have no labels."""
    checked = {end for end in UNITS for tag in TAGS if tag.chart and tag.name.endswith(end)}
    assert checked == UNITS.keys()
    for tag in TAGS:
        for end, unit in UNITS.items():
            if tag.chart and re.sub("/<.*>$", "", tag.name).endswith(end):
                assert re.search(unit, tag.chart[1]), tag.name


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
    assert lines[2].startswith("| `train/loss` | Mean loss over all ranks, ")
    assert all(line.count("|") == 4 for line in lines)


@pytest.mark.parametrize("form", [tag.console for tag in TAGS if tag.console])
def test_console_fields_keep_their_width(form: str) -> None:
    assert len({len(form.format(value)) for value in (0.0, 1e-4, 9.87654, float("nan"), float("-inf"))}) == 1
