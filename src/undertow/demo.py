"""What `scripts/demo` shows: a convnet trained on real digits within half of eager's memory, with proof.

In: nothing. Out: text on the terminal, and a run in `runs`; every number but the times repeats exactly on the same
machine. `main` returns the exit code: 0 if all comparisons hold, 1 if not.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import undertow as ut
from undertow.data.opening import open_data
from undertow.hashing import hash_tensors
from undertow.models.vgg import VGG, convolution_blocks
from undertow.report.refusal import print_refusal
from undertow.runtime.measure import measure_call
from undertow.torch_internals import activation_memory_budget
from undertow.train.config import TrainConfig
from undertow.train.feeding import Feed
from undertow.train.folder import RunFolder, new_folder
from undertow.train.optimizing import make_optimizer
from undertow.train.progress import Display, Silent, make_display
from undertow.train.result import TrainResult
from undertow.train.run import Run, UserCode
from undertow.train.workload import Workload, make_workload

SHAPE = (3, 16, 16)
CONFIG = TrainConfig(
    "undertow.demo:demo_network", epochs=8, batch=64, lr=0.05, seed=3, weight_decay=5e-4, schedule="cosine"
)
ONE_EPOCH = replace(CONFIG, epochs=1, schedule="constant")
COMPILE_BUDGET = 0.2  # of the activations; at this and below, torch.compile recomputes a dropout of this network
WHY_COMPILE_IS_OFF = """\
The setting is torch._functorch.config.activation_memory_budget, with the
backend aot_eager. At 0.2 torch.compile runs a dropout again in the backward
pass and draws another mask there; at 1.0 nothing runs again."""
MIN_ACCURACY = 0.97


def demo_network() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """A VGG of twelve 3x3 convolutions with BatchNorm, and dropout before its linear layers; an example input."""
    features = convolution_blocks(((4, 1), (4, 2), (4, 4)), width=16, has_batch_norm=True)
    classifier = nn.Sequential(
        nn.Dropout(0.3), nn.Linear(4 * 16 * 2 * 2, 64), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(64, 10)
    )
    return VGG(features, classifier), (torch.zeros(1, *SHAPE),)


def make_demo_workload() -> Workload:
    """The network with its initial weights, and the digits."""
    source = open_data("digits", SHAPE)
    torch.manual_seed(CONFIG.seed)
    return make_workload(demo_network()[0], source, int(CONFIG.batch))


def main() -> int:
    """Run the demonstration."""
    workload = make_demo_workload()
    num_parameters = sum(parameter.numel() for parameter in workload.model.parameters())
    print(f"A convnet of 12 convolutions with BatchNorm and dropout, {num_parameters:,} parameters.")
    print(f"1,438 handwritten digits to train on, 359 to test; batch {CONFIG.batch}, SGD with momentum.\n")

    print("1. One epoch with PyTorch alone")
    eager_hash, eager_peak = train_eagerly(workload)
    print(f"   peak memory of a step   {eager_peak:,} bytes\n   weights                 {eager_hash}\n")

    print("2. The same epoch, planned for half of that")
    budget = str(eager_peak // 2)
    with tempfile.TemporaryDirectory() as temporary:
        first = train(Path(temporary), replace(ONE_EPOCH, budget=budget), Silent())
    is_same = first.weights_sha256 == eager_hash
    is_within = report_peak(first)
    print(f"   weights                 {first.weights_sha256}: {'the same bits' if is_same else 'DIFFERENT'}\n")

    print("3. Gradients of one batch compared with eager's, by two ways to take less memory")
    is_exact = compare_gradients(int(budget))

    print("\n4. A budget that cannot be met is refused before anything runs")
    show_refusal()

    print(f"\n5. {CONFIG.epochs} epochs within that half, as `undertow train` runs them", flush=True)
    folder = new_folder(CONFIG)
    last = train(folder, replace(CONFIG, budget=budget), make_display())
    accuracy = last.progress.test_accuracy or 0.0
    print(f"   accuracy on the test split {accuracy:.2%}, {last.progress.seconds:.0f} s of training, in {folder}")
    print("\nNext: source .venv/bin/activate, for the command undertow; then")
    print(f"   undertow report {folder} --html    undertow train --help    docs/first-five-minutes.md")
    return 0 if is_same and is_within and is_exact and accuracy >= MIN_ACCURACY else 1


def train_eagerly(workload: Workload) -> tuple[str, int]:
    """Train an epoch in a plain loop; returns the hash of the weights and the peak of the second step."""
    model = workload.model
    optimizer = make_optimizer(ONE_EPOCH, model)
    peak = 0

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    for index, (inputs, targets) in enumerate(Feed(workload.train_loader, CONFIG.seed).batches(0, 0)):
        if index != 1:
            step(inputs, targets)
            continue
        state = [item for entry in optimizer.state.values() for item in entry.values()]
        held = [*model.parameters(), *model.buffers(), *state, inputs, targets]
        peak = measure_call(lambda pair=(inputs, targets): step(*pair), held).peak_bytes  # type: ignore[misc]
    return hash_tensors(model.state_dict()), peak


def train(path: Path, config: TrainConfig, display: Display) -> TrainResult:
    """Train as `undertow train` does."""
    folder = RunFolder(path)
    run = Run(config, make_demo_workload(), folder, display, torch.device("cpu"), UserCode())
    run.prepare()
    with folder.lock():
        folder.create(config)
        return run.train()


def report_peak(result: TrainResult) -> bool:
    """Print budget, predicted and measured peak; whether both peaks are equal and within the budget."""
    progress, budget = result.progress, result.budget_bytes
    predicted, measured = progress.predicted_peak_bytes, progress.measured_peak_bytes
    assert predicted is not None and measured is not None and budget is not None
    print(f"   budget                  {budget:,} bytes\n   predicted peak          {predicted:,} bytes")
    print(f"   measured peak           {measured:,} bytes")
    return predicted == measured <= budget


def compare_gradients(budget: int) -> bool:
    """Compare Undertow and torch.compile, each given a budget, with eager; whether Undertow has eager's bits."""
    workload = make_demo_workload()
    inputs, targets = next(Feed(workload.train_loader, CONFIG.seed).batches(0, 0))

    def gradients(wrap: Callable[[nn.Module], nn.Module]) -> torch.Tensor:
        model = copy.deepcopy(workload.model)
        wrapped = wrap(model)
        torch.manual_seed(0)
        cross_entropy(wrapped(inputs), targets).backward()
        return torch.cat([item.grad.reshape(-1) for item in model.parameters() if item.grad is not None])

    eager = gradients(lambda model: model)
    planned = gradients(lambda model: ut.plan(model, (inputs,), budget=budget))
    rows = [(f"ut.plan(budget={budget})", planned)]
    for share in (1.0, COMPILE_BUDGET):
        torch.compiler.reset()  # or the code for the other budget would run again
        with activation_memory_budget(share):
            compiled = gradients(lambda model: torch.compile(model, backend="aot_eager"))  # type: ignore[arg-type, return-value]
        rows.append((f"torch.compile, activation_memory_budget={share}", compiled))
    for name, found in rows:
        error = float((found - eager).norm() / eager.norm())
        print(f"   {name:<43} {'the same bits' if torch.equal(found, eager) else f'{error:.0%} off'}")
    print(textwrap.indent(WHY_COMPILE_IS_OFF, "   "))
    return torch.equal(planned, eager)


def show_refusal() -> None:
    """Request a budget of four MiB, which is refused."""
    workload = make_demo_workload()
    inputs, targets = next(Feed(workload.train_loader, CONFIG.seed).batches(0, 0))
    optimizer = make_optimizer(CONFIG, workload.model)
    try:
        model, budget = workload.model, "4MiB"
        ut.train_step(model, (inputs,), targets=(targets,), loss=cross_entropy, optimizer=optimizer, budget=budget)
    except ut.InfeasibleBudget as refusal:
        print(textwrap.indent(print_refusal(refusal), "   "))


if __name__ == "__main__":
    sys.exit(main())
