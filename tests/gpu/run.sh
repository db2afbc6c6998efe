#!/usr/bin/env bash
# usage: tests/gpu/run.sh [OUT] (default: build/gpu): what only a machine with an NVIDIA GPU can show, in 10 minutes.
#
# Needs Python with the package's requirements and JAX for CUDA (pip install '.[cuda,test]'), and nvcc and make unless
# there is a library for the card: src/cadenza/_cuda.so that is newer than its sources, or the file that
# CADENZA_GPU_LIBRARY names (`make cuda` makes one on a machine without a GPU); likewise the one with faults,
# csrc/build/native/faults/_cuda.so or CADENZA_GPU_FAULTS_LIBRARY (`make -C csrc cuda-faults`), without which the
# self-test is skipped. No network. A build that was cut goes on at the next call. OUT/report.md says what passed and
# where to look; OUT/report.json has all that the steps printed; OUT/kernels.json the times of kernels; OUT/result.json
# has the form of docs/results: copy it there and run `python -m tools.result_tables`. Written after each step.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=${1:-build/gpu}
case $out in
/*) ;;
*) out=$PWD/$out ;;
esac
export PYTHONPATH="$PWD/src:$PWD/benchmarks:$PWD${PYTHONPATH:+:$PYTHONPATH}" CADENZA_CACHE_DIR="${CADENZA_CACHE_DIR:-$out/cache}"
exec "${PYTHON:-python3}" -m tests.gpu.measure "$out"
