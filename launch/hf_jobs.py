"""One machine with 8 GPUs, on Hugging Face Jobs.

    python launch/hf_jobs.py

The keys of the bucket are taken from the environment and passed on as secrets. A job that fails is started again
(`attempts`, of recent huggingface_hub) and goes on from the store. What to change: image, flavor.
"""

import argparse
import os
from typing import Any

from huggingface_hub import run_job

SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "HF_TOKEN")
WORDS = [
    "launch/train.py",
    "--output_dir",
    "s3://bucket/team/digits",
    "--resume_from_checkpoint",
    "auto",
    "--parallel",
    "fsdp",
]


def job_of(flavor: str) -> dict[str, Any]:
    """Returns the arguments of `run_job`."""
    return {
        "image": "registry.example.com/team/paceline:latest",
        "command": ["paceline", "launch", "--nproc-per-node", "8", *WORDS],
        "secrets": {name: os.environ[name] for name in SECRETS if name in os.environ},
        "flavor": flavor,
        "timeout": "24h",
        "attempts": 3,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--flavor", default="h200x8", help="`hf jobs hardware` lists them")
    print(run_job(**job_of(parser.parse_args().flavor)).url)


if __name__ == "__main__":
    main()
