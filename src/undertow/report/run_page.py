"""A run as one HTML page: its curves, the memory of its step, what the plan decided, what was predicted and measured.

In: what was recorded of the run, and its plan made again from the recorded costs. Out: the page's text, made and
protected like a plan's own page: no network, no script needed for its tables, every name escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from undertow.ir import Plan, format_bytes
from undertow.report.page import Measured, document, memory_section, moments_of, section, tile_list
from undertow.report.page_bands import make_picture
from undertow.report.page_frames import make_figure
from undertow.report.page_tables import (
    decision_tables,
    environment_table,
    largest_table,
    layers_table,
    measured_table,
    peak_table,
)
from undertow.report.rank_picture import MAX_SHOWN, ranks_figure
from undertow.report.rank_times import StepOfRanks
from undertow.report.reasons import find_decisions
from undertow.report.run_confusion import Matrix, confusion_figure
from undertow.report.run_curves import HEIGHT, LOW_HEIGHT, Evaluated, Points, draw_run_curve, evaluation_table
from undertow.report.timeline import Timeline


@dataclass(frozen=True)
class RunView:
    """What the page says about a run in addition to its plan. Each tile is a name, a value and a note."""

    title: str
    verdict: str
    is_good: bool
    tiles: Sequence[tuple[str, str, str]]
    losses: Points  # of training, at each step
    judging: str  # the data that epochs were judged by: test or validation
    tests: Sequence[Evaluated]
    best_step: int | None
    tested: str  # what the best weights gave on the test data, where validation data judged
    curves: Sequence[tuple[str, Points]]
    confusion: tuple[str, Matrix] | None  # what it is of, and the counts
    classes: Sequence[str]
    config: Sequence[tuple[str, str]]
    environment: Sequence[tuple[str, str]]
    budget_bytes: int | None
    held_bytes: int  # part of the budget that the step's plan does not have
    measured: Measured | None  # of the step
    process_bytes: int | None
    ranks: StepOfRanks | None = None  # a step over ranks that was recorded


def render_run_page(view: RunView, plan: Plan) -> str:
    """The page."""
    decisions, timeline = find_decisions(plan), Timeline(plan)
    picture = make_picture(timeline)
    mark, kind = ("✓", "good") if view.is_good else ("✗", "bad")
    budget, predicted = view.budget_bytes, plan.peak_bytes + view.held_bytes
    tiles = [
        *view.tiles,
        ("Predicted peak", format_bytes(predicted), f"{predicted:,} bytes"),
        ("Budget", "none" if budget is None else format_bytes(budget), "" if budget is None else f"{budget:,} bytes"),
    ]
    sections = [
        f'<header><h1>{escape(view.title)}</h1><p class="verdict"><b class="{kind}">{mark}</b> '
        f"{escape(view.verdict)}</p>{tile_list(tiles)}</header>\n",
        _curves(view),
        "" if view.ranks is None else _ranks_section(view.ranks),
        memory_section(plan, timeline, picture),
        section("Predicted and measured", measured_table(plan, view.measured, view.process_bytes), _held_note(view)),
        section("At the peak", peak_table(plan, decisions.peak), largest_table(decisions.peak)),
        section("What was decided, layer by layer", layers_table(decisions), *decision_tables(decisions)),
        section("Settings of the run", environment_table(view.config)),
        section("Environment", environment_table(view.environment)),
    ]
    page = document(view.title, "".join(sections), moments_of(plan, timeline, picture))
    # A file name may contain bytes that are not text; the page must be written all the same.
    return page.encode("utf-8", "replace").decode("utf-8")


def _ranks_section(step: StepOfRanks) -> str:
    number = len(step.measured)
    note = f"One step of {number} ranks. {step.limit[0].upper()}{step.limit[1:]}."
    if number > MAX_SHOWN:
        note += f" The first {MAX_SHOWN} ranks are drawn."
    return section("A step over the ranks", f'<p class="note">{escape(note)}</p>', ranks_figure(step))


def _held_note(view: RunView) -> str:
    if not view.held_bytes:
        return ""
    size = format_bytes(view.held_bytes)
    return f'<p class="note">Besides the step, the budget has {size} for averaged weights and the next batch.</p>'


def _curves(view: RunView) -> str:
    if not view.losses:
        return section("Loss", "<p>No step has been recorded.</p>")
    legend = (
        '<ul class="legend"><li><i class="key-train"></i>training</li>'
        f'<li><i class="key-test"></i>{escape(view.judging)}</li></ul>'
    )
    tested, best = [(float(item.step), item.loss) for item in view.tests], view.best_step
    figure = make_figure(HEIGHT, lambda frame: draw_run_curve("Loss", view.losses, tested, frame, best), legend)
    parts = [section("Loss", figure)]
    shares = [(float(item.step), item.accuracy) for item in view.tests if item.accuracy is not None]
    if shares:
        title = f"{view.judging.capitalize()} accuracy"
        figure = make_figure(HEIGHT, lambda frame: draw_run_curve(title, (), shares, frame, best, is_share=True))
        parts.append(section(title, figure))
    if view.tests:
        note = f"<p>{escape(view.tested)}</p>" if view.tested else ""
        parts.append(section("Evaluations", note, evaluation_table(view.tests, view.judging)))
    if view.confusion is not None:
        what, matrix = view.confusion
        note = f'<p class="note">{escape(what)}</p>'
        parts.append(section("Which class was taken for which", note, confusion_figure(matrix, view.classes)))
    return "".join(parts) + "".join(section(title, _draw_low(title, points)) for title, points in view.curves)


def _draw_low(title: str, points: Points) -> str:
    return make_figure(LOW_HEIGHT, lambda frame: draw_run_curve(title, points, (), frame, is_from_zero=True))
