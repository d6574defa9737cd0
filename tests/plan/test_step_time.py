"""The time of a step from its FLOPs and its traffic."""

from __future__ import annotations

from titan_launch.config.job import JobConfig
from titan_launch.config.sections.parallelism import ParallelismConfig
from titan_launch.plan.communication import LinkTraffic
from titan_launch.plan.hardware import hardware_of
from titan_launch.plan.layout import Layout
from titan_launch.plan.step_time import StepTime, bubble_share, estimate_step_time


def test_a_step_takes_between_the_longer_of_computation_and_communication_and_their_sum() -> None:
    fast = hardware_of(JobConfig.model_validate({"planner": {"device": "h100-80gb", "mfu": 0.5}}), 8)
    time = estimate_step_time(6 * 989 * 10**12, LinkTraffic(within=450e9, across=100e9), fast)
    assert time == StepTime(compute=12, communication=2)  # at half the peak; the slower link counts
    assert time.interval == (12, 14)


def test_unknown_hardware_gives_no_interval() -> None:
    nothing = hardware_of(JobConfig(), 4)
    assert estimate_step_time(10, LinkTraffic(0, 0), nothing) == StepTime(None, 0.0)
    assert estimate_step_time(10, LinkTraffic(1, 0), nothing).communication is None
    assert StepTime(None, 1.0).interval is None


def test_a_pipeline_waits_while_it_fills_and_empties() -> None:
    def share(schedule: str) -> float:
        layout = Layout(replicate=1, shard=1, local_batch_size=1, num_microbatches=8, pipeline=4)
        keys = {"pipeline_parallel_degree": 4, "pipeline_parallel_schedule": schedule}
        return bubble_share(ParallelismConfig.model_validate(keys), layout)

    assert [share(name) for name in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")] == [3 / 8, 3 / 16, 0]
    h100 = hardware_of(JobConfig.model_validate({"planner": {"device": "h100-80gb", "mfu": 0.5}}), 8)
    time = estimate_step_time(989 * 10**12, LinkTraffic(0, 0), h100, share("1F1B"))
    assert (time.compute, time.bubble, time.interval) == (2.75, 0.75, (2.75, 2.75))


def test_steps_whose_intervals_overlap_tie() -> None:
    assert StepTime(10, 2).ties_with(StepTime(11, 0.5)) and StepTime(11, 0.5).ties_with(StepTime(10, 2))
    assert not StepTime(10, 0.5).ties_with(StepTime(11, 0.5))
    assert StepTime(None, 1).ties_with(StepTime(10, 1))
