"""What autograd keeps, and what else is alive: bytes by storage, each storage once.

Two tensors often are one memory (a view, a chunk, a transposed weight), and what a layer saves is
often what its neighbour saves too, so bytes are counted by storage. `SavedStorages` hears through
saved-tensor hooks what autograd keeps; `LiveBytes` sees each tensor that an operation makes and
when it is gone, so that what is needed only while an action runs has a peak. Memory inside one
kernel is visible on a CUDA device, whose allocator is asked, and not on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# A copy of its own costs more than so few bytes free; PipeOffload leaves up to 1024 elements.
SMALLEST_COPY_BYTES = 4096


def storage_key(tensor: Tensor) -> int:
    """Return what is equal for two tensors exactly if they are one memory (while both live)."""
    return tensor.untyped_storage().data_ptr()


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages behind these tensors, each once."""
    return sum({storage_key(each): each.untyped_storage().nbytes() for each in tensors}.values())


@dataclass(slots=True)
class SavedStorages:
    """The storages that autograd saves while `hear` is active, `ignored` ones left out."""

    ignored: set[int]
    kept: dict[int, Tensor] = field(default_factory=dict)  # alive, so that no key comes twice

    def hear(self) -> AbstractContextManager[Any]:
        from torch.autograd.graph import saved_tensors_hooks

        def pack(tensor: Tensor) -> Tensor:
            self.add([tensor])
            return tensor

        return saved_tensors_hooks(pack, lambda tensor: tensor)

    def add(self, tensors: Iterable[Tensor]) -> set[int]:
        """Count these as saved, and return their storages' keys."""
        keys: set[int] = set()
        for tensor in tensors:
            key = storage_key(tensor)
            if key not in self.ignored and tensor.untyped_storage().nbytes():
                self.kept.setdefault(key, tensor)
                keys.add(key)
        return keys


class Allocations(Protocol):
    """How many bytes are allocated, and how many were at most since the last `restart`."""

    def now_bytes(self) -> int: ...

    def peak_bytes(self) -> int: ...

    def restart(self) -> None: ...


@contextmanager
def allocations(device: torch.device, known: Iterable[Tensor]) -> Iterator[Allocations]:
    """Watch what is allocated on the device meanwhile; on a CPU, beside the `known` tensors."""
    if device.type == "cuda":
        yield _CudaBytes(device)
        return
    with _live_bytes(known) as live:
        yield live


@dataclass(slots=True)
class _CudaBytes:
    device: torch.device

    def now_bytes(self) -> int:
        import torch

        return torch.cuda.memory_allocated(self.device)

    def peak_bytes(self) -> int:
        import torch

        return torch.cuda.max_memory_allocated(self.device)

    def restart(self) -> None:
        import torch

        torch.cuda.reset_peak_memory_stats(self.device)


@dataclass(slots=True)
class _LiveBytes:
    now: int = 0
    peak: int = 0

    def now_bytes(self) -> int:
        return self.now

    def peak_bytes(self) -> int:
        return self.peak

    def restart(self) -> None:
        self.peak = self.now


@contextmanager
def _live_bytes(known: Iterable[Tensor]) -> Iterator[_LiveBytes]:
    """Count the storages that operations make from here on, until each is gone."""
    import weakref

    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter

    live = _LiveBytes()
    # weak references by storage; a finished one takes its bytes away
    seen: dict[int, weakref.ref[torch.UntypedStorage] | None] = {
        storage_key(tensor): None for tensor in known
    }

    def note(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        if not size or key in seen:
            return

        def gone(_: object) -> None:
            del seen[key]
            live.now -= size

        seen[key] = weakref.ref(storage, gone)
        live.now += size
        live.peak = max(live.peak, live.now)

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            for value in tree_iter(result):
                if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                    note(value)
            return result

    with Watch():  # type: ignore[no-untyped-call]
        yield live
    seen.clear()
