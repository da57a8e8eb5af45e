# db-SP for NVIDIA GPUs, in diffusers and xDiT, with the example server. docs/serving.md says how to run it.
#
#     docker build --tag dbsp .
#     docker run --rm --gpus all dbsp dbsp doctor

# 1. The wheel, built from what .dockerignore leaves in.
FROM python:3.12-slim AS build
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

# 2. The image. torch brings CUDA's libraries of version 13.0; the host's driver must support that.
FROM nvidia/cuda:13.0.2-base-ubuntu24.04
LABEL org.opencontainers.image.title="db-SP" \
      org.opencontainers.image.description="Load-balanced sequence parallelism for block-sparse attention" \
      org.opencontainers.image.source="https://github.com/db-sp/db-sp" \
      org.opencontainers.image.licenses="Apache-2.0"

# Triton compiles its launchers where the kernels run: it needs a C compiler and Python.h; torch.compile needs g++.
# imageio-ffmpeg brings ffmpeg.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# torch first: the largest layer stays as it is when db-SP changes. TORCH_INDEX is for torch with another CUDA.
ARG TORCH_INDEX=https://pypi.org/simple
ENV PATH=/opt/dbsp/bin:$PATH PYTHONUNBUFFERED=1
COPY constraints.txt /opt/constraints.txt
RUN python3 -m venv /opt/dbsp \
    && pip install --no-cache-dir --constraint /opt/constraints.txt --index-url $TORCH_INDEX torch
COPY --from=build /wheels /opt/wheels
RUN pip install --no-cache-dir --constraint /opt/constraints.txt "$(ls /opt/wheels/*.whl)[xdit,gpu,server]" \
    && pip check

# Weights and compiled kernels are kept in a volume. Ports from 1024 on and these folders are all that it needs.
RUN useradd --create-home dbsp \
    && mkdir /cache /work \
    && chown dbsp /cache /work
ENV HF_HOME=/cache/huggingface TRITON_CACHE_DIR=/cache/triton
VOLUME /cache
COPY examples /opt/examples
USER dbsp
WORKDIR /work
RUN dbsp doctor
EXPOSE 8000
CMD ["dbsp", "--help"]
