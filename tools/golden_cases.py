"""The cases of the golden corpus: `all_cases`, and how each is played, `play`.

Owns the requests and the routes on which an engine serves them. Invariants: requests are made of
integers alone; a route that did not happen is an error; what a route computes once more, or not at
all, changes no token, so its digest is that of the same case without a route.
"""

import hashlib
import struct
import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from cadenza.backends.base import Runner
from cadenza.checkpoint.random_checkpoint import named_shape, shape_names
from cadenza.config import EngineConfig, EngineLimits
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.engine.new_sequences import ResumedSample, Resumption
from cadenza.events import Finished, PromptLogprobs, Token
from cadenza.loading.build import plan_model
from cadenza.loading.planned_engine import PlannedEngine
from cadenza.request import Attachment, Request, SamplingParams
from cadenza.vision.processor import ImageProcessor, Run, image_digest
from cadenza.vision.tower_config import VisionConfig
from tools.golden_models import STORED, open_model, random_bytes

# Options of the engine. The last ones are of weights that a file has in another form.
FORMATS: Mapping[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4", "kv_cache_dtype": "int8"},
    "int8-kv": {"dtype": "float32", "kv_cache_dtype": "int8"},
    **{name: {"dtype": "bfloat16"} for name in STORED},
}

Group = Literal["families", "routes", "images", "stored weights"]
Route = Literal["hit", "snapshot", "drafts", "resumed"]

LONG_PROMPT = 1120  # beyond two spans of attention, and every window
NUM_TOKENS = 6
DIGEST_BYTES = 10
IMAGE_SIZES = ((64, 48), (96, 96))
# Tokens of a step, others than 64: a whole span of placeholders that see each other fits; and
# prompts are cut at other places than those of the case without a route.
BUDGETS: Mapping[Group, int] = {"images": 80, "routes": 160}


shape_of = cache(named_shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A tiny shape in one format, whose requests are served in one batch, at once or by a route."""

    shape: str
    format: str
    route: Route | None = None

    @property
    def name(self) -> str:
        words = (self.shape.removeprefix("tiny-"), self.format, self.route)
        return " ".join(word for word in words if word)

    @property
    def group(self) -> Group:
        if self.route is not None:
            return "routes"
        if self.format in STORED:
            return "stored weights"
        return "families" if shape_of(self.shape).vision is None else "images"

    @property
    def has_bf16_products(self) -> bool:
        """Then tables with instructions for bfloat16 have bits of their own."""
        settings = FORMATS[self.format]
        return settings["dtype"] == "bfloat16" and settings.get("kv_cache_dtype") != "int8"


# Windows, shared KV, sinks, latents, and each kind of recurrent state.
_ROUTES: Mapping[str, tuple[Route, ...]] = {
    "llama bfloat16": ("hit", "drafts", "resumed"),
    "llama int4": ("hit", "drafts"),
    "gemma2 bfloat16": ("hit",),
    "gemma4 bfloat16": ("hit", "drafts"),
    "gpt-oss bfloat16": ("hit",),
    "deepseek-v3 bfloat16": ("hit", "drafts"),
    "qwen3.5 bfloat16": ("snapshot", "drafts", "resumed"),
    "qwen3.5 float32": ("snapshot", "drafts"),
    "lfm2 bfloat16": ("snapshot", "drafts"),
    "granite4 bfloat16": ("snapshot", "drafts"),
}

_SEEING_FORMATS = {
    "tiny-qwen3-vl": ("bfloat16", "float32", "int8"),
    "tiny-smolvlm": ("bfloat16", "float32"),
}

_STORED_CASES = (
    Case(shape="tiny-llama", format="gguf"),
    Case(shape="tiny-gpt-oss", format="mxfp4"),
    Case(shape="tiny-qwen3", format="float8"),
)


def all_cases() -> list[Case]:
    tiny = [name for name in shape_names() if name.startswith("tiny-")]
    texts = [name for name in tiny if shape_of(name).vision is None]
    found = [
        Case(shape=shape, format=format)
        for shape in texts
        for format, settings in FORMATS.items()
        if format not in STORED
        and (shape_of(shape).latent is None or "kv_cache_dtype" not in settings)
    ]
    for each in [*found]:
        found += [replace(each, route=route) for route in _ROUTES.get(each.name, ())]
    for shape in tiny:
        if shape not in texts:
            formats = _SEEING_FORMATS.get(shape, ("bfloat16",))
            found += [Case(shape=shape, format=format) for format in formats]
    return [*found, *_STORED_CASES]


def play(case: Case, arithmetic: str = "portable") -> tuple[str, str]:
    """The class of arithmetic in which a case ran, and its digest."""
    with tempfile.TemporaryDirectory(prefix="cadenza-golden-") as folder:
        stored = case.format if case.format in STORED else None
        checkpoint = open_model(case.shape, stored, Path(folder))
        config = EngineConfig(
            max_num_seqs=4,
            max_model_len=LONG_PROMPT + NUM_TOKENS,
            max_num_batched_tokens=BUDGETS.get(case.group, 64),
            num_pages=4 * (LONG_PROMPT // 16 + 2),
            arithmetic=arithmetic,  # pyright: ignore[reportArgumentType]
            **FORMATS[case.format],
        )
        plan = plan_model(checkpoint, config)
        engine = PlannedEngine(checkpoint=checkpoint, plan=plan, config=config)
        name = engine.backend.name_arithmetic(checkpoint, engine.setup())
        if name is None:
            raise SystemExit("the golden corpus is of the native kernels, which are not built")
        vocab_size, vision = checkpoint.config.vocab_size, checkpoint.config.vision
        requests = make_requests(vocab_size)
        if vision is not None:
            requests = _with_images(requests, vision)
        with closing(engine.load_warm_runner(fill=float("nan"))) as runner:
            engines = _Engines(runner, plan.limits)
            played = _PLAYED[case.route](engines, requests)
        return name, played.digest


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


def _prompt(size: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(
        (size + 2_654_435_761 * (index + 1)) % 4_294_967_291 % vocab_size for index in range(size)
    )


@dataclass(slots=True)
class _Played:
    """The tokens of each request and sample, in the order of requests."""

    tokens: dict[tuple[int, int], list[Token]] = field(
        default_factory=dict[tuple[int, int], list[Token]]
    )
    num_prompt_logprobs: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def digest(self) -> str:
        text = b"\n".join(
            b"".join(_bytes_of(token) for token in each) for _, each in sorted(self.tokens.items())
        )
        return hashlib.blake2b(text, digest_size=DIGEST_BYTES).hexdigest()


def _bytes_of(event: Token) -> bytes:
    entry = event.logprobs
    assert entry is not None, "every request asks for log probabilities"
    count = len(entry.top_ids)
    numbers = (event.token_id, entry.logprob, entry.rank, *entry.top_ids, *entry.top_logprobs)
    return struct.pack(f"<qfq{count}q{count}f", *numbers)


@dataclass(frozen=True, slots=True)
class _Engines:
    """Engines over one runner, one after the other."""

    runner: Runner
    limits: EngineLimits

    def new(self) -> EngineCore:
        self.runner.reset()
        return EngineCore(self.runner, self.limits, CoreOptions(seed=11, secret=b"golden"))


def _run(core: EngineCore, requests: list[Request]) -> _Played:
    """In one batch."""
    ids = [core.submit(request) for request in requests]
    played = _Played({(i, k): [] for i, each in enumerate(requests) for k in range(each.params.n)})
    return _run_open(core, ids, played)


def _run_open(core: EngineCore, ids: list[int], played: _Played) -> _Played:
    """The open requests to their end, behind what `played` has of them."""
    while not core.is_idle:
        for event in core.step():
            index = ids.index(event.request_id)
            if isinstance(event, Token):
                played.tokens[index, event.sample].append(event)
            elif isinstance(event, PromptLogprobs):
                count = played.num_prompt_logprobs.get(index, 0)
                played.num_prompt_logprobs[index] = count + len(event.entries)
            elif isinstance(event, Finished) and event.error is not None:
                raise SystemExit(f"a request of the golden corpus failed: {event.error}")
    if not all(played.tokens.values()):
        raise SystemExit("a request of the golden corpus brought no token")
    return played


# Routes


def _play_cold(engines: _Engines, requests: list[Request]) -> _Played:
    return _run(engines.new(), requests)


def _play_hit(engines: _Engines, requests: list[Request]) -> _Played:
    """Again, once the prefix cache has their prompts."""
    core = engines.new()
    _run(core, requests)
    played = _run(core, requests)
    cached = played.tokens[0, 0][0].num_cached_tokens or 0
    if cached < LONG_PROMPT - 32:
        raise SystemExit(f"only {cached} tokens of the long prompt were found in the prefix cache")
    return played


def _play_drafts(engines: _Engines, requests: list[Request]) -> _Played:
    """With their own answers as predictions, some of whose tokens are others."""
    cold = _run(engines.new(), requests)
    guessed = [
        replace(request, prediction=_guess(cold.tokens[index, 0]))
        for index, request in enumerate(requests)
    ]
    core = engines.new()
    played = _run(core, guessed)
    counts = core.draft_counts
    if not 0 < counts.num_accepted_tokens < counts.num_draft_tokens:
        raise SystemExit(
            f"{counts.num_accepted_tokens} of {counts.num_draft_tokens} drafts were accepted; some "
            f"are to be, and some not"
        )
    return played


def _guess(tokens: list[Token]) -> tuple[int, ...]:
    ids = [token.token_id for token in tokens]
    return tuple(each ^ 1 if place % 4 == 3 else each for place, each in enumerate(ids))


def _play_resumed(engines: _Engines, requests: list[Request]) -> _Played:
    """By an engine that goes on behind another's first tokens."""
    cold, core, played = _run(engines.new(), requests), engines.new(), _Played()
    ids = [core.new_request_id() for _ in requests]
    for index, request in enumerate(requests):
        samples: list[ResumedSample] = []
        for k in range(request.params.n):
            known = cold.tokens[index, k][: 1 + (index + k) % 3]
            played.tokens[index, k] = known
            token_ids = tuple(token.token_id for token in known)
            samples.append(ResumedSample(sample=k, token_ids=token_ids))
        count = cold.num_prompt_logprobs.get(index, 0)
        core.resume(
            ids[index], request, Resumption(samples=tuple(samples), num_prompt_logprobs=count)
        )
    return _run_open(core, ids, played)


# A hit of a model with recurrent states begins with the state behind it, a snapshot.
_PLAYED: Mapping[Route | None, Callable[[_Engines, list[Request]], _Played]] = {
    None: _play_cold,
    "hit": _play_hit,
    "snapshot": _play_hit,
    "drafts": _play_drafts,
    "resumed": _play_resumed,
}


# Images


def _with_images(requests: list[Request], vision: VisionConfig) -> list[Request]:
    """The long prompt has two images, the next one the second of them, the last one none."""
    token_id = vision.image_token_id
    shown = (IMAGE_SIZES, IMAGE_SIZES[1:], ())
    return [
        _shown(request, vision.processor, token_id, sizes)
        for request, sizes in zip(requests, shown, strict=True)
    ]


def _shown(
    request: Request,
    processor: ImageProcessor,
    token_id: int,
    sizes: tuple[tuple[int, int], ...],
) -> Request:
    """With an image of each size behind the first tokens; the long one keeps its length."""
    text = [each + (each == token_id) for each in request.prompt_token_ids]
    tokens, parts = text[:5], list[Attachment]()
    for size in sizes:
        own, found = _image(processor, size, token_id)
        parts += [replace(each, start=each.start + len(tokens)) for each in found]
        tokens += [*own, *text[:9]]
    tokens += text[len(tokens) :] if sizes == IMAGE_SIZES else text[5:]
    return replace(request, prompt_token_ids=tuple(tokens), attachments=tuple(parts))


def _image(
    processor: ImageProcessor, size: tuple[int, int], token_id: int
) -> tuple[list[int], list[Attachment]]:
    """Its tokens, texts between parts as two tokens each, and its parts from the first of them."""
    plan = processor.plan(*size)
    tokens, places = list[int](), dict[int, tuple[int, int]]()
    for piece in plan.pieces:
        if isinstance(piece, Run):
            start, _ = places.get(piece.part, (len(tokens), 0))
            tokens += [token_id] * piece.count
            places[piece.part] = start, len(tokens)
        else:
            tokens += [each + (each == token_id) for each in (11, 13)]
    parts: list[Attachment] = []
    for index, part in enumerate(plan.parts):
        start, end = places[index]
        pixels = random_bytes(f"{size} part {index}", part.num_bytes).tobytes()
        parts.append(
            Attachment(
                start=start,
                length=end - start,
                digest=image_digest(processor.settings, part, pixels),
                payload=pixels,
                width=part.width,
                height=part.height,
                rows=part.rows,
                columns=part.columns,
            )
        )
    return tokens, sorted(parts, key=lambda each: each.start)
