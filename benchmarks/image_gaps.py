"""What images do to running streams: the worst gap between two of their chunks while some arrive.

    python benchmarks/image_gaps.py [--model bundled-vision] [--images 8] [--side 2000]
    python benchmarks/image_gaps.py --url http://127.0.0.1:8000

Starts `cadenza serve` of a model that sees; with `--url` a running server is asked. While so many
streams of text run, images of random pixels (4 megapixels each) arrive all at once in chats. Prints
the worst gap of any stream in the seconds before and while the images are answered, the 99th
percentile of gaps, how long the answers took, and the bound of a step (`--max-itl-ms`) that the
server stated. Client and server share the machine.
"""

import argparse
import asyncio
import base64
import io
import random
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
from PIL import Image

from long_prompts import AFTER_S, TIMEOUT_S, Server
from serving import serving


def random_image(side: int, seed: int) -> str:
    """A data: URL of a JPEG of coarse random pixels."""
    pixels = random.Random(seed).randbytes(64 * 64 * 3)
    image = Image.frombytes("RGB", (64, 64), pixels).resize((side, side))
    file = io.BytesIO()
    image.save(file, "JPEG")
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


async def ask(client: httpx.AsyncClient, url: str, model: str, image: str) -> float:
    """Seconds until a chat about an image is answered."""
    parts = [
        {"type": "image_url", "image_url": {"url": image}},
        {"type": "text", "text": "What do you see?"},
    ]
    body = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": parts}]}
    start_s = time.perf_counter()
    answer = await client.post(f"{url}/v1/chat/completions", json=body)
    if answer.status_code != httpx.codes.OK:
        raise SystemExit(f"{answer.status_code}: {answer.text}")
    return time.perf_counter() - start_s


async def measure(options: argparse.Namespace) -> None:
    images = [random_image(options.side, seed) for seed in range(options.images + 1)]
    limits = httpx.Limits(max_connections=options.streams + options.images + 4)
    async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as client:
        server = Server(options.url, client, num_ids=options.num_ids)
        listed = (await client.get(f"{options.url}/v1/models")).json()
        model = listed["data"][0]["id"]
        await ask(client, options.url, model, images.pop())
        async with server.running(options.streams, options.max_tokens) as streams:
            before_s = time.perf_counter()
            await asyncio.sleep(2 * AFTER_S)
            start_s = time.perf_counter()
            async with server.bounds() as bounds:
                asked = [ask(client, options.url, model, each) for each in images]
                took_s = await asyncio.gather(*asked)
            end_s = time.perf_counter()
        before, beside = (
            sorted(gap for each in streams for gap, _ in each.gaps(*part))
            for part in ((before_s, start_s), (start_s, end_s))
        )
    stated = [1000 * bound_s for _, bound_s in bounds.stated]
    print(f"bound of a step: {min(stated):.0f} to {max(stated):.0f} ms" if stated else "no bound")
    print(f"worst gap before: {1000 * before[-1]:.1f} ms")
    print(f"worst gap beside {options.images} images: {1000 * beside[-1]:.1f} ms")
    print(f"99th percentile beside: {1000 * beside[len(beside) * 99 // 100]:.1f} ms")
    print(f"answers: {min(took_s):.2f} to {max(took_s):.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description="Worst gaps of streams beside images.")
    parser.add_argument("--url")
    parser.add_argument("--model", default="bundled-vision")
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--side", type=int, default=2000, help="pixels of a side")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=2000, help="of each stream, at most")
    parser.add_argument(
        "--num-ids", type=int, default=500, help="prompts have ids from 100 to this"
    )
    options = parser.parse_args()
    with ExitStack() as stack:
        if options.url is None:
            options.url = stack.enter_context(
                serving(Path(options.model), "--disable-log-requests")
            )
        options.url = options.url.rstrip("/")
        asyncio.run(measure(options))


if __name__ == "__main__":
    main()
