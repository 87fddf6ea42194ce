"""`paceline doctor CONFIG.yaml`: looks for common mistakes before a run."""

from __future__ import annotations

import json
from collections.abc import Sequence

from paceline.args.secrets import mask_text
from paceline.cli.display import output_for, say
from paceline.cli.errors import UsageError
from paceline.cli.preview import built, read_words
from paceline.core.metrics import jsonable


def run(words: Sequence[str]) -> int:
    """Prints the findings; returns 1 if one of them is an error, else 0.

    Raises:
        UsageError: the configuration is invalid.
    """
    config, given = read_words("doctor", words, ("--json",))
    with output_for(bool(given)), built(config) as (trainer, _):
        try:
            found = trainer.doctor()
        except ValueError as error:
            raise UsageError(str(error)) from error
        is_first = trainer.is_world_process_zero()
    if is_first:
        if given:
            print(mask_text(json.dumps(jsonable(found.to_dict()), default=str)))
        else:
            say(str(found))
    return int(found.has_errors)
