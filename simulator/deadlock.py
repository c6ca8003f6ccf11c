"""Why an order cannot run: the ring of actions, transfers and copies that wait for each other.

It is found from where the engine stopped. Every device and copy lane that did not get to its
end has a first action or copy that waits; what it waits for stands at the head of its own row or
lane, or behind it. Following that from anywhere must come round, as there is no way out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.actions import (
    Action,
    Copy,
    CopyKind,
    CopySchedule,
    Kind,
    Schedule,
    pack,
    unpack,
)
from simulator.costs import Costs
from simulator.errors import DeadlockError
from simulator.graph import transfer_name

Int64 = NDArray[np.int64]

_CLAUSES = 12  # how many links of a cycle a message spells out


class _Link(NamedTuple):
    """One link of the ring: `who` waits, as `text` says, for the action or copy `awaited`."""

    who: str
    text: str
    through: str | None  # the transfer in between
    awaited: Action | Copy


def deadlock(
    schedule: Schedule,
    costs: Costs,
    copies: CopySchedule | None,
    next_action: Int64,
    next_copy: Int64,
) -> DeadlockError:
    """Return the error that spells out why the order cannot run.

    Args:
        schedule: a complete order that does not run to its end.
        costs: says on which device each stage is.
        copies: the copy lanes.
        next_action: [D] index into `schedule.codes` of the first action each device did not run.
        next_copy: [D] the same for the copies of each lane.
    """
    device_of = costs.stage_device.tolist()
    rows = {
        device: [unpack(code) for code in schedule.row(device)[done:].tolist()]
        for device, done in enumerate((next_action - schedule.offsets[:-1]).tolist())
    }
    lanes: dict[int, list[Copy]] = {}
    if copies is not None:
        done_copies = (next_copy - copies.offsets[:-1]).tolist()
        lanes = {
            device: list(lane[done:])
            for device, (lane, done) in enumerate(zip(copies.rows, done_copies, strict=True))
        }
    unfinished = {action.code for row in rows.values() for action in row}
    not_back = {copy.code: copy for lane in lanes.values() for copy in lane}

    def still_to_run(stage: int, kinds: tuple[Kind, ...], microbatch: int) -> Action | None:
        codes = (pack(stage, kind, microbatch) for kind in kinds)
        return next((unpack(code) for code in codes if code in unfinished), None)

    def action_link(action: Action) -> _Link:
        """Say what the first waiting action of a device waits for."""
        stage, kind, microbatch = action
        device = device_of[stage]
        producer = None
        if kind is Kind.F and stage > 0:
            producer = still_to_run(stage - 1, (Kind.F,), microbatch)
        elif kind in (Kind.B, Kind.I) and stage < costs.num_stages - 1:
            producer = still_to_run(stage + 1, (Kind.B, Kind.I), microbatch)
        if producer is not None:
            source = device_of[producer.stage]
            if source == device:
                return _Link(str(action), f"{action} waits for {producer}", None, producer)
            name = transfer_name(producer, source, device)
            text = f"{action} waits for {producer} over the channel {source}->{device}"
            return _Link(str(action), text, name, producer)
        reload = not_back[pack(stage, CopyKind.R, microbatch)]
        return _Link(str(action), f"{action} waits for the copy {reload}", None, reload)

    def copy_link(copy: Copy) -> _Link:
        """Say what the first waiting copy of a lane waits for."""
        forward = Action(copy.stage, Kind.F, copy.microbatch)
        if copy.kind is CopyKind.O and forward.code in unfinished:
            return _Link(str(copy), f"{copy} waits for {forward}", None, forward)
        assert copy.anchor is not None
        text = f"{copy} is held back for {copy.anchor}"
        return _Link(str(copy), text, None, copy.anchor)

    def behind(item: Action | Copy) -> _Link | None:
        """Say before which action or copy an item stands in line; None where it is the first."""
        device = device_of[item.stage]
        first: Action | Copy
        if isinstance(item, Copy):
            first, line = lanes[device][0], f"in the copy lane of device {device}"
        else:
            first, line = rows[device][0], f"on device {device}"
        if first == item:
            return None
        return _Link(str(item), f"{item} stands behind {first} {line}", None, first)

    item: Action | Copy = next(row[0] for row in rows.values() if row)
    links: list[_Link] = []
    seen: dict[str, int] = {}
    while str(item) not in seen:
        seen[str(item)] = len(links)
        link = behind(item)
        if link is None:
            link = copy_link(item) if isinstance(item, Copy) else action_link(item)
        links.append(link)
        item = link.awaited
    ring = links[seen[str(item)] :]
    clauses = [link.text for link in ring[:_CLAUSES]]
    if len(ring) > _CLAUSES:
        clauses.append(f"and so on, {len(ring) - _CLAUSES} more, back to {ring[0].who}")
    cycle = [name for link in ring for name in (link.who, link.through) if name is not None]
    return DeadlockError("this order cannot run: " + "; ".join(clauses), tuple(cycle))
