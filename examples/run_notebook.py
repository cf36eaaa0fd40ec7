"""Run a notebook in a real kernel and write it back with its outputs.

python examples/run_notebook.py examples/story.ipynb [OUTPUT.ipynb]
"""

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

WAIT_SECONDS = 1800  # for a cell, on a machine that does other work too


def run_notebook(source: Path, folder: Path) -> nbformat.NotebookNode:
    """Run `source` in `folder`; progress on stderr is left out of the outputs."""
    notebook = nbformat.read(source, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    NotebookClient(
        notebook, timeout=WAIT_SECONDS, resources={"metadata": {"path": str(folder)}}
    ).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of the day
        if cell.cell_type == "code":
            cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"]}
    return notebook


if __name__ == "__main__":
    source, target = Path(sys.argv[1]), Path(sys.argv[-1])
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        nbformat.write(run_notebook(source, Path(folder)), target)
