"""The commands about runs: train, evaluate, predict, export, report, look.

The options of `train` are made from the fields of `TrainConfig`. An option that is not given is None, so that a config
file can give it instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, get_origin, get_type_hints

import typer

from undertow.cli.exits import CHECK_FAILED, DONE, INTERRUPTED, TERMINATED
from undertow.cli.printing import STOPPED, check_page, print_data, print_result, report_error
from undertow.errors import CallError
from undertow.ranks.started import is_rank
from undertow.train.config import SERVER, TrainConfig, check_resumed, make_config, read_config_file

if TYPE_CHECKING:
    import torch

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run.")]
TrainedArgument = Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run, or a .utz file.")]
ModelOption = Annotated[str | None, typer.Option(help="The model of a .utz file, where it is your own code.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, or auto: a GPU where there is one.")]
LastOption = Annotated[bool, typer.Option("--last", help="Take the last weights instead of the best.")]
EpochOption = Annotated[int | None, typer.Option(help="Take the weights after this epoch; --keep keeps them.", min=1)]
DataOption = Annotated[str | None, typer.Option(help="Data to use instead of the run's own; as for train.")]


def add_run_commands(app: typer.Typer) -> None:
    """Add the commands about runs to the command line."""
    app.command("train")(_with_config_options(train_command))
    app.command("evaluate")(evaluate_command)
    app.command("predict")(predict_command)
    app.command("export")(export_command)
    app.command("report")(report_command)
    app.command("look")(look_command)


def _with_config_options(command: Any) -> Any:
    """The command with a parameter for every field of TrainConfig; the model is an argument, the others options."""
    hints = get_type_hints(TrainConfig)
    own = list(inspect.signature(command, eval_str=True).parameters.values())[:-1]
    made = []
    for item in fields(TrainConfig):
        text = item.metadata["help"]
        if item.default is not None and item.name != "model":
            default = {"True": "yes", "False": "no"}.get(str(item.default), item.default)
            text += f" [default: {default}]"
        value_type = hints[item.name].__args__[0] if isinstance(hints[item.name], UnionType) else hints[item.name]
        if item.metadata["word"] is not None or get_origin(value_type) is not None:
            value_type = str  # a number or a word; a list or a table, which `make_config` reads
        given: Any = typer.Option(help=text)
        if item.name == "model":
            given = typer.Argument(metavar="MODEL", help=text, show_default=False)
        elif item.metadata["choices"]:
            choices = f" One of {', '.join(item.metadata['choices'])}."
            given = typer.Option(help=f"{item.metadata['help']}{choices} [default: {item.default}]")
        made.append(
            inspect.Parameter(
                item.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[value_type | None, given]
            )
        )

    def run(**values: Any) -> int:
        named = {parameter.name: values.pop(parameter.name) for parameter in own}
        return command(**named, **values)

    run.__signature__ = inspect.Signature([*made, *own])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*made, *own)}
    run.__doc__ = command.__doc__
    return run


def train_command(
    *,
    config: Annotated[str | None, typer.Option(metavar="FILE", help="TOML or YAML with the same names.")] = None,
    resume: Annotated[str | None, typer.Option(metavar="RUN", help="Go on with the run in this folder.")] = None,
    replay: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Do the pushes of a run with --parallel server again, and compare."),
    ] = None,
    is_json: JsonOption = False,
    **given: Any,
) -> int:
    """Train a model within a memory budget, with eager PyTorch's bits."""
    named = {name: value for name, value in given.items() if value is not None}
    if replay is not None:
        from undertow.cli.serving import replay_run

        if named or config is not None or resume is not None:
            raise CallError("--replay takes its options from the run; leave the others out")
        found = replay_run(Path(replay))
        print_result(found, is_json)
        return DONE if found.is_same else CHECK_FAILED
    from_file = {} if config is None else read_config_file(Path(config))
    if resume is None:
        settings = make_config({**from_file, **named}, config or "command line")
    else:
        from undertow.train.folder import RunFolder

        before = RunFolder(Path(resume)).read_config()
        settings = check_resumed(before, {**from_file, **named}, Path(resume))
    if is_rank():
        from undertow.cli.rank_process import train_as_rank

        return train_as_rank(settings, resume is not None, is_json)
    if settings.mesh.num_ranks > 1:
        return _launch(settings, {"config": config, "resume": resume, **named}, is_json)
    from undertow.cli.training import train
    from undertow.train.job import Job

    if settings.parallel == SERVER:
        from undertow.cli.serving import train_served

        return report_training(lambda: train_served(settings, resume is not None), is_json)
    return report_training(lambda: train(settings, resume is not None, Job()), is_json)


def report_training(train: Callable[[], Any], is_json: bool) -> int:
    """Train and print the result; returns the exit code."""
    try:
        result = train()
    except KeyboardInterrupt:
        report_error(STOPPED, is_json)
        return INTERRUPTED
    print_result(result, is_json)
    return {"interrupted": INTERRUPTED, "terminated": TERMINATED}.get(result.progress.stopped, DONE)


def _launch(settings: TrainConfig, given: dict[str, Any], is_json: bool) -> int:
    from undertow.cli.launching import run_job, write_words
    from undertow.train.folder import new_folder

    folder = Path(settings.out) if settings.out is not None else new_folder(settings)
    given = {name: value for name, value in given.items() if value is not None and name != "parallel"}
    words = write_words(given.pop("model", None), {**given, "out": str(folder)})
    words += ["--json"] if is_json else []
    return run_job(words, settings, folder, "resume" in given, is_json)


def evaluate_command(
    run: TrainedArgument,
    data: DataOption = None,
    is_last: LastOption = False,
    epoch: EpochOption = None,
    model: ModelOption = None,
    device: DeviceOption = "auto",
    is_json: JsonOption = False,
) -> int:
    """Measure loss and accuracy of a trained model, with its best weights, on test data."""
    from undertow.cli.loading import running
    from undertow.cli.small_networks import is_small_file
    from undertow.cli.workloads import load_test_batches

    with running(f"evaluating {run}"):
        trained = _load(run, device, is_last, epoch, model)
        if data is None and is_small_file(run):
            raise CallError(f"{run} is a file without data: say on which data to evaluate it with --data")
        batches = load_test_batches(trained, data or trained.config.data)
        result = trained.make_evaluator().evaluate(batches)
    print_result(result, is_json)
    return DONE


def _load(run: str, device: str | None, is_last: bool, epoch: int | None, model: str | None) -> Any:
    """A run's network, or that of a `.utz` file."""
    from undertow.cli.small_networks import is_small_file, load_small_network
    from undertow.cli.workloads import load_trained

    if not is_small_file(run):
        if model is not None:
            raise CallError(f"--model is for a .utz file; {run} is a run, which says what its model is")
        return load_trained(run, device, is_last, epoch)
    if is_last or epoch is not None:
        raise CallError(f"--last and --epoch are for runs; {run} is a file with one network")
    return load_small_network(run, model, device)


def predict_command(
    run: TrainedArgument,
    inputs: Annotated[str, typer.Argument(metavar="INPUT", help="An image, a folder of images, a .npz or .txt file.")],
    top: Annotated[int, typer.Option(help="How many classes to name.", min=1)] = 1,
    is_last: LastOption = False,
    epoch: EpochOption = None,
    model: ModelOption = None,
    device: DeviceOption = "auto",
    is_json: JsonOption = False,
) -> int:
    """Print what a trained model says of new inputs: class probabilities, or numbers."""
    from undertow.cli.loading import running
    from undertow.train.prediction import predict, predict_numbers

    with running(f"predicting {inputs}"):
        trained = _load(run, device, is_last, epoch, model)
        if trained.preparation is None:
            raise CallError(f"{run} was trained on your own loaders, which do not say how a new input is prepared")
        evaluator = trained.make_evaluator()

        def run_model(given: torch.Tensor) -> Any:
            return evaluator.predict(given.to(trained.device))

        found: list[Any]
        if trained.objective.is_of_classes:
            found = [*predict(run_model, trained.preparation, trained.classes, Path(inputs), top)]
        else:
            found = [*predict_numbers(run_model, trained.preparation, Path(inputs))]
    if is_json:
        print_data([item.to_dict() for item in found])
    else:
        print(*found, sep="\n")
    return DONE


def export_command(
    run: TrainedArgument,
    weights: Annotated[str, typer.Argument(metavar="FILE.safetensors", help="Where to write them.")],
    is_last: LastOption = False,
    epoch: EpochOption = None,
    is_json: JsonOption = False,
) -> int:
    """Write a trained model's best weights as plain safetensors."""
    from undertow.hashing import hash_tensors
    from undertow.train.weights import write_tensors

    if Path(weights).suffix != ".safetensors":
        raise CallError(f"{weights}: weights are written as safetensors; give a name that ends in .safetensors")
    found = _read_weights(run, weights, is_last, epoch)
    write_tensors(Path(weights), found, {"format": "pt"})
    data = {"file": weights, "tensors": len(found), "weights_sha256": hash_tensors(found)}
    print_data(data) if is_json else print(f"{weights}: {len(found)} tensors, sha256 {data['weights_sha256']}")
    return DONE


def _read_weights(run: str, out: str, is_last: bool, epoch: int | None) -> dict[str, Any]:
    from undertow.cli.small_networks import is_small_file
    from undertow.coding.small_file import open_small_file
    from undertow.coding.tensors import CodedTensor
    from undertow.train.folder import RunFolder

    if is_small_file(run):
        tensors = open_small_file(Path(run)).read_all()
        return {name: item.dense() if isinstance(item, CodedTensor) else item for name, item in tensors.items()}
    folder = RunFolder(Path(run))
    if Path(out).exists() and any(Path(out).samefile(path) for path in folder.own_files()):
        raise CallError(f"{out} is one of the run's own checkpoints, which must not be replaced; give another file")
    return folder.read_trained(is_last, epoch).trained_weights()


def report_command(
    run: RunArgument,
    is_html: Annotated[
        bool, typer.Option("--html", help="Write the report as a page, report.html in the run's folder.")
    ] = False,
    is_json: JsonOption = False,
) -> int:
    """Show what a run did: its curves, its plan, predicted beside measured."""
    from undertow.cli.loading import running
    from undertow.cli.workloads import load_trained
    from undertow.durable import write_durably
    from undertow.train.folder import RunFolder
    from undertow.train.report import make_report

    with running(f"planning the step of {run} again"):
        trained = load_trained(run, None, is_last=True)
        if is_html:
            check_page(str(Path(run) / "report.html"))
        metrics = RunFolder(Path(run)).read_metrics()
        report = make_report(
            trained.config, trained.model, trained.checkpoint, metrics, trained.objective, trained.device
        )
    if is_html:
        path = str(Path(run) / "report.html")
        page = report.to_html().encode()
        write_durably(Path(path), lambda file: file.write(page))
        print_data({"page": path}) if is_json else print(path)
        return DONE
    print_result(report, is_json)
    return DONE


def look_command(
    run: RunArgument,
    data: DataOption = None,
    units: Annotated[int, typer.Option(help="How many filters or units of each layer to show.", min=1, max=64)] = 6,
    examples: Annotated[int, typer.Option(help="How many test examples to show for each.", min=1, max=16)] = 4,
    is_last: LastOption = False,
    epoch: EpochOption = None,
    device: DeviceOption = "auto",
    is_json: JsonOption = False,
) -> int:
    """Show what a network has learned: its filters, what triggers them, and by which pixels. Writes RUN/look.html."""
    from undertow.cli.loading import running
    from undertow.cli.workloads import load_test_batches, load_trained
    from undertow.durable import write_durably
    from undertow.look.looking import look_at
    from undertow.look.page import render_look

    path = Path(run) / "look.html"
    with running(f"looking at {run}"):
        trained = load_trained(run, device, is_last, epoch)
        check_page(str(path))
        loader = load_test_batches(trained, data or trained.config.data)
        look = look_at(
            trained.model,
            loader,
            trained.objective.read,
            trained.device,
            title=f"{trained.config.model} on {data or trained.config.data}",
            preparation=trained.preparation,
            classes=trained.classes,
            num_units=units,
            num_samples=examples,
            seed=trained.config.seed,
        )
        page = render_look(look).encode()
    write_durably(path, lambda file: file.write(page))
    print_data({"page": str(path), **look.to_dict()}) if is_json else print(path)
    return DONE
