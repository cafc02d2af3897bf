# syntax=docker/dockerfile:1
# megatron_patch on NVIDIA's PyTorch image, whose own torch, triton, NCCL and Transformer Engine are
# kept; docs/clusters.md has the build and enroot recipes and says what of this has been run.
#
# The base is pinned by tag and digest. The digest is given at build time, because only the registry
# can say what it is: without it the build stops at the first line. BASE replaces the base as a
# whole; it needs Python 3.12 or newer as `python`, pip, torch, triton, git and a C++ compiler.
ARG BASE_TAG=26.05-py3
ARG BASE_DIGEST=
ARG BASE=nvcr.io/nvidia/pytorch:${BASE_TAG}@${BASE_DIGEST}

FROM ${BASE} AS build
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# An empty one leaves Apex out. Transformer Engine comes from PyPI where the base has none; its torch
# extension is built here. An empty version leaves that out, too.
ARG APEX_REF=25.09
ARG TE_VERSION=2.20.2
ARG CUDA_ARCHITECTURES="9.0;10.0"
ARG BUILD_JOBS=8
WORKDIR /build
# Apex with its C++ and CUDA extensions: without them FusedAdam does not import.
RUN mkdir /wheels && touch /wheels/extras \
    && if [ -n "${APEX_REF}" ]; then \
      git init -q apex \
      && git -C apex fetch -q --depth 1 https://github.com/NVIDIA/apex.git "${APEX_REF}" \
      && git -C apex checkout -q FETCH_HEAD \
      && git -C apex submodule update -q --init --depth 1 \
      && TORCH_CUDA_ARCH_LIST="${CUDA_ARCHITECTURES}" MAX_JOBS="${BUILD_JOBS}" \
        APEX_CPP_EXT=1 APEX_CUDA_EXT=1 \
        python -m pip wheel --no-cache-dir --no-deps --no-build-isolation -w /wheels ./apex \
      && touch /wheels/apex; \
    fi
RUN if [ -n "${TE_VERSION}" ] && ! python -m pip show -q transformer-engine; then \
      MAX_JOBS="${BUILD_JOBS}" NVTE_FRAMEWORK=pytorch \
        python -m pip wheel --no-cache-dir --no-deps --no-build-isolation -w /wheels \
          "transformer-engine==${TE_VERSION}" "transformer-engine-cu13==${TE_VERSION}" \
          "transformer-engine-torch==${TE_VERSION}" \
      && echo "[te]" > /wheels/extras; \
    fi
# Our package and what the base lacks; the base's own constraints stay in force beside ours.
COPY docker/constraints.txt ./constraints.txt
RUN python -m pip wheel --no-cache-dir --no-deps -w /wheels -r constraints.txt
COPY pyproject.toml README.md LICENSE ./source/
COPY megatron_patch ./source/megatron_patch
COPY kernels ./source/kernels
RUN python -m pip wheel --no-cache-dir --no-deps -w /wheels ./source

FROM ${BASE} AS image
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
ARG BASE
ARG BASE_DIGEST
ARG SOURCE_COMMIT=unknown
ARG UID=10001
LABEL org.opencontainers.image.title="megatron_patch" \
      org.opencontainers.image.description="BF16 GPT pretraining on Megatron-Core with stable flash attention" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${SOURCE_COMMIT}" \
      org.opencontainers.image.base.name="${BASE}" \
      org.opencontainers.image.base.digest="${BASE_DIGEST}"
# What the base has is frozen before anything is added; the last lines prove that it stayed.
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    python -m pip freeze --exclude-editable | grep -E '^[A-Za-z0-9._-]+==' | grep -vi '^apex==' > /tmp/base.txt \
    && python -c "import torch, triton; print(torch.__version__, triton.__version__)" > /tmp/before \
    && if [ -e /wheels/apex ]; then python -m pip uninstall --yes apex; fi \
    && python -m pip install --no-cache-dir --no-deps --no-index /wheels/*.whl \
    && python -m pip install --no-cache-dir --constraint /tmp/base.txt \
        "megatron-patch-stable$(cat /wheels/extras)" \
    && python -c "import torch, triton; print(torch.__version__, triton.__version__)" | diff /tmp/before - \
    && if [ -e /wheels/apex ]; then python -c "import torch, amp_C"; fi \
    && rm /tmp/base.txt /tmp/before \
    && groupadd --gid "${UID}" trainer \
    && useradd --uid "${UID}" --gid "${UID}" --create-home --shell /bin/bash trainer
# Where megatron_patch.launcher looks for it beside an installed package.
COPY launch /usr/share/megatron_patch/launch
COPY configs /usr/share/megatron_patch/configs
COPY scripts/quickstart.sh scripts/quickstart_verdict.py /usr/share/megatron_patch/scripts/
# A container has no history; nothing of a read-only file system is written outside /tmp.
ENV SOURCE_COMMIT=${SOURCE_COMMIT} \
    PYTHONDONTWRITEBYTECODE=1 \
    NCCL_NVLS_ENABLE=0
USER ${UID}:${UID}
WORKDIR /home/trainer
# Imports and uses every compiled extension and our kernels; prints the version table.
HEALTHCHECK --interval=10m --timeout=3m --start-period=1m --retries=1 \
    CMD ["megatron-patch", "doctor"]
CMD ["megatron-patch", "doctor"]
