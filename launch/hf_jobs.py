"""One machine with eight GPUs, on Hugging Face Jobs.

    python launch/hf_jobs.py --output-dir s3://bucket/team/digits

The keys of the bucket are taken from the environment and passed on as secrets. A job that fails is started again
(`attempts`, of recent huggingface_hub) and goes on from the store. What to change: image, flavor.
"""

import argparse
import os
from typing import Any

from huggingface_hub import run_job

SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "HF_TOKEN")


def job_of(output_dir: str, flavor: str) -> dict[str, Any]:
    """Returns the arguments of `run_job`."""
    words = ["paceline", "launch", "--nproc-per-node", "8", "launch/train.py"]
    words += ["--output_dir", output_dir, "--resume_from_checkpoint", "auto", "--parallel", "fsdp"]
    return {
        "image": "registry.example.com/team/paceline:latest",
        "command": words,
        "secrets": {name: os.environ[name] for name in SECRETS if name in os.environ},
        "flavor": flavor,
        "timeout": "24h",
        "attempts": 3,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", default="s3://bucket/team/digits")
    parser.add_argument("--flavor", default="h200x8", help="`hf jobs hardware` lists them")
    options = parser.parse_args()
    print(run_job(**job_of(options.output_dir, options.flavor)).url)


if __name__ == "__main__":
    main()
