"""Passes of one microbatch through a chain of layers, for their times and for their bytes.

A pass is what a stage does with one microbatch: F of each layer in turn, then I of each from the
last to the first, then W of each. So every layer meets its input, its weights and the caches in
the state in which training meets them, which a loop over one layer would not.

    F0 F1 F2 .. Fn   In .. I2 I1 I0   Wn .. W2 W1 W0

Between two layers the graph is cut (each layer's input is a leaf), so that I of one layer is I of
that layer alone. The last layer of a model carries the loss: its F ends with the loss, its I
starts there. In a chain that does not end with the loss the last gradient is a random one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octotune.errors import MalformedError
from octotune.model.split import BackwardSplit, SplitRun
from octotune.model.storages import (
    SMALLEST_COPY_BYTES,
    Allocations,
    SavedStorages,
    allocations,
    storage_bytes,
    storage_key,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

GRADIENT_SCALE = 1e-3  # of random gradients: far from denormal numbers, which are slow on CPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One layer of a chain: its name, its function, and the parameters that it trains."""

    name: str
    function: Callable[[Tensor], Tensor]
    parameters: tuple[torch.nn.Parameter, ...]
    is_last: bool  # of the model: returns the loss


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationBytes:
    """What one layer holds for one microbatch; see docs/contract.md for each."""

    saved_bytes: int
    saved_w_bytes: int
    held_w_bytes: int
    workspace_bytes: int
    output_bytes: int
    offloadable_bytes: int


def sound_chain(links: Sequence[Link], inputs: Tensor) -> tuple[list[Link], Tensor]:
    """Run F once and refuse what cannot be measured; return the links as they are to be run.

    A layer that changes its input in place gets a copy of it: the input is a leaf here, which
    autograd does not let anyone change.

    Returns:
        The links, and the last one's output.

    Raises:
        MalformedError: if a layer fails, gives anything but one tensor, or the loss is no scalar
            that requires grad.
    """
    import torch

    sound: list[Link] = []
    for link in links:
        given = inputs.clone()
        version = given._version
        try:
            output = link.function(given)
        except Exception as error:
            reason = " ".join(str(error).split())
            raise MalformedError(
                f"layer {link.name!r} fails on an input of shape {list(inputs.shape)}, "
                f"{inputs.dtype} on {inputs.device}: {type(error).__name__}: {reason}"
            ) from error
        if not isinstance(output, torch.Tensor):
            raise MalformedError(
                f"layer {link.name!r} returns {_what(output)}; a layer hands one tensor to the "
                "next (wrap it so that it does)"
            )
        if link.is_last and (output.numel() != 1 or not output.requires_grad):
            raise MalformedError(
                f"loss_fn after layer {link.name!r} returns shape {list(output.shape)}, "
                f"requires_grad {output.requires_grad}; it returns one number that depends on "
                "trained parameters"
            )
        changes_input = given._version != version
        sound.append(_on_copies(link) if changes_input else link)
        inputs = _leaf(output)
    return sound, inputs


def time_pass(
    links: Sequence[Link], inputs: Tensor, split: BackwardSplit, stopwatch: Stopwatch
) -> list[tuple[int, int, int]]:
    """Return each layer's F, I and W duration in ns in one pass."""
    runs: list[SplitRun] = []
    for link in links:
        with stopwatch:
            run = split(link.function, inputs, link.parameters)
        runs.append(run)
        inputs = _leaf(run.output)
    grad = _last_grad(links, runs)
    for run in reversed(runs):
        if not run.output.requires_grad:  # nothing below is trained
            with stopwatch:
                pass
            continue
        with stopwatch:
            grad = run.input_grad(grad)
    for run in reversed(runs):
        with stopwatch:
            run.weight_grad()
    times = stopwatch.read_ns()
    count = len(links)
    forward, backward, weight = times[:count], times[count : 2 * count], times[2 * count :]
    return list(zip(forward, reversed(backward), reversed(weight), strict=True))


def byte_pass(
    links: Sequence[Link],
    inputs: Tensor,
    split: BackwardSplit,
    ignored: Sequence[Tensor],
) -> list[ActivationBytes]:
    """Return what each layer holds, in one pass; the `ignored` tensors (parameters) count nowhere.

    A storage that several layers save counts once: with a layer that needs it until W if there
    is one, else with the first. That is exact for layers on one device.
    """
    never = {storage_key(each) for each in ignored}
    runs: list[SplitRun] = []
    saved: list[SavedStorages] = []
    passed: list[tuple[Tensor, Tensor]] = []
    forward_peaks: list[int] = []
    backward_peaks: list[int] = []
    held: list[list[Tensor]] = []
    for_weights: list[set[int]] = []  # storages that W needs
    arrived: list[Tensor | None] = []  # the gradient that each layer's I starts from
    with allocations(inputs.device, [*ignored, inputs]) as live:
        for link in links:
            saves = SavedStorages(never)
            with saves.hear(), _Peak(live) as peak:
                run = split(link.function, inputs, link.parameters)
            runs.append(run)
            saved.append(saves)
            passed.append((inputs, run.output))
            forward_peaks.append(peak.bytes)
            inputs = _leaf(run.output)
        grad = _last_grad(links, runs)
        for run, saves in zip(reversed(runs), reversed(saved), strict=True):
            arrived.append(grad)
            if not run.output.requires_grad:
                held.append([])
                for_weights.append(set())
                backward_peaks.append(0)
                continue
            with _Peak(live) as input_peak:
                grad = run.input_grad(grad)
            kept = list(run.kept_grads())
            held.append(kept)
            for_weights.append(saves.add(run.kept_inputs()))
            backward_peaks.append(max(0, input_peak.bytes - _new_bytes(kept, arrived)))
        held.reverse()
        for_weights.reverse()
        arrived.reverse()
        backward_peaks.reverse()
        for index in reversed(range(len(runs))):
            with _Peak(live) as weight_peak:
                runs[index].weight_grad()
            backward_peaks[index] = max(backward_peaks[index], weight_peak.bytes)

    until_w: set[int] = set().union(*for_weights)
    counted: set[int] = set()
    counted_grads: set[int] = set()
    result: list[ActivationBytes] = []
    for index, saves in enumerate(saved):
        layer_input, layer_output = passed[index]
        w_keys = for_weights[index] - counted
        other_keys = set(saves.kept) - until_w - counted
        counted |= w_keys | other_keys
        grads = {storage_key(each): each for each in held[index]}
        own_grads = [each for key, each in grads.items() if key not in counted_grads]
        counted_grads |= set(grads)
        w_bytes = storage_bytes(saves.kept[key] for key in w_keys)
        other_bytes = storage_bytes(saves.kept[key] for key in other_keys)
        handed = {storage_key(layer_input), storage_key(layer_output)}
        inside = {
            key
            for key in (w_keys | other_keys) - handed
            if saves.kept[key].untyped_storage().nbytes() >= SMALLEST_COPY_BYTES
        }
        # what an action holds beyond what the fields above already charge for it
        made = set(saves.kept) - {storage_key(layer_input)}
        beyond = forward_peaks[index] - storage_bytes(saves.kept[key] for key in made)
        if not any(storage_key(layer_input) in each.kept for each in saved):
            beyond += storage_bytes([layer_input])
        gradient = arrived[index]
        waits = 0
        if gradient is not None and storage_key(gradient) not in grads:
            waits = storage_bytes([gradient])
        result.append(
            ActivationBytes(
                saved_bytes=other_bytes,
                saved_w_bytes=w_bytes,
                held_w_bytes=storage_bytes(own_grads),
                workspace_bytes=max(0, beyond, backward_peaks[index] + waits),
                output_bytes=layer_output.numel() * layer_output.element_size(),
                offloadable_bytes=storage_bytes(saves.kept[key] for key in inside),
            )
        )
    return result


class Stopwatch:
    """Durations of the blocks run under it.

    On a CPU by the clock, less what `queued_ns` says this thread stood in the run queue for
    other processes; by events on a CUDA device.
    """

    def __init__(self, device: torch.device, queued_ns: Callable[[], int]) -> None:
        self._device = device
        self._queued_ns = queued_ns
        self._marks: list[Any] = []

    def __enter__(self) -> None:
        self._mark()

    def __exit__(self, *_: object) -> None:
        self._mark()

    def _mark(self) -> None:
        if self._device.type == "cuda":
            import torch

            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter_ns() - self._queued_ns())

    def read_ns(self) -> list[int]:
        """Return the durations since the last reading, when all of them have ended."""
        marks, self._marks = self._marks, []
        pairs = list(zip(marks[::2], marks[1::2], strict=True))
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._device)
            return [round(start.elapsed_time(end) * 1e6) for start, end in pairs]
        return [max(0, end - start) for start, end in pairs]


class _Peak:
    """By how much the allocated bytes rose at most while the block ran."""

    def __init__(self, live: Allocations) -> None:
        self._live = live
        self._before = 0
        self.bytes = 0

    def __enter__(self) -> _Peak:
        self._live.restart()
        self._before = self._live.now_bytes()
        return self

    def __exit__(self, *_: object) -> None:
        self.bytes = self._live.peak_bytes() - self._before


def _leaf(output: Tensor) -> Tensor:
    return output.detach().requires_grad_(output.requires_grad)


def _last_grad(links: Sequence[Link], runs: Sequence[SplitRun]) -> Tensor | None:
    import torch

    if links[-1].is_last:
        return None
    return torch.randn_like(runs[-1].output.detach()) * GRADIENT_SCALE


def _on_copies(link: Link) -> Link:
    function = link.function
    return Link(
        name=link.name,
        function=lambda inputs: function(inputs.clone()),
        parameters=link.parameters,
        is_last=link.is_last,
    )


def _new_bytes(kept: Sequence[Tensor], arrived: Sequence[Tensor | None]) -> int:
    """Return the bytes of gradients that this layer's I made, not those that came to it."""
    came = {storage_key(each) for each in arrived if each is not None}
    return storage_bytes(each for each in kept if storage_key(each) not in came)


def _what(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
