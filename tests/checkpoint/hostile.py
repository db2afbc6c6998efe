"""The hostile corpus: folders that lie, and a program that opens each under watch.

Owns the corpus (`CORPUS`, a folder's files by case) and the watching: processor time, allocated
memory, and what Python's audit events tell of files, processes, sockets and code. Run as
`python -m tests.checkpoint.hostile ROOT COUNT`: it opens ROOT/<number> and prints a JSON line for
each.
"""

import json
import os
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.checkpoint.files import (
    SMALL_CONFIG,
    encode_file,
    encode_tensors,
    small_model,
    write_folder,
)

Case = Callable[[Path], object]

EVENTS = ("os.system", "subprocess.Popen", "socket.connect", "os.exec", "os.fork", "ctypes.dlopen")
EVIL = "import pathlib; pathlib.Path(__file__).with_name('ran').touch()\n"
TENSORS = small_model()[1]
FIRST = "model.embed_tokens.weight"
SHARD = "model-00001-of-00001.safetensors"


def config(**changes: Any) -> dict[str, Any]:
    return {"config.json": {**SMALL_CONFIG, **changes}}


def header(change: Callable[[dict[str, Any]], object], data: bytes | None = None) -> dict[str, Any]:
    """A file whose honest header was changed in place; `data` stands for the honest bytes."""
    table, honest = encode_tensors(TENSORS)
    change(table)
    return {"model.safetensors": encode_file(table, honest if data is None else data)}


def first(**changes: Any) -> dict[str, Any]:
    return header(lambda table: table[FIRST].update(changes))


def overlap(table: dict[str, Any]) -> None:
    second = table[list(TENSORS)[1]]
    second["data_offsets"] = [place - 8 for place in second["data_offsets"]]


def weights(content: bytes) -> dict[str, Any]:
    return {"model.safetensors": content}


def index(weight_map: object, **files: object) -> Case:
    def write(folder: Path) -> None:
        write_folder(folder, {"model.safetensors.index.json": {"weight_map": weight_map}, **files})
        (folder / "model.safetensors").rename(folder / SHARD)

    return write


def linked(name: str, target: str) -> Case:
    def write(folder: Path) -> None:
        write_folder(folder)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return write


def special(name: str, make: Callable[[Path], object]) -> Case:
    def write(folder: Path) -> None:
        write_folder(folder)
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return write


def sparse(claimed: int) -> Case:
    """A file of `claimed` bytes that takes none on the disk, with a header of that length."""

    def write(folder: Path) -> None:
        write_folder(folder)
        with (folder / "model.safetensors").open("wb") as file:
            file.write((claimed - 8).to_bytes(8, "little"))
            file.truncate(claimed)

    return write


def template(source: str) -> dict[str, Any]:
    return {"chat_template.jinja": source}


def tokenizer(content: object) -> dict[str, Any]:
    return {"tokenizer.json": content, "tokenizer_config.json": {"eos_token": "x"}}


HONEST = encode_file(*encode_tensors(TENSORS))
MANY = b"{" + b",".join(b'"%d":{}' % number for number in range(400_000)) + b"}"
WITHOUT = {name: array for name, array in TENSORS.items() if name != FIRST}
BPE = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
WEIGHT_MAP = dict.fromkeys(TENSORS, SHARD)

CORPUS: dict[str, tuple[str, dict[str, Any] | Case]] = {
    "header: length beyond the file": ("claims", weights((1 << 40).to_bytes(8, "little") + b"{}")),
    "header: length of 2^64 - 1": ("claims", weights(b"\xff" * 8 + b"{}")),
    "header: length beyond the cap": ("claims", sparse(1 << 40)),
    "header: length of nothing": ("is not valid JSON", weights(bytes(8))),
    "header: one byte too short": (
        "JSON",
        weights((len(HONEST) // 2).to_bytes(8, "little") + HONEST),
    ),
    "header: garbage": ("is not valid JSON", weights(encode_file(b"garbage!", b""))),
    "header: no UTF-8": ("is not valid JSON", weights(encode_file(b'{"\xff": 1}', b""))),
    "header: a list": ("must hold a JSON object", weights(encode_file([1], b""))),
    "header: deep nesting": ("not valid JSON", weights(encode_file(b'{"a":' * 90_000, b""))),
    "header: deeper nesting": ("over", weights(encode_file(b"[" * (15 << 20), b""))),
    "header: 400,000 tensors": ("split the file", weights(encode_file(MANY, b""))),
    "header: a name twice": ("twice", weights(encode_file(b'{"a": {}, "a": {}}', b""))),
    "header: a name of 1,000 letters": (
        "is not a tensor",
        header(lambda t: t.update({"a" * 1000: {}})),
    ),
    "header: an entry that is a number": ("is not a tensor", header(lambda t: t.update(a=3))),
    "tensor: overlapping another": ("overlaps", header(overlap)),
    "tensor: out of the file": ("data_offsets", first(data_offsets=[0, 1 << 40])),
    "tensor: offsets reversed": ("data_offsets", first(data_offsets=[312, 0])),
    "tensor: offsets negative": ("data_offsets", first(data_offsets=[-312, 0])),
    "tensor: offsets of floats": ("data_offsets", first(data_offsets=[0.0, 312.0])),
    "tensor: offsets of NaN": (
        "data_offsets",
        weights(
            encode_file(
                b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [NaN, Infinity]}}', b""
            )
        ),
    ),
    "tensor: three offsets": ("data_offsets", first(data_offsets=[0, 1, 2])),
    "tensor: shape of 2^62": ("shape", first(shape=[1 << 62])),
    "tensor: shape of 1,000,000 axes": ("shape", first(shape=[1] * 1_000_000)),
    "tensor: shape that overflows": ("shape", first(shape=[1 << 10] * 7)),
    "tensor: shape of 3,000 digits": ("shape", first(shape=[10**3000])),
    "tensor: shape negative": ("shape", first(shape=[-13, -6])),
    "tensor: shape a string": ("shape", first(shape="13x6")),
    "tensor: other shape": ("config.json requires", first(shape=[6, 13])),
    "tensor: dtype of another size": ("takes", first(dtype="F16")),
    "tensor: dtype of integers": ("takes", first(dtype="I64")),
    "tensor: integers in place of floats": ("not quantised", first(dtype="I32")),
    "tensor: dtype unknown": ("supported are", first(dtype="EVIL")),
    "tensor: dtype a list": ("must be a string", first(dtype=["F32"])),
    "tensor: missing": ("lack", weights(encode_file(*encode_tensors(WITHOUT)))),
    "tensor: extra": (
        "contain z",
        weights(encode_file(*encode_tensors({**TENSORS, "z": TENSORS[FIRST]}))),
    ),
    "file: cut": ("data_offsets", weights(HONEST[:-100])),
    "file: cut in the header": ("claims", weights(HONEST[:50])),
    "file: empty": ("too few", weights(b"")),
    "file: with more behind": ("tensors end", weights(HONEST + b"more")),
    "file: a folder": ("not a regular file", special("model.safetensors", Path.mkdir)),
    "file: a pipe": ("not a regular file", special("model.safetensors", os.mkfifo)),
    "file: without end": ("not a regular file", linked("model.safetensors", "/dev/zero")),
    "file: a link to nothing": ("neither", linked("model.safetensors", "absent")),
    "file: a link to itself": ("neither", linked("model.safetensors", "model.safetensors")),
    "file: a link to a secret": ("too few|claims", linked("model.safetensors", "../secret")),
    "config: a link to a secret": ("not valid JSON", linked("config.json", "../secret")),
    "config: without end": ("not a regular file", linked("config.json", "/dev/zero")),
    "index: up and out": ("same folder", index({**WEIGHT_MAP, FIRST: "../secret.safetensors"})),
    "index: absolute": ("same folder", index({**WEIGHT_MAP, FIRST: "/etc/x.safetensors"})),
    "index: a Windows path": ("same folder", index({**WEIGHT_MAP, FIRST: "..\\x.safetensors"})),
    "index: a pickle": ("same folder", index({**WEIGHT_MAP, FIRST: "pytorch_model.bin"})),
    "index: a number": ("same folder", index({**WEIGHT_MAP, FIRST: 3})),
    "index: an absent file": ("cannot be read", index({**WEIGHT_MAP, FIRST: "no.safetensors"})),
    "index: an absent tensor": ("does not", index({**WEIGHT_MAP, "z": SHARD})),
    "index: a tensor too few": (
        "does not list",
        index({k: v for k, v in WEIGHT_MAP.items() if k != FIRST}),
    ),
    "index: nothing": ("1 to", index({})),
    "index: a list": ("must be an object", index([])),
    "index: 5,000 files": ("1 to", index({str(n): f"{n}.safetensors" for n in range(5000)})),
    "config: garbage": ("not valid JSON", {"config.json": "garbage"}),
    "config: empty": ("not valid JSON", {"config.json": ""}),
    "config: UTF-16": ("not valid JSON", {"config.json": "{}".encode("utf-16")}),
    "config: a list": ("must hold a JSON object", {"config.json": "[]"}),
    "config: a key twice": ("twice", {"config.json": '{"vocab_size": 1, "vocab_size": 2}'}),
    "config: deep nesting": ("not valid JSON", {"config.json": "[" * 1_000_000}),
    "config: many containers": ("over", {"config.json": "[" * 3_000_000}),
    "config: five megabytes": (
        r"5\.0 MiB; at most 4\.0 MiB",
        {"config.json": '{"a": "%s"}' % ("x" * (5 << 20))},
    ),
    "config: NaN": (
        "hidden_size",
        {"config.json": json.dumps({**SMALL_CONFIG, "hidden_size": float("nan")})},
    ),
    "config: infinite": ("rms_norm_eps", config(rms_norm_eps=float("inf"))),
    "config: a number of 4,000 digits": ("hidden_size", config(hidden_size=10**4000)),
    "config: a number of 9,000 digits": (
        "not valid JSON",
        {"config.json": '{"a": %s}' % ("9" * 9000)},
    ),
    "config: 10^9 layers": ("num_hidden_layers", config(num_hidden_layers=10**9)),
    "config: a vocabulary of 2^62": ("vocab_size|shape", config(vocab_size=1 << 62)),
    "config: no heads": ("num_attention_heads", config(num_attention_heads=0)),
    "config: negative sizes": ("intermediate_size", config(intermediate_size=-10)),
    "config: true for a number": ("hidden_size", config(hidden_size=True)),
    "config: a string for a number": ("hidden_size", config(hidden_size="6")),
    "config: a list for a string": ("model_type", config(model_type=["llama"])),
    "config: no family": ("model_type", config(model_type=None, architectures=None)),
    "config: an unknown family": (
        "Evil.*supported are",
        config(model_type="evil", architectures=["Evil"]),
    ),
    "config: eos beyond the vocabulary": ("eos_token_id", config(eos_token_id=13)),
    "code: auto_map": (
        "auto_map|code",
        {**config(auto_map={"AutoModel": "evil.Model"}), "evil.py": EVIL},
    ),
    "generation: no JSON": ("generation_config", {"generation_config.json": "{"}),
    "generation: NaN": ("temperature", {"generation_config.json": '{"temperature": NaN}'}),
    "generation: out of bounds": ("top_p", {"generation_config.json": {"top_p": 7}}),
    "tokenizer: garbage": ("not valid JSON|not a tokenizer", tokenizer("garbage")),
    "tokenizer: nothing": ("not a tokenizer", tokenizer({})),
    "tokenizer: an unknown model": ("not a tokenizer", tokenizer({"model": {"type": "Evil"}})),
    "tokenizer: deep nesting": ("not valid JSON", tokenizer("[" * 1_000_000)),
    "tokenizer: added tokens of no kind": (
        "must be|not a tokenizer",
        tokenizer({"added_tokens": 3, "model": BPE}),
    ),
    "tokenizer: an id without bounds": (
        "must be",
        tokenizer({"added_tokens": [{"content": "x", "id": 1 << 70}], "model": BPE}),
    ),
    "tokenizer: an id of the wrong type": (
        "must be",
        tokenizer({"added_tokens": [{"content": "x", "id": "1"}], "model": BPE}),
    ),
    "tokenizer: a regular expression that is none": (
        "not a tokenizer",
        tokenizer(
            {
                "version": "1.0",
                "added_tokens": [],
                "model": BPE,
                "pre_tokenizer": {
                    "type": "Split",
                    "pattern": {"Regex": "((("},
                    "behavior": "Isolated",
                    "invert": False,
                },
            }
        ),
    ),
    "tokenizer: without end": ("not a regular file", linked("tokenizer.json", "/dev/zero")),
    "template: an escape": ("sandbox", template("{{ ''.__class__.__mro__[1].__subclasses__() }}")),
    "template: an escape by a filter": (
        "fails|sandbox",
        template("{{ ('' | attr('__class__')).mro() }}"),
    ),
    "template: an escape by a format": (
        "fails|sandbox",
        template("{{ '{0.__class__.mro}'.format(1)() }}"),
    ),
    "template: code of the machine": (
        "fails|sandbox",
        template("{{ cycler.__init__.__globals__.os.system('touch ran') }}"),
    ),
    "template: a file": ("fails", template("{% include '/etc/passwd' %}")),
    "template: much time": (
        "takes",
        template("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"),
    ),
    "template: much memory": ("takes", template("{{ 'a' * 10 ** 10 }}")),
    "template: much output": (
        "takes",
        template("{% for a in range(99999) %}{{ 'a' * 9999 }}{% endfor %}"),
    ),
    "template: a deep recursion": (
        "takes",
        template("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
    ),
    "template: a large number": ("takes", template("{{ 9 ** (9 ** 9) }}")),
    "template: nesting without end": ("compiled|Jinja", template("{{ " + "(" * 100_000)),
    "template: blocks in blocks": ("compiled|Jinja", template("{% if 1 %}" * 5_000)),
    "template: two megabytes": ("2\\.0 MiB", template("x" * (2 << 20))),
    "template: no UTF-8": ("UTF-8", {"chat_template.jinja": b"\xff\xfe"}),
    "template: a number": ("chat_template", {"tokenizer_config.json": {"chat_template": 3}}),
    "tokenizer: an eos that is a list": (
        "eos_token",
        {"tokenizer_config.json": {"eos_token": ["</s>"]}},
    ),
    "template: a list of nothing": (
        "name and template",
        {"tokenizer_config.json": {"chat_template": [{}]}},
    ),
}


def write_corpus(root: Path, names: Sequence[str]) -> None:
    (root / "secret").write_text("the secret of another tenant")
    for number, name in enumerate(names):
        folder, (_, content) = root / str(number), CORPUS[name]
        content(folder) if callable(content) else write_folder(folder, content)


def use_everything(folder: Path) -> None:
    """What a start does with a folder before any engine."""
    from cadenza.checkpoint.opening import open_checkpoint
    from cadenza.frontend.text_frontend import TextFrontend

    checkpoint = open_checkpoint(folder)
    for name in checkpoint.weights:
        checkpoint.weights[name].sum()
    face = TextFrontend(checkpoint)
    if checkpoint.tokenizer_source is not None:
        face.encode("x")
    if face.prompts.template is not None:
        from cadenza.text import ChatTemplate

        chat = ChatTemplate.of(
            checkpoint.tokenizer.chat_templates, checkpoint.tokenizer.special_tokens
        )
        assert chat is not None
        chat.render([{"role": "user", "content": "hi"}])


def watch(folder: Path) -> dict[str, Any]:
    from cadenza.errors import CadenzaError

    found: dict[str, Any] = {"error": None, "message": ""}
    tracemalloc.reset_peak()
    started = time.process_time()
    try:
        use_everything(folder)
    except CadenzaError as error:
        found = {"error": type(error).__name__, "message": str(error)}
    except BaseException as error:  # noqa: BLE001 # that is what the corpus looks for
        found = {"error": f"unnamed {type(error).__name__}", "message": str(error)[:200]}
    found["seconds"] = time.process_time() - started
    found["peak"] = tracemalloc.get_traced_memory()[1]
    return found


def main(root: Path, num_folders: int) -> None:
    seen: list[str] = []

    def listen(event: str, arguments: tuple[object, ...]) -> None:
        is_written = event == "open" and str(arguments[1] or "r").strip("bt") not in ("r", "None")
        if event in EVENTS or is_written:
            seen.append(f"{event} {arguments[:2]}")

    write_folder(root / "warm", {"chat_template.jinja": "x"})
    use_everything(root / "warm")
    tracemalloc.start()
    sys.addaudithook(listen)
    for number in range(num_folders):
        seen.clear()
        found = watch(root / str(number))
        sys.stdout.write(json.dumps({**found, "events": list(seen)}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
