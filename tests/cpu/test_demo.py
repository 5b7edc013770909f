"""The demo runs, in seconds, and what it says is the same is the same."""

import re

import torch

from undertow import demo


def test_demo_shows_equal_bits(capsys):
    with torch.random.fork_rng(devices=[]):
        assert demo.main() == 0
    printed = capsys.readouterr().out
    hashes = re.findall(r"\b[0-9a-f]{64}\b", printed)
    assert len(hashes) == 2
    assert hashes[0] == hashes[1]
    assert "gradients agree" in printed
    assert "backward" in printed and "vgg.py:" in printed


def test_hash_sees_every_part():
    entry = demo.SMALL["vgg_small"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        inputs, targets = entry.example_inputs(4), entry.example_targets(4)

        def hash_of(change):
            torch.manual_seed(2)
            model = entry.build()
            change(model)
            return demo.hash_training(model, entry, inputs, targets)

        unchanged = hash_of(lambda model: None)
        assert hash_of(lambda model: None) == unchanged
        # A counter that no gradient depends on, and dropout that draws other numbers.
        assert hash_of(lambda model: model.features[1].num_batches_tracked.add_(1)) != unchanged
        assert hash_of(lambda model: setattr(model.classifier[0], "p", 0.25)) != unchanged
        assert hash_of(lambda model: model.classifier[4].bias.data[0].add_(0.001)) != unchanged
