"""MTP layers of other layouts than MiMo's in plain numpy, beside `numpy_decoder`.

Written from the published definitions alone, with nothing of Cadenza's: vLLM's `qwen3_next_mtp.py`
and `qwen3_5_mtp.py` for the layout with `mtp.fc`, `deepseek_mtp.py` and `glm4_moe_mtp.py` for the
one with `eh_proj`, whose embedding is zero in the first position. All norm embedding and hidden
state, put the embedding first, and take the hidden state that the model's `forward` returns, which
is the one after its final norm (`qwen3_next.py`, `deepseek_v2.py`). The block is a layer of Qwen3
or Qwen3-MoE: transformers' `modeling_qwen3.py` and `modeling_qwen3_moe.py`; norms add one and heads
are rotated in part where Qwen3-Next's do (`Qwen3NextRMSNorm`, `partial_rotary_factor`). Computes in
float64.

T tokens, E embed, V vocabulary, X experts.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.oracle.numpy_decoder import Float64Array, NumpyDecoder


@dataclass(frozen=True)
class HeadNames:
    """The tensors around the block of an MTP layer, and the prefix of the block's."""

    block: str
    hidden_norm: str
    embedding_norm: str
    input_proj: str
    final_norm: str
    zeroes_first: bool = False


QWEN_NAMES = HeadNames(
    block="mtp.layers.0",
    hidden_norm="mtp.pre_fc_norm_hidden",
    embedding_norm="mtp.pre_fc_norm_embedding",
    input_proj="mtp.fc",
    final_norm="mtp.norm",
)


def deepseek_names(num_layers: int) -> HeadNames:
    """Of the MTP layer behind so many layers of the decoder."""
    prefix = f"model.layers.{num_layers}"
    return HeadNames(
        block=prefix,
        hidden_norm=f"{prefix}.hnorm",
        embedding_norm=f"{prefix}.enorm",
        input_proj=f"{prefix}.eh_proj",
        final_norm=f"{prefix}.shared_head.norm",
        zeroes_first=True,
    )


@dataclass(frozen=True, kw_only=True)
class NumpyMTP(NumpyDecoder):
    """A Qwen3 or Qwen3-MoE with an MTP layer.

    `config` may have `norm_adds_one` and `partial_rotary_factor` beside the published settings.
    """

    names: HeadNames = QWEN_NAMES
    wrong: frozenset[str] = field(default_factory=frozenset[str])
    """Faults for negative controls: `order`, `before_norm`, `keeps_first`."""

    def taken_states(self, token_ids: list[int]) -> Float64Array:
        """The hidden states [T, E] that the MTP layer takes."""
        hidden = self.hidden_states(token_ids)
        return hidden if "before_norm" in self.wrong else self._norm("model.norm", hidden)

    def mtp_states(
        self, hidden: Float64Array, token_ids: list[int], layer: int = 0
    ) -> Float64Array:
        assert layer == 0
        names = self.names
        embedded = self._weight("model.embed_tokens")[token_ids]
        if names.zeroes_first and "keeps_first" not in self.wrong:
            embedded[0] = 0.0
        parts = [self._norm(names.embedding_norm, embedded), self._norm(names.hidden_norm, hidden)]
        if "order" in self.wrong:
            parts.reverse()
        x = np.concatenate(parts, axis=-1) @ self._weight(names.input_proj).T
        return self._norm(names.final_norm, self._layer(names.block, x, None))

    def logits_of(self, hidden: Float64Array, token_ids: list[int]) -> Float64Array:
        """[T - 1, V]: row i predicts token i + 2, from the given hidden state of token i."""
        return self._head(self.mtp_states(hidden[: len(token_ids) - 1], token_ids[1:]))

    def mtp_logits(self, token_ids: list[int]) -> Float64Array:
        return self.logits_of(self.taken_states(token_ids), token_ids)

    def mtp_drafts(self, token_ids: list[int], count: int) -> list[int]:
        hidden, drafts = self.taken_states(token_ids)[:-1], list[int]()
        for _ in range(count):
            states = self.mtp_states(hidden, [*token_ids, *drafts][1:])
            drafts.append(int(self._head(states[-1:]).argmax()))
            hidden = np.concatenate([hidden, states[-1:]])
        return drafts

    def _layer(self, prefix: str, x: Float64Array, window: int | None) -> Float64Array:
        if f"{prefix}.mlp.gate.weight" not in self.tensors:
            return super()._layer(prefix, x, window)
        normed = self._norm(f"{prefix}.input_layernorm", x)
        x = x + self._attention(f"{prefix}.self_attn", normed, window)
        return x + self._experts(
            f"{prefix}.mlp", self._norm(f"{prefix}.post_attention_layernorm", x)
        )

    def _experts(self, prefix: str, x: Float64Array) -> Float64Array:
        scores = self._linear(f"{prefix}.gate", x)  # [T, X]
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        count = self.config["num_experts_per_tok"]
        result = np.zeros_like(x)
        for token, (row, shares) in enumerate(zip(x, weights, strict=True)):
            chosen = np.argsort(-shares)[:count]
            total = shares[chosen].sum() if self.config["norm_topk_prob"] else 1.0
            for expert in chosen:
                own = f"{prefix}.experts.{expert}"
                gate = self._linear(f"{own}.gate_proj", row)
                gated = gate / (1 + np.exp(-gate)) * self._linear(f"{own}.up_proj", row)
                part = self._linear(f"{own}.down_proj", gated)
                result[token] += shares[expert] / total * part
        return result

    def _heads(self, prefix: str, name: str, projected: Float64Array) -> Float64Array:
        norm = f"{prefix}.{name[0]}_norm"
        if f"{norm}.weight" not in self.tensors:
            return projected
        return self._norm(norm, projected)

    def _rotated(self, x: Float64Array) -> Float64Array:
        width = int(self._head_dim * self.config.get("partial_rotary_factor", 1.0))
        half, theta = width // 2, self.config["rope_parameters"]["rope_theta"]
        angles = np.arange(x.shape[1])[:, None] / theta ** (np.arange(half) / half)
        first, second, rest = x[..., :half], x[..., half:width], x[..., width:]
        cosines, sines = np.cos(angles), np.sin(angles)
        parts = [first * cosines - second * sines, second * cosines + first * sines, rest]
        return np.concatenate(parts, axis=-1)

    def _norm(self, name: str, x: Float64Array) -> Float64Array:
        weight = self._weight(name) + float(self.config.get("norm_adds_one", False))
        mean = (x * x).mean(axis=-1, keepdims=True)
        return x / np.sqrt(mean + self.config["rms_norm_eps"]) * weight


def numpy_mtp(
    config: dict[str, Any], tensors: dict[str, Any], names: HeadNames = QWEN_NAMES, *wrong: str
) -> NumpyMTP:
    """The definition for tensors of any float type."""
    return NumpyMTP(
        config=config,
        tensors={name: np.asarray(each).astype(np.float64) for name, each in tensors.items()},
        names=names,
        wrong=frozenset(wrong),
    )
