# `docker build --target cpu -t qerl-repro .` has all that README's two commands need, and no GPU;
# `--target cuda` is the image that the GPU workflows name by its digest (docs/contributing.md).
FROM python:3.13.15-slim-trixie@sha256:7c61056e61ac89e852de05f3dc6fa51a6dd2181797bceed46aa725dd7cb2cd3b AS base
# Triton builds its launchers with a C compiler; records name the commit that git knows.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev git \
    && rm -rf /var/lib/apt/lists/*
ENV PIP_CACHE_DIR=/var/cache/pip
RUN python -m pip install nox==2026.10.20
COPY . /qerl-repro
WORKDIR /qerl-repro

FROM base AS cpu
# Of the builds of one version pip prefers the one without CUDA there; the lock decides the rest.
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN nox -s smoke --install-only && rm -rf "$PIP_CACHE_DIR"
CMD ["nox", "-s", "smoke"]

FROM base AS cuda
# The driver comes from the machine, everything else of CUDA with torch. What pip has downloaded
# stays, so that a workflow's own checkout need not download it again.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN nox -s gpu-tests --install-only
CMD ["nox", "-s", "gpu-tests"]
