"""Exported models in a process that has no dpfp-ray."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Self

PATIENCE = 900.0  # seconds for an answer
# For every line on stdin: loads the folders that it names, prints the probabilities of its texts.
STRANGER = """
import json, sys
sys.modules["dpfp_ray"] = None  # importing it, or any part of it, fails from here on
import transformers
transformers.utils.logging.disable_progress_bar()
for line in sys.stdin:
    texts, folders = json.loads(line)
    found = {}
    for folder in folders:
        ask = transformers.pipeline("text-classification", folder, trust_remote_code=True)
        inputs = [text if isinstance(text, str) else {"text": text[0], "text_pair": text[1]}
                  for text in texts]
        answers = [ask(one, top_k=None) for one in inputs]
        rows = [one[0] if isinstance(one[0], list) else one for one in answers]
        found[folder] = [{each["label"]: each["score"] for each in row} for row in rows]
    print(json.dumps(found), flush=True)
"""


def own_cache(folder: Path) -> dict[str, str]:
    """Transformers copies a model's file to one place for all processes of a user."""
    return {**os.environ, "HF_MODULES_CACHE": str(folder / "modules")}


class Stranger:
    """One process for all questions: half of its time goes into importing transformers."""

    def __init__(self, folder: Path) -> None:
        self.errors = folder / "errors"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", STRANGER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=folder,
                env=own_cache(folder),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()

    def ask(self, texts: list[Any], *folders: Path) -> dict[str, list[dict[str, float]]]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps([texts, list(map(str, folders))]), file=self.process.stdin, flush=True)
        give_up = threading.Timer(PATIENCE, self.process.kill)
        give_up.start()
        answer = self.process.stdout.readline()
        give_up.cancel()
        assert answer, self.errors.read_text()
        found: dict[str, list[dict[str, float]]] = json.loads(answer)
        return found
