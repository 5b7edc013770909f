"""The commands. In: the words of the command line. Out: text or JSON on stdout, and an exit code (`exits`).

An error prints one line on stderr: what was wrong, where, and what to do; with `--json`, `{"error": line}`. Commands
that need torch import it themselves, so that `--help` is quick.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from enum import StrEnum
from typing import Annotated, Any

import typer

from undertow.cli.about_commands import add_about_commands
from undertow.cli.exits import CHECK_FAILED, DONE, WRONG_CALL, exit_code
from undertow.cli.printing import (
    check_page,
    print_result,
    report_error,
    report_missing,
    report_refusal,
    warnings_as_lines,
    write,
    write_page,
)
from undertow.cli.run_commands import add_run_commands
from undertow.cli.small_commands import add_small_commands
from undertow.errors import CallError, ClosedPipe, GradientCheckFailed, InfeasibleBudget, OutputError, UndertowError

# The base of all errors about the words themselves; older versions of typer take it from click.
UsageError: Any = typer.BadParameter.__base__

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A zoo name (vgg16), file.py:factory or package.module:factory.")
]
BatchOption = Annotated[int | None, typer.Option(help="Examples in the batch; 1 by default.")]
InputOption = Annotated[
    list[str] | None,
    typer.Option(
        "--input", metavar="SHAPE[:DTYPE]", help="An input, such as 8,3,224,224 or 8,128:int64; repeat for several."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, or auto: a GPU where there is one.")]
NumericsOption = Annotated[
    str, typer.Option(help="exact; fast: the fastest kernels, within error bounds; bf16: fast, in bfloat16.")
]


class OptimizerName(StrEnum):
    """Optimizers whose state `inspect` and `plan` can count: SGD with momentum, Adam, AdamW."""

    SGD = "sgd"
    ADAM = "adam"
    ADAMW = "adamw"


OptimizerOption = Annotated[OptimizerName | None, typer.Option(help="Count this optimizer's state.")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    # Python sets a stream to None if it was closed before the start.
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
    try:
        return _run(words)
    except OutputError as error:  # stderr cannot be written: nobody can be told
        return exit_code(error)


def _run(words: list[str]) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names may hold bytes that are not text
    output = io.StringIO()
    try:
        with redirect_stdout(output), warnings_as_lines():
            try:
                code = app(words, prog_name="undertow", standalone_mode=False)
            except InfeasibleBudget as refusal:
                report_refusal(refusal, "--json" in words)
                code = exit_code(refusal)
        write(output.getvalue(), sys.stdout)
        return code
    except ClosedPipe:
        raise
    except UsageError as error:
        report_error(f"{error.format_message().rstrip('.')}; see undertow --help", "--json" in words)
        return WRONG_CALL
    except UndertowError as error:
        report_error(str(error), "--json" in words)
        return exit_code(error)
    except ModuleNotFoundError as error:  # one of the user's modules is a CallError by now (`loading.running`)
        report_missing(error, "--json" in words)
        return WRONG_CALL


@app.command("inspect")
def inspect_command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="As for plan; or a .utz file, for the table of what it holds.")
    ],
    batch: BatchOption = None,
    inputs: InputOption = None,
    device: DeviceOption = "auto",
    optimizer: OptimizerOption = None,
    html: Annotated[str | None, typer.Option(metavar="FILE", help="Of a .utz file: write its table as a page.")] = None,
    is_json: JsonOption = False,
) -> int:
    """Show where the memory and the arithmetic of a training step go, or what a compressed network consists of."""
    from undertow.api.inspection import inspect
    from undertow.cli.loading import load, running
    from undertow.cli.small_commands import inspect_small_file
    from undertow.cli.small_networks import is_small_file

    if is_small_file(model):
        return inspect_small_file(model, html, is_json)
    if html is not None:
        raise CallError("--html is for a .utz file; undertow plan --html writes a page of a training step")
    subject = load(model, batch, inputs or [], device)
    with running(f"{model} on {subject.describe_inputs()}"):
        made = _make_optimizer(optimizer, subject.model)
        result = inspect(subject.model, subject.args, subject.kwargs, optimizer=made)
    print_result(result, is_json)
    return DONE


@app.command("check")
def check_command(
    model: ModelArgument,
    batch: BatchOption = None,
    inputs: InputOption = None,
    is_json: JsonOption = False,
) -> int:
    """Compare a model's derived gradients with finite differences."""
    from undertow.api.checks import check_gradients
    from undertow.cli.loading import load, running

    subject = load(model, batch, inputs or [])
    with running(f"{model} on {subject.describe_inputs()}"):
        try:
            result = check_gradients(subject.model, subject.args, subject.kwargs)
        except GradientCheckFailed as failure:
            result = failure.result
    print_result(result, is_json)
    return DONE if result.ok else CHECK_FAILED


@app.command("plan")
def plan_command(
    model: ModelArgument,
    batch: BatchOption = None,
    inputs: InputOption = None,
    device: DeviceOption = "auto",
    budget: Annotated[
        str | None, typer.Option(help="Peak memory of the step: 4GiB or 4G, 500MB, bytes, or auto: what is free.")
    ] = None,
    optimizer: OptimizerOption = None,
    numerics: NumericsOption = "exact",
    allow_other_bits: Annotated[
        bool,
        typer.Option("--allow-other-bits", help="Use kernels that take less memory where the fastest do not fit."),
    ] = False,
    costs: Annotated[str, typer.Option(help="measured, or model: from arithmetic and memory traffic.")] = "measured",
    is_quick: Annotated[
        bool, typer.Option("--quick", help="Only say whether the step fits into what is free; nothing is run.")
    ] = False,
    parallel: Annotated[
        str | None,
        typer.Option(help="Divide the model over ranks, such as stages=4 or data=2,stages=2; none is started."),
    ] = None,
    shards: Annotated[
        int | None, typer.Option(help="Shards of the batch, with --parallel; by default 4 for each stage.")
    ] = None,
    stage_schedule: Annotated[str, typer.Option(help="gpipe, 1f1b, interleaved or zero-bubble.")] = "1f1b",
    html: Annotated[str | None, typer.Option(metavar="FILE", help="Write the report as one page.")] = None,
    is_json: JsonOption = False,
) -> int:
    """Plan a training step for a memory budget: does it fit, what is kept, recomputed and encoded, and why."""
    from undertow.api.fitting import estimate_fit
    from undertow.api.reports import report_plan
    from undertow.cli.loading import load, running
    from undertow.report.refusal import render_refusal

    if html is not None:
        check_page(html)
    subject = load(model, batch, inputs or [], device)
    title = f"{model} on {subject.describe_inputs()}"
    if parallel is not None:
        from undertow.cli.stages import plan_stages

        with running(title):
            made = _make_optimizer(optimizer, subject.model)
            terms = {"budget": budget, "optimizer": made, "numerics": numerics, "costs": costs}
            stages = plan_stages(model, subject, parallel, shards, stage_schedule, title, terms)
        if html is not None:
            write_page(html, stages.to_html())
        print_result(stages, is_json)
        return DONE
    with running(title):
        made = _make_optimizer(optimizer, subject.model)
        estimate = estimate_fit(subject.model, subject.args, subject.kwargs, optimizer=made)
    is_unsafe = budget is None and costs == "measured" and not estimate.fits
    if is_quick or is_unsafe:
        print_result(estimate, is_json)
        return DONE if estimate.fits else CHECK_FAILED
    with running(title):
        try:
            result = report_plan(
                subject.model,
                subject.args,
                subject.kwargs,
                budget=budget,
                optimizer=made,
                numerics=numerics,
                allow_other_bits=allow_other_bits,
                costs=costs,
            )
        except InfeasibleBudget as refusal:
            if html is not None:
                write_page(html, render_refusal(refusal, title))
            raise
    if html is not None:
        write_page(html, result.to_html(title))
    print_result(result, is_json)
    return DONE


@app.command("tune")
def tune_command(
    model: ModelArgument,
    batch: BatchOption = None,
    inputs: InputOption = None,
    device: DeviceOption = "auto",
    numerics: NumericsOption = "fast",
    is_json: JsonOption = False,
) -> int:
    """Time every operation of a training step, and every way to run it, on this machine; later plans use the times."""
    from undertow.api.tuning import tune
    from undertow.cli.loading import load, running

    subject = load(model, batch, inputs or [], device)
    with running(f"{model} on {subject.describe_inputs()}"):
        result = tune(subject.model, subject.args, subject.kwargs, numerics=numerics)
    print_result(result, is_json)
    return DONE


@app.command("solve")
def solve_command(
    graph: Annotated[str, typer.Argument(metavar="GRAPH.json", help="Nodes with sizes and times, and their links.")],
    peak: Annotated[float, typer.Option(help="The budget as a share of the base peak.")],
    order: Annotated[str, typer.Option(help="fixed keeps the order of first runs; free may reorder.")] = "free",
    is_json: JsonOption = False,
) -> int:
    """Plan a bare graph of sizes and times, such as published planners are compared on."""
    from undertow.api.solving import solve

    result = solve(graph, peak, order=order)
    print_result(result, is_json)
    return DONE if result.extra_time_percent is not None else CHECK_FAILED


def _make_optimizer(name: OptimizerName | None, model: Any) -> Any:
    import torch

    makers: dict[str, Any] = {
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
    }
    return None if name is None else makers[name.value](model.parameters())


add_run_commands(app)
add_small_commands(app)
add_about_commands(app)
