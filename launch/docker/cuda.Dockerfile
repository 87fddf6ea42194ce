# docker build -f launch/docker/cuda.Dockerfile -t paceline:cuda .
# docker run --gpus all --shm-size 16g paceline:cuda paceline launch launch/train.py --output_dir /tmp/digits
# torch's wheels contain CUDA; the host needs NVIDIA's driver and container toolkit alone.
FROM python:3.12-slim

# the tag of torch's index for CUDA 12.8; the driver of the host must be as new
ARG CUDA=cu128
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1
# torch.compile builds the launchers of its kernels with a C compiler
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN pip install torch --index-url https://download.pytorch.org/whl/${CUDA}

WORKDIR /workspace
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install ".[demo,transformers,datasets,resources,s3]"
COPY launch launch

RUN useradd --create-home trainer && chown trainer /workspace
USER trainer
CMD ["paceline", "--help"]
