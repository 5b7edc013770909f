"""Whole training loops on a GPU in bfloat16: `undertow train` beside a plain loop, `torch.compile` and HF's Trainer.

All read the same made-up data through the same DataLoader with workers and pinned memory, take the same optimizer
(fused), and are timed over the same steps after as many for warming up: examples a second, from the end of one step to
the end of a later one. The peak is the allocator's, plus all memory of CUDA graphs. Contestants run in processes of
their own, one after the other, in rounds; the median of the rounds counts.

Usage: scripts/bench gpu_training resnet50|gpt2 [--rounds N] [--steps N] [--out F]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine
from torch import nn
from torch.utils.data import DataLoader, Dataset

BATCH = {"resnet50": 256, "gpt2": 16}
NUM_WARM = 10
SHARES = (1.0, 0.5, 1 / 3)  # of the plain loop's peak, as budgets of ours


class Images(Dataset[Any]):
    """Images of 224 x 224 as bytes and labels; a few tensors that are handed out again and again."""

    def __init__(self, num: int) -> None:
        self.images, self.num = torch.randint(256, (64, 3, 224, 224), dtype=torch.uint8), num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Any:
        return self.images[index % 64], index % 1000


class Tokens(Dataset[Any]):
    """Rows of 1,024 tokens, as `transformers` takes them."""

    def __init__(self, num: int) -> None:
        self.tokens, self.num = torch.randint(50257, (64, 1024)), num

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

    return FromBytes(ZOO["resnet50"].build())


def make_gpt2() -> nn.Module:
    """GPT-2 small of `transformers`, without dropout: PyTorch's compiled steps draw other numbers than eager."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    return GPT2LMHeadModel(config)


def make_loader(name: str, num_steps: int) -> DataLoader[Any]:
    """The data of all contestants."""
    data = (Images if name == "resnet50" else Tokens)(BATCH[name] * num_steps)
    return DataLoader(data, BATCH[name], num_workers=8, pin_memory=True, drop_last=True)


def resnet50_loaders() -> Any:
    """For `undertow train`."""
    return make_loader("resnet50", int(os.environ["STEPS"])), make_loader("resnet50", 1)


def gpt2_loaders() -> Any:
    """For `undertow train`."""
    return make_loader("gpt2", int(os.environ["STEPS"])), make_loader("gpt2", 1)


class Clock:
    """Notes when steps end; the rate is that after the first ones."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def tick(self) -> None:
        self.ends.append(time.perf_counter())

    def rate(self, batch: int) -> float:
        """Examples a second."""
        return batch * (len(self.ends) - 1 - NUM_WARM) / (self.ends[-1] - self.ends[NUM_WARM])


def find_loss(name: str, model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss of a batch on the GPU."""
    if name == "gpt2":
        moved = {key: item.cuda(non_blocking=True) for key, item in batch.items()}
        return model(**moved).loss
    images, labels = (item.cuda(non_blocking=True) for item in batch)
    return nn.functional.cross_entropy(model(images), labels)


def run_plain(name: str, mode: str | None, num_steps: int) -> tuple[float, float]:
    """A loop as a tutorial writes it, tuned: channels_last, fused optimizer, cuDNN's choice by measurement."""
    torch.backends.cudnn.benchmark = True
    model = (make_resnet50() if name == "resnet50" else make_gpt2()).cuda()
    if name == "resnet50":
        model = model.to(memory_format=torch.channels_last)
    optimizer = make_optimizer(name, model)
    runner = model if mode is None else torch.compile(model, mode=mode)
    clock = Clock()
    for batch in make_loader(name, num_steps):
        with torch.autocast("cuda", torch.bfloat16):
            loss = find_loss(name, runner, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        clock.tick()
    return clock.rate(BATCH[name]), torch.cuda.max_memory_allocated()


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """SGD for images, AdamW for text."""
    if name == "resnet50":
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    return torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)


def run_trainer(name: str, is_compiled: bool, num_steps: int) -> tuple[float, float]:
    """The Trainer of `transformers`."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    clock = Clock()

    class Ticks(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            torch.cuda.synchronize()
            clock.tick()

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
    loader = make_loader(name, num_steps)
    optimizer = make_optimizer(name, model.cuda())
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH[name],
            max_steps=num_steps,
            bf16=True,
            dataloader_num_workers=8,
            dataloader_drop_last=True,
            torch_compile=is_compiled,
            report_to=[],
            save_strategy="no",
            logging_steps=10**9,
            disable_tqdm=True,
            remove_unused_columns=False,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
        )
        trainer = Trainer(
            model,
            arguments,
            train_dataset=loader.dataset,
            data_collator=collate,
            optimizers=(optimizer, None),
            callbacks=[Ticks()],
        )
        trainer.train()
    return clock.rate(BATCH[name]), torch.cuda.max_memory_allocated()


def run_undertow(name: str, budget: int | None, num_steps: int) -> tuple[float, float]:
    """`undertow train`, with a callback that notes the time."""
    from undertow.cli import main as command
    from undertow.train.folder import RunFolder

    ends = Path(tempfile.mkdtemp()) / "ends"
    callbacks = ends.with_name("ticks.py")
    callbacks.write_text(
        "import time\nends = []\ndef on_step(record): ends.append(time.perf_counter())\n"
        f"def on_end(result):\n    with open({str(ends)!r}, 'w') as file: file.write(repr(ends))\n"
    )
    out = ends.with_name("run")
    words = ["train", f"{__file__}:make_{name}", "--data", f"{__file__}:{name}_loaders", "--numerics", "bf16"]
    words += ["--epochs", "1", "--out", str(out), "--callbacks", str(callbacks), "--device", "cuda"]
    words += ["--optimizer", "adamw", "--lr", "1e-4"] if name == "gpt2" else ["--lr", "0.01"]
    words += [] if budget is None else ["--budget", str(budget)]
    os.environ["STEPS"] = str(num_steps)
    if command(words):
        raise SystemExit("the run failed")
    clock = Clock()
    clock.ends = json.loads(ends.read_text())
    progress = RunFolder(out).read_checkpoint().progress
    assert progress.measured_peak_bytes is not None
    # The peak of the whole run, evaluation and planning apart, is that of its steps.
    return clock.rate(BATCH[name]), progress.measured_peak_bytes


def contestants(name: str, num_steps: int) -> dict[str, Callable[[], tuple[float, float]]]:
    """All but ours, by name."""
    found: dict[str, Callable[[], tuple[float, float]]] = {
        "plain loop": lambda: run_plain(name, None, num_steps),
        "compile": lambda: run_plain(name, "default", num_steps),
        "compile reduce-overhead": lambda: run_plain(name, "reduce-overhead", num_steps),
        "trainer": lambda: run_trainer(name, False, num_steps),
        "trainer compiled": lambda: run_trainer(name, True, num_steps),
    }
    return found


def run_one(name: str, who: str, num_steps: int) -> None:
    """One contestant, in this process."""
    if who.startswith("undertow"):
        budget = who.removeprefix("undertow").strip()
        rate, peak = run_undertow(name, int(budget) if budget else None, num_steps)
    else:
        rate, peak = contestants(name, num_steps)[who]()
    print("RESULT", json.dumps({"who": who, "examples_per_s": rate, "peak_mib": peak / 2**20}))


def call(name: str, who: str, num_steps: int) -> dict[str, Any] | None:
    """One contestant, in a process of its own."""
    words = [sys.executable, __file__, name, "--who", who, "--steps", str(num_steps)]
    done = subprocess.run(words, capture_output=True, text=True)
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    if line is None:
        print(f"{who}: {(done.stderr or done.stdout).strip()[-600:]}", flush=True)
        return None
    print(line, flush=True)
    return dict(json.loads(line.removeprefix("RESULT ")))


def main() -> None:
    """Run all contestants of one model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=BATCH)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--who", default="")
    parser.add_argument("--out", default="benchmarks/results/gpu_training.json")
    options = parser.parse_args()
    name, num_steps = options.model, options.steps
    if options.who:
        run_one(name, options.who, num_steps)
        return
    rows: dict[str, list[dict[str, Any]]] = {}
    names = [*contestants(name, num_steps), "undertow"]
    for number in range(options.rounds):
        for who in names:
            found = call(name, who, num_steps)
            if found is not None:
                rows.setdefault(who, []).append(found)
        if number == 0 and "plain loop" in rows:
            peak = rows["plain loop"][0]["peak_mib"] * 2**20
            names += [f"undertow {int(peak * share)}" for share in SHARES]
            for who in names[-len(SHARES) :]:
                found = call(name, who, num_steps)
                if found is not None:
                    rows.setdefault(who, []).append(found)
    result = {
        who: {
            "examples_per_s": round(statistics.median(item["examples_per_s"] for item in items), 1),
            "all": [round(item["examples_per_s"], 1) for item in items],
            "peak_mib": round(max(item["peak_mib"] for item in items)),
        }
        for who, items in rows.items()
    }
    out = Path(options.out)
    results = json.loads(out.read_text()) if out.exists() else {}
    results[name] = {"machine": describe_machine() | {"gpu": torch.cuda.get_device_name()}, "rows": result}
    out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
