#!/bin/sh
# check_wheel.sh WHEEL PYTHON: installs the wheel into a new environment without a C++ compiler, has
# the bundled model answer through the native kernels, by `generate` and by a server, has `verify`
# compare bits, and runs a command of cadenza_bench. With
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
verdict=$(CADENZA_REQUIRE_NATIVE=1 "$folder/venv/bin/cadenza" verify --max-num-seqs 4 --num-requests 8 2>&1 | tail -n 1)
port=$("$folder/venv/bin/python" -c "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])")
"$folder/venv/bin/cadenza" serve --host 127.0.0.1 --port "$port" 2> "$folder/serve.log" &
server=$!
trap 'kill "$server" 2> /dev/null || true; wait "$server" || true; rm -rf "$folder"' EXIT
served=$("$folder/venv/bin/python" - "$port" <<'ASK'
import sys, time
import httpx
url = f"http://127.0.0.1:{sys.argv[1]}/v1/completions"
body = {"model": "bundled", "prompt": "The capital of France is", "max_tokens": 4}
until = time.monotonic() + 120
while True:
    try:
        answer = httpx.post(url, json=body, timeout=60)
    except httpx.TransportError:
        answer = None
    if answer is not None and answer.status_code == 200:
        break
    if time.monotonic() > until:
        sys.exit("the server did not answer within 120 s")
    time.sleep(0.5)
print(answer.json()["choices"][0]["text"])
ASK
)
kill "$server"
wait "$server" || true
if [ "${CADENZA_CUDA:-0}" = 1 ]; then
  "$folder/venv/bin/python" "$tools/cuda_library.py"
fi
echo "answer:$answer"
echo "served:$served"
echo "verify: $verdict"
echo "$ops"
echo "installed: $size MiB"
case $answer in *Paris*) ;; *) echo "the answer is not Paris" >&2; exit 1 ;; esac
case $answer in *"$served"*) ;; *) echo "the server answers otherwise" >&2; exit 1 ;; esac
case $verdict in *PASS*) ;; *) echo "verify does not pass" >&2; exit 1 ;; esac
case $ops in *native*) ;; *) echo "the native kernels are not in use" >&2; exit 1 ;; esac
[ "$size" -le "$MOST_MIB" ] || { echo "more than $MOST_MIB MiB" >&2; exit 1; }
