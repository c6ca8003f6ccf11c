"""ZB-V: two stages a device in a V, B split, no more memory than 1F1B.

Device 0 holds the first and the last stage, so the loss is back where the microbatch came in.
With F = I = W nothing waits between warmup and cooldown. The order of F and I is the paper's: the
device goes down the V as far as its position allows, then up and back one for one; W fills.
"""

from __future__ import annotations

from octotune.placement import v_shape
from octotune.schedules.choose import best_filled
from octotune.schedules.family import Family, Row, action, device_of_rank, on_devices
from octotune.schedules.weights import world_of
from simulator.actions import Kind, Schedule
from simulator.costs import Costs


def zb_v_order(num_devices: int, num_microbatches: int) -> list[Row]:
    """Return each rank's order of F and I, without W.

    Source:
        Qi et al. 2024, arXiv:2401.10241, section 6.
    """
    p = num_devices
    # the pattern needs 2p - 1 microbatches; with fewer, the surplus is struck from its rows
    full = max(2 * p - 1, num_microbatches)
    rows: list[Row] = []
    for rank in range(p):
        down, up = rank, 2 * p - 1 - rank
        words: list[tuple[int, Kind]] = [(down, Kind.F)] * (2 * (p - rank) - 1)
        words += [(up, Kind.F), (down, Kind.F)] * rank
        words += [(up, Kind.F), (up, Kind.I)] * (p - rank)
        down_begun, up_begun = 2 * p - 1 - rank, p
        while up_begun < full:
            if down_begun < full:
                words.append((down, Kind.F))
                down_begun += 1
            words += [(down, Kind.I), (up, Kind.F), (up, Kind.I)]
            up_begun += 1
        words += [(down, Kind.I), (up, Kind.I)] * rank
        words += [(down, Kind.I)] * (p - rank)
        rows.append(_numbered(words, num_microbatches))
    return rows


def _numbered(words: list[tuple[int, Kind]], num_microbatches: int) -> Row:
    count: dict[tuple[int, Kind], int] = {}
    row: Row = []
    for word in words:
        microbatch = count.get(word, 0)
        count[word] = microbatch + 1
        if microbatch < num_microbatches:
            row.append(action(word[0], word[1], microbatch))
    return row


def _generate(costs: Costs) -> Schedule:
    devices = device_of_rank(costs, v_shape)
    order = on_devices(
        zb_v_order(len(devices), costs.num_microbatches), devices, costs.num_devices
    )
    return best_filled([order], world_of(costs, most=2 * len(devices)), costs)


ZB_V = Family(
    name="zb-v",
    source="Qi et al. 2024, arXiv:2401.10241, section 6",
    placement=v_shape,
    generate=_generate,
    adapts_to_memory=True,
    claimed_peak=lambda p, m: min(m, p),
)
