"""What the search changes: a genome is a partition, a placement and a scheduling rule.

The rule orders each device's work by keys: the key of F, I or W of microbatch j on stage s is
`phase[s, kind] + rhythm[j]`, the lowest key first; rhythm[j] is j, or advances in groups as
interleaved schedules do. Phases that are small against the number of microbatches interleave them
in a fixed pattern (a modulo schedule); large ones act as fixed priorities. A `strict` genome
follows the keys even when that means to wait; otherwise a device picks the lowest key among what
can start at once, or within its waiting window.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octotune.tune.problem import Int64, World

Float64 = NDArray[np.float64]

# kinds in the kernels; with a fused backward, I stands for B and there is no W
F, I, W = 0, 1, 2  # noqa: E741 - torch's letters
NEVER_FIRST = 1e9  # the phase of a W that only ever fills gaps

NUM_STAGES, STRICT = 0, 1


class Genome(NamedTuple):
    """Arrays have room for `capacity` stages; the first `meta[NUM_STAGES]` are used."""

    meta: Int64  # [2] number of stages; whether the rule is strict
    cut: Int64  # [capacity + 1] stage s has the layers from cut[s] up to cut[s + 1]
    device: Int64  # [capacity]
    split: Int64  # [capacity] 1: I and W apart; 0: fused
    recompute: Int64  # [capacity]
    phase: Float64  # [capacity, 3]
    limit: Int64  # [capacity] most microbatches between F and I, for early microbatches
    late: Int64  # [capacity] the same from microbatch `switch` on
    switch: Int64  # [capacity]
    rhythm: Float64  # [m] rises from 0
    window: Int64  # [D] ns a device may wait for a lower key
    fits: Float64  # [D] W fills a gap when its time times this is at most the gap
    bonus: Float64  # [D] taken off the key of an F after an I, and of an I after an F


def empty_genome(world: World, capacity: int) -> Genome:
    """Return a genome without stages, with room for `capacity`, and the plainest rule."""
    num_devices = world.num_devices
    genome = Genome(
        meta=np.zeros(2, np.int64),
        cut=np.zeros(capacity + 1, np.int64),
        device=np.zeros(capacity, np.int64),
        split=np.ones(capacity, np.int64),
        recompute=np.zeros(capacity, np.int64),
        phase=np.zeros((capacity, 3)),
        limit=np.full(capacity, world.num_microbatches, np.int64),
        late=np.full(capacity, world.num_microbatches, np.int64),
        switch=np.zeros(capacity, np.int64),
        rhythm=np.arange(world.num_microbatches, dtype=np.float64),
        window=np.zeros(num_devices, np.int64),
        fits=np.ones(num_devices),
        bonus=np.zeros(num_devices),
    )
    genome.phase[:, W] = NEVER_FIRST
    return genome


def copy_genome(genome: Genome) -> Genome:
    """Return a genome that shares no array with the given one."""
    return Genome(**{name: array.copy() for name, array in genome._asdict().items()})


def capacity_for(world: World) -> int:
    """Return how many stages a genome of this problem has room for."""
    return min(world.num_layers, max(10 * world.num_devices, 48))


class Shape(NamedTuple):
    """A genome's stages in numbers, filled by `shape_stages`."""

    duration: Int64  # [capacity, 3]
    hold: Int64  # [capacity] of the transfer between stages s and s + 1
    latency: Int64  # [capacity]
    nic: Int64  # [capacity] 1: it crosses hosts on limited NICs
    first: Int64  # [D + 1] where each device's stages begin in `member`
    member: Int64  # [capacity] stages by device
    load: Int64  # [D] one microbatch's work
    begin: Int64  # [D] the earliest time a device can get work
    idle: Int64  # [D] scratch of the repair: how long each device waits at least
    head: Int64  # [capacity] the earliest start of F
    turn: Int64  # [capacity] least time from the end of a F to the start of its I
    tail: Int64  # [capacity] least time from the end of an I to the end of the step
    optimizer: Int64  # [D]
    reduction: Int64  # [capacity]
    at_forward: Int64  # [capacity] bytes from the start of F
    at_backward: Int64  # [capacity] bytes more from the start of I
    off_backward: Int64  # [capacity] bytes freed at the end of I
    off_weight: Int64  # [capacity] bytes freed at the end of W
    workspace: Int64  # [capacity] bytes while an action runs
    reserve: Int64  # [D] what must stay free so that any I or W can run
    room: Int64  # [D] memory for activations
    tight: Int64  # [D] 1: memory can bind


def empty_shape(world: World, capacity: int) -> Shape:
    """Return room for the numbers of a genome."""
    per_stage = {
        name: np.zeros(capacity, np.int64)
        for name in (
            *("hold", "latency", "nic", "member", "reduction"),
            *("at_forward", "at_backward", "off_backward", "off_weight", "workspace"),
            *("head", "turn", "tail"),
        )
    }
    per_device = {
        name: np.zeros(world.num_devices, np.int64)
        for name in ("load", "begin", "idle", "optimizer", "reserve", "room", "tight")
    }
    return Shape(
        duration=np.zeros((capacity, 3), np.int64),
        first=np.zeros(world.num_devices + 1, np.int64),
        **per_stage,
        **per_device,
    )


class Run(NamedTuple):
    """The list scheduler's state, and the order it makes."""

    done: Int64  # [capacity, 3] how many microbatches of each stage and kind are scheduled
    arrival_f: Int64  # [capacity, m]
    arrival_i: Int64  # [capacity, m]
    free: Int64  # [D]
    left: Int64  # [D] work not scheduled yet, the optimizer included
    rest: Int64  # [capacity] F and I not scheduled yet of a stage and later ones on its device
    memory: Int64  # [D] bytes in use
    kept: Int64  # [capacity] bytes reserved for the stage's next microbatch
    kept_sum: Int64  # [D]
    use: Int64  # [capacity]
    pending: Int64  # [D] W that could run
    next_start: Int64  # [D]
    next_token: Int64  # [D] 4 * stage + kind
    last_kind: Int64  # [D]
    channel: Int64  # [D, D] free from
    sending: Int64  # [hosts]
    receiving: Int64  # [hosts]
    reducing: Int64  # [D]
    last_end: Int64  # [capacity] end of the stage's last action
    found_start: Int64  # [2 * capacity]
    found_key: Float64  # [2 * capacity]
    found_token: Int64  # [2 * capacity]
    reconsider: Int64  # [D] devices whose choice may have changed
    order: Int64  # [3 * capacity * m] tokens, device after device
    begin: Int64  # [D + 1] where each device's tokens begin
    position: Int64  # [D]


def empty_run(world: World, capacity: int) -> Run:
    """Return room for one run of the list scheduler."""
    devices, microbatches = world.num_devices, world.num_microbatches
    hosts = int(world.host.max()) + 1

    def ints(*shape: int) -> Int64:
        return np.zeros(shape, np.int64)

    return Run(
        done=ints(capacity, 3),
        arrival_f=ints(capacity, microbatches),
        arrival_i=ints(capacity, microbatches),
        free=ints(devices),
        left=ints(devices),
        rest=ints(capacity),
        memory=ints(devices),
        kept=ints(capacity),
        kept_sum=ints(devices),
        use=ints(capacity),
        pending=ints(devices),
        next_start=ints(devices),
        next_token=ints(devices),
        last_kind=ints(devices),
        channel=ints(devices, devices),
        sending=ints(hosts),
        receiving=ints(hosts),
        reducing=ints(devices),
        last_end=ints(capacity),
        found_start=ints(2 * capacity),
        found_key=np.zeros(2 * capacity),
        found_token=ints(2 * capacity),
        reconsider=ints(max(2, devices)),
        order=ints(3 * capacity * microbatches),
        begin=ints(devices + 1),
        position=ints(devices),
    )
