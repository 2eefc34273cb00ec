# Aquifer in a container, on a CPU:
#     docker build -t aquifer .
#     docker run -p 127.0.0.1:8000:8000 aquifer
# On NVIDIA GPUs, with torch for CUDA, which takes about 5.6 GB:
#     docker build -t aquifer:cuda --build-arg DEVICE=cuda .
#     docker run --gpus all -p 127.0.0.1:8000:8000 aquifer:cuda
# docs/guide/deployment.md has the rest.

ARG PYTHON=3.12
FROM python:${PYTHON}-slim

# cpu or cuda.
ARG DEVICE=cpu

# Triton compiles its launchers with a C compiler when a kernel is first used.
RUN if [ "$DEVICE" = cuda ]; then \
        apt-get update \
        && apt-get install --yes --no-install-recommends gcc libc6-dev \
        && rm -rf /var/lib/apt/lists/*; \
    fi

WORKDIR /build
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN case "$DEVICE" in \
        cpu) pip install --no-cache-dir -c constraints.txt \
            --extra-index-url https://download.pytorch.org/whl/cpu . ;; \
        cuda) pip install --no-cache-dir -c constraints.txt '.[cuda]' ;; \
        *) echo "DEVICE is '$DEVICE'; it must be cpu or cuda" >&2; exit 1 ;; \
    esac \
    && rm -rf /build/*

RUN useradd --uid 10001 --create-home aquifer
USER aquifer
WORKDIR /home/aquifer
# Models of the Hugging Face hub and compiled kernels: worth a volume.
ENV HF_HOME=/home/aquifer/.cache/huggingface \
    TRITON_CACHE_DIR=/home/aquifer/.cache/triton
RUN mkdir -p "$HF_HOME" "$TRITON_CACHE_DIR"

EXPOSE 8000
# 503 while models load; start-period is how long they may take.
HEALTHCHECK --interval=10s --timeout=6s --start-period=15m --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["aquifer", "serve", "--host", "0.0.0.0", "--port", "8000"]
CMD ["demo"]
