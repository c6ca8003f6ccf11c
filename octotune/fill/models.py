"""Ready fill models: configurations from published shapes, by a roofline of the hardware.

Five models in the sizes that PipeFill states, each as a list of blocks, a micro-step each:

| name | shape | parameters |
| --- | --- | --- |
| efficientnet | EfficientNetV2-L without its classifier, 384 x 384 | 117 M |
| bert-base | 12 layers, hidden 768, feed-forward 3072, 12 heads, 512 tokens | 109 M |
| bert-large | 24 layers, hidden 1024, feed-forward 4096, 16 heads, 512 tokens, no pooler | 334 M |
| swin-large | Swin-L at twice its widths (384 to 3072), depths 2 2 18 2, 224 x 224 | 779 M |
| xlm-r-xl | 36 layers, hidden 2560, feed-forward 10240, 32 heads, 512 tokens | 2.8 B |

BERT's vocabulary is 30522; XLM-R's embedding is left on the host, and out of the count.

A block's time is the larger of compute and memory traffic, plus launches. Compute runs at a share
of the peak that grows with the rows of its matrices, so that small batches cost. Weights and
activations are 16 bit; training keeps 16 bytes a parameter (weights, gradients, fp32 master and
Adam's moments). Offloading keeps weights and optimizer state on the host, streams a block's
weights in and its gradients out, and updates there. These are estimates, for planning and for
fleets; a real job brings measured micro-steps.

Source:
    Sizes: Arfeen et al. 2024, arXiv:2410.07192. Shapes: Tan and Le 2021, arXiv:2104.00298; Devlin
    et al. 2019, arXiv:1810.04805; Liu et al. 2021, arXiv:2103.14030; Goyal et al. 2021,
    arXiv:2105.00572. Saved bytes of a transformer layer: Korthikanti et al. 2022,
    arXiv:2205.05198. Bytes a parameter: Rajbhandari et al. 2020, arXiv:1910.02054.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from octotune.contract.quantities import short
from octotune.errors import MalformedError
from octotune.fill.jobs import Configuration, JobKind, MicroStep, Technique

_NS_PER_S = 10**9
_HALF = 2  # bytes of a 16-bit number
_STATE = 16  # bytes a parameter in training
_UPDATE_TRAFFIC = 28  # bytes a parameter that Adam reads and writes
_BATCH_SIZES = tuple(2**k for k in range(11))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A device as the roofline knows it. Rates per second.

    Of `peak_flops` matrices of `half_rows` rows reach half of `attainable`.
    """

    name: str
    peak_flops: float
    attainable: float
    half_rows: int
    bandwidth: float
    launch_ns: int
    memory_bytes: int
    link_bandwidth: float
    host_update_rate: float  # parameters a second that the host's optimizer updates


HARDWARE = {
    hardware.name: hardware
    for hardware in (
        Hardware(
            name="v100",
            peak_flops=125e12,
            attainable=0.6,
            half_rows=512,
            bandwidth=0.8 * 900e9,
            launch_ns=6_000,
            memory_bytes=16 * 2**30,
            link_bandwidth=12e9,
            host_update_rate=1e9,
        ),
        Hardware(
            name="h100",
            peak_flops=989e12,
            attainable=0.6,
            half_rows=2048,
            bandwidth=0.8 * 3350e9,
            launch_ns=4_000,
            memory_bytes=80 * 2**30,
            link_bandwidth=50e9,
            host_update_rate=2e9,
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What the profile keeps whole. Numbers are for one sample, but `params` and `kernels`."""

    name: str
    params: int
    flops: int  # of the forward
    rows: int  # of its matrices
    traffic_bytes: int  # activations read and written by the forward
    saved_bytes: int  # kept for the backward
    output_bytes: int
    kernels: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FillModel:
    """A model by its blocks, in forward order."""

    name: str
    blocks: tuple[Block, ...]

    @property
    def params(self) -> int:
        """How many parameters it has."""
        return sum(block.params for block in self.blocks)

    def flops(self, kind: JobKind) -> int:
        """Return the useful operations of one sample: forward, or forward and backward."""
        return sum(block.flops for block in self.blocks) * (3 if kind == "training" else 1)


def _transformer(
    name: str, *, width: int, inner: int, heads: int, tokens: int, **extra: int
) -> Block:
    """Return a transformer layer; attention among `window` tokens where it is given."""
    window = extra.get("window", tokens)
    weights = 4 * width * width + 2 * width * inner
    scores = heads * tokens * window
    return Block(
        name=name,
        params=weights + 9 * width + inner + extra.get("bias", 0),
        flops=2 * tokens * weights + 4 * tokens * window * width,
        rows=tokens,
        traffic_bytes=_HALF * (tokens * (16 * width + 4 * inner) + 4 * scores),
        saved_bytes=34 * tokens * width * (2 * width + inner) // (6 * width) + 5 * scores,
        output_bytes=_HALF * tokens * width,
        kernels=14,
    )


def _text_model(
    name: str,
    *,
    layers: int,
    width: int,
    inner: int,
    heads: int,
    tokens: int,
    vocabulary: int = 0,
    pooler: bool = False,
) -> FillModel:
    embedding = Block(
        name="embedding",
        params=(vocabulary + 512 + 2) * width + 2 * width if vocabulary else 0,
        flops=0,
        rows=tokens,
        traffic_bytes=4 * _HALF * tokens * width,
        saved_bytes=_HALF * tokens * width,
        output_bytes=_HALF * tokens * width,
        kernels=4,
    )
    blocks = [embedding] + [
        _transformer(f"layers.{i}", width=width, inner=inner, heads=heads, tokens=tokens)
        for i in range(layers)
    ]
    if pooler:
        blocks.append(
            Block(
                name="pooler",
                params=width * (width + 1),
                flops=2 * width * width,
                rows=1,
                traffic_bytes=2 * _HALF * width,
                saved_bytes=_HALF * width,
                output_bytes=_HALF * width,
                kernels=2,
            )
        )
    return FillModel(name=name, blocks=tuple(blocks))


def _swin(name: str, width: int, depths: tuple[int, ...], image: int, window: int) -> FillModel:
    side = image // 4
    blocks = [
        Block(
            name="patches",
            params=(4 * 4 * 3 + 3) * width,
            flops=2 * side * side * 48 * width,
            rows=side * side,
            traffic_bytes=2 * _HALF * side * side * width,
            saved_bytes=_HALF * side * side * width,
            output_bytes=_HALF * side * side * width,
            kernels=3,
        )
    ]
    for stage, depth in enumerate(depths):
        heads = width // 32
        blocks += [
            _transformer(
                f"stages.{stage}.{i}",
                width=width,
                inner=4 * width,
                heads=heads,
                tokens=side * side,
                window=window * window,
                bias=(2 * window - 1) ** 2 * heads,
            )
            for i in range(depth)
        ]
        if stage + 1 < len(depths):
            side //= 2
            rows = side * side
            blocks.append(
                Block(
                    name=f"merge.{stage}",
                    params=8 * width * width + 8 * width,
                    flops=2 * rows * 8 * width * width,
                    rows=rows,
                    traffic_bytes=_HALF * rows * 12 * width,
                    saved_bytes=_HALF * rows * 8 * width,
                    output_bytes=_HALF * rows * 2 * width,
                    kernels=3,
                )
            )
            width *= 2
    return FillModel(name=name, blocks=tuple(blocks))


def _convolution_block(
    name: str, kind: str, cin: int, cout: int, expand: int, side: int, stride: int
) -> Block:
    """Return an EfficientNetV2 block: `fused` or `mbconv`, of 3 x 3 convolutions."""
    out = side // stride
    inner, here, there = cin * expand, side * side, out * out
    if kind == "fused" and expand == 1:
        params = 9 * cin * cout + 2 * cout
        flops = 2 * there * 9 * cin * cout
        elements = here * cin + there * cout
        kernels = 3
    elif kind == "fused":
        params = 9 * cin * inner + 2 * inner + inner * cout + 2 * cout
        flops = 2 * there * (9 * cin * inner + inner * cout)
        elements = here * cin + there * (2 * inner + cout)
        kernels = 6
    else:
        squeeze = max(1, cin // 4)
        params = cin * inner + 2 * inner + 9 * inner + 2 * inner
        params += 2 * inner * squeeze + squeeze + inner + inner * cout + 2 * cout
        flops = 2 * here * cin * inner + 2 * there * (9 * inner + inner * cout)
        elements = here * (cin + 2 * inner) + there * (4 * inner + cout)
        kernels = 14
    return Block(
        name=name,
        params=params,
        flops=flops,
        rows=there,
        traffic_bytes=2 * _HALF * elements,
        saved_bytes=2 * _HALF * elements,
        output_bytes=_HALF * there * cout,
        kernels=kernels,
    )


def _efficientnet(name: str, image: int) -> FillModel:
    side = image // 2
    stem = Block(
        name="stem",
        params=9 * 3 * 32 + 64,
        flops=2 * side * side * 27 * 32,
        rows=side * side,
        traffic_bytes=2 * _HALF * side * side * 35,
        saved_bytes=2 * _HALF * side * side * 32,
        output_bytes=_HALF * side * side * 32,
        kernels=3,
    )
    blocks, cin = [stem], 32
    for stage, (kind, expand, stride, cout, depth) in enumerate(
        (
            ("fused", 1, 1, 32, 4),
            ("fused", 4, 2, 64, 7),
            ("fused", 4, 2, 96, 7),
            ("mbconv", 4, 2, 192, 10),
            ("mbconv", 6, 1, 224, 19),
            ("mbconv", 6, 2, 384, 25),
            ("mbconv", 6, 1, 640, 7),
        )
    ):
        for i in range(depth):
            step = stride if i == 0 else 1
            blocks.append(
                _convolution_block(f"stages.{stage}.{i}", kind, cin, cout, expand, side, step)
            )
            cin, side = cout, side // step
    blocks.append(
        Block(
            name="head",
            params=640 * 1280 + 2 * 1280,
            flops=2 * side * side * 640 * 1280,
            rows=side * side,
            traffic_bytes=2 * _HALF * side * side * (640 + 1280),
            saved_bytes=2 * _HALF * side * side * 1280,
            output_bytes=_HALF * 1280,
            kernels=4,
        )
    )
    return FillModel(name=name, blocks=tuple(blocks))


@cache
def models() -> dict[str, FillModel]:
    """Return the ready models by name."""
    found = (
        _efficientnet("efficientnet", 384),
        _text_model(
            "bert-base",
            layers=12,
            width=768,
            inner=3072,
            heads=12,
            tokens=512,
            vocabulary=30522,
            pooler=True,
        ),
        _text_model(
            "bert-large",
            layers=24,
            width=1024,
            inner=4096,
            heads=16,
            tokens=512,
            vocabulary=30522,
        ),
        _swin("swin-large", 384, (2, 2, 18, 2), 224, 7),
        _text_model("xlm-r-xl", layers=36, width=2560, inner=10240, heads=32, tokens=512),
    )
    return {model.name: model for model in found}


def find_model(name: str, place: str = "model") -> FillModel:
    """Return a ready model. Raises MalformedError where there is none of that name."""
    if name in models():
        return models()[name]
    raise MalformedError(f"{place}: found {short(name)}; {_allowed(name, models())}")


def find_hardware(name: str, place: str = "hardware") -> Hardware:
    """Return a known device. Raises MalformedError where there is none of that name."""
    if name in HARDWARE:
        return HARDWARE[name]
    raise MalformedError(f"{place}: found {short(name)}; {_allowed(name, HARDWARE)}")


def _allowed(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name[:60].lower(), known, n=1)
    return f"did you mean {near[0]}?" if near else f"allowed: {', '.join(known)}"


@cache
def configurations_of(
    model: FillModel, hardware: Hardware, kind: JobKind, time_scale: float = 1.0
) -> tuple[Configuration, ...]:
    """Return a model's configurations: batch sizes 1 to 1024, by the techniques that apply.

    Those whose largest micro-step exceeds the hardware's memory are left out.

    Args:
        model: its blocks.
        hardware: what they run on.
        kind: training or inference.
        time_scale: multiplies all times, to fit measurements.
    """
    techniques: tuple[Technique, ...] = (
        ("none", "offload")
        if kind == "inference"
        else ("none", "checkpointing", "offload", "checkpointing and offload")
    )
    found = []
    for technique in techniques:
        for batch_size in _BATCH_SIZES:
            make = _inference if kind == "inference" else _training
            configuration = make(model, hardware, batch_size, technique, time_scale)
            if configuration.peak_bytes > hardware.memory_bytes:
                break
            found.append(configuration)
    return tuple(found)


def alone_ns(configurations: Iterable[Configuration]) -> float:
    """Return the time of a sample on a device of its own: the best of the configurations."""
    return min(c.pass_ns / c.batch_size for c in configurations)


def _forward_ns(block: Block, hardware: Hardware, batch_size: int) -> float:
    rows = block.rows * batch_size
    rate = hardware.peak_flops * hardware.attainable * rows / (rows + hardware.half_rows)
    moved = _HALF * block.params * (block.flops > 0) + batch_size * block.traffic_bytes
    compute = max(batch_size * block.flops / rate, moved / hardware.bandwidth)
    return compute * _NS_PER_S + block.kernels * hardware.launch_ns


def _copy_ns(num_bytes: float, hardware: Hardware) -> int:
    return math.ceil(num_bytes / hardware.link_bandwidth * _NS_PER_S)


def _step(name: str, time_ns: float, memory: int, copy_ns: int, scale: float) -> MicroStep:
    time = max(time_ns * scale, copy_ns)
    return MicroStep(name=name, time_ns=max(1, round(time)), memory_bytes=memory, copy_ns=copy_ns)


def _workspace(block: Block, batch_size: int) -> int:
    return batch_size * (block.traffic_bytes // 2 + 2 * block.output_bytes)


def _streamed(model: FillModel) -> int:
    """Return the bytes of the block at hand and the next, which is on its way."""
    sizes = [_HALF * block.params for block in model.blocks]
    return max(map(sum, zip(sizes, [*sizes[1:], 0], strict=True)))


def _inference(
    model: FillModel, hardware: Hardware, batch_size: int, technique: Technique, scale: float
) -> Configuration:
    offload = technique == "offload"
    resident = 0 if offload else _HALF * model.params
    weights = _streamed(model) if offload else resident
    steps = [
        _step(
            block.name,
            _forward_ns(block, hardware, batch_size),
            weights + _workspace(block, batch_size),
            _copy_ns(_HALF * block.params, hardware) if offload else 0,
            scale,
        )
        for block in model.blocks
    ]
    return Configuration(
        batch_size=batch_size,
        technique=technique,
        resident_bytes=resident,
        carried_bytes=batch_size * max(block.output_bytes for block in model.blocks),
        micro_steps=tuple(steps),
    )


def _training(
    model: FillModel, hardware: Hardware, batch_size: int, technique: Technique, scale: float
) -> Configuration:
    offload, checkpointing = "offload" in technique, "checkpointing" in technique
    resident = 0 if offload else _STATE * model.params
    weights = 2 * _streamed(model) if offload else resident  # gradients on their way, too
    kept = [
        batch_size * (block.output_bytes if checkpointing else block.saved_bytes)
        for block in model.blocks
    ]
    steps, held = [], 0
    for block, saved in zip(model.blocks, kept, strict=True):
        held += saved
        steps.append(
            _step(
                f"{block.name} forward",
                _forward_ns(block, hardware, batch_size),
                weights + held + _workspace(block, batch_size),
                _copy_ns(_HALF * block.params, hardware) if offload else 0,
                scale,
            )
        )
    carried = held
    for block, saved in zip(reversed(model.blocks), reversed(kept), strict=True):
        again = batch_size * block.saved_bytes if checkpointing else 0
        forward_ns = _forward_ns(block, hardware, batch_size)
        time = (3 if checkpointing else 2) * forward_ns
        if offload:
            time = max(time, block.params / hardware.host_update_rate * _NS_PER_S)
        steps.append(
            _step(
                f"{block.name} backward",
                time,
                weights + held + again + _workspace(block, batch_size),
                _copy_ns(2 * _HALF * block.params, hardware) if offload else 0,
                scale,
            )
        )
        held -= saved
    if not offload:
        update = _UPDATE_TRAFFIC * model.params / hardware.bandwidth * _NS_PER_S
        steps.append(_step("update", update, resident, 0, scale))
    return Configuration(
        batch_size=batch_size,
        technique=technique,
        resident_bytes=resident,
        carried_bytes=carried,
        micro_steps=tuple(steps),
    )
