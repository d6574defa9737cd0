"""How many of a step's microbatches tell what a pipeline's step holds and communicates. No torch."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from titan_launch.config.gradient_accumulation import GradientAccumulationConfig
from titan_launch.config.parallelism import ParallelismConfig
from titan_launch.config.pipeline_rules import ONE_STAGE_SCHEDULES
from titan_launch.plan.layout import Layout
from titan_launch.plan.traffic import Collectives, Exchange, Traffic

_HOLDS_ALL = ("GPipe", "LoopedBFS")
"""Schedules that do all forwards before the first backward."""


def sufficient_microbatches(parallelism: ParallelismConfig, layout: Layout) -> int:
    """How many microbatches fill a pipeline: with more, none of its ranks holds more at once. At most those there are.

    In 1F1B the first rank has begun one for each rank before its first backward; where ranks hold several stages, at
    most three rounds of one for each rank.
    """
    schedule = parallelism.pipeline_parallel_schedule
    if schedule in _HOLDS_ALL:
        return layout.num_microbatches
    if schedule in ONE_STAGE_SCHEDULES:
        return min(layout.num_microbatches, layout.pipeline + 1)
    return min(layout.num_microbatches, 3 * layout.pipeline)


def scaled_to_step(seen: Traffic, num_seen: int, layout: Layout, accumulation: GradientAccumulationConfig) -> Traffic:
    """The traffic of a step of all microbatches, from that of one of `num_seen`: what is done for each of them is done
    more often, what is done once a step is not."""
    every = Fraction(layout.num_microbatches, num_seen)
    once = Fraction(1)
    gathers = once if accumulation.keep_params_unsharded else every
    scatters = once if accumulation.mode == "deferred" else every
    reduces = every if accumulation.mode == "immediate" else once

    def times(exchange: Exchange) -> Exchange:
        return Exchange(round(exchange.calls * every), round(exchange.sent_bytes * every))

    calls = seen.collectives
    return replace(
        seen,
        collectives=Collectives(
            round(calls.all_gathers * gathers),
            round(calls.reduce_scatters * scatters),
            round(calls.all_reduces * reduces),
        ),
        all_gather_bytes=round(seen.all_gather_bytes * gathers),
        reduce_scatter_bytes=round(seen.reduce_scatter_bytes * scatters),
        all_reduce_bytes=round(seen.all_reduce_bytes * reduces),
        tensor=times(seen.tensor),
        context=times(seen.context),
        pipeline=times(seen.pipeline),
    )
