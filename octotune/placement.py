"""Placement: which device each stage sits on.

A placement is one device a stage, in the order of the stages: `(0, 1, 1, 0)` puts stages 0 and 3
on device 0. With p devices and v stages on each:

    linear, p = 4            0 1 2 3
    loop, p = 4, v = 2       0 1 2 3 | 0 1 2 3          each pass starts again at device 0
    wave, p = 4, v = 3       0 1 2 3 | 3 2 1 0 | 0 1 2 3    each pass goes back over the last
    V                        the wave with v = 2: device 0 holds the first and the last stage

A loop sends over the closing edge p - 1 -> 0 once a pass; a wave never does, and turns round on a
device that hands over to itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from octotune.errors import InfeasibleError

Placement = tuple[int, ...]


def linear(num_devices: int) -> Placement:
    """Return one stage a device, in order."""
    return loop(num_devices, 1)


def loop(num_devices: int, stages_per_device: int) -> Placement:
    """Return stage s on device s mod p.

    Source:
        Narayanan et al. 2021, arXiv:2104.04473, section 2.2.
    """
    _at_least_one(num_devices=num_devices, stages_per_device=stages_per_device)
    return tuple(range(num_devices)) * stages_per_device


def wave(num_devices: int, stages_per_device: int) -> Placement:
    """Return passes over the devices that change direction each time.

    Source:
        Liu et al. 2023, Hanayo, arXiv:2308.15762, section 3.
    """
    _at_least_one(num_devices=num_devices, stages_per_device=stages_per_device)
    there = tuple(range(num_devices))
    back = there[::-1]
    return tuple(
        device for turn in range(stages_per_device) for device in (back if turn % 2 else there)
    )


def v_shape(num_devices: int) -> Placement:
    """Return the wave of two passes: device d holds stages d and 2p - 1 - d.

    Source:
        Qi et al. 2024, arXiv:2401.10241, section 6.
    """
    return wave(num_devices, 2)


def cross_host_edges(placement: Sequence[int], host_of_device: Sequence[int]) -> int:
    """Return how many boundaries between stages cross from one host to another."""
    hosts = [host_of_device[device] for device in placement]
    return sum(left != right for left, right in pairwise(hosts))


def renumbered(placement: Sequence[int], devices: Sequence[int]) -> Placement:
    """Return the placement with `devices[r]` in the place of device r."""
    return tuple(devices[rank] for rank in placement)


def _at_least_one(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise InfeasibleError(f"{name} is {count}; it is at least 1")
