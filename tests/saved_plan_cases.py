"""Training steps whose plans are saved by one process and run by another. As a script, it is the other process.

Usage: saved_plan_cases.py FOLDER    reads FOLDER/NAME.plan, writes what the training gives to FOLDER/NAME.safetensors
"""

import sys

import torch
from safetensors.torch import save_file

import undertow as ut
from undertow.models import SMALL
from undertow.planner import curve

# Model of the zoo, numerics, whether within the least memory, optimizer, what else is asked of the step.
CASES = {
    "plain": ("mlp", "exact", False, torch.optim.SGD, {}),
    "dropout": ("alexnet", "exact", True, torch.optim.AdamW, {}),
    "normalised": ("resnet50", "exact", True, torch.optim.Adam, {}),
    "fast": ("vgg_small", "fast", True, torch.optim.SGD, {}),
    "bf16": ("gpt", "bf16", True, torch.optim.AdamW, {}),
    "clipped": ("lstm", "exact", True, torch.optim.RMSprop, {"clip_norm": 1.0}),
}


def make(name):
    zoo, numerics, _, kind, settings = CASES[name]
    torch.manual_seed(0)
    entry = SMALL[zoo]
    model = entry.build().train()
    optimizer = kind(model.parameters(), lr=0.01)
    args, targets = entry.example_inputs(3), entry.example_targets(3)
    how = {"targets": targets, "loss": entry.loss, "optimizer": optimizer, "numerics": numerics, **settings}
    return model, args, targets, how


def train(model, step, inputs):
    """Everything that two calls change."""
    torch.manual_seed(1)
    found = {f"loss {call}": step(*inputs).detach().clone() for call in range(2)}
    found |= {f"parameter {name}": item.detach().clone() for name, item in model.named_parameters()}
    found |= {f"buffer {name}": item.clone() for name, item in model.named_buffers()}
    return found | {"generator": torch.get_rng_state()}


def refuse_search(*args):
    raise AssertionError("a saved plan needs no search")


if __name__ == "__main__":
    curve._find_points = refuse_search
    for name in CASES:
        model, args, targets, how = make(name)
        step = ut.train_step(model, args, saved_plan=f"{sys.argv[1]}/{name}.plan", **how)
        save_file(train(model, step, (*args, *targets)), f"{sys.argv[1]}/{name}.safetensors")
