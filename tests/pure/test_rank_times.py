"""A step over ranks: planned times of all lanes together, records that are read back, the picture."""

import json

import pytest

from undertow.ir.step_times import Row
from undertow.report.rank_picture import MAX_SHOWN, ranks_figure
from undertow.report.rank_times import (
    RankTimes,
    StepOfRanks,
    Stretch,
    measured_times,
    predict_ranks,
    read_step_of_ranks,
)


def rows_of(before_us, after_us, sent_us):
    """Compute, send, compute on, wait for what was sent, and update."""
    return [
        Row("computing", before_us * 1000, (), ""),
        Row("link", sent_us * 1000, (0,), "fc.weight"),
        Row("computing", after_us * 1000, (), ""),
        Row("computing", 5000, (1,), "fc.weight"),
    ]


def test_a_transfer_begins_when_all_ranks_have_come_so_far():
    quick, slow = predict_ranks([rows_of(10, 20, 30), rows_of(50, 20, 30)], [100, 200])
    assert [item for item in quick.stretches if item.kind == "sending"] == [Stretch("sending", 50, 80, "fc.weight")]
    assert quick.end_us == slow.end_us == 85
    assert (quick.busy_us("computing"), quick.busy_us("waiting")) == (35, 50)
    assert (slow.busy_us("computing"), slow.busy_us("waiting")) == (75, 10)
    assert slow.share("waiting") == pytest.approx(10 / 85)
    assert (quick.sent_bytes, slow.sent_bytes) == (100, 200)


def test_what_an_owner_answers_waits_for_no_other_rank():
    gathers = [Row("link", 4000, (), "w", is_joint=False), Row("computing", 1000, (0,), "w")]
    first, second = predict_ranks([gathers, [*gathers, Row("link", 4000, (1,), "v", is_joint=False)]], [1, 2])
    assert first.end_us == 5
    assert [item for item in second.stretches if item.kind == "sending"] == [
        Stretch("sending", 0, 4, "w"),
        Stretch("sending", 5, 9, "v"),
    ]


def step_of(number=2):
    ranks = predict_ranks([rows_of(10 + rank, 20, 30) for rank in range(number)], [100] * number)
    waits, sends = [("fc.weight", 40, 70), ("records", 75, 75.5)], [("fc.weight", 20, 70), ("fc.bias", 30, 60)]
    return StepOfRanks(ranks, tuple(measured_times(80, waits, sends, 90) for _ in range(number)))


def test_what_is_measured():
    rank = step_of().measured[0]
    assert rank.busy_us("computing") == 50 and rank.busy_us("waiting") == 30
    assert rank.busy_us("sending") == 50  # what is sent at the same time counts once
    assert rank.end_us == 80


def test_a_sentence_says_what_limits():
    computing, waiting = RankTimes((Stretch("computing", 0, 100),), 0), step_of().measured[0]
    assert "computing is the limit" in StepOfRanks((), (computing, computing)).limit
    assert "the link is the limit" in StepOfRanks((), (waiting, waiting)).limit
    assert (
        "rank 0 computes 0.0 ms longer"
        in StepOfRanks((), (computing, RankTimes((Stretch("computing", 0, 60),), 0))).limit
    )


def test_records_are_read_back_and_others_passed_over():
    step = step_of()
    data = json.loads(json.dumps(step.to_dict()))
    assert read_step_of_ranks(data) == step
    assert data["measured"][0]["sent_bytes"] == 90
    assert data["measured"][0]["idle_share"]["link"] == pytest.approx(1 - 50 / 80)
    for spoil in (
        lambda found: found.pop("measured"),
        lambda found: found["measured"].pop(),
        lambda found: found["measured"][0].update(sent_bytes=-1),
        lambda found: found["measured"][0].update(stretches=[["computing", 0, "1", ""]]),
        lambda found: found["measured"][0].update(stretches=[["computing", 0, float("nan"), ""]]),
        lambda found: found["measured"][0].update(stretches=[["computing", 5, 1, ""]]),
        lambda found: found["measured"][0].update(stretches=[["<b>", 0, 1, ""]]),
        lambda found: found.update(measured=[], predicted=[]),
    ):
        found = json.loads(json.dumps(data))
        spoil(found)
        assert read_step_of_ranks(found) is None
    assert read_step_of_ranks(None) is None and read_step_of_ranks([1]) is None


def test_the_picture_has_all_ranks_that_fit_and_no_markup_of_others():
    figure = ranks_figure(step_of())
    assert figure.count('class="lane-sending"') == 2 * 2 * 3 + 1  # two drawings; 1 planned, 2 measured; the legend
    many = ranks_figure(step_of(MAX_SHOWN + 3))
    assert f"rank {MAX_SHOWN - 1}<" in many and f"rank {MAX_SHOWN}<" not in many
    hostile = RankTimes((Stretch("computing", 0, 9), Stretch("sending", 0, 5, "<script>alert(1)</script>")), 1)
    assert "<script" not in ranks_figure(StepOfRanks((hostile,), (hostile,)))


def test_text_fits_a_terminal():
    lines = str(step_of(3)).splitlines()
    assert len(lines) == 1 + 1 + 6 + 1
    assert max(map(len, lines)) <= 80
