#!/usr/bin/env bash
# usage: tests/gpu/run.sh [OUT] (default: build/gpu): what only a machine with an NVIDIA GPU can show, in eight minutes.
#
# Needs Python with the package's requirements and JAX for CUDA (pip install '.[cuda,test]'), and nvcc unless
# src/cadenza/_cuda.so is there; no network. Each step has a time limit of its own, so that one which fails costs no
# other. OUT/result.json has the form of docs/results: copy it there and run `python -m tools.result_tables`.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=${1:-build/gpu}
mkdir -p "$out"
export PYTHON=${PYTHON:-python3} PYTHONPATH="$PWD/src:$PWD" CADENZA_CACHE_DIR=${CADENZA_CACHE_DIR:-$out/cache}
if [ ! -e src/cadenza/_cuda.so ]; then
  timeout 240 make -C csrc -j"$(nproc)" cuda PYTHON="$PYTHON" >"$out/build.log" 2>&1 ||
    { echo "the kernels were not built; see $out/build.log"; exit 1; }
fi
if [ ! -e src/cadenza/_native.so ]; then # packs quantised weights, and computes in tests
  timeout 200 make -C csrc -j"$(nproc)" library PYTHON="$PYTHON" >>"$out/build.log" 2>&1
fi
exec "$PYTHON" -m tests.gpu.measure "$out"
