"""What a device's way to its host carries: the cluster's `offload_bandwidth`, measured.

Copies between the device and pinned memory, out and back, each alone, both at once, and with other
processes copying meanwhile, as other ranks of the host will. On a CPU both ends are one memory, so
what is measured is that memory, by one thread a direction as a rank's lane copies: an upper bound
for a throttled lane. The time for which other processes held its core is taken off, as in the
profile.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octotune.errors import MalformedError
from octotune.model.run_queue import run_queue_ns

if TYPE_CHECKING:
    import torch

    from octotune.contract import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """Bytes a second between a device and its host.

    `out` and `back`: each direction alone. `both`: each of the two while the other runs.
    `out_beside` and `back_beside`: each while `neighbours` other processes copy as well.
    """

    out: int
    back: int
    both: int
    out_beside: int
    back_beside: int
    neighbours: int

    @property
    def offload_bandwidth(self) -> int:
        """What a plan can count on: the slower direction, with the neighbours copying.

        A device's lane does one copy at a time, so `both` does not enter.
        """
        return min(self.out_beside, self.back_beside)


def measure_host_link(
    device: torch.device | str = "cpu",
    *,
    size_bytes: int = 1 << 26,
    repeats: int = 5,
    neighbours: int = 0,
) -> HostLink:
    """Measure the link between a device and its host, medians over `repeats`.

    Args:
        device: which.
        size_bytes: of one copy.
        repeats: copies timed in each way, at least 1.
        neighbours: other processes that copy meanwhile, on the same device here; ranks of other
            devices of one link measure at the same time instead.

    Raises:
        MalformedError: if a count or the size is below 1 (neighbours: 0).
    """
    import torch

    if size_bytes < 1 or repeats < 1 or neighbours < 0:
        raise MalformedError(
            f"size_bytes, repeats, neighbours are {size_bytes}, {repeats}, {neighbours}; "
            "they are at least 1, 1, 0"
        )
    where = torch.device(device)
    ways = _Ways(where, size_bytes)
    out, back, both = (ways.rate(way, repeats) for way in ("out", "back", "both"))
    out_beside, back_beside = out, back
    if neighbours:
        with _copying(str(where), size_bytes, neighbours):
            out_beside, back_beside = ways.rate("out", repeats), ways.rate("back", repeats)
    return HostLink(
        out=out,
        back=back,
        both=both,
        out_beside=out_beside,
        back_beside=back_beside,
        neighbours=neighbours,
    )


def link_facts(link: HostLink, workload: Workload | None = None) -> dict[str, float]:
    """Return a measured link as names and numbers, bytes a second.

    With a workload also `offloadable_share`: what part of the bytes that its layers save for their
    backward may go to the host; 0 where they save nothing.
    """
    facts: dict[str, float] = {
        "out": link.out,
        "back": link.back,
        "both": link.both,
        "out_beside": link.out_beside,
        "back_beside": link.back_beside,
        "neighbours": link.neighbours,
        "offload_bandwidth": link.offload_bandwidth,
    }
    if workload is not None:
        saved = sum(layer.saved_bytes + layer.saved_w_bytes for layer in workload.layers)
        away = sum(layer.offloadable_bytes for layer in workload.layers)
        facts["offloadable_share"] = away / saved if saved else 0.0
    return facts


class _Ways:
    """Two tensors on the device, two on the host, and copies between them."""

    def __init__(self, device: torch.device, size_bytes: int) -> None:
        import torch

        self._cuda = device.type == "cuda"
        self._size = size_bytes

        def there() -> torch.Tensor:
            return torch.ones(size_bytes, dtype=torch.uint8, device=device)

        def here() -> torch.Tensor:
            return torch.ones(size_bytes, dtype=torch.uint8, pin_memory=self._cuda)

        self._pairs = {"out": (here(), there()), "back": (there(), here())}
        self._streams = (
            [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]
            if self._cuda
            else []
        )

    def rate(self, way: str, repeats: int) -> int:
        """Return the bytes a second of one direction, `both`: of each of the two."""
        names = ("out", "back") if way == "both" else (way,)
        times_ns = (
            self._on_streams(names, repeats) if self._cuda else self._on_threads(names, repeats)
        )
        return max(1, round(self._size * 1e9 / max(1, statistics.median(times_ns))))

    def _on_streams(self, names: tuple[str, ...], repeats: int) -> list[int]:
        """Copy on a stream a direction; return how long each turn took."""
        import torch

        times = []
        for _ in range(repeats + 1):
            began = time.perf_counter_ns()
            for name, stream in zip(names, self._streams, strict=False):
                with torch.cuda.stream(stream):
                    target, source = self._pairs[name]
                    target.copy_(source, non_blocking=True)
            for stream in self._streams:
                stream.synchronize()
            times.append(time.perf_counter_ns() - began)
        return times[1:]

    def _on_threads(self, names: tuple[str, ...], repeats: int) -> list[int]:
        """Copy on a thread a direction, turns begun together; return how long each copy took."""
        import threading

        times: list[int] = []
        turn = threading.Barrier(len(names))

        def copy(name: str) -> None:
            target, source = self._pairs[name]
            with run_queue_ns() as queued_ns:
                for number in range(repeats + 1):
                    turn.wait()
                    before, began = queued_ns(), time.perf_counter_ns()
                    ctypes.memmove(target.data_ptr(), source.data_ptr(), self._size)
                    took = time.perf_counter_ns() - began - (queued_ns() - before)
                    if number:
                        times.append(took)

        others = [threading.Thread(target=copy, args=(name,)) for name in names[1:]]
        for other in others:
            other.start()
        copy(names[0])
        for other in others:
            other.join()
        return times


class _copying:  # noqa: N801 - a context manager
    """Keep processes copying meanwhile; they are there once this is entered."""

    def __init__(self, device: str, size_bytes: int, count: int) -> None:
        self._arguments = (device, size_bytes)
        self._count = count

    def __enter__(self) -> None:
        import multiprocessing

        context = multiprocessing.get_context("spawn")
        self._stop = context.Event()
        ready = [context.Event() for _ in range(self._count)]
        self._processes = [
            context.Process(target=_copy_until, args=(*self._arguments, event, self._stop))
            for event in ready
        ]
        for process in self._processes:
            process.daemon = True
            process.start()
        for process, event in zip(self._processes, ready, strict=True):
            while not event.wait(0.1):
                if not process.is_alive():
                    self.__exit__()
                    raise RuntimeError("a process that was to copy meanwhile ended")

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.terminate()


def _copy_until(device: str, size_bytes: int, ready: object, stop: object) -> None:
    import torch

    torch.set_num_threads(1)
    ways = _Ways(torch.device(device), size_bytes)
    ready.set()  # type: ignore[attr-defined]
    while not stop.is_set():  # type: ignore[attr-defined]
        ways.rate("out", 1)
        ways.rate("back", 1)
