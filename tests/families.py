"""Small random configurations of model families from `transformers`, each with a training batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

_generator = torch.Generator().manual_seed(1)
_ids = torch.randint(3, 99, (2, 12), generator=_generator)
_image = torch.randn(2, 3, 32, 32, generator=_generator)
_text = {"input_ids": _ids, "labels": _ids}
_picture = {"pixel_values": _image, "labels": torch.tensor([1, 3])}

_small_text = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_small_text |= {"intermediate_size": 64, "bos_token_id": 1, "eos_token_id": 2}

FAMILIES: dict[str, tuple[Callable[[], Any], dict[str, torch.Tensor]]] = {
    "gpt2": (
        lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=99, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
        ),
        _text,
    ),
    "llama": (
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_small_text, num_key_value_heads=2, attention_dropout=0.1)),
        _text,
    ),
    "bert": (
        lambda: hf.BertForMaskedLM(hf.BertConfig(**_small_text)),
        _text | {"attention_mask": (torch.arange(12) < 9).long().expand(2, 12)},
    ),
    "vit": (
        lambda: hf.ViTForImageClassification(
            hf.ViTConfig(
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=64,
                image_size=32,
                patch_size=8,
                hidden_dropout_prob=0.1,
                attention_probs_dropout_prob=0.1,
                num_labels=5,
            )  # fmt: skip
        ),
        _picture,
    ),
    "t5": (
        lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
        ),
        _text,
    ),
    "convnext": (
        lambda: hf.ConvNextForImageClassification(
            hf.ConvNextConfig(
                hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1], drop_path_rate=0.2, image_size=32, num_labels=5
            )
        ),
        _picture,
    ),
    "swin": (
        lambda: hf.SwinForImageClassification(
            hf.SwinConfig(
                image_size=32,
                patch_size=2,
                embed_dim=8,
                depths=[2, 2],
                num_heads=[2, 4],
                window_size=4,
                drop_path_rate=0.1,
                num_labels=5,
            )  # fmt: skip
        ),
        _picture,
    ),
    "resnet": (
        lambda: hf.ResNetForImageClassification(
            hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], num_labels=5)
        ),
        _picture,
    ),
    "bart": (
        lambda: hf.BartForConditionalGeneration(
            hf.BartConfig(
                vocab_size=99,
                d_model=32,
                encoder_layers=2,
                decoder_layers=2,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                encoder_ffn_dim=64,
                decoder_ffn_dim=64,
                max_position_embeddings=32,
                encoder_layerdrop=0.3,
                decoder_layerdrop=0.3,
                bos_token_id=0,
                eos_token_id=2,
            )  # fmt: skip
        ),
        _text,
    ),
}
