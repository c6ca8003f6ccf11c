"""Confirming a bubble the paper's way: lengthen a wait until the main step gets longer.

One device after the other, in its longest wait, the rank sleeps for a growing share of what the
wait was measured to be, and takes the message only then. The largest share that leaves the main
step as long as it was is what the device's waits are good for. Every step belongs to one device
and one share, known in advance on every rank; at the end all ranks put their times together.

Source:
    Arfeen et al. 2024, arXiv:2410.07192: the usable duration of a bubble is found by adding waits
    until the main job's throughput drops.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

SHARES = (0.6, 0.8, 0.9, 1.0, 1.15)
_ROUNDS = 2
_TOLERANCE = 0.01


def num_steps(num_devices: int) -> int:
    """Return how many main steps confirming takes."""
    return num_devices * len(SHARES) * _ROUNDS


def trial(step: int, num_devices: int) -> tuple[int, float] | None:
    """Return device and share of a step, counted from the first trial; None: there are no more."""
    if not 0 <= step < num_steps(num_devices):
        return None
    device, rest = divmod(step, len(SHARES) * _ROUNDS)
    return device, SHARES[rest // _ROUNDS]


def confirmed(
    plain_ns: Sequence[int], trials_ns: Sequence[int], num_devices: int
) -> tuple[float, ...]:
    """Return, for each device, the largest share that did no harm; 0.5 where the least one did.

    Args:
        plain_ns: main steps without any trial.
        trials_ns: main steps in the order of `trial`.
        num_devices: of the pipeline.
    """
    usual = statistics.median(plain_ns)
    spread = statistics.median(abs(each - usual) for each in plain_ns)
    most = usual + max(_TOLERANCE * usual, 3.0 * spread)
    found = []
    for device in range(num_devices):
        best = 0.5
        for number, share in enumerate(SHARES):
            begin = (device * len(SHARES) + number) * _ROUNDS
            # the quicker of the rounds: others on the machine only make a step longer
            if min(trials_ns[begin : begin + _ROUNDS]) > most:
                break
            best = share
        found.append(best)
    return tuple(found)
