# Four images: operator, router, worker, and worker-gpu for NVIDIA GPUs. Build one with
#   docker build --target router --tag medha-router:0.1.0 .
# docs/images.md: their sizes, private package indexes, other bases, and how tests build them without a registry.

# Any image with glibc, Python 3.11 or newer and its venv module.
ARG BASE_IMAGE=docker.io/library/python:3.11-slim-bookworm
# The same with a C++ compiler and Python's headers, for the kernels of worker-gpu.
ARG COMPILER_IMAGE=docker.io/library/python:3.11-bookworm

# --- what builds, and stays behind ----------------------------------------------------------------------

FROM ${BASE_IMAGE} AS build
ENV PATH=/build/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin
WORKDIR /src
COPY constraints.txt ./
# The images' own environment, /opt/medha, holds no pip: that of /build fills it. Their user has a name, since libraries
# ask for it.
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    python3 -m venv /build \
    && python3 -m venv --without-pip /opt/medha \
    && pip install --no-cache-dir --constraint constraints.txt hatchling \
    && groupadd --gid 65532 medha \
    && useradd --no-log-init --uid 65532 --gid medha --no-create-home --home-dir /tmp --shell /usr/sbin/nologin medha
# `packages EXTRA [WITHOUT]` installs what pyproject.toml lists for an image. Bytecode is compiled here, since nothing
# can write it under a read-only root, and is taken unchecked, since copying may change a file's time.
COPY pyproject.toml .docker/packages ./

FROM build AS operator-packages
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf ./packages operator

FROM build AS router-packages
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf ./packages router,traces

FROM build AS worker-packages
# Which torch: `cpu` takes a CPU build where pip is offered one, else PyPI's for CUDA without what only a GPU needs;
# `pypi` takes it whole; `none` leaves it out, for a volume that is mounted on PYTHONPATH.
ARG TORCH=cpu
# Where a CPU build is: an index, or a page or folder of wheels, such as .docker/wheels.
ARG TORCH_INDEX_URL=
ARG TORCH_FIND_LINKS=
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=bind,source=.docker,target=/src/.docker \
    ./packages worker,traces "${TORCH}"

FROM build AS worker-gpu-packages
# FlashInfer looks for compiled kernels in `aot` of its package.
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf ./packages gpu,traces \
    && ln -s /opt/medha/aot /opt/medha/lib/python3.*/site-packages/flashinfer/data/

FROM build AS nvcc-packages
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf ./packages nvcc

FROM ${COMPILER_IMAGE} AS kernels
# All that FlashInfer would compile when a pod starts. If empty: for every architecture that the file names.
ARG GPU_ARCHITECTURES=
# Debian's buildah builds both stages first because of these two files: it ignores mounts for that.
COPY --from=worker-gpu-packages /src/requirements.txt /requirements/gpu.txt
COPY --from=nvcc-packages /src/requirements.txt /requirements/nvcc.txt
COPY worker/medha_worker/kernels/flashinfer/compiled_modules.py worker/medha_worker/kernels/triton/driver_module.py /
RUN --mount=type=bind,from=worker-gpu-packages,source=/opt/medha,target=/opt/medha \
    --mount=type=bind,from=nvcc-packages,source=/opt/medha,target=/nvcc \
    /opt/medha/bin/python /compiled_modules.py --out /aot --nvcc /nvcc --arch "${GPU_ARCHITECTURES}" \
    && /opt/medha/bin/python /driver_module.py --out /triton/cuda_utils.so

FROM build AS application
COPY . .
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels . \
    && pip --python /opt/medha/bin/python install --no-cache-dir --no-compile --no-deps --no-index \
        --root /application /wheels/*.whl \
    && python3 -m compileall -q --invalidation-mode unchecked-hash /application

# --- what runs ------------------------------------------------------------------------------------------

FROM ${BASE_IMAGE} AS runtime
COPY --from=build /etc/passwd /etc/group /etc/
ENV PATH=/opt/medha/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
LABEL org.opencontainers.image.vendor="Medha" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"
WORKDIR /
USER 65532:65532

FROM runtime AS operator
LABEL org.opencontainers.image.title="medha-operator" \
      org.opencontainers.image.description="Kubernetes operator for Medha, long-context LLM serving"
COPY --from=operator-packages /opt/medha /opt/medha
COPY --from=application /application /
EXPOSE 8080 9402
ENTRYPOINT ["kopf", "run", "--standalone", "-m", "medha_operator"]
CMD ["--all-namespaces", "--liveness=http://0.0.0.0:8080/healthz"]

FROM runtime AS router
LABEL org.opencontainers.image.title="medha-router" \
      org.opencontainers.image.description="OpenAI-compatible router for Medha, long-context LLM serving"
COPY --from=router-packages /opt/medha /opt/medha
COPY --from=application /application /
EXPOSE 8000 5700 5701 9403
ENTRYPOINT ["python", "-m", "medha_router"]
CMD ["--settings", "/etc/medha/router.json"]

FROM runtime AS worker
LABEL org.opencontainers.image.title="medha-worker" \
      org.opencontainers.image.description="Controller and 3D-parallel engine of Medha, long-context LLM serving"
COPY --from=worker-packages /opt/medha /opt/medha
COPY --from=application /application /
EXPOSE 5600 5601 9400 9401
ENTRYPOINT ["python", "-m", "medha_worker.pod"]
CMD ["--replica", "/etc/medha/config/replica.json", "--keys", "/etc/medha/keys"]

FROM runtime AS worker-gpu
LABEL org.opencontainers.image.title="medha-worker-gpu" \
      org.opencontainers.image.description="Controller and 3D-parallel engine of Medha on NVIDIA GPUs"
# Pods have neither nvcc nor a C compiler: FlashInfer and Triton take what was compiled above. FlashInfer's other norms could
# not be compiled there.
ENV FLASHINFER_DISABLE_JIT=1 \
    FLASHINFER_USE_CUDA_NORM=1 \
    MEDHA_TRITON_DRIVER=/opt/medha/triton/cuda_utils.so
COPY --from=worker-gpu-packages /opt/medha /opt/medha
COPY --from=kernels /aot /opt/medha/aot
COPY --from=kernels /triton /opt/medha/triton
COPY --from=application /application /
EXPOSE 5600 5601 9400 9401
ENTRYPOINT ["python", "-m", "medha_worker.pod"]
CMD ["--replica", "/etc/medha/config/replica.json", "--keys", "/etc/medha/keys"]
