"""Processes over gloo: parity, a rank that dies, the command line under torchrun's environment."""

from __future__ import annotations

import json
import random
import time

import executor_ranks
import msgspec
import pytest
import torch
import torch.multiprocessing as mp
from executor_tools import (
    make_plan,
    make_workload,
    one_f_one_b_rows,
    random_rows,
    rising,
    unsplit,
)
from test_executor_parity import LOSS, batch, layers_of

from octotune.contract import Cluster, DataParallel
from octotune.schedules import FAMILIES, plan_from


def plans_for_four_ranks():
    plans, options = [], []
    for name in FAMILIES:
        family = FAMILIES[name]
        num_layers = max(8, len(family.placement(4)))
        plans.append(plan_from(family, make_workload(num_layers), Cluster.equal(4), 5))
        options.append({})
    for seed in range(12):
        rng = random.Random(1000 + seed)
        homes = [rng.randrange(4) for _ in range(rng.randint(1, 7))]
        count = rng.randint(1, 5)
        rows = random_rows(rng, homes, 4, count, rising=True)
        plans.append(make_plan(rows, [(1, home, rng.random() < 0.2) for home in homes], count))
        options.append(
            {
                "receive_window": rng.randint(1, 3),
                "send_window": rng.choice((1, 16)),
                "float_limit": rng.choice(("off", "plan", "memory")),
            }
        )
    return plans, options


def replicated_plan():
    """Two replicas of two devices, with two stages on each, one of them recomputed."""
    rows = ["0F0 0F1 3F0 3I0 3F1 3W0 3B1 0I0 0W0 0B1", "1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 2B1 1B1"]
    cluster = msgspec.structs.replace(
        Cluster.equal(2), data_parallel=DataParallel(size=2, bandwidth=10**9)
    )
    return make_plan(rows, [(1, 0), (1, 1, True), (1, 1), (1, 0)], 2, cluster=cluster)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_every_schedule_and_random_plans_match_over_gloo(shared_memory):
    """Case E04: 20 plans in one process group, two steps each."""
    plans, options = plans_for_four_ranks()
    plans, options = [*plans, replicated_plan()], [*options, {}]
    results = executor_ranks.spawn(4, executor_ranks.run_plans, plans, options, shared_memory)
    check_replicas(plans[-1], [result[-1] for result in results])
    for index, plan in enumerate(plans[:-1]):
        grads = {name: grad for result in results for name, grad in result[index][1].items()}
        layers = layers_of(len(plan.workload.layers))()
        expected, _ = unsplit(
            layers, LOSS, *batch(plan.num_microbatches), range(plan.num_microbatches)
        )
        for result in results:
            assert result[index][0] == [expected] * 2
        for number, layer in enumerate(layers):
            for name, param in layer.named_parameters():
                found = torch.tensor(grads[f"layer{number}.{name}"])
                if rising(plan):
                    assert torch.equal(found, param.grad), (index, number, name)
                else:
                    assert (found - param.grad).norm() <= 1e-6 * param.grad.norm()


def check_replicas(plan, results):
    """All four ranks have the mean gradient over both replicas' microbatches."""
    layers = layers_of(4)()
    expected, _ = unsplit(layers, LOSS, *batch(4), range(4))
    for losses, grads in results:
        assert losses == pytest.approx([expected] * 2, rel=1e-6)
        for name, grad in grads.items():
            param = layers[int(name[5])].get_parameter(name.partition(".")[2])
            assert (torch.tensor(grad) - param.grad).norm() <= 1e-6 * param.grad.norm()
    assert results[0][1] == results[2][1]
    assert results[1][1] == results[3][1]


def test_a_killed_rank_is_named_with_the_action(tmp_path):
    """Case E14: rank 2 of 4 is gone in mid-step; all others stop, within the timeout."""
    plan = make_plan(one_f_one_b_rows(4, 2), [(1, d) for d in range(4)], 2)
    context, store = mp.get_context("spawn"), executor_ranks.open_store()
    rest = (str(tmp_path), executor_ranks.lose_a_rank, (plan, str(tmp_path)))
    ranks = [
        context.Process(target=executor_ranks._main, args=(rank, 4, store.port, *rest))
        for rank in range(4)
    ]
    began = time.monotonic()
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert time.monotonic() - began < 45
    assert [process.exitcode for process in ranks] == [3, 3, -9, 3]
    said = [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1, 3)]
    assert len(set(said)) == 1  # the first that noticed speaks for all
    owner = said[0][0]
    assert owner in "13"
    action = {"1": "2I0 from rank 2 to run 1B0", "3": "2F1 from rank 2 to run 3F1"}[owner]
    assert f"rank {owner}, waiting for {action}: the connection closed" in said[0]


# --- the command ------------------------------------------------------------------------

MODEL = """
import torch
from torch import nn

def make():
    layers = [lambda: nn.Linear(4, 4) for _ in range(4)]
    batches = [(torch.full((4, 4), float(n)), torch.zeros(4, 4)) for n in range(3)]
    return layers, nn.functional.mse_loss, batches, lambda p: torch.optim.SGD(p, lr=0.1)

def short():
    layers, *rest = make()
    return layers[:3], *rest

def raises():
    raise RuntimeError("no data")

def odd():
    layers, loss, _, optimizer = make()
    return layers, loss, [(torch.zeros(3, 4), torch.zeros(3, 4))], optimizer

def nothing():
    return None
"""


def launch(size, *arguments):
    """Run the command on `size` ranks; return statuses, standard outputs and errors."""
    ranks = executor_ranks.start_command(size, *arguments)
    try:
        # a machine with other work takes a minute to start four torch processes
        ends = [process.communicate(timeout=240) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    errors = [line for _, text in ends for line in text.splitlines() if line]
    return [process.returncode for process in ranks], [out for out, _ in ends], errors


@pytest.fixture
def files(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    rows = ["0F0 0F1 0B0 0B1", "1F0 1I0 1W0 1F1 1B1"]
    make_plan(rows, [(2, 0), (2, 1)], 2).save(tmp_path / "plan.json")
    make_plan(["0F0 0B0", "1F0 1B0"], [(2, 0), (2, 1)], 2).save(tmp_path / "broken.json")
    (tmp_path / "text.json").write_text("{")
    return tmp_path


def test_the_command_trains_and_reports(files):
    status, outputs, errors = launch(
        2,
        *("--plan", files / "plan.json", "--model", f"{files / 'model.py'}:make", "--steps", 5),
        *("--report", files / "report.json", "--trace", files / "trace.json"),
    )
    assert (status, errors) == ([0, 0], [])
    assert outputs[1] == ""
    assert outputs[0].count("loss") == 3  # the batches end before the steps do
    report = json.loads((files / "report.json").read_text())
    assert set(report) == {"steps", "predicted_step_ns", "devices"}
    assert len(report["steps"]) == 3
    said = [line.split()[-2] for line in outputs[0].splitlines() if "loss" in line]
    assert said == [f"{step['step_ns'] / 1e6:.1f}" for step in report["steps"]]
    assert all(step["step_ns"] > 0 for step in report["steps"])
    assert len(report["devices"]) == 2
    assert all(d["busy_ns"] > 0 and d["peak_bytes"] > 0 for d in report["devices"])

    from executor.stages import make_layer

    layers = [make_layer(lambda: torch.nn.Linear(4, 4), 0, index) for index in range(4)]
    optimizer = torch.optim.SGD(torch.nn.Sequential(*layers).parameters(), lr=0.1)
    for number in range(3):
        loss, _ = unsplit(
            layers,
            torch.nn.functional.mse_loss,
            torch.full((4, 4), float(number)),
            torch.zeros(4, 4),
            range(2),
        )
        assert report["steps"][number]["loss"] == pytest.approx(loss, rel=1e-6)
        optimizer.step()
        optimizer.zero_grad()

    from simulator.chrome import loads

    timeline = loads((files / "trace.json").read_bytes())
    assert sorted(timeline.schedule.words()[1]) == ["1B1", "1F0", "1F1", "1I0", "1W0"]


@pytest.mark.parametrize(
    ("plan", "factory", "size", "status", "text"),
    [
        ("plan.json", "short", 2, 2, "the model has 3 layers"),
        ("plan.json", "make", 1, 2, "there are 1 ranks; the plan needs 2"),
        ("plan.json", "odd", 2, 2, "must divide into 2 microbatches"),
        ("broken.json", "make", 2, 1, "F1"),
        ("text.json", "raises", 1, 2, "text.json"),
        ("plan.json", "raises", 1, 2, "raised RuntimeError: no data"),
    ],
)
def test_the_command_refuses_in_one_line_on_every_rank(files, plan, factory, size, status, text):
    found, _, errors = launch(
        size,
        *("--plan", files / plan, "--model", f"{files / 'model.py'}:{factory}", "--steps", 1),
    )
    assert found == [status] * size
    assert len(errors) == 1, errors
    assert errors[0].startswith("executor: ")
    assert text in errors[0]


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("model.py", "write FILE_OR_MODULE:FACTORY"),
        ("none.py:make", "there is no file"),
        ("no.such.module:make", "ModuleNotFoundError"),
        ("json:nothing", "has no callable 'nothing'"),
        ("math:pi", "has no callable 'pi'"),
        ("os:getcwd", "gave a str"),
    ],
)
def test_a_model_that_cannot_be_found_is_malformed(spec, text):
    from executor.__main__ import load_model
    from octotune.errors import MalformedError

    with pytest.raises(MalformedError, match=text):
        load_model(spec)
