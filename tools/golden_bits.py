"""The golden corpus: digests of every family's streams that every machine must reproduce.

    python -m tools.golden_bits                   # compares; exit status 1 on any difference
    python -m tools.golden_bits --only gemma      # the cases whose name contains this
    python -m tools.golden_bits --record          # records; refuses changed bits of a revision

Owns the requests, the weights and `tests/golden/bits.json`. A digest is of the tokens and of the
bits of all log probabilities. Invariants: weights and requests are made of integers alone, so they
have the same bits with every version of numpy; recorded digests change only with
`ARITHMETIC_REVISION`.
"""

import argparse
import hashlib
import json
import struct
import sys
import tempfile
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from cadenza.checkpoint import named_shape, open_checkpoint
from cadenza.checkpoint.random_checkpoint import (
    NoiseSource,
    text_shape_names,
    write_drawn_checkpoint,
)
from cadenza.config import EngineConfig
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.events import Token
from cadenza.fingerprint import ARITHMETIC_REVISION
from cadenza.loading.build import plan_model
from cadenza.loading.planned_engine import PlannedEngine
from cadenza.request import Request, SamplingParams

FILE = Path(__file__).resolve().parents[1] / "tests" / "golden" / "bits.json"

FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4", "kv_cache_dtype": "int8"},
    "int8-kv": {"dtype": "float32", "kv_cache_dtype": "int8"},
}
LONG_PROMPT = 1120
"""Beyond two spans of attention, and every window."""
NUM_TOKENS = 6
DIGEST_BYTES = 10

# Of the sum of four uniform numbers of 16 bits.
_MEAN_OF_SUM = 2 * 65_535
_DEVIATION_OF_SUM = 37_837.23


class Corpus(msgspec.Struct, frozen=True, kw_only=True):
    """Digests by class of arithmetic and case."""

    revision: int
    classes: dict[str, dict[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A family's tiny shape in one format."""

    shape: str
    format: str

    @property
    def name(self) -> str:
        return f"{self.shape.removeprefix('tiny-')} {self.format}"


def all_cases() -> list[Case]:
    shapes = [name for name in text_shape_names() if name.startswith("tiny-")]
    return [
        Case(shape=shape, format=format)
        for shape in shapes
        for format, settings in FORMATS.items()
        if named_shape(shape).latent is None or "kv_cache_dtype" not in settings
    ]


def read_corpus() -> Corpus:
    return msgspec.json.decode(FILE.read_bytes(), type=Corpus)


def play(case: Case, arithmetic: str = "portable") -> tuple[str, str]:
    """The class of arithmetic in which a case ran, and its digest."""
    with tempfile.TemporaryDirectory(prefix="cadenza-golden-") as folder:
        shape = named_shape(case.shape)
        source = NoiseSource(seed=7, draw=_even_noise)
        write_drawn_checkpoint(shape, Path(folder), source, dtype="float32")
        checkpoint = open_checkpoint(Path(folder))
        config = EngineConfig(
            max_num_seqs=4,
            max_model_len=LONG_PROMPT + NUM_TOKENS,
            max_num_batched_tokens=64,
            num_pages=4 * (LONG_PROMPT // 16 + 2),
            arithmetic=arithmetic,  # pyright: ignore[reportArgumentType]
            **FORMATS[case.format],
        )
        plan = plan_model(checkpoint, config)
        engine = PlannedEngine(checkpoint=checkpoint, plan=plan, config=config)
        name = engine.backend.name_arithmetic(checkpoint, engine.setup())
        if name is None:
            raise SystemExit("the golden corpus is of the native kernels, which are not built")
        with closing(engine.load_warm_runner(fill=float("nan"))) as runner:
            core = EngineCore(runner, plan.limits, CoreOptions(seed=11, secret=b"golden"))
            return name, _digest_of_streams(core, make_requests(shape.vocab_size))


def make_requests(vocab_size: int) -> list[Request]:
    """A long greedy one, and short ones with every filter and penalty."""
    plain = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, logprobs=2, ignore_eos=True)
    drawn = replace(plain, temperature=0.875, top_k=40, top_p=0.9375, min_p=0.03125, seed=3, n=2)
    ruled = replace(
        plain,
        temperature=1.25,
        top_n_sigma=1.5,
        repetition_penalty=1.25,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        seed=1 << 40,
        prompt_logprobs=1,
    )
    sizes = ((LONG_PROMPT, plain), (33, drawn), (7, ruled))
    return [
        Request(prompt_token_ids=_prompt(size, vocab_size), params=params) for size, params in sizes
    ]


def compare(corpus: Corpus, cases: list[Case], arithmetic: str = "portable") -> list[str]:
    """The names of the cases whose bits are not the recorded ones, with both digests."""
    differences: list[str] = []
    for case in cases:
        name, digest = play(case, arithmetic)
        recorded = corpus.classes.get(name, {}).get(case.name)
        if digest != recorded:
            differences.append(f"{name}: {case.name}: {digest} here, {recorded} in the corpus")
    return differences


def record(corpus: Corpus, cases: list[Case], arithmetic: str = "portable") -> Corpus:
    """The corpus with these cases of this revision. Raises SystemExit where recorded bits of the
    same revision would change."""
    is_new = corpus.revision != ARITHMETIC_REVISION
    classes = {} if is_new else {name: dict(each) for name, each in corpus.classes.items()}
    for case in cases:
        name, digest = play(case, arithmetic)
        before = classes.setdefault(name, {}).setdefault(case.name, digest)
        if before != digest:
            raise SystemExit(
                f"{case.name}: the bits of {name} changed; raise ARITHMETIC_REVISION in "
                f"cadenza/fingerprint.py, and record all cases anew"
            )
    return Corpus(revision=ARITHMETIC_REVISION, classes=classes)


def _digest_of_streams(core: EngineCore, requests: list[Request]) -> str:
    """Of the requests in one batch, in the order of requests and samples."""
    found: dict[tuple[int, int], list[bytes]] = {}
    for request in requests:
        request_id = core.submit(request)
        found |= {(request_id, sample): [] for sample in range(request.params.n)}
    while not core.is_idle:
        for event in core.step():
            if isinstance(event, Token):
                found[event.request_id, event.sample].append(_bytes_of(event))
    if not all(found.values()):
        raise SystemExit("a request of the golden corpus brought no token")
    text = b"\n".join(b"".join(each) for _, each in sorted(found.items()))
    return hashlib.blake2b(text, digest_size=DIGEST_BYTES).hexdigest()


def _bytes_of(event: Token) -> bytes:
    entry = event.logprobs
    assert entry is not None, "every request asks for log probabilities"
    count = len(entry.top_ids)
    numbers = (event.token_id, entry.logprob, entry.rank, *entry.top_ids, *entry.top_logprobs)
    return struct.pack(f"<qfq{count}q{count}f", *numbers)


def _prompt(size: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(
        (size + 2_654_435_761 * (index + 1)) % 4_294_967_291 % vocab_size for index in range(size)
    )


def _even_noise(generator: np.random.Generator, count: int) -> npt.NDArray[np.float32]:
    """Sums of four uniform integers, which only exact operations turn into floats."""
    words = np.asarray(generator.bit_generator.random_raw(count), np.uint64)
    parts = [(words >> np.uint64(16 * place)) & np.uint64(0xFFFF) for place in range(4)]
    total = np.asarray(np.sum(parts, axis=0, dtype=np.int64) - _MEAN_OF_SUM, np.float32)
    return np.divide(total, np.float32(_DEVIATION_OF_SUM), dtype=np.float32)


def main() -> int:
    """Returns the exit status: 1 if a comparison found a difference."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--arithmetic", default="portable", choices=("portable", "fast"))
    options = parser.parse_args()
    cases = [case for case in all_cases() if options.only in case.name]
    corpus = read_corpus() if FILE.exists() else Corpus(revision=ARITHMETIC_REVISION, classes={})
    if options.record:
        recorded = record(corpus, cases, options.arithmetic)
        text = json.dumps(msgspec.to_builtins(recorded), indent=1, sort_keys=True)
        FILE.write_text(text + "\n", encoding="utf-8")
        print(f"recorded {len(cases)} cases of revision {recorded.revision}")
        return 0
    differences = compare(corpus, cases, options.arithmetic)
    print("\n".join([*differences, f"{len(cases)} cases compared, {len(differences)} differ"]))
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
