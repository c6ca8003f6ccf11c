"""What paging works on: costs by stage and device, the rule, and the state of a game.

`lane` moves the copies, `play` the actions; both work on these.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.actions import Kind
from simulator.compiled import kernel

Int64 = NDArray[np.int64]
Int8 = NDArray[np.int8]
Bool = NDArray[np.bool_]

KINDS = len(Kind)
FORWARD, BACKWARD, WEIGHT = 0, 1, 2  # rows of the keys

NEVER = 2**62
FOREVER = np.int64(NEVER)  # the same, for arrays

# where an activation is
ABSENT, HERE, LEAVING, AWAY, BACK = 0, 1, 2, 3, 4


class Pages(NamedTuple):
    """Costs as the kernel takes them: S stages, D devices, m microbatches."""

    num_microbatches: int
    duration: Int64  # [S * 4] ns
    delay: Int64  # [S] ns from the end of an action of stage s - 1 to its arrival; [0] is 0
    split: Bool  # [S] I and W in place of B
    stage_device: Int64  # [S]
    first: Int64  # [D + 1] where each device's stages begin in `local`
    local: Int64  # [S] the stages by device, rising
    rise: Int64  # [S * 4] bytes an action adds at its start
    fall: Int64  # [S * 4] and takes away at its end
    room: Int64  # [D] bytes beside what is always held
    margin: Int64  # [D] the most that a backward or W adds at its start
    moved: Int64  # [S] bytes of a copy; 0: nothing of the stage leaves
    copy: Int64  # [S] ns one way
    link: Int64  # [D] the host link a device shares; -1: its own
    num_links: int
    host: Int64  # [D]
    num_hosts: int
    host_room: int


class Rule(NamedTuple):
    """How copies and forwards weigh. Copy times are those of one way."""

    least_trips: float = 1.0  # round trips that a life must last to be worth a copy
    least_life_ns: int = 0  # lives shorter than this stay, too
    lead: float = 0.0  # copy times that a reload begins before it must
    notice: int = 1  # stages further on whose backward must have begun before a reload is due
    reach: float = 0.0  # copy times beyond a forward's end whose reloads keep their room from it
    window_ns: int = 0  # how much later an action's key may be that overtakes one not ready
    overtake: float = 0.0  # of its own length, that it may delay the other
    slack: float = 1.0  # of its length, that must be idle for a W to come early


class State(NamedTuple):
    held: Int64  # [D] bytes now
    high: Int64  # [D] the most since the last action began or the last copy ended
    crest: Int64  # [D] the most since the last action ended
    free: Int64  # [D] when the last action ended
    last_start: Int64  # [D]
    last_code: Int64  # [D] the last action, or -1
    lag: Int64  # [D] how much later than its key the last action began
    lane_free: Int64  # [D]
    running: Int64  # [D] kind of the copy that runs, or -1
    copied_stage: Int64  # [D]
    copied_mb: Int64  # [D]
    where: Int8  # [S, m]
    begun: Int64  # [S]
    turned: Int64  # [S]
    left: Int64  # [S]
    input_at: Int64  # [S, m]
    grad_at: Int64  # [S, m]
    forward_end: Int64  # [S, m]
    back_at: Int64  # [S, m] when a reload ends
    here: Int64  # [S, m] microbatches that are here, rising, from bottom to top
    bottom: Int64  # [S]
    top: Int64  # [S]
    reload_from: Int64  # [S] no microbatch below it is away
    link_free: Int64  # [2 * links]
    host_held: Int64  # [hosts]
    copies: Int64  # [2 * S * m] packed
    anchors: Int64  # [2 * S * m]
    written: Int64  # [D]
    needs: Int64  # [S] scratch
    costs: Int64  # [S] scratch
    over: Int64  # [D] bytes above the room, where the order is fixed
    late: Int64  # [S] ns that backwards of a stage waited for reloads alone


@kernel
def fresh_state(
    p: Pages, copies: Int64, anchors: Int64, written: Int64, over: Int64, late: Int64
) -> State:
    """Return the state before the first action; the arrays given are results."""
    m = p.num_microbatches
    num_devices, num_stages = len(p.room), len(p.stage_device)
    return State(
        np.zeros(num_devices, np.int64),
        np.zeros(num_devices, np.int64),
        np.zeros(num_devices, np.int64),
        np.zeros(num_devices, np.int64),
        np.zeros(num_devices, np.int64),
        np.full(num_devices, -1),
        np.zeros(num_devices, np.int64),
        np.zeros(num_devices, np.int64),
        np.full(num_devices, -1),
        np.zeros(num_devices, np.int64),
        np.zeros(num_devices, np.int64),
        np.zeros((num_stages, m), np.int8),
        np.zeros(num_stages, np.int64),
        np.zeros(num_stages, np.int64),
        np.zeros(num_stages, np.int64),
        np.full((num_stages, m), FOREVER),
        np.full((num_stages, m), FOREVER),
        np.zeros((num_stages, m), np.int64),
        np.zeros((num_stages, m), np.int64),
        np.zeros((num_stages, m), np.int64),
        np.zeros(num_stages, np.int64),
        np.zeros(num_stages, np.int64),
        np.zeros(num_stages, np.int64),
        np.zeros(2 * p.num_links, np.int64),
        np.zeros(p.num_hosts, np.int64),
        copies,
        anchors,
        written,
        np.zeros(num_stages, np.int64),
        np.zeros(num_stages, np.int64),
        over,
        late,
    )
