"""2 machines with 8 GPUs each (spot), on SageMaker, through boto3.

    python launch/sagemaker_job.py --role arn:aws:iam::123456789012:role/training

The container lists its machines in a file, which the command reads. SageMaker starts a spot job again when machines are
taken away: it goes on from the store. What to change: image, bucket, kind of machine.
"""

import argparse
import shlex
import time
from typing import Any

GPUS, MACHINES = 8, 2
DAY = 24 * 3600  # seconds
WORDS = [
    "launch/train.py",
    "--output_dir",
    "s3://bucket/team/digits",
    "--resume_from_checkpoint",
    "auto",
    "--parallel",
    "fsdp",
]
# prints the first machine, and the place of this one among all
PLACE = (
    "import json; found = json.load(open('/opt/ml/input/config/resourceconfig.json')); hosts = sorted(found['hosts']); "
    "print(hosts[0], hosts.index(found['current_host']))"
)
COMMAND = f"""set -eu
read -r first rank <<< "$(python -c "{PLACE}")"
cd /workspace
exec paceline launch --nnodes {MACHINES} --nproc-per-node {GPUS} --node-rank "$rank" --master-addr "$first" \\
    --master-port 29500 {shlex.join(WORDS)}
"""


def job_of(role: str, name: str) -> dict[str, Any]:
    """Returns the request of `create_training_job`."""
    return {
        "TrainingJobName": name,
        "RoleArn": role,
        "AlgorithmSpecification": {
            "TrainingImage": "registry.example.com/team/paceline:latest",
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["bash", "-c"],
            "ContainerArguments": [COMMAND],
        },
        "OutputDataConfig": {"S3OutputPath": "s3://bucket/team/digits"},
        "ResourceConfig": {"InstanceType": "ml.p5.48xlarge", "InstanceCount": MACHINES, "VolumeSizeInGB": 200},
        "EnableManagedSpotTraining": True,
        "StoppingCondition": {"MaxRuntimeInSeconds": DAY, "MaxWaitTimeInSeconds": 2 * DAY},
        "RetryStrategy": {"MaximumRetryAttempts": 3},
    }


def main() -> None:
    import boto3  # a job can be described without it

    parser = argparse.ArgumentParser()
    parser.add_argument("--role", required=True, help="the ARN of the role that the job has")
    name = time.strftime("train-%Y%m%d-%H%M%S")
    print(boto3.client("sagemaker").create_training_job(**job_of(parser.parse_args().role, name)))


if __name__ == "__main__":
    main()
