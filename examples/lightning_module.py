"""Lightning with a planned module inside the LightningModule: the one line is `net = ut.plan(net, ...)`.

Not supported: `torch.compile` of the module, and manual optimization with `create_graph=True`.
"""

import lightning
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import undertow as ut


class Classifier(lightning.LightningModule):
    """A network and its loss."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        inputs, targets = batch
        return cross_entropy(self.net(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-2)


def main(is_planned: bool = True) -> dict[str, torch.Tensor]:
    """Train for an epoch; returns the weights."""
    lightning.seed_everything(1, verbose=False)
    net = torch.nn.Sequential(
        torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(64, 64), torch.nn.ReLU(),
        torch.nn.Linear(64, 4),
    )  # fmt: skip
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))
    if is_planned:
        net = ut.plan(net, (torch.zeros(16, 8),), budget="100KiB")
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(Classifier(net), DataLoader(data, 16))
    return net.state_dict()


if __name__ == "__main__":
    main()
