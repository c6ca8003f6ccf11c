"""What autograd saves of one stage and microbatch, storage by storage, so that it can leave.

    F, under `Parcel.listening()`     each saved tensor becomes a Handle on its storage's Piece
    `Parcel.close`                    chooses the pieces to move: as many bytes as the plan says
    the lane                          copies them out, lets go of them, brings them back
    I or B                            autograd unpacks: views of the piece as they were

A storage is moved once however many tensors lie in it, and views come back as views: same shape,
strides and offset. What others hold as well would not be freed, so it stays: parameters, buffers
and other tensors of the modules, the stage's input and output, tensors of another device or kind,
and whatever still has another owner when F has ended. Small storages stay too.

Memory is freed by letting go of references and never by force, so a holder nobody thought of
costs memory and not a gradient. A tensor that was changed in place after autograd saved it is an
error when it is unpacked, as in autograd itself; once its copy has left, the copy is what was
saved, and later changes do not matter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from executor.offload.host_pool import Block
from octotune.model.storages import SMALLEST_COPY_BYTES

_MOST_SUMS = 4096


class Piece:
    """One saved storage. Holds it until it leaves, and what comes back in its place."""

    __slots__ = ("aliases", "block", "device", "lock", "num_bytes", "storage", "versions")

    def __init__(self, storage: torch.UntypedStorage, lock: threading.Lock) -> None:
        self.num_bytes = storage.nbytes()
        self.device = storage.device
        self.lock = lock
        self.aliases: list[Tensor] = []  # one a saved tensor; each has its version counter
        self.versions: list[int] = []
        self.block: Block | None = None  # where it is on the host
        self.storage: torch.UntypedStorage | None = None  # what came back

    def bytes(self) -> Tensor:
        """Return the device's memory as uint8 [num_bytes]."""
        return _bytes_of(self.aliases[0].untyped_storage())

    def owners_elsewhere(self) -> int:
        """Return how many tensors beside this piece's own still hold the storage."""
        storage = self.aliases[0].untyped_storage()
        # the Python object is one owner
        return int(torch._C._storage_Use_Count(storage._cdata)) - 1 - len(self.aliases)

    def is_unchanged(self) -> bool:
        """Whether nothing was changed in place since it was saved."""
        return all(
            alias._version == version
            for alias, version in zip(self.aliases, self.versions, strict=True)
        )

    def leave(self, block: Block) -> None:
        """Let go of the device's memory: its bytes are in `block`."""
        with self.lock:
            self.block = block
            self.aliases.clear()

    def come_back(self, memory: Tensor) -> Block | None:
        """Take memory that holds the bytes again; return the block that is free now."""
        with self.lock:
            block, self.block = self.block, None
            if self.storage is None:
                self.storage = memory.untyped_storage()
            return block

    def fetch(self) -> torch.UntypedStorage:
        """Bring it back at once, whatever the lane does: somebody asked before its turn."""
        with self.lock:
            if self.storage is None:
                assert self.block is not None
                memory = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device)
                memory.copy_(self.block.bytes)
                self.storage = memory.untyped_storage()
            return self.storage


class Handle(NamedTuple):
    """What autograd keeps in place of a saved tensor: which piece, and where in it."""

    piece: Piece
    which: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int


class Kept(NamedTuple):
    """A saved tensor that stays."""

    tensor: Tensor
    version: int


def unpack(packed: Handle | Kept) -> Tensor:
    """Return the saved tensor. Raises RuntimeError, as autograd does, if it was changed."""
    if isinstance(packed, Kept):
        tensor, version = packed
        if tensor._version != version:
            raise RuntimeError(changed_words(tensor, version))
        return tensor
    piece = packed.piece
    storage = piece.storage
    if storage is None:
        with piece.lock:
            alias = piece.aliases[packed.which] if piece.aliases else None
        if alias is not None:
            version = piece.versions[packed.which]
            if alias._version != version:
                raise RuntimeError(changed_words(alias, version))
            return alias
        storage = piece.fetch()
    made = torch.empty(0, dtype=packed.dtype, device=piece.device)
    with torch.no_grad():
        made.set_(storage, packed.offset, packed.shape, packed.strides)
    return made


def changed_words(tensor: Tensor, version: int) -> str:
    """Return autograd's own words for a saved tensor that was changed in place."""
    return (
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; "
        f"expected version {version} instead. Hint: clone it before changing it."
    )


class Parcel:
    """What one stage saves of one microbatch.

    Args:
        fixed: keys of storages that are there anyway (parameters, buffers).
        device: where activations live; what is elsewhere stays.
        note: called with each saved storage that is not fixed, small ones too.
        smallest_bytes: storages of fewer bytes stay.
    """

    def __init__(
        self,
        fixed: frozenset[int],
        device: torch.device,
        note: Callable[[torch.UntypedStorage], None] | None = None,
        smallest_bytes: int = SMALLEST_COPY_BYTES,
    ) -> None:
        self._fixed = fixed
        self._device = device
        self._note = note
        self._smallest = smallest_bytes
        self._lock = threading.Lock()
        self._pieces: dict[int, Piece] = {}
        self.chosen: list[Piece] = []
        self.offered_bytes = 0  # of all that could have been chosen
        self.held_bytes = 0  # of what has other owners
        self.why_not = ""  # where nothing was chosen

    def listening(self) -> AbstractContextManager[Any]:
        """Return the context to run F in."""
        return saved_tensors_hooks(self._pack, unpack)

    def _pack(self, tensor: Tensor) -> Handle | Kept:
        if (
            type(tensor) is not Tensor
            or tensor.layout is not torch.strided
            or tensor.device != self._device
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor.is_quantized
        ):
            # a plain alias, so that the graph does not hold itself through a saved output
            plain = type(tensor) is Tensor and tensor.layout is torch.strided
            return Kept(tensor.detach() if plain else tensor, tensor._version)
        alias = tensor.detach()
        storage = alias.untyped_storage()
        key = storage.data_ptr()
        if key in self._fixed:
            return Kept(alias, alias._version)
        if self._note is not None:
            self._note(storage)
        if storage.nbytes() < self._smallest:
            return Kept(alias, alias._version)
        piece = self._pieces.get(key)
        if piece is None:
            piece = self._pieces[key] = Piece(storage, self._lock)
        piece.aliases.append(alias)
        piece.versions.append(alias._version)
        return Handle(
            piece,
            len(piece.aliases) - 1,
            alias.dtype,
            alias.shape,
            alias.stride(),
            int(alias.storage_offset()),
        )

    def close(self, handed: Iterable[Tensor], budget_bytes: int) -> int:
        """Choose the pieces that will move; return their bytes. F has ended.

        Args:
            handed: tensors that others hold, such as the stage's input and output.
            budget_bytes: the plan's; chosen are as many bytes as come nearest from below.
        """
        outside = {tensor.untyped_storage().data_ptr() for tensor in handed}
        free: list[Piece] = []
        for key, piece in self._pieces.items():
            # what nobody else holds nobody can change from here on
            if key in outside or piece.owners_elsewhere() > 0 or not piece.is_unchanged():
                self.held_bytes += piece.num_bytes
            else:
                free.append(piece)
        self._pieces = {}
        sizes = tuple(piece.num_bytes for piece in free)
        self.offered_bytes = sum(sizes)
        self.chosen = [free[at] for at in choose(sizes, budget_bytes)]
        if not self.chosen:
            self.why_not = (
                f"nothing could leave: of {budget_bytes} bytes planned, {self.held_bytes} are "
                "held by others as well, the rest is small, or not saved at all"
                if not free
                else f"nothing could leave: the smallest storage has {min(sizes)} bytes, the "
                f"plan moves {budget_bytes}"
            )
        return sum(piece.num_bytes for piece in self.chosen)

    def empty(self) -> None:
        """Forget the pieces: from here on they live as long as autograd wants them."""
        self.chosen = []


@lru_cache(maxsize=256)
def choose(sizes: tuple[int, ...], budget: int) -> Sequence[int]:
    """Return which of `sizes` add up to the most that is not above `budget`.

    Exact for up to some thousand different sums, else at least as good as taking the largest
    that fits, again and again.
    """
    if sum(sizes) <= budget:
        return tuple(range(len(sizes)))
    order = sorted(range(len(sizes)), key=lambda at: -sizes[at])
    greedy: list[int] = []
    left = budget
    for at in order:
        if sizes[at] <= left:
            greedy.append(at)
            left -= sizes[at]
    if left == 0:
        return tuple(sorted(greedy))
    # sums that can be reached, and by which size last
    reached: dict[int, tuple[int, int] | None] = {0: None}
    for at in order:
        for total in list(reached):
            new = total + sizes[at]
            if new <= budget and new not in reached:
                reached[new] = (at, total)
        if len(reached) > _MOST_SUMS:
            return tuple(sorted(greedy))
    total = max(reached)
    found: list[int] = []
    step = reached[total]
    while step is not None:
        found.append(step[0])
        step = reached[step[1]]
    return tuple(sorted(found))


def fixed_storages(modules: Iterable[torch.nn.Module]) -> frozenset[int]:
    """Return the keys of storages that modules hold: parameters, buffers, plain attributes."""
    keys: set[int] = set()
    for root in modules:
        for module in root.modules():
            found: list[Any] = [*module._parameters.values(), *module._buffers.values()]
            found += vars(module).values()
            keys |= {
                value.untyped_storage().data_ptr()
                for value in found
                if isinstance(value, Tensor | Parameter) and value.layout is torch.strided
            }
    return frozenset(keys)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
