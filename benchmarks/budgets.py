"""A planned step beside what PyTorch offers to save memory: peak and time of each, measured in one run.

Peers: no checkpointing; `torch.utils.checkpoint` on every block and on every n-th; selective checkpointing that keeps
products and convolutions; `torch.compile` with `activation_memory_budget` in steps of 0.1 (backend "aot_eager", and
"inductor" at a few). For every peak that a peer reaches, Undertow plans a step within that peak. A step is forward
pass, loss and backward pass; rounds are interleaved. Each model runs in its own process.

Usage: scripts/bench budgets [--models vgg16,gpt2] [--rounds N] [--inductor] [--out F]
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config
import transformers
from machine import describe_machine
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import undertow as ut
from undertow.models import ZOO
from undertow.runtime.measure import measure_call

aten = torch.ops.aten
PRODUCTS = {
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.convolution.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}  # fmt: skip


@dataclass
class Workload:
    """A model, its batch, its loss, and the blocks that a user would checkpoint."""

    model: nn.Module
    args: tuple[Any, ...]
    targets: tuple[Any, ...]
    loss: Callable[..., torch.Tensor]
    blocks: Callable[[nn.Module], Sequence[nn.Module]]


def _stages(features: nn.Sequential, is_last: Callable[[nn.Module], bool]) -> nn.Sequential:
    """The layers of a flat Sequential, grouped into blocks."""
    groups: list[list[nn.Module]] = [[]]
    for layer in features:
        groups[-1].append(layer)
        if is_last(layer):
            groups.append([])
    return nn.Sequential(*(nn.Sequential(*group) for group in groups if group))


def vgg16(batch: int = 4) -> Workload:
    """VGG-16, 224 x 224; its blocks end with a pooling layer."""
    zoo = ZOO["vgg16"]
    model = zoo.build()
    model.features = _stages(model.features, lambda layer: isinstance(layer, nn.MaxPool2d))
    return Workload(model, zoo.example_inputs(batch), zoo.example_targets(batch), zoo.loss, lambda m: list(m.features))


def resnet50(batch: int = 8, side: int = 128) -> Workload:
    """ResNet-50; a block is a bottleneck."""
    model = ZOO["resnet50"].build()
    blocks = lambda m: [module for module in m.modules() if type(module).__name__ == "Bottleneck"]  # noqa: E731
    return Workload(
        model, (torch.randn(batch, 3, side, side),), (torch.randint(1000, (batch,)),), cross_entropy, blocks
    )


def unet(batch: int = 2, side: int = 192) -> Workload:
    """U-Net; a block is a pair of convolutions."""
    model = ZOO["unet"].build(width=32)
    blocks = lambda m: [*m.contracting, *m.expanding]  # noqa: E731
    data = (torch.randn(batch, 1, side, side),), (torch.randint(2, (batch, side, side)),)
    return Workload(model, *data, cross_entropy, blocks)


class InvertedResidual(nn.Module):
    """A block of MobileNetV2 (Sandler et al., CVPR 2018): widen, convolve each channel, narrow."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.is_residual = stride == 1 and inputs == outputs
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, hidden, 1, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(inplace=True),
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(inplace=True),
            nn.Conv2d(hidden, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output, added to its input where the shapes agree."""
        return x + self.layers(x) if self.is_residual else self.layers(x)


def mobilenet(batch: int = 8, side: int = 128) -> Workload:
    """MobileNetV2's table of blocks at width 1."""
    table = [(6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU6(inplace=True)]
    layers.append(InvertedResidual(32, 16, 1, 1))
    inputs = 16
    for expansion, outputs, count, stride in table:
        for index in range(count):
            layers.append(InvertedResidual(inputs, outputs, stride if index == 0 else 1, expansion))
            inputs = outputs
    layers += [nn.Conv2d(320, 1280, 1, bias=False), nn.BatchNorm2d(1280), nn.ReLU6(inplace=True)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(1280, 1000)]
    blocks = lambda m: [module for module in m if isinstance(module, InvertedResidual)]  # noqa: E731
    data = (torch.randn(batch, 3, side, side),), (torch.randint(1000, (batch,)),)
    return Workload(nn.Sequential(*layers), *data, cross_entropy, blocks)


def gpt2(batch: int = 4, length: int = 256) -> Workload:
    """GPT-2 small with dropout."""
    zoo = ZOO["gpt"]
    tokens = torch.randint(50257, (batch, length))
    blocks = lambda m: [module for module in m.modules() if type(module).__name__ == "Block"]  # noqa: E731
    return Workload(zoo.build(), (tokens,), (torch.randint(50257, (batch, length)),), zoo.loss, blocks)


def bert(batch: int = 8, length: int = 128) -> Workload:
    """BERT with 6 layers of width 512, dropout on."""
    config = transformers.BertConfig(
        hidden_size=512,
        num_hidden_layers=6,
        num_attention_heads=8,
        intermediate_size=2048,
        vocab_size=8192,
        num_labels=2,
    )
    model = transformers.BertForSequenceClassification(config)
    data = (torch.randint(8192, (batch, length)),), (torch.randint(2, (batch,)),)
    blocks = lambda m: list(m.bert.encoder.layer)  # noqa: E731
    return Workload(model, *data, lambda out, y: cross_entropy(out.logits, y), blocks)


def vit(batch: int = 8) -> Workload:
    """ViT with 8 layers of width 384 on 224 x 224."""
    config = transformers.ViTConfig(
        hidden_size=384, num_hidden_layers=8, num_attention_heads=6, intermediate_size=1536, num_labels=100
    )
    model = transformers.ViTForImageClassification(config)
    data = (torch.randn(batch, 3, 224, 224),), (torch.randint(100, (batch,)),)
    blocks = lambda m: [module for module in m.modules() if type(module).__name__ == "ViTLayer"]  # noqa: E731
    return Workload(model, *data, lambda out, y: cross_entropy(out.logits, y), blocks)


WORKLOADS = {
    "vgg16": vgg16, "resnet50": resnet50, "unet": unet, "mobilenet": mobilenet, "gpt2": gpt2, "bert": bert, "vit": vit
}  # fmt: skip


@dataclass
class Contender:
    """One way to run the step, and what was measured of it."""

    name: str
    run: Callable[[], Any]
    persistent: list[torch.Tensor]
    peak_bytes: int = 0
    times_s: list[float] = field(default_factory=list)
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The numbers by name."""
        return {
            "name": self.name,
            "peak_mib": round(self.peak_bytes / 2**20, 1),
            "median_s": round(statistics.median(self.times_s), 4),
            "times_s": [round(item, 4) for item in self.times_s],
            "note": self.note,
        }


def _copy(model: nn.Module) -> nn.Module:
    """A copy that shares the parameters: nothing is updated here, and thirty copies of them would not fit."""
    return copy.deepcopy(model, {id(item): item for item in model.parameters()})


def _plain_step(model: nn.Module, work: Workload) -> Callable[[], Any]:
    def run() -> None:
        model.zero_grad(set_to_none=True)
        work.loss(model(*work.args), *work.targets).backward()

    return run


def _checkpointed(work: Workload, every: int, is_selective: bool) -> nn.Module:
    model = _copy(work.model)
    settings: dict[str, Any] = {"use_reentrant": False}
    if is_selective:

        def policy(context: Any, target: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            return CheckpointPolicy.MUST_SAVE if target in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE

        settings["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    for index, block in enumerate(work.blocks(model)):
        if index % every == 0:
            block.forward = partial(checkpoint, block.forward, **settings)
    return model


def own_backend(name: str) -> Callable[[torch.fx.GraphModule, list[torch.Tensor]], Any]:
    """The backend as a new callable: copies of a model share their code, and would run what was compiled first."""

    def compile_graph(graph: torch.fx.GraphModule, examples: list[torch.Tensor]) -> Any:
        return lookup_backend(name)(graph, examples)

    return compile_graph


def _compiled(work: Workload, ratio: float, backend: str) -> nn.Module:
    model = _copy(work.model)
    with torch._functorch.config.patch(activation_memory_budget=ratio):
        compiled = torch.compile(model, backend=own_backend(backend), dynamic=False)
        _plain_step(compiled, work)()  # compiles under this ratio
    return compiled


def _gradients(model: nn.Module, work: Workload) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    _plain_step(model, work)()
    return {
        name.replace("_orig_mod.", ""): item.grad for name, item in model.named_parameters() if item.grad is not None
    }


def peers(work: Workload, backends: dict[str, Sequence[float]]) -> list[Contender]:
    """Every way of PyTorch's, each on a copy of the model."""
    expected = {name: item.clone() for name, item in _gradients(_copy(work.model), work).items()}
    found: list[Contender] = []

    def add(name: str, make: Callable[[], nn.Module]) -> None:
        try:
            model = make()
            gradients = _gradients(model, work)
        except Exception as error:  # a peer that cannot run the model is reported
            print(f"  {name}: {type(error).__name__}: {str(error)[:100]}", flush=True)
            return
        worst = max(float((gradients[key] - item).norm() / (item.norm() + 1e-30)) for key, item in expected.items())
        persistent = [*model.parameters(), *model.buffers(), *work.args, *work.targets]
        contender = Contender(name, _plain_step(model, work), persistent, note=f"gradients off by {worst:.1e}")
        model.zero_grad(set_to_none=True)
        gc.collect()
        contender.peak_bytes = measure_call(contender.run, persistent).peak_bytes
        model.zero_grad(set_to_none=True)
        found.append(contender)

    add("eager", lambda: _copy(work.model))
    for every in (1, 2, 3):
        add(f"checkpoint every {every}", partial(_checkpointed, work, every, False))
    add("selective checkpoint", partial(_checkpointed, work, 1, True))
    for backend, ratios in backends.items():
        for ratio in ratios:
            add(f"compile {backend} {ratio:.1f}", partial(_compiled, work, ratio, backend))
    return found


def undertow_steps(work: Workload, budgets: Sequence[int], numerics: str) -> list[Contender]:
    """A step planned for each budget; budgets that cannot be met are printed and left out."""
    found = []
    label = "undertow" if numerics == "exact" else f"undertow {numerics}"
    for budget in sorted(set(budgets), reverse=True):
        model = _copy(work.model)
        try:
            step = ut.train_step(
                model, work.args, targets=work.targets, loss=work.loss, budget=budget, numerics=numerics
            )
        except ut.InfeasibleBudget as refusal:
            least = refusal.minimum_bytes / 2**20
            print(f"  {label}: {budget / 2**20:.0f} MiB refused, least {least:.0f}", flush=True)
            continue

        def run(step: Any = step, model: nn.Module = model) -> None:
            model.zero_grad(set_to_none=True)
            step(*work.args, *work.targets)

        persistent = [*model.parameters(), *model.buffers(), *work.args, *work.targets]
        name = f"{label} {budget / 2**20:.0f} MiB"
        contender = Contender(name, run, persistent, note=f"budget {budget}, predicted {step.plan.peak_bytes}")
        run()
        model.zero_grad(set_to_none=True)
        gc.collect()
        contender.peak_bytes = measure_call(run, persistent).peak_bytes
        assert contender.peak_bytes <= budget, (contender.peak_bytes, budget)
        model.zero_grad(set_to_none=True)
        found.append(contender)
    return found


def _best_ratio(steps: Sequence[Contender], peer: Contender) -> float | None:
    """The time of the fastest step within the peer's peak, over the peer's time; None if no step is within."""
    fitting = [item for item in steps if item.peak_bytes <= peer.peak_bytes]
    best = min((statistics.median(item.times_s) for item in fitting), default=None)
    return None if best is None else best / statistics.median(peer.times_s)


def compare(name: str, num_rounds: int, backends: dict[str, Sequence[float]]) -> dict[str, Any]:
    """All contenders of one model, timed in interleaved rounds."""
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 64
    work = WORKLOADS[name]()
    contenders = peers(work, backends)
    num_peers = len(contenders)
    exact = undertow_steps(work, [item.peak_bytes for item in contenders], "exact")
    # Inductor computes other bits than eager, and so does `fast`.
    fast = undertow_steps(work, [item.peak_bytes for item in contenders if "inductor" in item.name], "fast")
    contenders += [*exact, *fast]
    for _ in range(num_rounds):
        for contender in contenders:
            start = time.perf_counter()
            contender.run()
            contender.times_s.append(time.perf_counter() - start)
            work.model.zero_grad(set_to_none=True)
    for peer in contenders[:num_peers]:
        again = measure_call(peer.run, peer.persistent).peak_bytes
        work.model.zero_grad(set_to_none=True)
        assert abs(again / peer.peak_bytes - 1) < 0.01, (
            f"{peer.name}: its peak changed between the first and the last round"
        )
    rows = [item.to_dict() for item in contenders]
    beaten = []
    for peer in contenders[:num_peers]:
        row = {"peer": peer.name, "peak_mib": round(peer.peak_bytes / 2**20, 1)}
        row["undertow_over_peer"] = _best_ratio(exact, peer)
        if "inductor" in peer.name:
            row["fast_over_peer"] = _best_ratio(fast, peer)
        beaten.append(row)
    return {"model": name, "contenders": rows, "at_equal_peak": beaten}


def main() -> None:
    """Compare the named models, each in its own process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=",".join(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--inductor", action="store_true")
    parser.add_argument("--out", default="benchmarks/results/budgets.json")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        backends: dict[str, Sequence[float]] = {"aot_eager": [round(0.1 * step, 1) for step in range(10)]}
        if options.inductor:
            backends["inductor"] = (0.0, 0.5, 1.0)
        print("RESULT" + json.dumps(compare(options.one, options.rounds, backends)))
        return
    out = Path(options.out)
    results = json.loads(out.read_text()) if out.exists() else {"models": {}}
    for name in options.models.split(","):
        words = [sys.executable, __file__, "--one", name, "--rounds", str(options.rounds)]
        words += ["--inductor"] if options.inductor else []
        lines = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
        result = json.loads(next(line for line in lines if line.startswith("RESULT")).removeprefix("RESULT"))
        print(*(line for line in lines if not line.startswith("RESULT")), sep="\n")
        for row in result["at_equal_peak"]:
            ratio = row["undertow_over_peer"]
            shown = "refused" if ratio is None else f"{ratio:.3f}"
            if row.get("fast_over_peer") is not None:
                shown += f", fast {row['fast_over_peer']:.3f}"
            print(f"{name:10} {row['peer']:24} {row['peak_mib']:8.0f} MiB  {shown}")
        results["models"][name] = result | {"machine": describe_machine()}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
