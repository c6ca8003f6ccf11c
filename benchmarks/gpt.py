"""A small GPT whose layers honestly differ, on text that every machine has.

The layers are an embedding, attention and MLP blocks of unequal width (as architecture search
leaves them), and a vocabulary head that costs several blocks: what an equal number of layers a
stage cannot balance. The text is the source of Python's standard library, in pieces that a
byte-level BPE learned from it; both are made once and kept in the user's cache directory.

`factory` is what `torchrun -m executor --model benchmarks.gpt:factory` calls: it returns
callables, so that each rank makes only its own layers, and each draws its weights from a seed of
its own, so that a layer starts alike whichever rank makes it.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

CORPUS_VERSION = 1  # raise it when what is written to the cache changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One attention layer and one MLP layer, by their inner widths."""

    num_heads: int
    attention_width: int
    mlp_width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GptSettings:
    """Sizes of model and batch: a sequence is `length` tokens, a microbatch so many of them."""

    vocabulary: int
    width: int
    length: int
    blocks: tuple[Block, ...]
    microbatch: int
    num_microbatches: int
    corpus_bytes: int
    learning_rate: float = 1e-3
    seed: int = 0

    @property
    def layer_names(self) -> list[str]:
        """One a layer, in forward order."""
        inner = [
            f"blocks.{index}.{part}"
            for index in range(len(self.blocks))
            for part in ("attention", "mlp")
        ]
        return ["embedding", *inner, "head"]


SETTINGS = GptSettings(
    vocabulary=8192,
    width=256,
    length=128,
    blocks=(
        Block(num_heads=4, attention_width=256, mlp_width=1024),
        Block(num_heads=2, attention_width=128, mlp_width=512),
        Block(num_heads=4, attention_width=256, mlp_width=1536),
        Block(num_heads=6, attention_width=384, mlp_width=768),
        Block(num_heads=2, attention_width=128, mlp_width=1024),
        Block(num_heads=4, attention_width=256, mlp_width=640),
    ),
    microbatch=2,
    num_microbatches=8,
    corpus_bytes=8_000_000,
)

TINY = GptSettings(
    vocabulary=300,
    width=16,
    length=8,
    blocks=(
        Block(num_heads=2, attention_width=16, mlp_width=32),
        Block(num_heads=1, attention_width=8, mlp_width=64),
    ),
    microbatch=2,
    num_microbatches=4,
    corpus_bytes=60_000,
)


class Embedding(nn.Module):
    """Token ids [microbatch, length] -> [microbatch, length, width]."""

    kind = "embedding"

    def __init__(self, settings: GptSettings) -> None:
        super().__init__()
        self.token = nn.Embedding(settings.vocabulary, settings.width)
        self.position = nn.Embedding(settings.length, settings.width)
        self.register_buffer("index", torch.arange(settings.length), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.token(ids) + self.position(self.index)


class Attention(nn.Module):
    """Causal self-attention with its norm and residual: [microbatch, length, width] throughout."""

    kind = "attention"

    def __init__(self, settings: GptSettings, block: Block) -> None:
        super().__init__()
        self.num_heads = block.num_heads
        self.norm = nn.LayerNorm(settings.width)
        self.qkv = nn.Linear(settings.width, 3 * block.attention_width)
        self.out = nn.Linear(block.attention_width, settings.width)

    def forward(self, inputs: Tensor) -> Tensor:
        batch, length, _ = inputs.shape
        projected = self.qkv(self.norm(inputs)).view(batch, length, 3, self.num_heads, -1)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return inputs + self.out(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two linear layers around a GELU, with norm and residual."""

    kind = "mlp"

    def __init__(self, settings: GptSettings, block: Block) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(settings.width)
        self.up = nn.Linear(settings.width, block.mlp_width)
        self.down = nn.Linear(block.mlp_width, settings.width)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(nn.functional.gelu(self.up(self.norm(inputs))))


class Head(nn.Module):
    """Norm and projection to the vocabulary: logits [microbatch, length, vocabulary]."""

    kind = "head"

    def __init__(self, settings: GptSettings) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(settings.width)
        self.project = nn.Linear(settings.width, settings.vocabulary, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.project(self.norm(inputs))


def next_token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy of the next token; logits [microbatch, length, vocabulary]."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def layer_makers(settings: GptSettings) -> list[Callable[[], nn.Module]]:
    """Return a callable a layer; each gives the same weights whenever it is called."""
    makers: list[Callable[[], nn.Module]] = [partial(Embedding, settings)]
    for block in settings.blocks:
        makers += [partial(Attention, settings, block), partial(Mlp, settings, block)]
    makers.append(partial(Head, settings))
    return [
        partial(_seeded, make, settings.seed * 1000 + index) for index, make in enumerate(makers)
    ]


def _seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = make()
        for module in layer.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
    return layer


def batches(settings: GptSettings, tokens: np.ndarray) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield minibatches without end: ids and next ids, [microbatches x microbatch, length] each.

    The windows are drawn with a generator of their own, so that every rank sees the same ones.
    """
    generator = np.random.default_rng(settings.seed)
    rows = settings.microbatch * settings.num_microbatches
    while True:
        starts = generator.integers(0, len(tokens) - settings.length - 1, size=rows)
        windows = np.stack([tokens[at : at + settings.length + 1] for at in starts])
        ids = torch.from_numpy(windows.astype(np.int64))
        yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def make_optimizer(
    settings: GptSettings, parameters: Sequence[nn.Parameter]
) -> torch.optim.Optimizer:
    """Return the optimizer of the settings: AdamW."""
    return torch.optim.AdamW(parameters, lr=settings.learning_rate)


Factory = tuple[
    list[Callable[[], nn.Module]],
    Callable[[Tensor, Tensor], Tensor],
    Iterator[tuple[Tensor, Tensor]],
    Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
]


def build(settings: GptSettings) -> Factory:
    """Return layers, loss, minibatches and optimizer as the executor takes them."""
    return (
        layer_makers(settings),
        next_token_loss,
        batches(settings, corpus(settings)),
        partial(make_optimizer, settings),
    )


def factory() -> Factory:
    """Return the model of `make run`."""
    return build(SETTINGS)


def tiny_factory() -> Factory:
    """Return a model small enough for tests."""
    return build(TINY)


def corpus(settings: GptSettings) -> np.ndarray:
    """Return the tokens of the standard library's source, uint16, from the cache if it has them.

    The same Python, settings and tokenizers version give the same tokens.
    """
    import tokenizers

    sources = _sources(settings.corpus_bytes)
    key = hashlib.sha256(
        f"{CORPUS_VERSION} {sys.version} {tokenizers.__version__} {settings.vocabulary} "
        f"{[(path.name, path.stat().st_size) for path in sources]}".encode()
    ).hexdigest()[:16]
    target = _cache_directory() / f"stdlib-{key}.npy"
    if target.exists():
        return np.load(target)
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in sources]
    tokenizer = _train_bpe(texts, settings.vocabulary)
    ids = [id_ for encoded in tokenizer.encode_batch(texts) for id_ in encoded.ids]
    tokens = np.array(ids, dtype=np.uint16)
    handle, temporary = tempfile.mkstemp(dir=target.parent, suffix=".npy")
    with os.fdopen(handle, "wb") as file:
        np.save(file, tokens)
    os.replace(temporary, target)  # ranks may do this at the same time: the last one wins whole
    return tokens


def _train_bpe(texts: Sequence[str], vocabulary: int):  # tokenizers has no types
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _sources(limit_bytes: int) -> list[Path]:
    """Return modules of the standard library in order of their path, up to so many bytes."""
    root = Path(sysconfig.get_path("stdlib"))
    chosen: list[Path] = []
    total = 0
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if "site-packages" in parts or "test" in parts or "tests" in parts:
            continue
        size = path.stat().st_size
        if total + size > limit_bytes:
            continue
        chosen.append(path)
        total += size
    return chosen


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    directory = (Path(base) if base else Path.home() / ".cache") / "octotune"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:  # no home to write to, as in some containers
        directory = Path(tempfile.gettempdir()) / f"octotune-{os.getuid()}"
        directory.mkdir(exist_ok=True)
    return directory
