"""Qwen2's decoder and MiMo's MTP layer in plain numpy: the measure where transformers has no model.

Written from the published definitions alone, with nothing of Cadenza's: transformers'
`modeling_qwen2.py` for the decoder, and for the MTP layer `MiMoMTPLayers` of MiMo's own
`modeling_mimo.py`. Which hidden state that layer takes is said by the vLLM of MiMo's authors
(`XiaomiMiMo/vllm`, `mimo.py`, whose `MiMoModel` gives the sum of the residual stream without the
final norm, and `mimo_mtp.py`): the one before the decoder's final norm. Computes in float64; that
the decoder is right is shown on a checkpoint for which transformers gave the logits.

T tokens, E embed, V vocabulary.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class NumpyDecoder:
    """The settings of config.json, and the tensors by name."""

    config: dict[str, Any]
    tensors: dict[str, Float64Array]

    @classmethod
    def open(cls, folder: Path) -> "NumpyDecoder":
        stored = load_file(folder / "model.safetensors")
        tensors = {name: array.astype(np.float64) for name, array in stored.items()}
        return cls(json.loads((folder / "config.json").read_text()), tensors)

    def hidden_states(self, token_ids: list[int]) -> Float64Array:
        """Before the final norm: [T, E]."""
        x = self._weight("model.embed_tokens")[token_ids]
        for index in range(self.config["num_hidden_layers"]):
            x = self._layer(f"model.layers.{index}", x, self._window_of(index))
        return x

    def logits(self, token_ids: list[int]) -> Float64Array:
        """[T, V]; row i predicts token i + 1."""
        return self._head(self._norm("model.norm", self.hidden_states(token_ids)))

    def mtp_states(
        self, hidden: Float64Array, token_ids: list[int], layer: int = 0
    ) -> Float64Array:
        """The MTP layer's output [T, E] after its final norm, for the hidden states [T, E] of some
        positions and the tokens [T] behind each of them.
        """
        prefix = f"model.mtp_layers.{layer}"
        embedded = self._weight("model.embed_tokens")[token_ids]
        parts = [
            self._norm(f"{prefix}.hidden_layernorm", hidden),
            self._norm(f"{prefix}.token_layernorm", embedded),
        ]
        x = np.concatenate(parts, axis=-1) @ self._weight(f"{prefix}.input_proj").T
        return self._norm(f"{prefix}.final_layernorm", self._layer(prefix, x, None))

    def mtp_logits(self, token_ids: list[int]) -> Float64Array:
        """[T - 1, V]: row i predicts token i + 2, from the hidden state of token i."""
        states = self.mtp_states(self.hidden_states(token_ids)[:-1], token_ids[1:])
        return self._head(states)

    def mtp_drafts(self, token_ids: list[int], count: int) -> list[int]:
        """Greedy drafts behind `token_ids`: the layer is applied again to its own output."""
        hidden, drafts = self.hidden_states(token_ids)[:-1], list[int]()
        for _ in range(count):
            states = self.mtp_states(hidden, [*token_ids, *drafts][1:])
            drafts.append(int(self._head(states[-1:]).argmax()))
            hidden = np.concatenate([hidden, states[-1:]])
        return drafts

    def _window_of(self, index: int) -> int | None:
        types = self.config.get("layer_types")
        is_windowed = types is not None and types[index] == "sliding_attention"
        return self.config["sliding_window"] if is_windowed else None

    def _layer(self, prefix: str, x: Float64Array, window: int | None) -> Float64Array:
        normed = self._norm(f"{prefix}.input_layernorm", x)
        x = x + self._attention(f"{prefix}.self_attn", normed, window)
        normed = self._norm(f"{prefix}.post_attention_layernorm", x)
        gate = self._linear(f"{prefix}.mlp.gate_proj", normed)
        up = self._linear(f"{prefix}.mlp.up_proj", normed)
        return x + self._linear(f"{prefix}.mlp.down_proj", gate / (1 + np.exp(-gate)) * up)

    def _attention(self, prefix: str, x: Float64Array, window: int | None) -> Float64Array:
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        count = len(x)

        def split(name: str) -> Float64Array:  # [heads, T, D]
            projected = self._linear(f"{prefix}.{name}", x)
            heads = projected.reshape(count, -1, self._head_dim).swapaxes(0, 1)
            return self._heads(prefix, name, heads)

        queries, keys = self._rotated(split("q_proj")), self._rotated(split("k_proj"))
        keys, values = (np.repeat(each, heads // kv_heads, 0) for each in (keys, split("v_proj")))
        scores = queries @ keys.swapaxes(1, 2) / np.sqrt(self._head_dim)  # [Hq, T, T]
        distance = np.arange(count)[:, None] - np.arange(count)
        is_seen = (distance >= 0) & (distance < (window or count))
        scores = np.where(is_seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        joined = (weights @ values).swapaxes(0, 1).reshape(count, -1)
        return self._linear(f"{prefix}.o_proj", joined)

    def _heads(self, prefix: str, name: str, heads: Float64Array) -> Float64Array:
        """The heads [heads, T, D] of a projection, which Qwen2 does not norm."""
        del prefix, name
        return heads

    def _rotated(self, x: Float64Array) -> Float64Array:
        half, theta = self._head_dim // 2, self.config["rope_parameters"]["rope_theta"]
        angles = np.arange(x.shape[1])[:, None] / theta ** (np.arange(half) / half)  # [T, D / 2]
        first, second = x[..., :half], x[..., half:]
        cosines, sines = np.cos(angles), np.sin(angles)
        parts = [first * cosines - second * sines, second * cosines + first * sines]
        return np.concatenate(parts, axis=-1)

    @property
    def _head_dim(self) -> int:
        sizes = self.config["hidden_size"], self.config["num_attention_heads"]
        return self.config.get("head_dim") or sizes[0] // sizes[1]

    def _norm(self, name: str, x: Float64Array) -> Float64Array:
        mean = (x * x).mean(axis=-1, keepdims=True)
        return x / np.sqrt(mean + self.config["rms_norm_eps"]) * self._weight(name)

    def _head(self, x: Float64Array) -> Float64Array:
        is_tied = self.config["tie_word_embeddings"]
        return x @ self._weight("model.embed_tokens" if is_tied else "lm_head").T

    def _linear(self, name: str, x: Float64Array) -> Float64Array:
        return x @ self._weight(name).T + self.tensors.get(f"{name}.bias", 0.0)

    def _weight(self, name: str) -> Float64Array:
        return self.tensors[f"{name}.weight"]
