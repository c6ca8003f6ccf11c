"""I and W on autograd: weight gradients put off without running anything twice.

While a stage whose backward is split runs forward, the functions that hold nearly all weights
(linear, convolution, embedding, batched and grouped products) go through autograd Functions that
do not have the weight in the graph. Backward (I) gives the gradient of their input as usual and
puts what the weight's gradient needs, the input and the output's gradient, into the
`WeightQueue` of that stage and microbatch; `WeightQueue.run` (W) computes the gradients with the
same kernels autograd would have used and adds them in the order autograd would have, so the bits
are the same. Everything else, small weights such as those of norms, weights that are not leaves,
compiled regions and foreign autograd Functions, keeps its full backward in I.

The functions are replaced in their namespaces (`torch.nn.functional.linear` and so on) while a
step runs, not by a TorchFunctionMode: a mode does not see the linears inside attention. The queue
is active during I as well: checkpointed blocks that run again meet the same functions. A weight
with hooks gets its gradient through `torch.autograd.backward`, so that the hooks run.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter

Grads = Sequence[Tensor | None]


class Entry(NamedTuple):
    """One use of some weights, waiting for its W.

    `tensors` and the `versions` they had say what the gradients are computed from; `compute` is
    None for a linear, which is done in place for speed.
    """

    params: tuple[Tensor | None, ...]
    tensors: tuple[Tensor, ...]
    versions: tuple[int, ...]
    compute: Callable[[], Grads] | None


class WeightQueue:
    """The weight gradients of one stage and microbatch that are still to be computed."""

    __slots__ = ("entries",)

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def defer(
        self,
        params: tuple[Tensor | None, ...],
        tensors: tuple[Tensor, ...],
        compute: Callable[[], Grads],
    ) -> None:
        """Put off `compute`, which returns one gradient (or None) for each of `params`.

        For the backward of a user's own autograd.Function whose forward kept this queue (see
        `weight_queue`) and left the weights out of its inputs. `tensors` must not change until W;
        that is checked.
        """
        self.entries.append(
            Entry(params, tensors, tuple(tensor._version for tensor in tensors), compute)
        )

    def held_bytes(self) -> int:
        """Return the bytes the entries keep alive, each storage once."""
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for entry in self.entries
            for tensor in entry.tensors
        }
        return sum(storages.values())

    def run(self) -> None:
        """Compute and add the gradients, in the order in which I met the weights.

        Raises RuntimeError if a tensor changed in place since I.
        """
        entries, self.entries = self.entries, []
        with torch.no_grad():
            sums: dict[Tensor, Tensor] | None = None
            if _repeats(entries):
                sums = {}
            for params, tensors, versions, compute in entries:
                for tensor, version in zip(tensors, versions, strict=True):
                    if tensor._version != version:
                        raise RuntimeError(
                            f"a tensor of shape {list(tensor.shape)} that a weight gradient needs "
                            "was changed in place between I and W; clone it before changing it"
                        )
                grads: Grads
                if compute is None:
                    x, g = tensors
                    _, bias = params
                    grads = (g.t().mm(x), None if bias is None else g.sum(0))
                else:
                    grads = compute()
                for param, grad in zip(params, grads, strict=True):
                    if param is None or grad is None:
                        continue
                    if sums is None:
                        accumulate(param, grad)
                    elif param in sums:
                        sums[param] = sums[param] + grad
                    else:
                        sums[param] = grad
            if sums is not None:
                for param, grad in sums.items():
                    accumulate(param, grad)


def _repeats(entries: list[Entry]) -> bool:
    """Whether a weight occurs twice: autograd then adds its uses before it adds to `.grad`."""
    seen: set[int] = set()
    for entry in entries:
        for param in entry.params:
            if param is not None:
                if id(param) in seen:
                    return True
                seen.add(id(param))
    return False


def accumulate(param: Tensor, grad: Tensor) -> None:
    """Add a gradient as autograd would: through the hooks where there are any."""
    if grad.dtype != param.dtype:
        grad = grad.to(param.dtype)
    if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
        torch.autograd.backward((param,), (grad,))
    elif param.grad is None:
        param.grad = grad
    else:
        param.grad.add_(grad)


# --- which queue is active -----------------------------------------------------------------

_local = threading.local()
_lock = threading.Lock()
_users = 0
# On CUDA, autograd runs checkpointed blocks again on its own threads, which have no queue of
# their own; where one pipeline alone runs in this process its queue serves them.
_shared: WeightQueue | None = None
_cuda = torch.cuda.is_available()


def weight_queue() -> WeightQueue | None:
    """Return the queue that weight gradients of the code running now may be put off to, if any.

    For user autograd.Functions: ask in forward (outside `Function.apply`), keep the answer on
    `ctx`, and in backward call `queue.defer`; None means: return the weights' gradients as usual.
    """
    found: WeightQueue | None = getattr(_local, "queue", _shared)
    return found


def activate(queue: WeightQueue | None) -> None:
    """Make `queue` the active one of this thread; None ends that."""
    global _shared
    _local.queue = queue
    if _cuda:
        _shared = queue if _users == 1 else None


# --- the replaced functions ----------------------------------------------------------------

_anchor_of = threading.local()


def _anchor(x: Tensor | None) -> Tensor | None:
    """Return what makes a Function's output differentiable although its input is not."""
    if x is not None and x.requires_grad:
        return None
    anchor: Tensor | None = getattr(_anchor_of, "tensor", None)
    if anchor is None:
        anchor = _anchor_of.tensor = torch.zeros((), requires_grad=True)
    return anchor


def _active_for(weight: Any) -> WeightQueue | None:
    """Return the queue if this weight's gradient can be put off: a plain trained leaf."""
    queue = weight_queue()
    if (
        queue is None
        or type(weight) is not Parameter
        or not weight.requires_grad
        or not torch.is_grad_enabled()
        or torch._C._are_functorch_transforms_active()
    ):
        return None
    return queue


def _refuse_second_order() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True reached a layer whose weight gradient is put off; "
            "build the Pipeline with defer=False"
        )


def _cast(x: Tensor, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    """Cast to autocast's type where it is on, as it would have done inside the function."""
    if not torch.is_autocast_enabled(x.device.type):
        return (x, *others)
    dtype = torch.get_autocast_dtype(x.device.type)
    return tuple(
        t.to(dtype) if t is not None and t.is_floating_point() else t for t in (x, *others)
    )


class _Linear(Function):
    """x [n, in] -> [n, out]; `use` is (queue, weight, bias, weight as cast, bias as cast)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor | None, use: Any) -> Tensor:
        ctx.use = use
        ctx.save_for_backward(x, use[3])
        return _linear(x, use[3], use[4])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        if torch.is_grad_enabled():
            _refuse_second_order()
        x, weight = ctx.saved_tensors
        queue, param, bias, _, _ = ctx.use
        queue.entries.append(Entry((param, bias), (x, g), (x._version, g._version), None))
        return (g.mm(weight) if ctx.needs_input_grad[0] else None), None, None


def _deferred_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if torch.compiler.is_compiling():
        return _linear(input, weight, bias)
    queue = _active_for(weight)
    if (
        queue is None
        or (bias is not None and (type(bias) is not Parameter or not bias.requires_grad))
        or type(input) is not Tensor
    ):
        return _linear(input, weight, bias)
    x, w, b = _cast(input, weight.detach(), None if bias is None else bias.detach())
    assert x is not None
    use = (queue, weight, bias, w, b)
    if x.dim() == 2:
        out: Tensor = _Linear.apply(x, _anchor(x), use)
        return out
    # flattened outside the Function: its output is then no view made inside it, which in-place
    # activations would be refused on, and the matmul takes the quick two-dimensional path
    flat = x.reshape(-1, x.shape[-1])
    out = _Linear.apply(flat, _anchor(x), use)
    return out.view(*x.shape[:-1], weight.shape[0])


class _Conv(Function):
    """A convolution; `use` is (queue, function, weight, bias, both as cast, geometry)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor | None, use: Any) -> Tensor:
        _, function, _, _, weight, bias, geometry = use
        ctx.use = use
        ctx.save_for_backward(x, weight)
        out: Tensor = function(x, weight, bias, *geometry)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        if torch.is_grad_enabled():
            _refuse_second_order()
        x, weight = ctx.saved_tensors
        queue, _, param, bias, _, _, (stride, padding, dilation, groups) = ctx.use

        def backward(mask: list[bool]) -> Any:
            return torch.ops.aten.convolution_backward(
                g,
                x,
                weight,
                None if bias is None else [weight.shape[0]],
                stride,
                padding,
                dilation,
                False,
                [0] * len(stride),
                groups,
                mask,
            )

        queue.defer((param, bias), (x, g), lambda: backward([False, True, bias is not None])[1:])
        grad = backward([True, False, False])[0] if ctx.needs_input_grad[0] else None
        return grad, None, None


def _deferred_conv(dims: int, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def conv(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        if torch.compiler.is_compiling():
            return original(input, weight, bias, stride, padding, dilation, groups)
        queue = _active_for(weight)
        if (
            queue is None
            or (bias is not None and (type(bias) is not Parameter or not bias.requires_grad))
            or type(input) is not Tensor
            or isinstance(padding, str)
            or input.dim() != dims + 2
        ):
            return original(input, weight, bias, stride, padding, dilation, groups)
        x, w, b = _cast(input, weight.detach(), None if bias is None else bias.detach())
        geometry = (_tuple(stride, dims), _tuple(padding, dims), _tuple(dilation, dims), groups)
        use = (queue, original, weight, bias, w, b, geometry)
        out: Tensor = _Conv.apply(x, _anchor(x), use)
        return out

    return conv


def _tuple(value: Any, dims: int) -> list[int]:
    if isinstance(value, int):
        return [value] * dims
    return list(value) if len(value) == dims else list(value) * dims


class _Embedding(Function):
    """Rows of a table; `use` is (queue, weight, padding index, scale by frequency)."""

    @staticmethod
    def forward(ctx: Any, indices: Tensor, anchor: Tensor | None, use: Any) -> Tensor:
        ctx.use = use
        ctx.save_for_backward(indices)
        _, weight, padding, scale = use
        return torch.embedding(weight, indices, padding, scale, False)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        if torch.is_grad_enabled():
            _refuse_second_order()
        (indices,) = ctx.saved_tensors
        queue, weight, padding, scale = ctx.use
        rows = weight.shape[0]
        queue.defer(
            (weight,),
            (indices, g),
            lambda: (torch.ops.aten.embedding_dense_backward(g, indices, rows, padding, scale),),
        )
        return None, None, None


def _deferred_embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    if torch.compiler.is_compiling() or max_norm is not None or sparse:
        queue = None
    else:
        queue = _active_for(weight)
    if queue is None or type(input) is not Tensor:
        return _embedding(
            input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
        )
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    out: Tensor = _Embedding.apply(
        input, _anchor(None), (queue, weight, padding, scale_grad_by_freq)
    )
    return out


class _Grouped(Function):
    """Products with one weight an expert; `use` is (queue, param, cast weight, product, mask).

    x is [experts, n, k], or [n, k] with the experts' rows in turn; the weight is [experts, k, m].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor | None, use: Any) -> Tensor:
        _, _, weight, product = use
        ctx.use = use
        ctx.save_for_backward(x, weight)
        out: Tensor = product(x, weight)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        if torch.is_grad_enabled():
            _refuse_second_order()
        x, weight = ctx.saved_tensors
        queue, param, _, product = ctx.use

        def weight_grad() -> Grads:
            # a weight laid out column by column gets a gradient laid out the same way
            if weight.stride(-2) == 1 and weight.stride(-1) == weight.shape[-2]:
                return (product(g.transpose(-2, -1), x).transpose(-2, -1),)
            return (product(x.transpose(-2, -1), g),)

        queue.defer((param,), (x, g), weight_grad)
        grad = product(g, weight.transpose(-2, -1)) if ctx.needs_input_grad[0] else None
        return grad, None, None


def _deferred_bmm(input: Tensor, mat2: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if torch.compiler.is_compiling() or args or kwargs:
        return _bmm(input, mat2, *args, **kwargs)
    queue = _active_for(mat2)
    if queue is None or type(input) is not Tensor:
        return _bmm(input, mat2)
    x, w = _cast(input, mat2.detach())
    out: Tensor = _Grouped.apply(x, _anchor(x), (queue, mat2, w, _bmm))
    return out


def _deferred_grouped(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def grouped_mm(
        mat_a: Tensor,
        mat_b: Tensor,
        *,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        plain = bias is None and out_dtype is None and mat_b.dim() == 3
        queue = _active_for(mat_b) if plain and not torch.compiler.is_compiling() else None
        if queue is None or type(mat_a) is not Tensor:
            return original(mat_a, mat_b, offs=offs, bias=bias, out_dtype=out_dtype)

        def product(a: Tensor, b: Tensor) -> Tensor:
            return original(a, b, offs=offs)

        x, w = _cast(mat_a, mat_b.detach())
        out: Tensor = _Grouped.apply(x, _anchor(x), (queue, mat_b, w, product))
        return out

    return grouped_mm


_linear = torch.nn.functional.linear
_embedding = torch.nn.functional.embedding
_bmm = torch.bmm

_REPLACED: list[tuple[Any, str, Any, Any]] = [
    (torch.nn.functional, "linear", _linear, _deferred_linear),
    (torch.nn.functional, "embedding", _embedding, _deferred_embedding),
    (torch, "bmm", _bmm, _deferred_bmm),
    *(
        (torch.nn.functional, name, getattr(torch.nn.functional, name), _deferred_conv(dims, f))
        for dims, name, f in (
            (dims, f"conv{dims}d", getattr(torch.nn.functional, f"conv{dims}d"))
            for dims in (1, 2, 3)
        )
    ),
    *(
        (where, name, getattr(where, name), _deferred_grouped(getattr(where, name)))
        for where, name in ((torch.nn.functional, "grouped_mm"), (torch, "_grouped_mm"))
        if hasattr(where, name)
    ),
]


_collects = False


@contextmanager
def routing() -> Iterator[None]:
    """Put the deferring functions in place; they act as the originals where no queue is active.

    Python's cyclic garbage collector rests meanwhile: with torch loaded it takes tens of
    milliseconds whenever it likes, on one rank, and all the others wait.
    """
    global _users, _collects
    with _lock:
        _users += 1
        if _users == 1:
            _collects = gc.isenabled()
            gc.disable()
            for where, name, _, ours in _REPLACED:
                setattr(where, name, ours)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                for where, name, original, _ in _REPLACED:
                    setattr(where, name, original)
                if _collects:
                    gc.enable()
