"""Where torch.distributed.pipelining has a schedule, ours is the same, action by action.

Its schedules for several stages a rank are built on stand-ins and never run; the order of compute
actions is read from them, idle slots and communication left out, overlapped pairs in the order in
which its runtime takes them. GPipe and 1F1B are loops in code: they run on a stage that records.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from octotune.placement import loop, v_shape
from octotune.schedules.dualpipe_v import dualpipe_v
from octotune.schedules.gpipe import gpipe
from octotune.schedules.interleaved import interleaved
from octotune.schedules.interleaved_zero_bubble import interleaved_zero_bubble
from octotune.schedules.looped_bfs import looped_bfs
from octotune.schedules.one_f_one_b import one_f_one_b
from octotune.schedules.zb_v import zb_v

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

COMPUTE = {"F", "B", "I", "W"}


class Recorder:
    """A stage that notes which microbatch it is asked to compute, and sends nothing."""

    def __init__(self, stage, num_stages):
        self.words = []
        self.stage_index = stage
        self.num_stages = num_stages
        self.is_first = stage == 0
        self.is_last = stage == num_stages - 1

    def forward_one_chunk(self, microbatch, *_, **__):
        self.words.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch, **_):
        self.words.append(f"{self.stage_index}B{microbatch}")

    def nothing(self, *_):
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = nothing
    perform_reduce_grad = nothing


def recorded_words(name, num_stages, num_microbatches, monkeypatch):
    """Return the order in which torch's loop of one stage a rank computes, on each rank."""
    kind = schedules.get_schedule_class(name)
    monkeypatch.setattr(kind, "_initialize_stage", lambda *_: None)
    rows = []
    for rank in range(num_stages):
        stage = Recorder(rank, num_stages)
        kind(stage, num_microbatches)._step_microbatches([()] * num_microbatches)
        rows.append(tuple(stage.words))
    return tuple(rows)


def stand_ins(placement, rank):
    """Return what a schedule asks the stages of one rank for."""
    return [
        SimpleNamespace(
            stage_index=stage,
            num_stages=len(placement),
            group_rank=rank,
            group_size=max(placement) + 1,
            submod=None,
        )
        for stage, device in enumerate(placement)
        if device == rank
    ]


def torch_words(name, placement, num_microbatches):
    """Return torch's order of compute actions, one tuple of words a rank."""
    kind = schedules.get_schedule_class(name)
    stages = stand_ins(placement, 0)
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    schedule = kind(stages[0] if single else stages, num_microbatches)
    order = schedule.pipeline_order
    return tuple(
        tuple(word for action in order[rank] for word in words_of(action))
        for rank in range(max(placement) + 1)
    )


def words_of(action):
    if action is None:
        return
    if action.sub_actions:
        for part in action.sub_actions:
            yield from words_of(part)
    elif action.computation_type.value in COMPUTE:
        yield f"{action.stage_index}{action.computation_type.value}{action.microbatch_index}"


@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 4), (2, 1), (3, 5), (4, 2), (4, 8)])
def test_gpipe_is_torch_s(p, m, monkeypatch):
    assert gpipe(p, m).words() == recorded_words("GPipe", p, m, monkeypatch)


@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 4), (2, 2), (3, 5), (4, 4), (4, 9)])
def test_1f1b_is_torch_s(p, m, monkeypatch):
    assert one_f_one_b(p, m).words() == recorded_words("1F1B", p, m, monkeypatch)


@pytest.mark.parametrize(("p", "v", "m"), [(1, 2, 3), (2, 2, 4), (3, 2, 5), (4, 3, 2), (2, 4, 7)])
def test_looped_bfs_is_torch_s(p, v, m):
    assert looped_bfs(p, v, m).words() == torch_words("LoopedBFS", loop(p, v), m)


# p | m; fewer microbatches than devices; and sizes that torch cuts into equal larger rounds
ROUNDS = [
    (1, 2, 3),
    (2, 2, 4),
    (2, 4, 8),
    (3, 2, 9),
    (4, 2, 8),
    (4, 4, 16),
    (4, 2, 3),
    (4, 3, 1),
    (4, 2, 10),
    (4, 2, 7),
    (5, 3, 12),
]


@pytest.mark.parametrize(("p", "v", "m"), ROUNDS)
def test_interleaved_1f1b_is_torch_s(p, v, m):
    assert interleaved(p, v, m).words() == torch_words("Interleaved1F1B", loop(p, v), m)


@pytest.mark.parametrize(("p", "v", "m"), ROUNDS)
def test_interleaved_zero_bubble_is_torch_s(p, v, m):
    ours = interleaved_zero_bubble(p, v, m).words()
    assert ours == torch_words("InterleavedZeroBubble", loop(p, v), m)


@pytest.mark.parametrize(
    ("p", "m"), [(1, 1), (1, 5), (2, 1), (2, 4), (3, 2), (4, 4), (4, 7), (4, 8), (5, 13)]
)
def test_zb_v_is_torch_s(p, m):
    assert zb_v(p, m).words() == torch_words("ZBVZeroBubble", v_shape(p), m)


@pytest.mark.parametrize(
    ("p", "m"), [(1, 2), (1, 5), (2, 4), (2, 7), (3, 6), (4, 8), (4, 11), (5, 10), (6, 17)]
)
def test_dualpipe_v_is_torch_s(p, m):
    assert dualpipe_v(p, m).words() == torch_words("DualPipeV", v_shape(p), m)


@pytest.mark.parametrize(
    ("name", "ours", "placement", "m", "reason"),
    [
        ("1F1B", lambda: one_f_one_b(4, 3), loop(4, 1), 3, "greater than or equal"),
        ("Interleaved1F1B", lambda: interleaved(4, 2, 9), loop(4, 2), 9, "multiple of the number"),
        (
            "InterleavedZeroBubble",
            lambda: interleaved_zero_bubble(4, 2, 9),
            loop(4, 2),
            9,
            "multiple of the number",
        ),
        ("DualPipeV", lambda: dualpipe_v(3, 5), v_shape(3), 5, "at least as many microbatches"),
    ],
)
def test_ours_runs_where_torch_refuses(name, ours, placement, m, reason):
    with pytest.raises(ValueError, match=reason):
        torch_words(name, placement, m)
    words = [word for row in ours().words() for word in row]
    assert len(set(words)) == len(words)
    assert {word for word in words if "F" in word} == {
        f"{stage}F{microbatch}" for stage in range(len(placement)) for microbatch in range(m)
    }
