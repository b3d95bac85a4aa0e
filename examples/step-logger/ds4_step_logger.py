"""Writes one line of JSON for every step of every engine to the file that STEP_LOG names; without it, nothing.

An example of the hook ds4_observe_step. Try it:

    pip install ./examples/step-logger
    STEP_LOG=steps.jsonl ds4 run --demo
"""

import json
import os
import time
from dataclasses import asdict

from ds4.plugin import StepRecord, hookimpl

api_version = 1  # the version of the plugin API this was written for


@hookimpl
def ds4_observe_step(record: StepRecord) -> None:
    path = os.environ.get("STEP_LOG")
    if path is None:
        return
    line = json.dumps({"time": time.time(), "process": os.getpid(), **asdict(record)})
    # One write in append mode: lines of several threads and processes do not mix.
    with open(path, "ab", buffering=0) as file:
        file.write(line.encode() + b"\n")
