"""Captions: a tokenizer of whole words and a small frozen UMT5, random, whose output depends on word order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from scripts.training.world import captions

PADDED = 512  # tokens to which WanPipeline pads every caption, with zeros
_NEIGHBOURS = (1, -1, 2, -2)  # how far from its own word each head of the encoder looks
_ATTRACTION = 6.0


def make_tokenizer() -> Any:
    """One token for each word of the world; other words are <unk>."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = sorted({word for caption in captions() for word in caption.split()})
    vocabulary = {word: index for index, word in enumerate(["<pad>", "</s>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=PADDED
    )


def make_text_encoder(words: int) -> Any:
    """A UMT5 that is never trained: its random embeddings distinguish words.

    Cross-attention sees a set of word vectors without order. So that "red" before "ball" differs from "red" before
    "floor", each head's position bias draws it to one neighbour, and a word's vector says what is next to it.
    """
    from transformers import UMT5Config, UMT5EncoderModel

    heads = len(_NEIGHBOURS)
    config = UMT5Config(vocab_size=words, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=heads)
    encoder = UMT5EncoderModel(config)
    half = config.relative_attention_num_buckets // 2
    with torch.no_grad():
        for block in encoder.encoder.block:
            bias = block.layer[0].SelfAttention.relative_attention_bias.weight  # [buckets, heads]
            for head, offset in enumerate(_NEIGHBOURS):
                bias[offset + half if offset > 0 else -offset, head] += _ATTRACTION
    return encoder.eval().requires_grad_(False)


@torch.no_grad()
def embed(tokenizer: Any, encoder: Any, texts: Sequence[str], length: int) -> torch.Tensor:
    """float32[n, length, d]: word vectors, then zeros, as WanPipeline makes them (with `length` for its 512)."""
    rows = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt").input_ids
        vectors = encoder(ids).last_hidden_state[0]
        if len(vectors) >= length:
            raise ValueError(f"{text!r} has {len(vectors)} tokens; at least one of {length} must be padding")
        rows.append(torch.cat([vectors, vectors.new_zeros(length - len(vectors), vectors.shape[1])]))
    return torch.stack(rows)
