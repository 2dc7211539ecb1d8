"""A language model small enough to train in a test, and attention for TRL's packed rows that needs no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 200


def write(folder: Path) -> str:
    """Write a random Llama and its tokenizer, whose words are ``t0``, ``t1``, ...; return where."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {f"t{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0", pad_token="t1", eos_token="t2").save_pretrained(
        folder
    )
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


class PlainAttention:
    """Does what the kernel ``flash-attn3`` does for segments of different lengths, slowly."""

    @staticmethod
    def flash_attn_varlen_func(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        ends_q: torch.Tensor,
        ends_k: torch.Tensor,
        most_q: int,
        most_k: int,
        softmax_scale: float | None = None,
        causal: bool = True,
        **more: Any,
    ) -> torch.Tensor:
        """Attend, [tokens, heads, size]; a segment's queries are the last of its keys."""
        assert causal
        parts = []
        for at in range(len(ends_q) - 1):
            q, k, v = (
                each[ends[at] : ends[at + 1]].transpose(0, 1)
                for each, ends in ((query, ends_q), (key, ends_k), (value, ends_k))
            )
            count, seen = q.shape[1], k.shape[1]
            mask = torch.ones(count, seen, dtype=torch.bool).tril(seen - count)
            part = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=softmax_scale)
            parts.append(part.transpose(0, 1))
        return torch.cat(parts)
