"""What longer groups of int8 codes cost in quality: KL and top-1 agreement of a trained model.

    .venv-oracle/bin/python benchmarks/int8_groups.py FOLDER... [--chunks 12] [--only NAME]...

Weights and inputs of every linear, and of the head, are rounded as a scheme says; the products are
float32, so the differences are those of the codes alone. KL is from the same model without
rounding, in nats, over the whole vocabulary.

A scheme names the elements of K that share a scale, for weights and for activations; 0 is all of
K. Its extra codes are for one part of every 2048 elements of K, that with the largest magnitude:
`second` gives one group a second set of codes for what the first ones leave, as `int8` does
(csrc/core/quantised.h), `apart` takes 32 elements out of their group, so that they do not raise its
scale, and gives them codes and second codes of their own.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

CHUNK, SKIPPED = 512, 128
"""Tokens of a context, and how many of its first are not scored."""

SPAN, SHORT = 2048, 32
TEXTS = ("tests/oracle/corpus.txt", "README.md", "docs/serving.md", "docs/exactness.md")

Rounding = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Elements of K with one scale, and what has extra codes."""

    name: str
    weights: int
    activations: int
    extra: Literal["none", "second", "apart"] = "none"


SCHEMES = (
    Scheme(name="int8", weights=32, activations=32, extra="second"),
    Scheme(name="128/128 apart", weights=128, activations=128, extra="apart"),
    Scheme(name="128/128 second", weights=128, activations=128, extra="second"),
    Scheme(name="0/0 apart", weights=0, activations=0, extra="apart"),
    Scheme(name="64/64 second", weights=64, activations=64, extra="second"),
    Scheme(name="256/256 apart", weights=256, activations=256, extra="apart"),
    Scheme(name="0/128 apart", weights=0, activations=128, extra="apart"),
    Scheme(name="0/0", weights=0, activations=0),
    Scheme(name="32/32", weights=32, activations=32),
    Scheme(name="128/128", weights=128, activations=128),
)


def grouped(x: Tensor, length: int) -> Tensor:
    """[..., groups, length], zero beyond K."""
    length = length or x.shape[-1]
    padding = -x.shape[-1] % length
    return nn.functional.pad(x, (0, padding)).unflatten(-1, (-1, length))


def rounded_groups(x: Tensor, length: int, *, scale_type: torch.dtype = torch.float32) -> Tensor:
    """The values of the int8 codes of x [..., K]."""
    groups = grouped(x, length)
    scales = (groups.abs().amax(-1, keepdim=True) / 127).to(scale_type).float()
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    codes = (groups * inverse).round().clamp(-127, 127)
    return (codes * scales).flatten(-2)[..., : x.shape[-1]]


def largest_parts(x: Tensor, length: int) -> Tensor:
    """Whether an element of x is in the largest group of its span, [..., K]."""
    groups = grouped(x, length)
    most = groups.abs().amax(-1)
    spans = grouped(most, max(SPAN // (length or SPAN), 1))
    chosen = nn.functional.one_hot(spans.argmax(-1), spans.shape[-1]).bool()
    of_groups = chosen.flatten(-2)[..., : most.shape[-1]]
    return of_groups.unsqueeze(-1).expand_as(groups).flatten(-2)[..., : x.shape[-1]]


def rounded_activations(x: Tensor, scheme: Scheme) -> Tensor:
    length = scheme.activations
    if scheme.extra == "none":
        return rounded_groups(x, length)
    apart = scheme.extra == "apart"
    chosen = largest_parts(x, SHORT if apart else length)
    first = rounded_groups(torch.where(chosen, 0.0, x) if apart else x, length)
    if apart:
        first = first + torch.where(chosen, rounded_groups(torch.where(chosen, x, 0.0), SHORT), 0.0)
    second = rounded_groups(torch.where(chosen, x - first, 0.0), SHORT if apart else length)
    return first + second


@contextmanager
def rounding(model: Any, scheme: Scheme) -> Iterator[None]:
    """The model with the scheme's codes; its weights are as before afterwards."""
    with ExitStack() as after:
        for module in model.modules():
            if not isinstance(module, nn.Linear):
                continue
            kept = module.weight.data
            rounded = rounded_groups(kept, scheme.weights, scale_type=torch.float16)
            module.weight.data = rounded
            after.callback(setattr, module.weight, "data", kept)
            hook = module.register_forward_pre_hook(
                lambda _, inputs: (rounded_activations(inputs[0], scheme), *inputs[1:])
            )
            after.callback(hook.remove)
        yield


@torch.inference_mode()
def log_probabilities(model: Any, ids: Tensor) -> Tensor:
    """[scored positions, V]."""
    logits = model(ids[None], use_cache=False).logits[0, SKIPPED:]
    return torch.log_softmax(logits, -1)


@dataclass(slots=True)
class Measure:
    """Sums over the scored positions."""

    kls: list[Tensor]
    num_equal: int = 0
    loss: float = 0.0

    def add(self, exact: Tensor, other: Tensor, ids: Tensor) -> None:
        self.kls.append((exact.exp() * (exact - other)).sum(-1))
        self.num_equal += int((exact.argmax(-1) == other.argmax(-1)).sum())
        following = ids[SKIPPED + 1 :, None]
        self.loss += float(other[:-1].gather(1, following).neg().sum())

    def row(self, name: str, exact: "Measure") -> str:
        kls = torch.cat(self.kls)
        scored = len(kls)
        ratio = torch.tensor((self.loss - exact.loss) / scored).exp()
        return (
            f"| {name} | {kls.mean():.2e} | {kls.quantile(0.99):.2e} "
            f"| {100 * self.num_equal / scored:.2f} % | {ratio:.4f} |"
        )


def chunks_of(folder: Path, count: int) -> list[Tensor]:
    """Evenly spaced pieces of the texts."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "\n\n".join(Path(name).read_text(encoding="utf-8") for name in TEXTS)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids[0]
    stride = (len(ids) - CHUNK) // max(count - 1, 1)
    pieces = [ids[at * stride : at * stride + CHUNK].clone() for at in range(count)]
    if (first := tokenizer.bos_token_id) is not None and "gemma" in folder.name:
        for piece in pieces:
            piece[0] = first
    return pieces


def measure(folder: Path, options: argparse.Namespace) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    chunks = chunks_of(folder, options.chunks)
    exact = [log_probabilities(model, ids) for ids in chunks]
    alone = Measure([])
    for ids, own in zip(chunks, exact, strict=True):
        alone.add(own, own, ids)
    print(f"\n{folder.name}: {sum(map(len, exact))} positions of {len(chunks)} texts\n")
    print("| weights/activations | mean KL | 99th percentile | same first token | perplexity |")
    print("|---|---|---|---|---|", flush=True)
    for scheme in SCHEMES:
        if options.only and scheme.name not in options.only:
            continue
        found = Measure([])
        with rounding(model, scheme):
            for ids, own in zip(chunks, exact, strict=True):
                found.add(own, log_probabilities(model, ids), ids)
        print(found.row(scheme.name, alone), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--chunks", type=int, default=12)
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="of the schemes; repeatable"
    )
    options = parser.parse_args()
    for folder in options.folders:
        measure(folder, options)


if __name__ == "__main__":
    main()
