# docker build -f launch/docker/rocm.Dockerfile -t paceline:rocm .
# docker run --device /dev/kfd --device /dev/dri --group-add video --group-add render --shm-size 16g paceline:rocm \
#     paceline launch launch/train.py --output_dir /tmp/digits
# torch's wheels contain ROCm; the host needs the amdgpu driver alone. The devices are torch's "cuda" devices.
FROM python:3.12-slim

# the tag of torch's index
ARG ROCM=rocm6.4
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1
# torch.compile builds the launchers of its kernels with a C compiler
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN pip install torch --index-url https://download.pytorch.org/whl/${ROCM}

WORKDIR /workspace
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install ".[demo,transformers,datasets,s3]"
COPY launch launch

RUN useradd --create-home trainer && chown trainer /workspace
USER trainer
CMD ["paceline", "--help"]
