"""The main job's pieces at small sizes: the GPT and its text."""

import math
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import gpt, record, sleeping
from benchmarks.alternate import Answer, Step
from benchmarks.comparison import (
    LOSS_TOLERANCE,
    TUNED,
    Comparison,
    Run,
    compare,
    gain_sentences,
    worst_departure,
)
from benchmarks.launch import RanksFailedError, run_ranks
from benchmarks.machine import LinkTimes, action_overhead_ns
from benchmarks.main_job import EQUAL, Sizes, losses_alone, main_job_record
from executor.measure import deferred_split
from octotune import Cluster, read_plan
from octotune.model import profile
from octotune.schedules import FAMILIES, plan_from


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny layers on several threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(directory))
        yield directory


def test_the_text_is_the_same_from_the_cache_and_made_anew(cache):
    made = gpt.corpus(gpt.TINY)
    (file,) = cache.rglob("*.npy")
    assert np.array_equal(gpt.corpus(gpt.TINY), made)
    file.unlink()
    assert np.array_equal(gpt.corpus(gpt.TINY), made)
    assert made.max() < gpt.TINY.vocabulary
    assert len(np.unique(made)) > 100


def test_targets_are_the_next_tokens_and_every_caller_sees_the_same_batches(cache):
    (ids, target), (later, _) = islice(gpt.tiny_factory()[2], 2)
    rows = gpt.TINY.microbatch * gpt.TINY.num_microbatches
    assert ids.shape == target.shape == (rows, gpt.TINY.length)
    assert torch.equal(ids[:, 1:], target[:, :-1])
    assert not torch.equal(ids, later)
    assert torch.equal(ids, next(gpt.tiny_factory()[2])[0])


def test_a_layer_starts_alike_whichever_rank_makes_it_and_in_whatever_order(cache):
    makers = gpt.layer_makers(gpt.TINY)
    assert len(makers) == len(gpt.TINY.layer_names) == 6
    forwards = [make().state_dict() for make in makers]
    torch.manual_seed(99)
    backwards = [make().state_dict() for make in reversed(makers)][::-1]
    for own, other in zip(forwards, backwards, strict=True):
        assert own.keys() == other.keys()
        assert all(torch.equal(own[key], other[key]) for key in own)


def test_the_gpt_learns(cache):
    makers, loss_fn, batches, make_optimizer = gpt.tiny_factory()
    model = torch.nn.Sequential(*[make() for make in makers])
    optimizer = make_optimizer(model.parameters())
    losses = []
    for ids, target in islice(batches, 30):
        optimizer.zero_grad()
        loss = loss_fn(model(ids), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(gpt.TINY.vocabulary), rel=0.05)
    assert np.mean(losses[-5:]) < losses[0] - 0.2


def test_attention_looks_back_only():
    settings = gpt.TINY
    torch.manual_seed(0)
    layer = gpt.Attention(settings, settings.blocks[0])
    inputs = torch.randn(1, settings.length, settings.width)
    changed = inputs.clone()
    changed[:, 5:] += 1
    assert torch.allclose(layer(inputs)[:, :5], layer(changed)[:, :5])


def test_the_gpts_layers_are_unequal_and_its_head_is_the_largest(cache):
    makers, loss_fn, batches, make_optimizer = gpt.tiny_factory()
    ids, target = (each[: gpt.TINY.microbatch] for each in next(batches))
    workload = profile(
        makers, ids, loss_fn, example_target=target, optimizer_fn=make_optimizer,
        names=gpt.TINY.layer_names, repeats=1, warmup=0,
    )  # fmt: skip
    assert [layer.name for layer in workload.layers] == gpt.TINY.layer_names
    kinds = ["embedding", "attention", "mlp", "attention", "mlp", "head"]
    assert [layer.kind for layer in workload.layers] == kinds
    assert len({layer.param_bytes for layer in workload.layers[1:5]}) == 4
    settings = gpt.SETTINGS
    head = settings.vocabulary * settings.width
    blocks = [
        settings.width * (4 * block.attention_width + 2 * block.mlp_width)
        for block in settings.blocks
    ]
    assert head > 5 * np.mean(blocks) / 2  # a block is two layers


# ---------------------------------------------------------------- runs and what is made of them


def step(step_ns: int, queued_ns: int, loss: float = 1.0) -> Step:
    return Step(
        step_ns=step_ns,
        bubble_fraction=step_ns / 1000,
        busy_ns=[1, 1],
        queued_ns=[queued_ns, 0],
        loss=loss,
    )


def test_measured_are_the_calmest_steps_after_warmup():
    steps = [step(1, 0), step(90, 20), step(50, 0), step(70, 7), step(60, 0), step(99, 50)]
    answer = Answer(steps={"tuned": steps}, warmup=1, wanted=3)
    assert [each.step_ns for each in answer.measured("tuned")] == [50, 60, 70]
    assert answer.step_ns("tuned") == 60
    assert answer.typical("tuned") == 4
    assert answer.bubble_fraction("tuned") == 0.06
    assert steps[1].taken == 20 / 180


def test_the_gain_is_other_steps_over_tuned_steps():
    answer = Answer(steps={TUNED: [step(50, 0)], EQUAL: [step(80, 0)]}, warmup=0, wanted=1)
    found = Comparison(
        predicted={TUNED: SimpleNamespace(step_ns=40), EQUAL: SimpleNamespace(step_ns=60)},
        measured={},
        answer=answer,
        plan_files={},
        traces={},
        picture=Path("none"),
    )
    assert found.gain(EQUAL) == (1.5, 1.6)


def test_the_worst_loss_is_found_among_all_plans_and_steps():
    answer = Answer(
        steps={"a": [step(1, 0, 2.0), step(1, 0, 4.0)], "b": [step(1, 0, 2.0), step(1, 0, 5.0)]},
        warmup=0,
        wanted=1,
    )
    assert worst_departure(answer, [2.0, 4.0]) == 0.25


def test_a_links_bandwidth_is_what_the_latency_leaves():
    link = LinkTimes(small_ns=100, large_ns=600, large_bytes=1000).link()
    assert (link.latency_ns, link.bandwidth) == (100, 2 * 10**9)
    assert LinkTimes(small_ns=100, large_ns=90, large_bytes=1000).link().bandwidth > 10**11


def test_an_action_of_a_layer_that_does_nothing_costs_something():
    assert 0 < action_overhead_ns(num_microbatches=4, steps=3) < 10**8


def test_the_sleeping_models_layers_are_its_workloads():
    layers, loss_fn, batches = sleeping.factory()
    workload = sleeping.workload()
    assert len(layers) == len(workload.layers) == 12
    for layer, known in zip(layers, workload.layers, strict=True):
        times = (known.forward_ns, known.input_grad_ns, known.weight_grad_ns)
        assert times == tuple(round(seconds * 1e9) for seconds in layer.seconds)
    inputs, target = next(batches)
    assert inputs.shape[0] == target.shape[0] == sleeping.NUM_MICROBATCHES
    assert inputs[0].numel() * 4 == workload.layers[0].output_bytes
    assert loss_fn(inputs, target).item() == 1.0


def test_ranks_that_fail_are_quoted_with_their_status():
    with pytest.raises(RanksFailedError, match=r"exit status 1; its last lines:(.|\n)*no_such_"):
        run_ranks(1, "benchmarks.no_such_module", [])


def test_plans_run_in_turns_and_match_one_process(cache, tmp_path):
    """The whole of the main job's comparison, on the tiny model: two ranks, two plans."""
    makers, loss_fn, batches, make_optimizer = gpt.tiny_factory()
    ids, target = (each[: gpt.TINY.microbatch] for each in next(batches))
    workload = profile(
        makers, ids, loss_fn, example_target=target, optimizer_fn=make_optimizer,
        names=gpt.TINY.layer_names, repeats=1, warmup=0, split=deferred_split,
    )  # fmt: skip
    cluster = Cluster.equal(2)
    plans = {
        name: plan_from(FAMILIES[family], workload, cluster, gpt.TINY.num_microbatches)
        for name, family in ((TUNED, "zb-h1"), (EQUAL, "1f1b"))
    }
    run = Run(model="benchmarks.gpt:tiny_factory", ranks=2, warmup=1, steps=1, limit_s=0.0)
    found = compare("tiny", plans, run, tmp_path)
    assert {name: len(steps) for name, steps in found.answer.steps.items()} == {TUNED: 2, EQUAL: 2}
    alone = losses_alone(2, gpt.TINY)
    assert worst_departure(found.answer, alone) <= LOSS_TOLERANCE
    for name in plans:
        assert read_plan(found.plan_files[name]).workload == workload
        assert found.measured[name].step_ns == found.answer.steps[name][-1].step_ns
    assert {path.name for path in tmp_path.iterdir()} >= {
        "tiny.png", "tiny-tuned.trace.json", "tiny-1f1b-equal-layers.plan.json",
    }  # fmt: skip
    assert found.picture.read_bytes()[1:4] == b"PNG"
    page = record.to_markdown(
        main_job_record(found, found, 0.0, 2, Sizes(), ["--record"]), record.environment()
    )
    (gained,) = gain_sentences(found)
    assert f"- {gained}\n" in page
    assert f"- On sleeping layers the{gained.removeprefix('The')}\n" in page
