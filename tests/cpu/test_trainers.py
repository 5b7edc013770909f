"""A planned model inside the trainers people use: the same weights as with the eager model, without special code."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import undertow as ut


def assert_same_state(left: nn.Module, right: nn.Module) -> None:
    left_state, right_state = left.state_dict(), right.state_dict()
    assert list(left_state) == list(right_state)
    for name, tensor in left_state.items():
        assert torch.equal(tensor, right_state[name]), name


def test_the_transformers_trainer_gives_the_same_weights(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=32)
    eager = transformers.GPT2LMHeadModel(config)
    rows = [torch.randint(0, 64, (16,)) for _ in range(20)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    batch = torch.stack(rows[:4])
    planned = ut.plan(copy.deepcopy(eager), (), {"input_ids": batch, "labels": batch})

    def train(model: nn.Module, folder: str) -> float:
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / folder),
            num_train_epochs=2,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            report_to=[],
            seed=3,
            save_strategy="epoch",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:6])
        trainer.train()
        return trainer.evaluate()["eval_loss"]

    assert train(eager, "eager") == train(planned, "planned")
    assert_same_state(eager, planned)


def test_lightning_gives_the_same_weights(tmp_path):
    lightning = pytest.importorskip("lightning")

    class Classifier(lightning.LightningModule):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch, index):
            images, labels = batch
            return nn.functional.cross_entropy(self.net(images), labels)

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 1e-2)

    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 4))
    planned = ut.plan(copy.deepcopy(eager), (torch.randn(8, 8),))
    data = TensorDataset(torch.randn(30, 8), torch.randint(0, 4, (30,)))
    for net in (eager, planned):
        lightning.seed_everything(1, verbose=False)
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            gradient_clip_val=0.5,
            default_root_dir=tmp_path,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        trainer.fit(Classifier(net), DataLoader(data, batch_size=8, shuffle=True))
    assert_same_state(eager, planned)
