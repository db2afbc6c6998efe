"""`Identity`: a part that decides bits changes each key that has it, and no other key."""

import os
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, get_args

import pytest

from cadenza.backends.base import RunnerSetup
from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.config import EngineConfig
from cadenza.fingerprint import Fingerprint
from cadenza.kv.page_keys import Content, PageKeys
from cadenza.loading.identity import Identity, Key
from cadenza.loading.planned_engine import MIN_WEIGHT_BYTES, PlannedEngine, packed_weights_file
from cadenza.request import Attachment
from cadenza.sparse_prefill import CHUNK, KeptTokens
from cadenza.vision.processor import ImagePart, image_digest
from tests.engine.stored import folder_of
from tests.engine.test_plan import plan
from tests.faces.stub_backend import STUBS, StubBackend

OWN = Identity(
    version="1.2",
    revision=4,
    checkpoint="c" * 64,
    declared="ModelConfig()",
    kernels=("jax 1", "avx2"),
    machine=(),
    backend="xla:cpu",
    ops="native",
    exactness="fast",
    activations="bfloat16",
    weights="int8",
    quantization="int8",
    kv="bfloat16",
    kv_cache_dtype="auto",
    page_size=16,
    max_model_len=256,
    hidden=(),
    arithmetic="avx2-4",
    eos_token_ids=("2",),
    tokenizer="t",
    template="m",
    defaults="d",
    scorer="s",
    engine_seed=0,
)

KEYS: dict[str, tuple[Any, str]] = {
    "version": ("1.3", "pages weights streams"),
    "revision": (5, "pages weights streams"),
    "checkpoint": ("d" * 64, "pages weights scores streams answers"),
    "declared": ("ModelConfig(num_layers=1)", "weights"),
    "kernels": (("jax 1", "avx512"), "pages weights streams"),
    "machine": (("x86_64", "8"), "pages"),
    "backend": ("xla:gpu", "pages"),
    "ops": ("reference", "pages"),
    "exactness": ("portable", "pages weights streams"),
    "activations": ("float32", "pages weights scores streams answers"),
    "weights": ("int4", "pages streams answers"),
    "quantization": ("int4", "weights scores"),
    "kv": ("int8", "pages streams answers"),
    "kv_cache_dtype": ("int8", "weights"),
    "page_size": (32, "pages"),
    "max_model_len": (512, "pages streams answers"),
    "hidden": (("hidden states",), "pages"),
    "arithmetic": ("avx2-5", "scores streams answers"),
    "eos_token_ids": (("2", "3"), "streams"),
    "tokenizer": ("u", "answers"),
    "template": ("n", "answers"),
    "defaults": ("e", "answers"),
    "scorer": ("r", "streams answers"),
    "engine_seed": (1, "streams answers"),
}
"""Of each part: another value, and the keys that it changes."""


@pytest.fixture
def found_by(tmp_path: Path) -> Callable[[Identity], set[str]]:
    """The keys under which what `OWN` stored, or told, is found by another identity."""
    page = bytes(32)
    folder_of(tmp_path, OWN.digest("pages")).write(page, b"content")
    setup = replace(engine_of().setup(), quantization="int8", cache_folder=tmp_path)

    def file_of(identity: Identity) -> Path | None:
        return packed_weights_file(setup, EngineConfig(), MIN_WEIGHT_BYTES, lambda: identity)

    def found(other: Identity) -> set[str]:
        equal = {
            "pages": folder_of(tmp_path, other.digest("pages")).read(page) == b"content",
            "weights": file_of(other) == file_of(OWN) is not None,
            "scores": other.digest("scores") == OWN.digest("scores"),
            "streams": other.digest("streams") == OWN.digest("streams"),
            "answers": other.fingerprint == OWN.fingerprint,
        }
        return {key for key, is_equal in equal.items() if is_equal}

    return found


def engine_of(folder: Path | None = None, **options: Any) -> PlannedEngine:
    return PlannedEngine(
        checkpoint=open_checkpoint(folder),
        plan=plan(**options),
        config=EngineConfig(**options),
        backends=STUBS,
    )


class NamedStub(StubBackend):
    def name_arithmetic(self, checkpoint: Checkpoint, setup: RunnerSetup) -> str:
        return "stored"


def test_a_part_misses_in_each_key_that_has_it_and_in_no_other(
    found_by: Callable[[Identity], set[str]],
) -> None:
    every = {*get_args(Key)}
    assert set(KEYS) == {each.name for each in fields(Identity)}
    assert found_by(replace(OWN)) == every
    for name, (value, keys) in KEYS.items():
        assert found_by(replace(OWN, **{name: value})) == every - {*keys.split()}, name


def test_an_answers_digest_has_what_changes_its_tokens() -> None:
    for name, (value, keys) in KEYS.items():
        own, other = OWN.fingerprint, replace(OWN, **{name: value}).fingerprint
        decides = "answers" in keys and name != "engine_seed"  # a receipt has its own seed
        assert (other.digest != own.digest) == (decides and name != "scorer"), name
        assert (other.pruned("x").digest != own.pruned("x").digest) == decides, name
    assert {each.name for each in fields(Identity) if each.name in OWN.parts("answers")} == {
        *Fingerprint.__struct_fields__
    } - {"forms", "sparse_prefill"}, "these are known where text is made"


def test_what_an_earlier_version_stored_is_found_under_the_same_digests() -> None:
    """Their texts in the order in which page folders, packed weights and receipts have them."""

    def of(*texts: str) -> str:
        return sha256("".join(f"{len(each)}:{each}" for each in texts).encode()).hexdigest()

    checkpoint, types = "c" * 64, ("bfloat16", "int8", "bfloat16", "16", "256")
    page = ("1.2", "4", checkpoint, "jax 1", "avx2", "xla:cpu", "native", "fast", *types)
    assert OWN.digest("pages") == of(*page)
    assert replace(OWN, hidden=("hidden states",)).digest("pages") == of(*page, "hidden states")
    assert OWN.digest("weights") == of(
        *("1.2", "4", checkpoint, "ModelConfig()", "jax 1", "avx2"),
        *("fast", "bfloat16", "int8", "auto"),
    )
    assert OWN.digest("scores") == of(checkpoint, "bfloat16", "int8", "avx2-4")
    parts = {"checkpoint": "c" * 32, "arithmetic": "avx2-4", "activations": "bfloat16"}
    parts |= {"weights": "int8", "kv": "bfloat16", "max_model_len": "256", "tokenizer": "t"}
    parts |= {"template": "m", "defaults": "d", "forms": ""}
    text = "\0".join(f"{name}={value}" for name, value in parts.items())
    assert OWN.fingerprint.digest == f"cdz-{sha256(text.encode()).hexdigest()[:24]}"


def test_a_copied_and_touched_model_has_its_identity_in_any_folder(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_pages": 8, "max_num_seqs": 2}
    copied = tmp_path / "another name"
    shutil.copytree(open_checkpoint(None).folder, copied)
    for path in copied.iterdir():
        os.utime(path, (1, 1))
    own, other = engine_of(**options).identity(), engine_of(copied, **options).identity()
    assert other == own
    weights = next(copied.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    changed = engine_of(copied, **options).identity()
    assert changed == replace(own, checkpoint=changed.checkpoint) != own


@pytest.mark.parametrize("is_named", [True, False])
def test_the_sizes_that_follow_the_free_memory_are_in_no_key(is_named: bool) -> None:
    """Also where the arithmetic has no name, but for the shapes of a step."""
    backends = {"stub": f"{__name__}:NamedStub"} if is_named else STUBS
    own = replace(engine_of(num_pages=8), backends=backends)

    def with_limits(**limits: int) -> Identity:
        limited = replace(own.plan.limits, **limits)
        return replace(own, plan=replace(own.plan, limits=limited)).identity()

    for name in ("num_pages", "num_state_slots", "max_num_queued_reqs", "max_num_queued_tokens"):
        assert with_limits(**{name: 5}) == own.identity(), name
    assert (with_limits(max_num_seqs=3) == own.identity()) == is_named, "the control"


def test_salt_images_and_indices_stand_beside_the_identity_in_the_keys_of_prefixes() -> None:
    def key_of(secret: bytes = b"of an identity", **changes: Any) -> bytes:
        keys: list[bytes] = []
        content = Content(**{"token_ids": tuple(range(2 * CHUNK)), **changes})
        PageKeys(page_size=16, secret=secret).extend(keys, content)
        return keys[-1]

    image = Attachment(start=2, length=4, digest=b"an image")
    others = [
        key_of(b"of another one"),
        key_of(salt="a tenant's"),
        key_of(attachments=(image,)),
        key_of(attachments=(replace(image, digest=b"another"),)),
        key_of(kept=KeptTokens(num_prompt_tokens=4 * CHUNK, chunks=(0, 3))),
    ]
    assert len({key_of(), *others}) == 1 + len(others)


def test_rows_of_an_image_are_found_by_all_that_the_tower_sees_and_nothing_else() -> None:
    part = ImagePart(width=4, height=2, rows=2, columns=2)
    own = image_digest(b"settings", part, b"pixels")
    assert own == image_digest(b"settings", replace(part), b"pixels")
    others = [
        image_digest(b"other settings", part, b"pixels"),
        image_digest(b"settings", part, b"other pixels"),
        image_digest(b"settingsp", part, b"ixels"),
        *(
            image_digest(b"settings", replace(part, **{name: 8}), b"pixels")
            for name in ("width", "height", "rows", "columns")
        ),
    ]
    assert len({own, *others}) == 1 + len(others)
