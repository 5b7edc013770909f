"""Whole training loops on a GPU in bfloat16: `undertow train` beside a plain loop, `torch.compile` and HF's Trainer.

All read the same made-up data through the same DataLoader with workers and pinned memory, and take the same optimizer
(fused). Each is tuned as a user can tune it: channels_last, cuDNN's choice by measurement, and a loss that is read at
every tenth step only; Undertow records every loss.

Every contestant is a process that sets up once and then waits. Rounds go through all of them: each runs some steps to
warm up and then NUM_TIMED steps, from one synchronisation to the next. So rates are interleaved, and each round gives
one rate for each. The peak is that of the allocator after setting up, plus all memory of CUDA graphs. Undertow also
runs within shares of the plain loop's peak.

Usage: scripts/bench gpu_training [resnet50 gpt2] [--rounds N] [--out F]
       scripts/bench gpu_training --smoke        small networks, also without a GPU: whether this script works
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine
from torch import nn
from torch.utils.data import DataLoader, Dataset

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IS_SMOKE = os.environ.get("SMOKE") == "1"
BATCH = {"resnet50": 4, "gpt2": 2} if IS_SMOKE else {"resnet50": 256, "gpt2": 16}
SIDE, LENGTH = (32, 16) if IS_SMOKE else (224, 1024)
# Kernels are chosen and graphs captured in the first steps; the first steps after a pause have batches waiting.
NUM_FIRST, NUM_WARM, NUM_TIMED = (8, 1, 2) if IS_SMOKE else (12, 5, 20)
READ_EVERY = 10  # steps, by the rivals
NUM_STEPS = 10_000  # more than any contestant takes
NUM_WORKERS = 1 if IS_SMOKE else 4
SHARES = (0.7, 0.5, 1 / 3)  # of the plain loop's peak, as budgets of ours


class Images(Dataset[Any]):
    """Images as bytes, and labels; a few tensors that are handed out again and again."""

    def __init__(self, num: int) -> None:
        self.images, self.num = torch.randint(256, (64, 3, SIDE, SIDE), dtype=torch.uint8), num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Any:
        return self.images[index % 64], index % 1000


class Tokens(Dataset[Any]):
    """Rows of tokens, as `transformers` takes them."""

    def __init__(self, num: int) -> None:
        self.tokens, self.num = torch.randint(50257, (64, LENGTH)), num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Any:
        row = self.tokens[index % 64]
        return {"input_ids": row, "labels": row}


class FromBytes(nn.Module):
    """A network whose images arrive as bytes: a quarter of what workers and the link to the GPU must carry."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.network(images.contiguous(memory_format=torch.channels_last) / 127.5 - 1)


def make_resnet50() -> nn.Module:
    """The zoo's."""
    from undertow.models import ZOO

    build = ZOO["resnet50"].build
    return FromBytes(build(width=8, depths=(1, 1, 1, 1)) if IS_SMOKE else build())


def make_gpt2() -> nn.Module:
    """GPT-2 small of `transformers`, without dropout: PyTorch's compiled steps draw other numbers than eager."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2} if IS_SMOKE else {}
    return GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, **sizes))


MODELS: dict[str, Callable[[], nn.Module]] = {"resnet50": make_resnet50, "gpt2": make_gpt2}


def make_loader(name: str, num_steps: int = NUM_STEPS) -> DataLoader[Any]:
    """The data of all contestants."""
    data = (Images if name == "resnet50" else Tokens)(BATCH[name] * num_steps)
    return DataLoader(
        data, BATCH[name], num_workers=NUM_WORKERS, pin_memory=DEVICE == "cuda", drop_last=True, prefetch_factor=2
    )


def resnet50_loaders() -> Any:
    """For `undertow train`."""
    return make_loader("resnet50"), make_loader("resnet50", 1)


def gpt2_loaders() -> Any:
    """For `undertow train`."""
    return make_loader("gpt2"), make_loader("gpt2", 1)


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """SGD for images, AdamW for text."""
    if name == "resnet50":
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    return torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)


class Gate:
    """Lets the steps of a contestant pass: after the first ones in blocks, each when the parent says so."""

    def __init__(self) -> None:
        self.batch, self._num_steps, self._start_s = 1, 0, 0.0

    def tick(self) -> None:
        """After each step."""
        self._num_steps += 1
        number = self._num_steps - NUM_FIRST
        if number < 0:
            return
        place = number % (NUM_WARM + NUM_TIMED)
        if place == NUM_WARM:
            self._start_s = _now()
        elif place == 0 and number == 0:
            _now()
            if DEVICE == "cuda":
                torch.cuda.reset_peak_memory_stats()
            self._wait({"ready": True})
        elif place == 0:
            seconds = _now() - self._start_s
            self._wait({"examples_per_s": self.batch * NUM_TIMED / seconds, "peak_mib": _peak_bytes() / 2**20})

    def _wait(self, message: dict[str, Any]) -> None:
        if DEVICE == "cuda":
            torch.cuda.empty_cache()  # the others need the memory; it is taken again in the steps that are not timed
        print("RESULT " + json.dumps(message), file=sys.__stdout__, flush=True)  # commands have a stdout of their own
        if not sys.stdin.readline().strip():
            os._exit(0)  # the workers notice, and end


def _now() -> float:
    """The time when the device has done all that it was given."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _peak_bytes() -> int:
    from undertow.runtime.cuda_graphs import idle_graph_bytes

    return torch.cuda.max_memory_allocated() + idle_graph_bytes() if DEVICE == "cuda" else 0


GATE = Gate()


def find_loss(name: str, model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss of a batch on the device."""
    if name == "gpt2":
        return model(**{key: item.to(DEVICE, non_blocking=True) for key, item in batch.items()}).loss
    images, labels = (item.to(DEVICE, non_blocking=True) for item in batch)
    return nn.functional.cross_entropy(model(images), labels)


def run_plain(name: str, mode: str | None) -> None:
    """A loop as a tutorial writes it, tuned."""
    torch.backends.cudnn.benchmark = True
    model = MODELS[name]().to(DEVICE)
    if name == "resnet50":
        model = model.to(memory_format=torch.channels_last)
    optimizer = make_optimizer(name, model)
    runner = model if mode is None else torch.compile(model, mode=mode)
    for number, batch in enumerate(make_loader(name)):
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = find_loss(name, runner, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if number % READ_EVERY == 0:
            loss.item()
        GATE.tick()


def run_trainer(name: str, is_compiled: bool) -> None:
    """The Trainer of `transformers`."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Ticks(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            GATE.tick()

    class WithLoss(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, images: torch.Tensor, labels: torch.Tensor) -> Any:
            logits = self.inner(images)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    def collate(rows: list[Any]) -> Any:
        if name == "gpt2":
            return torch.utils.data.default_collate(rows)
        images, labels = torch.utils.data.default_collate(rows)
        return {"images": images, "labels": labels}

    model = make_gpt2() if name == "gpt2" else WithLoss(make_resnet50().to(memory_format=torch.channels_last))
    torch.backends.cudnn.benchmark = True
    optimizer = make_optimizer(name, model.to(DEVICE))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH[name],
            max_steps=NUM_STEPS,
            bf16=True,
            use_cpu=DEVICE == "cpu",
            dataloader_num_workers=NUM_WORKERS,
            dataloader_prefetch_factor=2,
            dataloader_drop_last=True,
            torch_compile=is_compiled,
            report_to=[],
            save_strategy="no",
            logging_steps=10**9,
            logging_nan_inf_filter=False,  # it would wait for the GPU at every step
            disable_tqdm=True,
            remove_unused_columns=False,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
        )
        data = make_loader(name).dataset
        Trainer(
            model,
            arguments,
            train_dataset=data,
            data_collator=collate,
            optimizers=(optimizer, None),
            callbacks=[Ticks()],
        ).train()


def run_undertow(name: str, budget: int | None) -> None:
    """`undertow train`, with a callback that is the gate."""
    from undertow.cli import main as command
    from undertow.train import callbacks

    callbacks.LIMIT_S = 1e6  # a call waits while others run
    folder = Path(tempfile.mkdtemp())
    (folder / "ticks.py").write_text("import __main__\ndef on_step(record): __main__.GATE.tick()\n")
    words = ["train", f"{__file__}:make_{name}", "--data", f"{__file__}:{name}_loaders", "--numerics", "bf16"]
    words += ["--epochs", "1", "--out", f"{folder}/run", "--callbacks", f"{folder}/ticks.py", "--device", DEVICE]
    words += ["--optimizer", "adamw", "--lr", "1e-4"] if name == "gpt2" else ["--lr", "0.01"]
    words += [] if budget is None else ["--budget", str(budget)]
    raise SystemExit(command(words))


RIVALS: dict[str, Callable[[str], None]] = {
    "plain loop": partial(run_plain, mode=None),
    "compile": partial(run_plain, mode="default"),
    "compile reduce-overhead": partial(run_plain, mode="reduce-overhead"),
    "trainer": partial(run_trainer, is_compiled=False),
    "trainer compiled": partial(run_trainer, is_compiled=True),
}


def run_one(name: str, who: str) -> None:
    """One contestant, in this process."""
    GATE.batch = BATCH[name]
    if who.startswith("undertow"):
        budget = who.removeprefix("undertow").strip()
        run_undertow(name, int(budget) if budget else None)
    else:
        RIVALS[who](name)


class Contestant:
    """A process that runs a block of steps when it is told to."""

    def __init__(self, name: str, who: str) -> None:
        self.who, self.note = who, ""
        self.rates: list[float] = []
        self.peak_mib, self._start_s = 0.0, time.perf_counter()
        words = [sys.executable, __file__, name, "--who", who]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  open as long as the process writes
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )

    def wait(self) -> bool:
        """Wait until it has set up; returns whether it has."""
        is_ready = self._read() is not None
        self.set_up_s = time.perf_counter() - self._start_s
        print(f"{self.who}: {'ready' if is_ready else self.note} after {self.set_up_s:.0f} s", flush=True)
        return is_ready

    def run_block(self) -> None:
        """One block of steps."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        found = self._read()
        if found is not None:
            self.rates.append(found["examples_per_s"])
            self.peak_mib = max(self.peak_mib, found["peak_mib"])

    def _read(self) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("RESULT "):
                return dict(json.loads(line.removeprefix("RESULT ")))
        self._errors.seek(0)
        self.note = self._errors.read().strip()[-400:]
        return None

    def end(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        if not self.rates:
            return {"failed": self.note}
        return {
            "examples_per_s": round(statistics.median(self.rates), 1),
            "all": [round(rate, 1) for rate in self.rates],
            "peak_mib": round(self.peak_mib),
            "set_up_s": round(self.set_up_s),
        }


def compare(name: str, num_rounds: int) -> dict[str, Any]:
    """All contestants of one model, interleaved."""
    # Undertow times kernels while it plans, so nothing else may run then. Rivals compile side by side.
    ready = [item for item in (Contestant(name, "undertow"),) if item.wait()]
    failed: list[Contestant] = []
    plain = Contestant(name, "plain loop")
    if plain.wait():
        plain.run_block()
        ready.append(plain)
        peak_bytes = plain.peak_mib * 2**20 or (1 << 30)
        for share in SHARES:
            item = Contestant(name, f"undertow {int(peak_bytes * share)}")
            (ready if item.wait() else failed).append(item)
    started = [Contestant(name, who) for who in RIVALS if who != "plain loop"]
    for item in started:
        (ready if item.wait() else failed).append(item)
    for number in range(num_rounds):
        for item in ready if number % 2 else reversed(ready):
            item.run_block()
            print(f"{item.who}: {item.rates[-1:]}, {item.peak_mib:.0f} MiB", flush=True)
    for item in (*ready, *failed):
        item.end()
    return {item.who: item.to_dict() for item in (*ready, *failed)}


def describe() -> dict[str, Any]:
    """The machine, and the versions of what is compared."""
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "accelerate")}
    gpu = {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda} if DEVICE == "cuda" else {}
    return describe_machine() | versions | gpu | {"steps": NUM_TIMED, "workers": NUM_WORKERS, "batch": BATCH}


def main() -> None:
    """Run all contestants of some models."""
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--who", default="")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--out", default="benchmarks/results/gpu_training.json")
    options = parser.parse_args()
    if options.who:
        run_one(options.models[0], options.who)
        return
    if options.smoke and not IS_SMOKE:
        words = [sys.executable, __file__, *options.models, "--rounds", "2", "--out", options.out]
        raise SystemExit(subprocess.run(words, env={**os.environ, "SMOKE": "1"}).returncode)
    out = Path(options.out)
    results = json.loads(out.read_text()) if out.exists() else {}
    for name in options.models:
        rows = compare(name, options.rounds)
        results[name] = {"machine": describe(), "rows": rows}
        out.write_text(json.dumps(results, indent=1) + "\n")
        print(json.dumps(rows, indent=1), flush=True)


if __name__ == "__main__":
    main()
