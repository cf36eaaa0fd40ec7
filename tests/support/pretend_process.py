"""A process in which torch has a pretend CUDA device (`pretend_cuda.py`).

A build of torch for CPUs knows no device "cuda". A shared library of 40 lines gives it one. It must
be loaded before torch is, hence a process of its own.
"""

import ctypes
import importlib.util
import pickle
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("pretend_guard.cpp")
COMPILER = shutil.which("g++")
Call = Callable[..., Any]


def torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")  # finds it, without importing it
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def build_guard(folder: Path) -> Path:
    """The compiled guard: a few seconds."""
    assert COMPILER is not None
    include, lib, built = torch_folder() / "include", torch_folder() / "lib", folder / "guard.so"
    options = ["-shared", "-fPIC", "-O0", "-std=c++20", f"-I{include}", str(SOURCE), f"-L{lib}"]
    command = [COMPILER, *options, "-o", str(built), "-lc10", "-ltorch_cpu"]
    subprocess.run(command, check=True)
    return built


def load_guard(built: Path) -> None:
    libraries = torch_folder() / "lib"
    for library in (libraries / "libc10.so", libraries / "libtorch_cpu.so", built):
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


def serve(built: str) -> None:
    """Load the guard, then answer the calls that arrive on stdin, until it is closed."""
    load_guard(Path(built))
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    while True:
        try:
            function, args = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = (True, function(*args))
        except Exception as error:
            error.add_note(traceback.format_exc())
            answer = (False, error)
        pickle.dump(answer, answers)
        answers.flush()


@contextmanager
def pretend_process(folder: Path) -> Iterator[Call]:
    """Gives `call(function, *args)`: what the function, one of a module's own, gives over there."""
    program = f"from {__name__} import serve; serve({str(build_guard(folder))!r})"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def call(function: Call, *args: Any) -> Any:
            pickle.dump((function, args), process.stdin)
            process.stdin.flush()
            fine, answer = pickle.load(process.stdout)
            if not fine:
                raise answer
            return answer

        yield call
        process.stdin.close()
