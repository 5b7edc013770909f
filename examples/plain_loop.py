"""A plain training loop with a planned step: the loop stays, the step is one call.

`ut.train_step` does what `zero_grad`, the forward pass, `backward` and `optimizer.step` did, within the budget.
"""

import torch
from torch.nn.functional import cross_entropy

import undertow as ut


def main() -> float:
    """Train for an epoch on random points; returns the share of them that is then classified correctly."""
    torch.manual_seed(0)
    points = torch.randn(2048, 2)
    labels = (points.norm(dim=1) > 1.2).long()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(points, labels), 64, shuffle=True)

    layers = [torch.nn.Linear(2, 256), torch.nn.Tanh()]
    for _ in range(6):
        layers += [torch.nn.Linear(256, 256), torch.nn.Tanh()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(256, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    batch = next(iter(loader))
    step = ut.train_step(
        model, (batch[0],), targets=(batch[1],), loss=cross_entropy, optimizer=optimizer, budget="6MiB"
    )
    for inputs, targets in loader:
        loss = step(inputs, targets)
    print(f"last loss {loss.item():.3f}; predicted peak {step.plan.peak_bytes:,} bytes of {6 * 2**20:,}")
    return float((model(points).argmax(1) == labels).float().mean())


if __name__ == "__main__":
    print(f"{main():.1%} right")
