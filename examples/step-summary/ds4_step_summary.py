"""Adds the command `ds4 steps FILE`, which sums up what the example ds4-step-logger wrote.

An example of the hook ds4_register_commands. Try it:

    pip install ./examples/step-summary
    ds4 steps steps.jsonl
"""

import argparse
import json
from collections import Counter

from ds4.plugin import Ds4Error, RegisterCommand, hookimpl

api_version = 1  # the version of the plugin API this was written for


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "example:\n  ds4 steps steps.jsonl"
    parser.add_argument("file", help="lines of JSON, as ds4-step-logger writes them")


def run(args: argparse.Namespace) -> int:
    # An OSError about a file is one line for the user, and so is a Ds4Error; nothing else needs to be caught.
    with open(args.file, encoding="utf-8") as file:
        steps = [parsed(line, number, args.file) for number, line in enumerate(file, 1)]
    done = [step for step in steps if step["error"] is None]
    rows, seconds = sum(step["n_rows"] for step in done), sum(step["seconds"] for step in done)
    print(f"{len(done)} steps, {rows} rows, {seconds:.3f} s on the backend, {len(steps) - len(done)} failed")
    for path, count in Counter(step["path"] for step in done).most_common():
        print(f"  {count} {path}")
    return 0


def parsed(line: str, number: int, file: str) -> dict:
    try:
        step = json.loads(line)
        return {key: step[key] for key in ("n_rows", "seconds", "path", "error")}
    except (ValueError, KeyError, TypeError) as exc:
        raise Ds4Error(f"line {number} is not one of ds4-step-logger: {exc}", file=file, line=number) from exc


@hookimpl
def ds4_register_commands(register: RegisterCommand) -> None:
    register(name="steps", help="sum up a log of steps", configure=configure, run=run)
