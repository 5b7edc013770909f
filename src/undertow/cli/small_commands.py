"""The commands about compressed networks: compress, and what inspect shows of a `.utz` file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from undertow.cli.exits import CHECK_FAILED, DONE, INTERRUPTED, TERMINATED
from undertow.cli.printing import check_page, print_data, print_result, report_error, write_page
from undertow.errors import CallError

STATE_SUFFIX = ".part"


def add_small_commands(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("compress")(compress_command)


def compress_command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run; or a model, with --weights.")],
    out: Annotated[str, typer.Option(metavar="FILE.utz", help="Where to write the small network.")],
    max_loss: Annotated[float, typer.Option(help="Percentage points of accuracy that may be lost.")] = 0.1,
    coder: Annotated[
        str, typer.Option(help="mixed: the smallest; huffman: as Deep Compression publishes it.")
    ] = "mixed",
    data: Annotated[str | None, typer.Option(help="Data to use instead of the run's own; as for train.")] = None,
    validation: Annotated[str, typer.Option(help="Share of the training data that judges, or other data.")] = "0.1",
    weights: Annotated[str | None, typer.Option(metavar="FILE.safetensors", help="Weights of a model.")] = None,
    epochs: Annotated[int, typer.Option(help="Epochs of retraining in each round.", min=1)] = 4,
    lr: Annotated[float, typer.Option(help="Learning rate of retraining.")] = 1e-3,
    optimizer: Annotated[str, typer.Option(help="adam, adamw or sgd.")] = "adam",
    distill: Annotated[float, typer.Option(help="Share of the dense network's outputs in the loss.")] = 0.0,
    numerics: Annotated[str, typer.Option(help="As for train.")] = "exact",
    budget: Annotated[str | None, typer.Option(help="Peak memory of a step, as for train.")] = None,
    minutes: Annotated[float, typer.Option(help="End with what was found by then.", min=0)] = math.inf,
    is_last: Annotated[bool, typer.Option("--last", help="Take the run's last weights instead of the best.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, or auto: a GPU where there is one.")] = "auto",
    is_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Shrink a trained network: prune, retrain, share, code. The same command goes on after a crash."""
    from undertow.cli.loading import running
    from undertow.shrink.retraining import Stopped
    from undertow.shrink.settings import Settings
    from undertow.shrink.time_limit import TimeLimit

    limit = TimeLimit(60 * minutes)
    settings = Settings(max_loss, coder, epochs, lr, optimizer, distill, 0, numerics, budget)  # type: ignore[arg-type]
    state = Path(f"{out}{STATE_SUFFIX}")
    _check_can_write(Path(out))
    try:
        with running(f"compressing {run}"):
            result = _compress(run, data, validation, weights, device, is_last, settings, state, limit)
    except Stopped as stop:
        there = f"the same command goes on from {state}" if state.exists() else "nothing was finished yet"
        report_error(f"{stop}; {there}", is_json)
        return TERMINATED if str(stop) == "terminated" else INTERRUPTED
    except KeyboardInterrupt:
        report_error(f"stopped immediately; if {state} is there, the same command goes on from it", is_json)
        return INTERRUPTED
    result.save(out)
    state.unlink(missing_ok=True)
    if is_json:
        print_data({"file": out, **result.to_dict()})
    else:
        print(_describe(out, result, max_loss))
    return DONE if result.is_accuracy_kept else CHECK_FAILED


def _compress(
    run: str,
    data: str | None,
    validation: str,
    weights: str | None,
    device: str,
    is_last: bool,
    settings: Any,
    state: Path,
    limit: Any,
) -> Any:
    from undertow.cli.small_networks import describe_network
    from undertow.cli.small_sources import load_source
    from undertow.shrink.compressing import Parts, shrink
    from undertow.train.progress import make_display

    source = load_source(run, data, validation, weights, device, is_last)
    display = make_display()
    trained, workload = source.trained, source.workload
    try:
        for note in source.notes:
            display.say(note)
        metadata = describe_network(trained.config, trained.preparation, trained.classes)
        parts = Parts(workload.train_loader, source.validation, workload.test_loader)
        return shrink(trained.model, parts, trained.objective, settings, state, metadata, display.say, limit)
    finally:
        display.close()
        workload.close()


def _check_can_write(out: Path) -> None:
    """Raise CallError before minutes of work."""
    if out.suffix != ".utz":
        raise CallError(f"--out {out}: a compressed network is written as .utz; give a name that ends in .utz")
    check_page(str(out), "--out")


def _describe(out: str, result: Any, max_loss: float) -> str:
    from undertow.report.columns import wrap

    accuracy = result.accuracy
    lines = [
        f"{what} {accuracy[name]:.2f} (dense {accuracy[f'dense_{name}']:.2f})"
        for what, name in (("validation", "validation"), ("test", "test"))
        if accuracy.get(name) is not None
    ]
    lines = [f"score on {line}" for line in lines]
    if not result.is_accuracy_kept:
        lines.append(f"a loss of {max_loss:g} could not be kept: this is the best that could be reached")
    return "\n".join(map(wrap, [*lines, f"{out}: {result}"]))


def inspect_small_file(path: str, html: str | None, is_json: bool) -> int:
    """Show the table of a file, and write it as a page."""
    from undertow.coding.small_file import open_small_file
    from undertow.shrink.page import render_page
    from undertow.shrink.report import make_report

    if html is not None:
        check_page(html)
    report = make_report(Path(path).name, open_small_file(Path(path)))
    if html is not None:
        write_page(html, render_page(report))
    print_result(report, is_json)
    return DONE
