"""Compiles the modules of the bundled model, which `--backend iree` runs: generic x86-64, 4 and 8
rows. They are part of the package.

    python -m tools.iree_modules            # writes src/cadenza/models/bundled/iree
    python -m tools.iree_modules --check    # 1 if other modules would be written

Whatever changes the plain operations, the programs or the step schema changes the modules.
"""

import sys

from cadenza.backends.exporting import ExportOptions, encode_manifest, make_modules, write_modules
from cadenza.backends.iree.manifest import FOLDER, MANIFEST_FILE
from cadenza.checkpoint.opening import open_checkpoint

OPTIONS = ExportOptions(num_rows=(4, 8), max_model_len=2048, dtype="float32")


def main(arguments: list[str]) -> int:
    """Writes the modules, or compares them."""
    checkpoint = open_checkpoint(None)
    made = make_modules(checkpoint, OPTIONS, lambda name: print(f"compiling {name}"))
    assert not made.made, "every parameter is a tensor of the bundled model, or a rope"
    if arguments != ["--check"]:
        write_modules(made, checkpoint.folder)
        return 0
    inner = checkpoint.folder / FOLDER
    wanted = {**made.files, MANIFEST_FILE: encode_manifest(made.manifest)}
    found = {path.name: path.read_bytes() for path in inner.iterdir()}
    others = sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))
    for name in others:
        print(f"{inner / name} is not what is made now; run python -m tools.iree_modules")
    return 1 if others else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
