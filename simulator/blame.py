"""Which stage is to blame when a device waits for an input that is still computed.

The action that computes it has mostly waited itself, for an input of its own, and so on. The walk
goes back along that chain, from tensor to tensor, until it meets an action that had its input and
still did not begin, because its device was busy with other work. The stage of that work is to
blame: were it quicker, all that follows would be earlier.

    device 2      [ 3F4 ][ 3B2 ][ 3F5 ][ 3B3 ]      3B3 had its input, the device was busy: stage 3
    device 1             ............   [ 2B3 ]     2B3 began when its gradient came
    device 0      ......................      [ 1B3 ]   and so did 1B3

Where the chain leads to the start of the step without such an action, nothing but the depth of the
pipeline is to blame, and where it meets a reload, the copy lane is: no stage, -1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulator.compiled import kernel

Int64 = NDArray[np.int64]


@kernel
def root_stages(
    length_ns: Int64,
    missing: Int64,
    start_ns: Int64,
    end_ns: Int64,
    needs: Int64,
    ready_ns: Int64,
    reload_ns: Int64,
    offsets: Int64,
    device: Int64,
    stage: Int64,
    num_stages: int,
) -> Int64:
    """Return the stage to blame for each interval [N], or -1.

    A tensor is needed by one action only, so a walk takes at most two steps a stage. Of the busy
    device it looks at no more time than the interval is long, and at none that is not idle
    elsewhere: together, the walks are about as long as the timeline has actions.

    Args:
        length_ns: how long each interval is [N].
        missing: the action whose result is waited for [N].
        start_ns: of each action [A]; -1: not recorded; so is `end_ns`.
        end_ns: of each action [A].
        needs: the action whose result each action needs [A], or -1.
        ready_ns: when that result was there [A].
        reload_ns: when its activations were back from the host [A], or -1.
        offsets: where each device's actions begin [D + 1].
        device: of each action [A].
        stage: of each action [A].
        num_stages: how many there are.
    """
    roots = np.full(len(length_ns), -1, np.int64)
    busy = np.zeros(num_stages, np.int64)
    touched = np.empty(num_stages, np.int64)
    for piece in range(len(length_ns)):
        action = missing[piece]
        steps = 0
        # the limit guards against orders that never ran: in those that did, no chain comes round
        while action >= 0 and steps <= 2 * num_stages + 2:
            steps += 1
            if start_ns[action] < 0 or end_ns[action] < 0:
                break
            previous = action - 1 if action > offsets[device[action]] else -1
            freed = end_ns[previous] if previous >= 0 else -1
            if reload_ns[action] > max(freed, ready_ns[action]):
                break
            if freed <= ready_ns[action]:
                action = needs[action]
                continue
            # its device was busy: with which stage, while the tensor lay there?
            since = max(ready_ns[action], 0, start_ns[action] - length_ns[piece])
            num_touched = 0
            at = previous
            while at >= offsets[device[action]] and end_ns[at] > since:
                where = stage[at]
                if busy[where] == 0:
                    touched[num_touched] = where
                    num_touched += 1
                busy[where] += end_ns[at] - max(since, start_ns[at])
                at -= 1
            best = -1
            for index in range(num_touched):
                where = touched[index]
                if best < 0 or busy[where] > busy[best]:
                    best = where
            for index in range(num_touched):
                busy[touched[index]] = 0
            roots[piece] = best
            break
    return roots
