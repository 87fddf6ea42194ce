# docker build -f launch/docker/cpu.Dockerfile -t paceline:cpu .
# For tests and small models, on a machine without an accelerator.
FROM python:3.12-slim

ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1
# torch first, in a layer of its own: it changes less often than the package
RUN pip install torch --index-url https://download.pytorch.org/whl/cpu

WORKDIR /workspace
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install ".[demo,transformers,datasets,s3]"
COPY launch launch

RUN useradd --create-home trainer && chown trainer /workspace
USER trainer
CMD ["paceline", "--help"]
