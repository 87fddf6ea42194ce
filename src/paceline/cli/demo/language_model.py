"""The demonstration's model: a small causal transformer as a plain `nn.Module`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """The size of a `LanguageModel`.

    Attributes:
        vocabulary: number of token ids.
        context: maximum sequence length in tokens.
        width: features per token.
        layers: number of blocks.
        heads: attention heads per block; divides `width`.
    """

    vocabulary: int
    context: int
    width: int
    layers: int
    heads: int


class Block(nn.Module):
    """Causal attention, then a two-layer network per token, both with residual connections."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(shape.width)
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.attention_out = nn.Linear(shape.width, shape.width, bias=False)
        self.network_norm = nn.LayerNorm(shape.width)
        self.network_in = nn.Linear(shape.width, 4 * shape.width)
        self.network_out = nn.Linear(4 * shape.width, shape.width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps `(batch, tokens, width)` to the same shape."""
        batch, tokens, width = hidden.shape
        mixed: Tensor = self.query_key_value(self.attention_norm(hidden))
        query, key, value = mixed.view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(attended.transpose(1, 2).reshape(batch, tokens, width))
        widened = functional.gelu(self.network_in(self.network_norm(hidden)))
        result: Tensor = hidden + self.network_out(widened)
        return result


class LanguageModel(nn.Module):
    """Predicts the next token from those before it (pre-norm transformer, tied embeddings; Radford et al., 2019).

    Args:
        shape: the size; its `heads` must divide its `width`.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        if shape.width % shape.heads:
            raise ValueError(f"heads={shape.heads} does not divide width={shape.width}")
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList([Block(shape) for _ in range(shape.layers)])
        self.norm = nn.LayerNorm(shape.width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws normal weights with deviation 0.02, or 0.02/sqrt(n) in the last layers of the n residual branches."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_last = name.endswith(("attention_out.weight", "network_out.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * self.shape.layers) if is_last else 0.02)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Returns logits, and the loss if there are labels.

        Args:
            input_ids: `(batch, tokens)` ids.
            labels: the next token of each position, same shape; -100 is ignored.

        Returns:
            `logits` `(batch, tokens, vocabulary)`; with labels also `loss`, the mean cross-entropy in nats per token.
        """
        hidden = self.tokens(input_ids) + self.positions.weight[: input_ids.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits = functional.linear(self.norm(hidden), self.tokens.weight)
        if labels is None:
            return {"logits": logits}
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    temperature: float = 0.7,
    top: int = 40,
    seed: int = 0,
) -> list[int]:
    """Continues a prompt, sampling each token from the `top` likeliest.

    Args:
        prompt: at least one id.
        temperature: a value below 1 sharpens the distribution; 0 always takes the likeliest token.
        seed: seed of a separate generator; the global random state is not changed.

    Returns:
        The new ids only.
    """
    device = model.tokens.weight.device
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    was_training = model.training
    model.eval()
    for _ in range(num_tokens):
        window = torch.tensor([ids[-model.shape.context :]], device=device)
        logits = model(window)["logits"][0, -1].float().cpu()
        if temperature <= 0:
            ids.append(int(logits.argmax()))
            continue
        values, indices = logits.topk(min(top, logits.numel()))
        choice = torch.multinomial(torch.softmax(values / temperature, dim=0), 1, generator=generator)
        ids.append(int(indices[choice]))
    model.train(was_training)
    return ids[len(prompt) :]
