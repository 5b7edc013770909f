"""The Trainer of `transformers` with a planned model: the one line is `model = ut.plan(model, ...)`.

Not supported: `torch_compile=True` and `gradient_checkpointing=True` (the plan decides what is recomputed). Not tried:
fp16 with a gradient scaler.
"""

import tempfile

import torch
import transformers

import undertow as ut


def main(is_planned: bool = True) -> dict[str, torch.Tensor]:
    """Train a small GPT-2 for an epoch; returns its weights."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=32)
    model = transformers.GPT2LMHeadModel(config)
    rows = [torch.randint(0, 64, (16,)) for _ in range(16)]
    data = [{"input_ids": row, "labels": row} for row in rows]

    if is_planned:
        batch = torch.stack(rows[:4])
        model = ut.plan(model, (), {"input_ids": batch, "labels": batch}, budget="2MiB")

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, num_train_epochs=1, per_device_train_batch_size=4, report_to=[], use_cpu=True, seed=3
        )
        transformers.Trainer(model=model, args=arguments, train_dataset=data).train()
    return model.state_dict()


if __name__ == "__main__":
    main()
