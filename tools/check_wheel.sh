#!/bin/sh
# check_wheel.sh WHEEL PYTHON: installs the wheel into a new environment without a C++ compiler, has
# the bundled model answer through the native kernels, and runs a command of cadenza_bench. With
# CADENZA_CUDA=1 the wheel must have the kernels for NVIDIA GPUs, too. Prints what the environment
# takes on disk.
set -eu

wheel=$1
python=$2
tools=$(cd "$(dirname "$0")" && pwd)
MOST_MIB=768
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

"$python" -m venv "$folder/venv"
before=$(du -sm "$folder/venv" | cut -f1)
CXX=false CC=false "$folder/venv/bin/python" -m pip --quiet install "$wheel"
size=$(($(du -sm "$folder/venv" | cut -f1) - before))
cd "$folder"
answer=$(CADENZA_REQUIRE_NATIVE=1 "$folder/venv/bin/cadenza" generate "The capital of France is" --max-tokens 4)
ops=$("$folder/venv/bin/cadenza" info | grep -i 'ops\|kernels' || true)
"$folder/venv/bin/cadenza" bench simulate --step-cost 5.4,0.25,0.1,0.00002 --num-requests 100 --json > /dev/null
if [ "${CADENZA_CUDA:-0}" = 1 ]; then
  "$folder/venv/bin/python" "$tools/cuda_library.py"
fi
echo "answer:$answer"
echo "$ops"
echo "installed: $size MiB"
case $answer in *Paris*) ;; *) echo "the answer is not Paris" >&2; exit 1 ;; esac
case $ops in *native*) ;; *) echo "the native kernels are not in use" >&2; exit 1 ;; esac
[ "$size" -le "$MOST_MIB" ] || { echo "more than $MOST_MIB MiB" >&2; exit 1; }
