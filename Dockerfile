# titan-launch with PyTorch for CUDA. The torch wheel has the CUDA libraries; the host has the driver and the NVIDIA
# Container Toolkit.
#
#   docker build --tag titan-launch .
#   docker run --gpus all --ipc host --volume "$PWD:/work" titan-launch launch --config llama_bn

FROM python:3.12-slim AS wheel
RUN python -m pip install --no-cache-dir build==1.6.1 setuptools==84.2.1
WORKDIR /src
COPY pyproject.toml README.md ./
COPY configs configs
COPY titan_launch titan_launch
RUN python -m build --wheel --no-isolation --outdir /dist

FROM python:3.12-slim
# The compiler is for torch.compile and Triton.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
COPY constraints.txt /tmp/constraints.txt
COPY --from=wheel /dist /tmp/dist
RUN python -m pip install --no-cache-dir --constraint /tmp/constraints.txt "$(ls /tmp/dist/*.whl)[chat,hf,images,parquet]"
RUN useradd --create-home trainer
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER trainer
WORKDIR /work
ENTRYPOINT ["titan-launch"]
CMD ["--help"]
