"""The course of a search: when walks end, when polishes hand over, when a new cycle begins."""

from __future__ import annotations

import pytest

from octotune.tune.course import (
    COOLING,
    CYCLE_ACTIONS_BINDING,
    CYCLE_EVALUATIONS,
    CYCLE_EVALUATIONS_BINDING,
    LEAST_CYCLE,
    PATIENCE,
    QUICK_EVALUATIONS,
    QUICK_PART,
    Course,
)


def polishing(walks_ended: float = 0.5) -> Course:
    course = Course()
    course.begin(0.0)
    course.end_walks(walks_ended)
    return course


def test_walks_have_their_share_of_what_is_left():
    course = Course()
    course.begin(0.2)
    assert course.walks_part(0.2, 0.75) == 0.0
    assert course.walks_part(0.5, 0.75) == pytest.approx(0.5)
    assert course.walks_part(0.8, 0.75) == pytest.approx(1.0)


def test_walks_are_shorter_where_memory_binds():
    course = Course()
    course.begin(0.0)
    assert course.walks_part(0.0, 1.0, CYCLE_EVALUATIONS_BINDING) < 1.0
    course.binding = True
    assert course.walks_part(0.0, 1.0, CYCLE_EVALUATIONS_BINDING) == 1.0


def test_walks_are_fewer_where_each_takes_long():
    course = Course()
    course.begin(0.0)
    course.binding = True
    course.num_actions = 2 * CYCLE_ACTIONS_BINDING // CYCLE_EVALUATIONS_BINDING
    part = course.walks_part(0.0, 1.0, CYCLE_EVALUATIONS_BINDING // 4)
    assert part == pytest.approx(0.5, rel=1e-3)
    assert not course.full
    assert course.walks_part(0.0, 1.0, CYCLE_EVALUATIONS_BINDING // 2 + 100) >= 1.0
    assert course.full


def test_polishes_cool_down_and_stay_cold():
    course = polishing(0.5)
    assert course.polish_part(0.5) == 0.0
    assert course.polish_part(0.5 + 0.25 * COOLING) == pytest.approx(0.5)
    assert course.polish_part(0.99) == 1.0


def test_polishes_that_find_nothing_hand_over_once_they_are_cold():
    course = polishing(0.5)
    waited = 0.5 + 0.5 * max(COOLING, PATIENCE)
    assert not course.hands_over(0.5 + 0.5 * COOLING - 0.01)
    assert course.hands_over(waited + 0.01)
    course.note_gain(waited)
    assert not course.hands_over(waited + 0.01)
    assert course.hands_over(waited + 0.5 * PATIENCE + 0.01)


def test_the_last_cycle_keeps_what_is_left():
    course = polishing(0.5)
    assert course.hands_over(1.0 - LEAST_CYCLE - 0.001)
    assert not course.hands_over(1.0 - LEAST_CYCLE + 0.001)


def test_pointless_polishes_hand_over_at_once_and_only_once():
    course = polishing(0.95)
    course.pointless = True
    assert course.hands_over(0.95)
    course.begin(0.95)
    course.end_walks(0.99)
    assert not course.hands_over(0.99)


def test_a_cycle_of_many_evaluations_ends_early_and_the_next_begins_anew():
    course = Course()
    course.begin(0.1, 1000)
    assert course.fresh
    assert course.walks_part(0.2, 0.75, 1000 + CYCLE_EVALUATIONS // 2) == pytest.approx(0.5)
    assert course.walks_part(0.25, 0.75, 1000 + CYCLE_EVALUATIONS) == pytest.approx(1.0)
    course.end_walks(0.25, 0.75)
    planned = 0.15 / 3  # a quarter of the cycle
    assert course.polish_part(0.25 + COOLING * planned) == pytest.approx(1.0)
    assert course.hands_over(0.25 + planned)
    course.begin(0.3, 2 * CYCLE_EVALUATIONS)
    assert course.fresh
    course.walks_part(0.9, 0.75, 3 * CYCLE_EVALUATIONS)
    course.begin(0.9, 3 * CYCLE_EVALUATIONS)
    assert not course.fresh  # too little is left for a whole one


def test_a_cycle_that_time_ended_is_gone_on_with():
    course = Course()
    course.begin(0.1, 0)
    course.walks_part(0.5, 0.4, 100)
    course.end_walks(0.5, 0.4)
    course.begin(0.6, 200)
    assert not course.fresh


def test_a_quick_cycle_comes_first_and_the_next_one_begins_where_it_did():
    course = Course(quick=True)
    course.begin(0.1, 1000)
    assert course.quick
    assert course.walks_part(0.1, 0.75, 1000 + QUICK_EVALUATIONS // 2) == pytest.approx(0.5)
    assert course.walks_part(0.1 + QUICK_PART, 0.75, 1000) == pytest.approx(1.0)
    course.end_walks(0.1 + QUICK_PART, 0.75)
    assert course.hands_over(0.1 + 1.5 * QUICK_PART)
    course.begin(0.2, 2000)
    assert (course.quick, course.fresh, course.elsewhere) == (False, True, False)
    assert course.walks_part(0.2 + QUICK_PART, 0.75, 2000 + QUICK_EVALUATIONS) < 0.3
    course.walks_part(0.4, 0.75, 2000 + CYCLE_EVALUATIONS)
    course.begin(0.4, 2000 + CYCLE_EVALUATIONS)
    assert (course.quick, course.fresh, course.elsewhere) == (False, True, True)
