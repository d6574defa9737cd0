from __future__ import annotations

from titan_launch.plan.memory.ledger import Category, Footprint, Ledger, StepPoint, extrapolate

FORWARD, BACKWARD = StepPoint(0, "forward", "layers.0"), StepPoint(0, "backward", "layers.0")


def two_points() -> Ledger:
    ledger = Ledger()
    ledger.enter(FORWARD)
    ledger.allocate(100, Category.PARAMETERS)
    ledger.allocate(30, Category.ACTIVATIONS)
    ledger.free(10, Category.ACTIVATIONS)
    ledger.enter(BACKWARD)
    ledger.allocate(40, Category.ALL_GATHER)
    ledger.free(40, Category.ALL_GATHER)
    ledger.allocate(15, Category.BACKWARD)
    return ledger


def test_peak_its_step_point_and_bytes_by_category() -> None:
    footprint = two_points().footprint()
    assert footprint.peak_bytes == 160
    assert footprint.peak_point == BACKWARD
    assert footprint.by_category == {Category.PARAMETERS: 100, Category.ACTIVATIONS: 20, Category.ALL_GATHER: 40}
    assert footprint.by_phase() == {"forward": 130, "backward": 160}


def test_cuda_streams_have_separate_memory_pools() -> None:
    """The 40 bytes of the all-gather are free again when compute needs 15 more, but in another pool."""
    assert two_points().footprint().stream_bytes == 100 + 20 + 15 + 40


def test_bytes_at_the_start_of_a_step_point_count_there() -> None:
    ledger = Ledger()
    ledger.allocate(7, Category.PARAMETERS)
    ledger.enter(FORWARD)
    assert ledger.footprint().peaks[FORWARD].total == 7


def test_a_step_point_that_is_entered_again_keeps_its_peak() -> None:
    ledger = two_points()
    ledger.enter(FORWARD)
    ledger.free(100, Category.PARAMETERS)
    assert ledger.footprint().peaks[FORWARD].total == 135  # the point starts with the tensors of backward
    assert ledger.footprint().peaks[BACKWARD].total == 160


def test_moving_between_categories_does_not_raise_the_peak() -> None:
    ledger = Ledger()
    ledger.enter(FORWARD)
    ledger.allocate(50, Category.REDUCE_SCATTER)
    ledger.move(50, Category.REDUCE_SCATTER, Category.GRADIENTS)
    assert ledger.footprint().peak_bytes == 50
    assert ledger.live[Category.GRADIENTS] == 50


def of_depth(depth: int) -> Footprint:
    """Return a footprint that grows with the forward of each early block. Only the first and last blocks have names at
    every depth."""
    ledger = Ledger()
    for index in range(depth):
        ledger.enter(StepPoint(0, "forward", f"layers.{index if index < 2 else 100 - depth + index}"))
        ledger.allocate(10 + depth, Category.ACTIVATIONS)
    return ledger.footprint()


def test_extrapolation_of_an_affine_footprint_is_exact() -> None:
    def held(depth: int) -> Footprint:
        ledger = Ledger()
        ledger.enter(StepPoint(0, "forward", "layers.0"))
        ledger.allocate(3 + 5 * depth, Category.PARAMETERS)
        ledger.enter(StepPoint(0, "backward", "layers.0"))
        ledger.allocate(8, Category.ALL_GATHER)
        return ledger.footprint()

    assert extrapolated(held(4), held(5), 76).peaks == held(80).peaks


def extrapolated(shorter: Footprint, longer: Footprint, factor: float) -> Footprint:
    footprint = extrapolate(shorter, longer, factor)
    assert footprint is not None
    return footprint


def test_the_highest_maximum_of_a_point_may_be_another_one_at_another_depth() -> None:
    """The first block's backward needs memory of its own, or ends with a buffer that all blocks share."""

    def held(depth: int) -> Footprint:
        ledger = Ledger()
        ledger.enter(BACKWARD)
        for num_bytes, category in ((100, Category.BACKWARD), (10 * depth, Category.ALL_GATHER)):
            ledger.allocate(num_bytes, category)
            ledger.free(num_bytes, category)
        return ledger.footprint()

    assert [held(depth).peak_bytes for depth in (4, 5, 80)] == [100, 100, 800]
    whole = extrapolated(held(4), held(5), 76)
    assert (whole.peaks, whole.stream_bytes) == (held(80).peaks, 100 + 800)


def test_a_point_with_more_maxima_in_a_deeper_model_is_not_extrapolated() -> None:
    def held(depth: int) -> Footprint:
        ledger = Ledger()
        ledger.enter(BACKWARD)
        for _ in range(depth):
            ledger.allocate(1, Category.BACKWARD)
            ledger.free(1, Category.BACKWARD)
        return ledger.footprint()

    assert extrapolate(held(4), held(5), 76) is None


def test_step_points_in_the_middle_are_skipped() -> None:
    points = extrapolated(of_depth(4), of_depth(5), 3).peaks
    assert [point.unit for point in points] == ["layers.0", "layers.1", "layers.98", "layers.99"]


def test_step_points_read_like_sentences() -> None:
    assert str(StepPoint(1, "backward", "layers.3")) == "backward of layers.3 in microbatch 2"
    assert str(StepPoint(0, "loss", "")) == "loss in microbatch 1"
    assert str(StepPoint(3, "optimizer", "")) == "optimizer update"
