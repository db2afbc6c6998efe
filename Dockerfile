# The image for CPUs: docs/serving.md, "In a container", says how it is run.
FROM python:3.11-slim AS build

RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/cadenza

WORKDIR /source
COPY pyproject.toml setup.py MANIFEST.in requirements.lock README.md LICENSE ./
COPY csrc csrc
COPY src src
COPY benchmarks/cadenza_bench benchmarks/cadenza_bench
# Kernels of every instruction set: the image runs on other machines than the one that builds it.
# The C++ library is linked in, so that the last stage needs no package of the distribution.
RUN CADENZA_BUILD_ISAS=all CADENZA_REQUIRE_NATIVE=1 LDFLAGS="-static-libstdc++ -static-libgcc" \
    /opt/cadenza/bin/pip install --no-cache-dir --constraint requirements.lock .

FROM python:3.11-slim

RUN useradd --uid 10001 --create-home cadenza \
 && install --directory --owner=cadenza --group=cadenza /var/cache/cadenza
COPY --from=build /opt/cadenza /opt/cadenza

# Weights, compiled programs and models of the hub outlive the container in a volume.
ENV PATH=/opt/cadenza/bin:$PATH \
    CADENZA_HOST=0.0.0.0 \
    CADENZA_CACHE_DIR=/var/cache/cadenza \
    HF_HOME=/var/cache/cadenza/huggingface
USER cadenza
WORKDIR /home/cadenza
VOLUME /var/cache/cadenza
EXPOSE 8000
# 503 until the model is loaded; a first start may have to fetch it.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen(f\"http://127.0.0.1:{os.environ.get('CADENZA_PORT', 8000)}/health\", timeout=4)"]
ENTRYPOINT ["cadenza", "serve"]
