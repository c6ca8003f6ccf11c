"""Pipeline: bad input is refused on every rank, and what ranks share stays right."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from executor_tools import (
    make_plan,
    make_workload,
    one_f_one_b_rows,
    run_plan,
    run_ranks,
    unsplit,
)
from torch import nn
from torch.nn import functional

from executor.errors import MismatchError, PeerError, StepError
from executor.pipeline import Pipeline
from executor.transport import ThreadWorld
from octotune.contract import Cluster, DataParallel
from octotune.errors import DeadlockError, MalformedError, OutOfMemoryError, ScheduleError

WIDTH = 4


def two_ranks(num_microbatches=2, split=True, **fields):
    return make_plan(
        one_f_one_b_rows(2, num_microbatches, split=split),
        [(1, 0), (1, 1)],
        num_microbatches,
        **fields,
    )


def linears(count=2, seed=0):
    torch.manual_seed(seed)
    return [nn.Linear(WIDTH, WIDTH) for _ in range(count)]


def batch(rows):
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, WIDTH, generator=generator), torch.zeros(rows, WIDTH)


def refusals(plan, layers_of, act=None, size=2, **options):
    """What each rank raises when it builds a pipeline and acts on it."""
    models = [layers_of(rank) for rank in range(size)]
    options = {"timeout_s": 10} | options

    def body(transport):
        try:
            pipe = Pipeline(
                plan, models[transport.rank], functional.mse_loss, transport=transport, **options
            )
            if act is not None:
                act(pipe)
        except (ValueError, RuntimeError) as error:
            return error
        return None

    return run_ranks(size, body, world=ThreadWorld(size))


def all_say(errors, kind, text):
    assert all(isinstance(error, kind) for error in errors), errors
    assert all(text in str(error) for error in errors), errors
    assert all("\n" not in str(error) for error in errors)
    # one rank, the same for all, has the line to print
    assert len({getattr(error, "rank", 0) for error in errors}) == 1


# --- what does not fit ------------------------------------------------------------------


def test_another_number_of_layers_is_refused():
    all_say(
        refusals(two_ranks(), lambda rank: linears(3)),
        MismatchError,
        "the model has 3 layers, the plan's workload 'test' has 2",
    )


def test_a_layer_that_cannot_be_made_on_one_rank_stops_all():
    def fails():
        raise OSError("no such weights")

    all_say(
        refusals(two_ranks(), lambda rank: [lambda: nn.Linear(4, 4), fails]),
        MismatchError,
        "layer 1 ('layer1') cannot be made: OSError: no such weights",
    )


def test_a_callable_that_makes_no_module_is_refused():
    all_say(
        refusals(two_ranks(), lambda rank: [lambda: 3, lambda: nn.Linear(4, 4)]),
        MismatchError,
        "layer 0 is a int; it must be an nn.Module",
    )


def test_a_layer_wrapped_for_data_parallel_is_refused():
    """Its hooks would never see the deferred gradients: silently unreduced otherwise."""

    class DistributedDataParallel(nn.Module):
        __module__ = "torch.nn.parallel.distributed"

    all_say(
        refusals(two_ranks(), lambda rank: [nn.Linear(4, 4), DistributedDataParallel()]),
        MismatchError,
        "layer 1 is wrapped in DistributedDataParallel",
    )


def test_a_wrong_world_size_is_refused():
    all_say(
        refusals(two_ranks(), lambda rank: linears(), size=3),
        MismatchError,
        "there are 3 ranks; the plan needs 2",
    )


def test_copies_on_a_device_without_offload_bandwidth_are_refused():
    plan = two_ranks(offload=(("0O0", "0R0"), ()))
    all_say(refusals(plan, lambda rank: linears()), ScheduleError, "device 0 cannot offload")


def test_empty_offload_lanes_are_no_offload():
    """Case D10."""
    assert refusals(two_ranks(offload=((), ())), lambda rank: linears()) == [None, None]


@pytest.mark.parametrize(
    ("rows", "kind", "text"),
    [
        (["0F0 0B0 0F1", "1F0 1B0 1F1 1B1"], ScheduleError, "0B1"),
        (["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"], DeadlockError, "1F1"),
    ],
)
def test_a_plan_that_breaks_a_rule_is_refused(rows, kind, text):
    plan = make_plan(rows, [(1, 0), (1, 1)], 2)
    errors = refusals(plan, lambda rank: linears())
    assert all(isinstance(error, kind) and text in str(error) for error in errors), errors


def test_a_plan_over_memory_is_refused():
    plan = two_ranks(cluster=Cluster.equal(2, memory_bytes=31))
    errors = refusals(plan, lambda rank: linears())
    assert all(isinstance(error, OutOfMemoryError) for error in errors), errors


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"receive_window": 0}, "receive_window is 0"),
        ({"float_limit": "far"}, "float_limit is 'far'"),
    ],
)
def test_unknown_options_are_refused(options, text):
    all_say(refusals(two_ranks(), lambda rank: linears(), **options), MismatchError, text)


def test_without_torch_distributed_two_devices_are_refused():
    with pytest.raises(MismatchError, match=r"torch\.distributed is not initialised"):
        Pipeline(two_ranks(), linears(), functional.mse_loss)


@pytest.mark.parametrize(
    ("inputs", "targets", "text"),
    [
        (torch.zeros(3, WIDTH), torch.zeros(4, WIDTH), "inputs has shape [3, 4]"),
        (torch.zeros(4, WIDTH), torch.zeros(5, WIDTH), "targets has shape [5, 4]"),
        (None, torch.zeros(4, WIDTH), "step() got no inputs"),
        ([torch.zeros(2, WIDTH)], torch.zeros(4, WIDTH), "inputs has 1 parts"),
        (
            [torch.zeros(2, WIDTH), torch.zeros(1, WIDTH)],
            torch.zeros(4, WIDTH),
            "a microbatch has shape [1, 4]",
        ),
        (torch.zeros(4, WIDTH + 1), torch.zeros(4, WIDTH), "rank 0, at 0F0: RuntimeError"),
        (torch.zeros(4, WIDTH).long(), torch.zeros(4, WIDTH), "rank 0, at 0F0: RuntimeError"),
    ],
)
def test_a_batch_that_does_not_fit_stops_every_rank(inputs, targets, text):
    def act(pipe):
        first = pipe.transport.rank == 0
        pipe.step(inputs if first else torch.zeros(4, WIDTH), targets)

    all_say(refusals(two_ranks(), lambda rank: linears(), act), MismatchError, text)


def test_a_layer_that_raises_names_rank_and_action():
    class Fails(nn.Module):
        runs = 0

        def forward(self, x):
            Fails.runs += 1
            if Fails.runs == 2:
                raise KeyError("key")
            return x

    errors = refusals(
        two_ranks(), lambda rank: [nn.Linear(4, 4), Fails()], lambda pipe: pipe.step(*batch(4))
    )
    all_say(errors, MismatchError, "rank 1, at 1F1: KeyError: 'key'")


def test_a_failed_pipeline_says_so_afterwards():
    def act(pipe):
        with pytest.raises(MismatchError, match="must divide into 2 microbatches"):
            pipe.step(*batch(3))
        pipe.step(*batch(4))

    errors = refusals(two_ranks(), lambda rank: linears(), act)
    all_say_step = [error for error in errors if isinstance(error, StepError)]
    assert len(all_say_step) == 2
    assert all("an earlier step failed" in str(error) for error in all_say_step)


def test_a_closed_pipeline_says_so_and_closes_once():
    models = [linears() for _ in range(2)]

    def body(transport):
        with Pipeline(
            two_ranks(), models[transport.rank], functional.mse_loss, transport=transport
        ) as pipe:
            pipe.step(*batch(4))
        pipe.close()
        with pytest.raises(StepError, match="the Pipeline is closed"):
            pipe.step(*batch(4))

    run_ranks(2, body)


def test_an_error_between_steps_stops_the_other_ranks():
    def act(pipe):
        with pipe:
            pipe.step(*batch(4))
            if pipe.transport.rank == 0:
                raise ValueError("the user's own")
            pipe.step(*batch(4))

    own, told = refusals(two_ranks(), lambda rank: linears(), act)
    assert isinstance(own, ValueError)
    assert isinstance(told, StepError)
    assert str(told) == "rank 0, between steps: ValueError: the user's own"


@pytest.mark.parametrize("loss", [lambda out, target: out, lambda out, target: 1.0])
def test_a_loss_that_is_no_number_is_refused(loss):
    models = [linears() for _ in range(2)]

    def body(transport):
        pipe = Pipeline(two_ranks(), models[transport.rank], loss, transport=transport)
        with pytest.raises(MismatchError, match="loss_fn gives"):
            pipe.step(*batch(4))

    run_ranks(2, body)


def test_a_stage_that_gives_no_tensor_is_refused():
    class Pair(nn.Module):
        def forward(self, x):
            return x, x

    errors = refusals(
        two_ranks(), lambda rank: [Pair(), nn.Linear(4, 4)], lambda pipe: pipe.step(*batch(4))
    )
    all_say(errors, MismatchError, "stage 0 gives a tuple")


def test_a_rank_that_stops_is_named_with_the_action():
    """A wait ends after the timeout, and says on what."""
    models = [linears() for _ in range(2)]

    def body(transport):
        pipe = Pipeline(
            two_ranks(),
            models[transport.rank],
            functional.mse_loss,
            transport=transport,
            timeout_s=1,
        )
        pipe.step(*batch(4))
        if transport.rank == 1:
            return None
        with pytest.raises(PeerError, match=r"rank 0, waiting for 1I0 from rank 1 to run 0I0"):
            pipe.step(*batch(4))
        return None

    run_ranks(2, body)


# --- shapes -----------------------------------------------------------------------------


def test_shapes_may_change_when_every_rank_sees_the_inputs():
    models = [linears() for _ in range(2)]

    def body(transport):
        pipe = Pipeline(
            two_ranks(), models[transport.rank], functional.mse_loss, transport=transport
        )
        return [pipe.step(*batch(rows)) for rows in (4, 8, 8, 2, 4)]

    losses = run_ranks(2, body)
    expected = [
        unsplit(linears(), functional.mse_loss, *batch(rows), range(2))[0]
        for rows in (4, 8, 8, 2, 4)
    ]
    assert losses == [expected, expected]


def test_a_change_of_shape_that_others_cannot_see_is_refused():
    def act(pipe):
        first = pipe.transport.rank == 0
        for rows in (4, 8):
            inputs, targets = batch(rows)
            pipe.step(inputs if first else None, targets)

    all_say(
        refusals(two_ranks(), lambda rank: linears(), act),
        MismatchError,
        "which rank 1 cannot know",
    )


def test_inputs_are_needed_only_where_they_are_used():
    models = [linears() for _ in range(2)]

    def body(transport):
        pipe = Pipeline(
            two_ranks(), models[transport.rank], functional.mse_loss, transport=transport
        )
        inputs, targets = batch(4)
        mine = (inputs, None) if transport.rank == 0 else (None, targets)
        return [pipe.step(*mine) for _ in range(2)]

    expected = unsplit(linears(), functional.mse_loss, *batch(4), range(2))[0]
    assert run_ranks(2, body) == [[expected] * 2] * 2


# --- what stages hand on ----------------------------------------------------------------


class Views(nn.Module):
    """A stage whose output and input gradient are views of what it got."""

    def forward(self, x):
        return x.view(x.shape)


@pytest.mark.parametrize("buffered", [False, True])
def test_stages_that_hand_on_their_buffers_stay_right(buffered):
    """A receive buffer is used again only when nobody, not even the next stage, reads it."""
    rows = [
        "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3",
        "1F0 2F0 1F1 2F1 1F2 2F2 1F3 2F3 2I0 1I0 1W0 2I1 1I1 1W1 2I2 1I2 1W2 2I3 1I3 1W3 "
        "2W0 2W1 2W2 2W3",
        "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3",
    ]
    plan = make_plan(rows, [(1, 0), (1, 1), (1, 1), (1, 2)], 4)

    def make():
        torch.manual_seed(0)
        return [nn.Linear(4, 4), Views(), nn.Linear(4, 4, bias=False), nn.Linear(4, 4)]

    inputs, targets = batch(8)
    _, grads, _ = run_plan(
        plan,
        make,
        functional.mse_loss,
        inputs,
        targets,
        world=ThreadWorld(3, fifo=True, buffered=buffered),
        steps=2,
        receive_window=1,
    )
    layers = make()
    unsplit(layers, functional.mse_loss, inputs, targets, range(4))
    for index, layer in enumerate(layers):
        for name, param in layer.named_parameters():
            assert torch.equal(grads[f"layer{index}.{name}"], param.grad)


class Skips(nn.Module):
    """The loss does not depend on the input for some microbatches."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        if x.sum() > 0:
            return self.weight * torch.ones_like(x)
        return x * self.weight


def test_an_unused_output_gets_a_zero_gradient():
    """Case E09."""
    inputs = torch.tensor([[1.0] * 4, [-1.0] * 4, [2.0] * 4, [-3.0] * 4])
    plan = two_ranks(4)

    def make():
        return [nn.Linear(4, 4), Skips()]

    torch.manual_seed(0)
    state = nn.Linear(4, 4).state_dict()

    def build():
        made = make()
        made[0].load_state_dict(state)
        return made

    _, grads, _ = run_plan(plan, build, functional.mse_loss, inputs, torch.zeros(4, 4))
    layers = build()
    unsplit(layers, functional.mse_loss, inputs, torch.zeros(4, 4), range(4))
    assert torch.equal(grads["layer0.weight"], layers[0].weight.grad)
    assert torch.equal(grads["layer1.weight"], layers[1].weight.grad)


class Buckets(nn.Module):
    """Hands integers on: no gradient crosses that boundary."""

    def forward(self, x):
        return (x * 10).long().clamp(0, 6)


def test_integers_between_stages_have_no_gradient():
    plan = make_plan(one_f_one_b_rows(3, 3, split=True), [(1, 0), (1, 1), (1, 2)], 3)

    def make():
        torch.manual_seed(0)
        return [Buckets(), nn.Embedding(7, 4), nn.Linear(4, 4)]

    inputs = torch.rand(6, 4)
    targets = torch.zeros(6, 4, 4)
    losses, grads, _ = run_plan(plan, make, functional.mse_loss, inputs, targets)
    layers = make()
    expected, _ = unsplit(layers, functional.mse_loss, inputs, targets, range(3))
    assert all(loss == [expected] for loss in losses)
    assert torch.equal(grads["layer1.weight"], layers[1].weight.grad)


@pytest.mark.parametrize("where", [0, 1])
def test_a_frozen_stage_runs(where):
    def make():
        made = linears()
        made[where].requires_grad_(False)
        return made

    inputs, targets = batch(4)
    _, grads, _ = run_plan(two_ranks(), make, functional.mse_loss, inputs, targets)
    layers = make()
    unsplit(layers, functional.mse_loss, inputs, targets, range(2))
    other = 1 - where
    assert grads[f"layer{where}.weight"] is None
    assert torch.equal(grads[f"layer{other}.weight"], layers[other].weight.grad)


def test_callables_make_the_same_layers_on_any_partition():
    makers = [lambda: nn.Linear(4, 4) for _ in range(3)]
    inputs, targets = batch(4)
    found = []
    for rows, stages in (
        (["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], [(2, 0), (1, 1)]),
        (["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], [(1, 0), (2, 1)]),
        (["0F0 0B0 0F1 0B1"], [(3, 0)]),
    ):
        plan = make_plan(rows, stages, 2)
        losses, _, _ = run_plan(plan, lambda: makers, functional.mse_loss, inputs, targets, seed=5)
        found.append(losses[0])
    assert found[0] == found[1] == found[2]


def test_a_device_without_stages_takes_part():
    plan = make_plan(["0F0 0B0", "", "1F0 1B0"], [(1, 0), (1, 2)], 1)
    inputs, targets = batch(2)
    losses, _, _ = run_plan(plan, linears, functional.mse_loss, inputs, targets)
    assert len({loss[0] for loss in losses}) == 1


def test_memory_does_not_grow_with_the_number_of_microbatches():
    """Case D13: the receive buffers of 32 microbatches are those of 8."""
    made = []
    for count in (8, 16, 32):
        plan = make_plan(
            one_f_one_b_rows(4, count, split=True),
            [(1, d) for d in range(4)],
            count,
            workload=make_workload(4, output_bytes=1 << 20),  # so that few are posted ahead
        )
        _, _, pipes = run_plan(
            plan,
            lambda: linears(4),
            functional.mse_loss,
            *batch(count),
            float_limit="off",
        )
        made.append([pipe.runtime.pool.made for pipe in pipes])
    assert made[0] == made[1] == made[2]


# --- shared parameters and replicas -----------------------------------------------------


def test_tied_layers_on_two_devices_share_their_gradient():
    """The embedding on rank 0 and the head on rank 1 stay one table, step after step."""
    plan = make_plan(
        one_f_one_b_rows(2, 2, split=True),
        [(2, 0), (1, 1)],
        2,
        workload=make_workload(3, tied=[(0, 2)]),
    )

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(7, 4))

        def forward(self, x):
            return functional.linear(x, self.weight)

    def make(shared):
        torch.manual_seed(0)
        made = [nn.Embedding(7, 4), nn.Linear(4, 4), Head()]
        if shared:
            made[2].weight = made[0].weight
        return made

    inputs = torch.arange(8).view(4, 2) % 7
    targets = torch.arange(8).view(4, 2) % 5

    def loss_fn(out, target):
        return functional.cross_entropy(out.flatten(0, 1), target.flatten())

    def train(parameters, step):
        optimizer = torch.optim.SGD(parameters, lr=0.5)
        losses = []
        for _ in range(3):
            losses.append(step())
            optimizer.step()
            optimizer.zero_grad()
        return losses

    models = [make(False) for _ in range(2)]

    def body(transport):
        pipe = Pipeline(plan, models[transport.rank], loss_fn, transport=transport)
        losses = train(list(pipe.parameters()), lambda: pipe.step(inputs, targets))
        return losses, dict(pipe.named_parameters())

    (losses, first), (_, second) = run_ranks(2, body)
    layers = make(True)
    model = nn.Sequential(*layers)
    expected = train(
        list(model.parameters()), lambda: unsplit(layers, loss_fn, inputs, targets, range(2))[0]
    )
    assert losses == pytest.approx(expected, rel=1e-6)
    assert torch.equal(first["layer0.weight"], second["layer2.weight"])
    assert torch.allclose(first["layer0.weight"], layers[0].weight, rtol=1e-6, atol=1e-7)


def test_tied_modules_share_what_is_one_object():
    """Both layers have a norm of their own; only the table is tied."""
    plan = make_plan(
        one_f_one_b_rows(2, 2, split=True),
        [(1, 0), (1, 1)],
        2,
        workload=make_workload(2, tied=[(0, 1)]),
    )

    class Head(nn.Module):
        def __init__(self, table):
            super().__init__()
            self.norm = nn.LayerNorm(4)
            self.table = table

        def forward(self, x):
            return functional.linear(self.norm(x), self.table)

    def make():
        torch.manual_seed(0)
        first = nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4))
        return [first, Head(first[0].weight)]

    inputs, targets = torch.arange(8) % 7, torch.arange(8) % 5
    _, grads, _ = run_plan(plan, make, functional.cross_entropy, inputs, targets)
    layers = make()
    unsplit(layers, functional.cross_entropy, inputs, targets, range(2))
    table = layers[0][0].weight.grad
    for name in ("layer0.0.weight", "layer1.table"):
        assert (grads[name] - table).norm() <= 1e-6 * table.norm()
    assert torch.equal(grads["layer0.1.weight"], layers[0][1].weight.grad)
    assert torch.equal(grads["layer1.norm.weight"], layers[1].norm.weight.grad)


def test_unknown_tied_parameters_are_refused():
    plan = two_ranks(workload=make_workload(2, tied=[(0, 1)]))
    all_say(
        refusals(plan, lambda rank: linears(), tied_parameters={(0, 1): [("weight", "wight")]}),
        MismatchError,
        "tied_parameters names 'wight', which layer 1 does not have; it has weight, bias",
    )


def test_layers_that_share_a_parameter_unsaid_are_refused():
    def make(rank):
        made = linears(2)
        made[1].weight = made[0].weight
        return made

    all_say(
        refusals(two_ranks(), make), MismatchError, "layers 0 and 1 share the parameter 'weight'"
    )


def test_tied_layers_whose_share_is_unclear_are_refused():
    class Three(nn.Module):
        def __init__(self, *names):
            super().__init__()
            for name in names:
                setattr(self, name, nn.Parameter(torch.zeros(4)))

        def forward(self, x):
            return x

    plan = two_ranks(workload=make_workload(2, tied=[(0, 1)]))
    all_say(
        refusals(plan, lambda rank: [Three("a", "b"), Three("c", "d")]),
        MismatchError,
        "which parameters they share is not clear",
    )


def test_tied_layers_on_one_device_are_one_parameter():
    plan = make_plan(
        ["0F0 1F0 1B0 0B0", ""],
        [(1, 0), (1, 0)],
        1,
        workload=make_workload(2, tied=[(0, 1)]),
    )

    def body(transport):
        pipe = Pipeline(
            plan,
            [lambda: nn.Linear(4, 4), lambda: nn.Linear(4, 4)],
            functional.mse_loss,
            transport=transport,
        )
        return len(list(pipe.parameters()))

    assert run_ranks(2, body) == [2, 0]


@pytest.mark.parametrize("float_limit", ["off", "memory"])
def test_replicas_reduce_each_gradient_once_after_its_last_w(float_limit):
    """Case E11: two replicas of two devices; two stages on each; mean over all microbatches."""
    rows = [
        "0F0 0F1 3F0 3I0 3F1 3W0 3B1 0I0 0W0 0B1",
        "1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 2B1 1B1",
    ]
    cluster = Cluster.equal(2)
    cluster = type(cluster)(
        name="replicated",
        devices=cluster.devices,
        links=cluster.links,
        data_parallel=DataParallel(size=2, bandwidth=10**9),
    )
    plan = make_plan(rows, [(1, 0), (1, 1), (1, 1), (1, 0)], 2, cluster=cluster)
    models = [linears(4) for _ in range(4)]
    inputs, targets = batch(8)
    world = ThreadWorld(4)
    sums = []

    def body(transport):
        reduce = transport.all_reduce
        transport.all_reduce = lambda tensor, ranks: (
            sums.append((transport.rank, tensor.numel())) or reduce(tensor, ranks)
        )
        pipe = Pipeline(
            plan,
            models[transport.rank],
            functional.mse_loss,
            transport=transport,
            float_limit=float_limit,
        )
        loss = pipe.step(pipe.share(inputs), pipe.share(targets))
        return loss, {name: param.grad for name, param in pipe.named_parameters()}

    results = run_ranks(4, body, world=world)
    layers = linears(4)
    expected, _ = unsplit(layers, functional.mse_loss, inputs, targets, range(4))
    assert [loss for loss, _ in results] == pytest.approx([expected] * 4, rel=1e-6)
    for rank, (_, grads) in enumerate(results):
        for name, grad in grads.items():
            assert torch.equal(grad, results[(rank + 2) % 4][1][name])
            index = int(name[5])
            param = layers[index].get_parameter(name.partition(".")[2])
            assert torch.allclose(grad, param.grad, rtol=1e-6, atol=1e-8)
    # per rank: its two stages of one linear each, once; the loss on the last stage's ranks
    of_rank = {
        rank: sorted(size for who, size in sums if who == rank and size > 1) for rank in range(4)
    }
    assert of_rank == {rank: [20, 20] for rank in range(4)}


def test_metrics_that_only_some_ranks_have_are_summed():
    """Case E07."""

    def body(transport):
        pipe = Pipeline(two_ranks(), linears(), functional.mse_loss, transport=transport)
        mine = {"tokens": 1.0} if transport.rank == 0 else {"tokens": 2.0, "dropped": 5.0}
        return pipe.sum_metrics(mine), pipe.sum_metrics({})

    assert run_ranks(2, body) == [({"tokens": 3.0, "dropped": 5.0}, {})] * 2


# --- what was measured ------------------------------------------------------------------


@pytest.mark.parametrize("float_limit", ["off", "memory"])
def test_a_measured_timeline_obeys_the_rules_of_a_simulated_one(float_limit):
    from simulator.validate import validate

    plan = two_ranks(4)
    models = [linears() for _ in range(2)]

    def body(transport):
        pipe = Pipeline(
            plan,
            models[transport.rank],
            functional.mse_loss,
            transport=transport,
            float_limit=float_limit,
        )
        pipe.step(*batch(8))
        with pipe.optimizer_step():
            pass
        return pipe.timeline()

    first, second = run_ranks(2, body)
    assert first == second
    validate(first.schedule, first.costs)
    assert (first.end_ns >= first.start_ns).all()
    offsets = first.schedule.offsets
    for begin, end in pairwise(offsets):
        assert (first.start_ns[begin + 1 : end] >= first.end_ns[begin : end - 1]).all()
    assert (first.forward_arrived_ns[0] >= first.forward_sent_ns[0]).all()
    assert (first.backward_arrived_ns[1] >= first.backward_sent_ns[1]).all()
    assert (first.forward_sent_ns[1] == -1).all()
    assert first.step_ns >= first.end_ns.max()
    assert 0 < first.bubble_fraction < 1


def test_clocks_of_other_hosts_are_aligned():
    """Two "hosts" whose clocks are one: the measured offset is no more than a round trip."""
    from executor.trace import clock_offset_ns

    def body(transport):
        return clock_offset_ns(transport, ["here", "there"], 10, torch.device("cpu"))

    first, second = run_ranks(2, body)
    assert first == 0
    assert second != 0
    assert abs(second) < 50_000_000


def test_the_profiler_shows_each_action():
    plan = make_plan(["0F0 0I0 0W0"], [(2, 0)], 1)
    pipe = Pipeline(plan, linears(), functional.mse_loss)
    with torch.profiler.profile() as profiler:
        pipe.step(*batch(2))
    names = [event.name for event in profiler.events()]
    assert {"0F0", "0I0", "0W0"} <= set(names)


def test_torchs_csv_runs(tmp_path):
    path = tmp_path / "order.csv"
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1I0,1F1,1W0,1B1\n")
    inputs, targets = batch(4)
    models = [linears(3) for _ in range(2)]

    def body(transport):
        pipe = Pipeline(path, models[transport.rank], functional.mse_loss, transport=transport)
        return pipe.step(inputs, targets)

    expected, _ = unsplit(linears(3), functional.mse_loss, inputs, targets, range(2))
    assert run_ranks(2, body) == [expected] * 2


def test_a_missing_csv_is_malformed(tmp_path):
    with pytest.raises(MalformedError, match="No such file"):
        Pipeline(tmp_path / "none.csv", linears(3), functional.mse_loss)
