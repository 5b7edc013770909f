"""The demo runs, and what it prints as equal is equal."""

import re
from dataclasses import replace

import torch

from undertow import demo


def test_demo_proves_what_it_says(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Fewer epochs than the demo, and too few for its accuracy, which is not tested here.
    monkeypatch.setattr(demo, "CONFIG", replace(demo.CONFIG, epochs=1))
    monkeypatch.setattr(demo, "MIN_ACCURACY", 0.0)
    with torch.random.fork_rng(devices=[]):
        assert demo.main() == 0
    printed = capsys.readouterr().out
    hashes = re.findall(r"\b[0-9a-f]{64}\b", printed)
    assert len(hashes) == 2 and hashes[0] == hashes[1]
    eager, budget, predicted, measured = (
        int(number.replace(",", "")) for number in re.findall(r"(?:peak|step|budget) +([\d,]+) bytes", printed)
    )
    assert predicted == measured <= budget == eager // 2
    assert re.search(r"torch\.compile, activation_memory_budget=0\.2 +\d+% off", printed)
    assert re.search(r"torch\.compile, activation_memory_budget=1\.0 +the same bits", printed)
    assert "torch._functorch.config.activation_memory_budget" in printed and "draws another mask" in printed
    unwrapped = " ".join(printed.split())
    assert all(part in unwrapped for part in ("cannot be met", "what would fit", "a batch of"))
    assert (tmp_path / "runs" / "demo_network-digits" / "checkpoint.safetensors").is_file()
