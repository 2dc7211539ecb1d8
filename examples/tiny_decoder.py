"""A small decoder in plain torch, with a store of keys and values for decoding many replies at once."""

import math
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional


class Memory(Protocol):
    """What the tokens at ``at`` (their places, [L] or [n, 1]) attend to."""

    at: torch.Tensor

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return what is attended to, [n, heads, L, size], as q, k and v are."""
        ...


class Decoder(nn.Module):
    """A causal transformer with learned places. Token ids [n, L] become logits [n, L, vocabulary] of what follows."""

    def __init__(self, vocabulary: int, longest: int, *, width: int = 96, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.longest, self.heads, self.size = longest, heads, width // heads
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.blocks = nn.ModuleList([Block(width, heads, number, layers) for number in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, ids: torch.Tensor, memory: Memory | None = None) -> torch.Tensor:
        memory = Whole(ids.shape[1]) if memory is None else memory
        x = self.tokens(ids) + self.places(memory.at)
        for block in self.blocks:
            x = block(x, memory)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits

    def store(self, rows: int) -> torch.Tensor:
        """Return room for keys and values of ``rows`` texts: [layers, 2, rows, heads, longest, size]."""
        return torch.zeros(len(self.blocks), 2, rows, self.heads, self.longest, self.size)


class Block(nn.Module):
    """Attention and a layer of four times the width, each with its norm before it."""

    def __init__(self, width: int, heads: int, number: int, layers: int) -> None:
        super().__init__()
        self.heads, self.number = heads, number
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        for last in (self.out, self.down):
            nn.init.normal_(last.weight, std=0.5 / math.sqrt(2 * layers * last.in_features))

    def forward(self, x: torch.Tensor, memory: Memory) -> torch.Tensor:
        apart = self.qkv(self.norms[0](x)).view(*x.shape[:2], 3, self.heads, -1)
        q, k, v = apart.permute(2, 0, 3, 1, 4)
        x = x + self.out(memory.attend(self.number, q, k, v).transpose(1, 2).flatten(2))
        added: torch.Tensor = self.down(functional.gelu(self.up(self.norms[1](x))))
        return x + added


class Whole:
    """Whole texts: each token attends to itself and to what comes before it."""

    def __init__(self, length: int) -> None:
        self.at = torch.arange(length)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Prompts(Whole):
    """Whole texts, whose keys and values go to the rows of a store from ``first`` on."""

    def __init__(self, store: torch.Tensor, first: int, length: int) -> None:
        super().__init__(length)
        self.store, self.first = store, first

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = self.store[layer, :, self.first : self.first + len(k), :, : k.shape[2]]
        keys.copy_(k)
        values.copy_(v)
        return super().attend(layer, q, k, v)


class Next:
    """One more token for each of the first n rows of a store, at the places ``at`` [n]."""

    def __init__(self, store: torch.Tensor, at: torch.Tensor) -> None:
        self.at, self.rows = at[:, None], torch.arange(len(at))
        self.store = store[:, :, : len(at), :, : int(at.max()) + 1]
        self.mask = (torch.arange(self.store.shape[4]) <= self.at)[:, None, None, :]

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = self.store[layer]
        keys[self.rows, :, self.at[:, 0]], values[self.rows, :, self.at[:, 0]] = k[:, :, 0], v[:, :, 0]
        return functional.scaled_dot_product_attention(q, keys, values, attn_mask=self.mask)
