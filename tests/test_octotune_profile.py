"""profile: bytes against hand counts, gradients of the split, what is left as it was, refusals."""

import copy
import subprocess
from itertools import pairwise
from typing import ClassVar

import hypothesis.strategies as st
import msgspec
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from executor.measure import deferred_split
from octotune.contract import Layer, Workload
from octotune.errors import MalformedError
from octotune.model import profile
from octotune.model.chain import Link, byte_pass, sound_chain
from octotune.model.neighbours import busy_neighbours
from octotune.model.split import autograd_split
from octotune.model.storages import SavedStorages, storage_bytes, storage_key

FLOAT = 4


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny layers on several threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


STEP_COUNTER = 4  # AdamW keeps one float a parameter


def squared(output, target):
    return (output - target).square().mean() if target is not None else output.square().mean()


def measured(*layers: nn.Module, inputs: torch.Tensor, loss_fn=squared, **named) -> Workload:
    return profile(
        layers, inputs, loss_fn, **{"repeats": 1, "warmup": 0, "progress": False} | named
    )


def first_layer(layer: nn.Module, inputs: torch.Tensor, **named) -> Layer:
    """Profile a layer between one that makes its input need a gradient and one for the loss."""
    before = nn.Linear(inputs.shape[-1], inputs.shape[-1])
    return measured(before, layer, Square(), inputs=inputs, **named).layers[1]


class Square(nn.Module):
    def forward(self, inputs):
        return inputs * 1.0


class Attention(nn.Module):
    """One pre-norm attention block written out: x + Wo softmax(q k') v."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, inputs):
        batch, length, width = inputs.shape
        heads = (batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = self.qkv(self.norm(inputs)).view(heads).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(query @ key.transpose(-2, -1), dim=-1)
        return inputs + self.out((weights @ value).transpose(1, 2).reshape(inputs.shape))


# ---------------------------------------------------------------- bytes against hand counts


def test_linear_keeps_its_input_and_its_output_gradient_for_w():
    layer = first_layer(nn.Linear(8, 32), torch.randn(6, 8))
    params = 8 * 32 + 32
    assert layer.param_bytes == FLOAT * params
    assert layer.state_bytes == 4 * FLOAT * params + 2 * STEP_COUNTER  # w, g, two moments
    assert layer.saved_bytes == 0
    assert layer.saved_w_bytes == FLOAT * 6 * 8
    assert layer.held_w_bytes == FLOAT * 6 * 32
    assert layer.output_bytes == FLOAT * 6 * 32
    assert layer.offloadable_bytes == 0  # all it saves is its input


def test_gelu_keeps_its_input_until_i_and_nothing_for_w():
    layer = first_layer(nn.GELU(), torch.randn(6, 8))
    assert (layer.param_bytes, layer.state_bytes, layer.optimizer_ns) == (0, 0, 0)
    assert (layer.saved_bytes, layer.saved_w_bytes, layer.held_w_bytes) == (FLOAT * 48, 0, 0)


def test_layer_norm_keeps_its_input_and_two_statistics_a_row():
    layer = first_layer(nn.LayerNorm(8), torch.randn(6, 8))
    assert (layer.saved_bytes, layer.saved_w_bytes) == (FLOAT * (48 + 2 * 6), 0)
    assert layer.held_w_bytes == 0
    assert layer.offloadable_bytes == 0  # too small for a copy of their own
    rows = 2048
    layer = first_layer(nn.LayerNorm(8), torch.randn(rows, 8))
    assert layer.offloadable_bytes == FLOAT * 2 * rows


def test_embedding_keeps_the_token_ids_and_its_output_gradient():
    ids = torch.randint(0, 50, (3, 7))
    layer = measured(nn.Embedding(50, 8), Square(), inputs=ids).layers[0]
    assert layer.param_bytes == FLOAT * 400
    assert (layer.saved_bytes, layer.saved_w_bytes) == (0, 8 * 21)
    assert layer.held_w_bytes == layer.output_bytes == FLOAT * 21 * 8


def test_attention_block_by_hand():
    batch, length, width, heads = 2, 5, 12, 3
    tokens = batch * length
    layer = first_layer(Attention(width, heads), torch.randn(batch, length, width))
    norm_out, attended = tokens * width, tokens * width
    qkv = 3 * tokens * width  # one storage, of which query, key and value are views
    scores = batch * heads * length * length
    norm_saves = tokens * width + 2 * tokens
    # permuted views are made contiguous for the batched products, which is what is saved then
    assert layer.saved_w_bytes == FLOAT * (norm_out + attended)
    assert layer.held_w_bytes == FLOAT * (3 * tokens * width + tokens * width)
    assert layer.saved_bytes in {
        FLOAT * (norm_saves + scores + copies) for copies in (qkv, qkv + tokens * width)
    }
    assert layer.param_bytes == FLOAT * (2 * width + 4 * width * width + 4 * width)


def test_dropout_keeps_its_mask_and_convolution_its_input():
    dropout = first_layer(nn.Dropout(0.5), torch.randn(6, 8))
    assert dropout.saved_bytes in {48, FLOAT * 48}  # a mask of bytes, or of scaled numbers
    images = torch.randn(2, 3, 8, 8)
    workload = measured(nn.Conv2d(3, 4, 3), Square(), inputs=images)
    conv = workload.layers[0]
    assert (conv.saved_bytes, conv.saved_w_bytes) == (0, FLOAT * images.numel())
    assert conv.held_w_bytes == conv.output_bytes == FLOAT * 2 * 4 * 6 * 6


def test_the_loss_is_the_last_layers_part():
    ids = torch.randint(0, 11, (4,))
    layer = measured(
        nn.Linear(8, 11),
        inputs=torch.randn(4, 8),
        loss_fn=nn.functional.cross_entropy,
        example_target=ids,
    ).layers[0]
    log_softmax, targets, weight_sum = FLOAT * 44, 8 * 4, FLOAT
    assert layer.saved_bytes == log_softmax + targets + weight_sum
    assert layer.saved_w_bytes == FLOAT * 32
    assert layer.output_bytes == FLOAT


def test_a_storage_that_two_layers_save_counts_once_and_until_w():
    """ReLU saves its output, which is the next Linear's input."""
    inputs = torch.randn(6, 8)
    relu, linear = measured(
        nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), Square(), inputs=inputs
    ).layers[1:3]
    assert (relu.saved_bytes, relu.saved_w_bytes) == (0, 0)
    assert (linear.saved_bytes, linear.saved_w_bytes) == (0, FLOAT * 48)


def test_query_key_and_value_projections_share_one_saved_input():
    class Three(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, inputs):
            return sum(part(inputs) for part in self.parts)

    layer = first_layer(Three(), torch.randn(6, 8))
    assert layer.saved_w_bytes == FLOAT * 48
    assert layer.held_w_bytes == FLOAT * 48  # a sum hands one gradient to all three


def test_frozen_parameters_are_resident_but_have_no_gradient():
    layer = nn.Linear(8, 8)
    layer.weight.requires_grad_(False)
    found = first_layer(layer, torch.randn(6, 8))
    assert found.param_bytes == FLOAT * 8  # the bias
    assert found.state_bytes == FLOAT * (64 + 8 + 8 + 2 * 8) + STEP_COUNTER
    assert found.saved_w_bytes == 0
    everything = first_layer(nn.Linear(8, 8).requires_grad_(False), torch.randn(6, 8))
    assert (everything.param_bytes, everything.state_bytes) == (0, FLOAT * 72)
    assert everything.weight_grad_ns < 10**6


def test_buffers_and_constants_are_no_activations():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.rand(6, 8))
            self.plain = torch.rand(6, 8)

        def forward(self, inputs):
            return inputs * self.scale * self.plain

    layer = first_layer(Masked(), torch.randn(6, 8))
    assert (layer.saved_bytes, layer.saved_w_bytes) == (0, 0)
    assert layer.state_bytes == FLOAT * 48


def test_workspace_is_what_an_action_needs_beyond_what_it_keeps():
    class Wide(nn.Module):
        def forward(self, inputs):
            return inputs.repeat(1, 10).view(6, 10, 8).sum(1)

    layer = first_layer(Wide(), torch.randn(6, 8))
    assert layer.saved_bytes == 0
    assert layer.workspace_bytes >= FLOAT * 48 * 10


def test_optimizer_state_is_counted_from_the_optimizer_that_is_given():
    params = 8 * 32 + 32
    plain = first_layer(
        nn.Linear(8, 32), torch.randn(6, 8), optimizer_fn=lambda own: torch.optim.SGD(own, lr=0.1)
    )
    assert plain.state_bytes == 2 * FLOAT * params
    momentum = first_layer(
        nn.Linear(8, 32),
        torch.randn(6, 8),
        optimizer_fn=lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9),
    )
    assert momentum.state_bytes == 3 * FLOAT * params


@given(
    widths=st.lists(st.integers(1, 12), min_size=2, max_size=5),
    rows=st.integers(1, 5),
    between=st.sampled_from([nn.GELU, nn.Tanh, nn.ReLU, nn.Sigmoid]),
)
@settings(max_examples=15, deadline=None)
def test_all_layers_together_save_what_autograd_saves(widths, rows, between):
    """The sum over layers equals one count over the unsplit model's forward."""
    torch.manual_seed(0)
    layers = [
        part for wide, narrow in pairwise(widths) for part in (nn.Linear(wide, narrow), between())
    ]
    inputs = torch.randn(rows, widths[0])
    model = nn.Sequential(*layers)
    saves = SavedStorages({storage_key(each) for each in model.parameters()})
    with saves.hear():
        loss = squared(model(inputs), None)
    workload = measured(*layers, inputs=inputs)
    total = sum(layer.saved_bytes + layer.saved_w_bytes for layer in workload.layers)
    assert total == storage_bytes(saves.kept.values())
    assert loss.isfinite()
    linear = [layer for layer in workload.layers if layer.kind == "Linear"]
    assert [layer.saved_w_bytes for layer in linear] == [FLOAT * rows * w for w in widths[:-1]]
    assert all(layer.offloadable_bytes <= layer.saved_bytes for layer in workload.layers)


# ---------------------------------------------------------------- the split


def twice(width: int) -> nn.Module:
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(width, width)

        def forward(self, inputs):
            return self.inner(torch.relu_(self.inner(inputs)))

    return Twice()


def encoder(width: int) -> nn.Module:
    return nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True)


@pytest.mark.parametrize("make", [twice, encoder, lambda w: Attention(w, 2), nn.LayerNorm])
def test_i_then_w_give_the_gradients_of_one_backward(make):
    torch.manual_seed(1)
    layer = make(8)
    whole = copy.deepcopy(layer)
    inputs = torch.randn(2, 3, 8, requires_grad=True)
    grad = torch.randn(2, 3, 8)
    expected = inputs.detach().clone().requires_grad_()
    whole(expected).backward(grad)

    run = autograd_split(layer, inputs, tuple(layer.parameters()))
    input_grad = run.input_grad(grad)
    waiting = {id(part.weight) for part in layer.modules() if isinstance(part, nn.Linear)}
    assert all(each.grad is None for each in layer.parameters() if id(each) in waiting)
    run.weight_grad()

    # equal up to the order of summation where one weight gets several gradients
    torch.testing.assert_close(input_grad, expected.grad)
    for own, other in zip(layer.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


def test_the_executors_split_keeps_the_same_bytes_as_autograds():
    """Two splits that share no code, and one count."""
    layers, ids, target = mixed_model()
    named = {"example_target": target, "repeats": 1, "warmup": 0}
    by_autograd = profile(layers, ids, token_loss, **named)
    by_executor = profile(layers, ids, token_loss, split=deferred_split, **named)
    fields = (
        "param_bytes", "state_bytes", "saved_bytes", "saved_w_bytes", "held_w_bytes",
        "output_bytes", "offloadable_bytes",
    )  # fmt: skip
    for one, other in zip(by_autograd.layers, by_executor.layers, strict=True):
        assert [getattr(one, name) for name in fields] == [getattr(other, name) for name in fields]
    assert all(layer.weight_grad_ns > 0 for layer in by_executor.layers[::4])


def test_functions_are_put_back_when_a_layer_fails():
    before = nn.functional.linear
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        autograd_split(nn.Linear(3, 3), torch.randn(2, 4), ())
    assert nn.functional.linear is before


def test_the_executors_split_can_take_autograds_place():
    """Whatever runs I and W is timed and asked what it keeps."""
    calls = []

    class Recorder:
        def __init__(self, function, inputs, parameters):
            self.run = autograd_split(function, inputs, parameters)
            self.output = self.run.output

        def input_grad(self, grad):
            calls.append("I")
            return self.run.input_grad(grad)

        def weight_grad(self):
            calls.append("W")
            self.run.weight_grad()

        def kept_inputs(self):
            return []

        def kept_grads(self):
            return []

    workload = measured(nn.Linear(4, 4), nn.GELU(), inputs=torch.randn(2, 4), split=Recorder)
    assert calls == ["I", "I", "W", "W"] * 2  # the byte pass, then one timed pass
    linear = workload.layers[0]
    assert (linear.saved_bytes, linear.saved_w_bytes, linear.held_w_bytes) == (FLOAT * 8, 0, 0)


# ---------------------------------------------------------------- the workload


def mixed_model() -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    layers = nn.Sequential()
    layers.add_module("tokens", nn.Embedding(20, 8))
    layers.add_module("attention", Attention(8, 2))
    layers.add_module("rectify", nn.ReLU(inplace=True))
    layers.add_module("drop", nn.Dropout(0.2))
    layers.add_module("head", nn.Linear(8, 20))
    ids = torch.randint(0, 20, (2, 5))
    return layers, ids, ids.roll(-1, 1)


def token_loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def test_a_mixed_model_gives_a_valid_workload_with_its_modules_names():
    layers, ids, target = mixed_model()
    workload = profile(
        layers, ids, token_loss, example_target=target, repeats=3, warmup=1, name="mixed"
    )
    assert msgspec.json.decode(msgspec.json.encode(workload), type=Workload) == workload
    assert workload.name == "mixed"
    assert [layer.name for layer in workload.layers] == [
        "tokens", "attention", "rectify", "drop", "head",
    ]  # fmt: skip
    assert [layer.kind for layer in workload.layers] == [
        "Embedding", "Attention", "ReLU", "Dropout", "Linear",
    ]  # fmt: skip
    for layer in workload.layers:
        assert layer.forward_ns > 0
        assert layer.output_bytes > 0
    for index in (0, 1, 4):
        layer = workload.layers[index]
        assert layer.weight_grad_ns > 0
        assert layer.optimizer_ns > 0
    assert workload.layers[1].input_grad_ns > 0


def test_nothing_of_the_model_is_left_changed():
    layers, ids, target = mixed_model()
    layers.append(nn.BatchNorm1d(5))
    layers[0].weight.grad = torch.ones(20, 8)
    before = copy.deepcopy(layers.state_dict())
    threads, random_state = torch.get_num_threads(), torch.random.get_rng_state()
    profile(
        layers,
        ids,
        lambda output, _: output.square().mean(),
        example_target=target,
        repeats=1,
        warmup=1,
        threads=1,
    )
    for key, value in layers.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert torch.equal(layers[0].weight.grad, torch.ones(20, 8))
    assert all(each.grad is None for each in layers[1:].parameters())
    assert layers.training
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.random.get_rng_state(), random_state)


def test_layers_given_as_callables_are_made_one_at_a_time_and_hold_the_same_bytes():
    alive: list[int] = []

    def maker(seed: int):
        def make() -> nn.Module:
            torch.manual_seed(seed)
            module = Counted()
            alive.append(len(Counted.living))
            return module

        return make

    class Counted(nn.Linear):
        living: ClassVar[set[int]] = set()

        def __init__(self):
            super().__init__(8, 8)
            Counted.living.add(id(self))

        def __del__(self):
            Counted.living.discard(id(self))

    inputs = torch.randn(4, 8)
    makers = [maker(seed) for seed in range(4)]
    one_by_one = profile(makers, inputs, squared, repeats=1, warmup=0)
    assert alive == [1, 1, 1, 1]
    together = profile([make() for make in makers], inputs, squared, repeats=1, warmup=0)

    def sizes(workload: Workload) -> list[tuple[int, ...]]:
        return [
            (layer.param_bytes, layer.state_bytes, layer.saved_bytes, layer.saved_w_bytes,
             layer.held_w_bytes, layer.output_bytes)
            for layer in workload.layers
        ]  # fmt: skip

    assert sizes(one_by_one) == sizes(together)


def test_layers_that_share_parameters_are_tied():
    embedding, head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
    head.weight = embedding.weight
    ids = torch.randint(0, 20, (2, 5))
    layers = [embedding, nn.Linear(8, 8), head]
    workload = profile(
        layers, ids, token_loss, example_target=ids, repeats=1, warmup=0, progress=False
    )
    assert workload.tied == ((0, 2),)
    with pytest.raises(MalformedError, match="shares parameters with more than one layer"):
        profile([*layers[:2], nn.Linear(8, 8), layers[1], layers[1], head], ids, token_loss,
                example_target=ids, repeats=1, warmup=0)  # fmt: skip


def test_a_layer_that_changes_its_input_is_measured_on_a_copy():
    link = Link(name="relu", function=nn.ReLU(inplace=True), parameters=(), is_last=False)
    inputs = torch.randn(4, 4, requires_grad=True)
    before = inputs.detach().clone()
    links, output = sound_chain([link], inputs)
    sizes = byte_pass(links, inputs, autograd_split, [])
    assert torch.equal(inputs.detach(), before)
    assert torch.equal(output, before.relu())
    assert sizes[0].saved_bytes == FLOAT * 16


def test_neighbours_compute_until_the_block_ends(monkeypatch):
    started: list[subprocess.Popen] = []

    def start(*arguments, **named):
        started.append(subprocess.Popen(*arguments, **named))
        return started[-1]

    monkeypatch.setattr("octotune.model.neighbours.Popen", start)
    with busy_neighbours(1):
        assert [process.poll() for process in started] == [None]
    assert [process.poll() for process in started] == [0]


def test_a_neighbour_that_cannot_start_is_an_error(monkeypatch):
    monkeypatch.setattr("octotune.model.neighbours._PROGRAM", "raise SystemExit(3)")
    with (
        pytest.raises(RuntimeError, match="a neighbour process ended with status 3 before"),
        busy_neighbours(1),
    ):
        pass


def test_the_bar_is_silent_where_stderr_is_no_terminal(capfd):
    measured(nn.Linear(2, 2), inputs=torch.randn(2, 2), progress=True)
    assert capfd.readouterr() == ("", "")


# ---------------------------------------------------------------- refusals


class Pair(nn.Module):
    def forward(self, inputs):
        return inputs, inputs


@pytest.mark.parametrize(
    ("layers", "named", "message"),
    [
        ([], {}, "layers is empty"),
        ([3], {}, r"layers\[0\] is a int; it is an nn.Module or a callable"),
        ([lambda: 3], {}, "layer 'layers.0' is a callable that returns a int"),
        (nn.Linear(4, 4), {}, "layers is a Linear; give its parts"),
        (
            [Pair(), Square()],
            {},
            "layer 'layers.0' returns a tuple of 2; a layer hands one tensor",
        ),
        (
            [nn.Linear(4, 4), nn.Linear(5, 4)],
            {},
            r"'layers.1' fails on an input of shape \[2, 4\]",
        ),
        ([nn.Linear(4, 4)], {"names": ["a", "b"]}, "names has 2 entries; there are 1 layers"),
        ([Square(), Square()], {"names": ["a", "a"]}, r"names\[1\] is 'a' a second time"),
        ([nn.Linear(4, 4)], {"repeats": 0}, "repeats, warmup, threads, neighbours are 0,"),
        ([nn.Linear(4, 4)], {"loss_fn": lambda out, _: out}, r"loss_fn .* returns shape \[2, 4\]"),
        ([nn.Linear(4, 4)], {"loss_fn": None}, "loss_fn is a NoneType; it is a callable"),
        ([Square()], {}, "requires_grad False; it returns one number that depends on"),
        ([nn.Linear(4, 4, device="meta")], {"device": "cpu"}, "'weight' on meta, .* move the"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(layers, named, message):
    arguments = {"loss_fn": squared, "repeats": 1, "warmup": 0} | named
    with pytest.raises(MalformedError, match=message) as caught:
        profile(layers, torch.randn(2, 4), **arguments)
    assert "\n" not in str(caught.value)


def test_an_input_that_is_no_tensor_is_refused():
    with pytest.raises(MalformedError, match="example_input is a list; it is one tensor"):
        profile([nn.Linear(4, 4)], [1.0], squared)


@pytest.mark.gpu
def test_a_cuda_device_is_timed_by_events_and_asked_for_peaks():
    layers, ids, target = mixed_model()
    on_cpu = profile(layers, ids, token_loss, example_target=target, repeats=1, warmup=0)
    on_gpu = profile(
        layers.cuda(), ids, token_loss, example_target=target, device="cuda", repeats=3, warmup=1
    )
    for one, other in zip(on_cpu.layers, on_gpu.layers, strict=True):
        assert (one.param_bytes, one.output_bytes) == (other.param_bytes, other.output_bytes)
        assert other.forward_ns > 0
    linear = on_gpu.layers[-1]
    assert linear.saved_w_bytes == on_cpu.layers[-1].saved_w_bytes
    assert linear.workspace_bytes > 0
