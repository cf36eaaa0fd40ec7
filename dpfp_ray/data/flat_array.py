"""A .npy file of one dimension that is written piece by piece, of a length nobody knows before."""

from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt


class FlatArray:
    """What is added is appended; the header, with the length, is written again at the end.

    numpy leaves room in it for any number of rows.
    """

    def __init__(self, path: Path, kind: np.dtype[Any]) -> None:
        self.path, self.kind, self.count = path, kind, 0

    def __enter__(self) -> "FlatArray":
        self._file = self.path.open("xb")
        self._header = self._write_header()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._file:
            if kind is None:
                self._file.seek(0)
                if self._write_header() != self._header:
                    raise OSError(f"{self.path}: the header of {self.count} numbers is too long")

    def _write_header(self) -> int:
        facts = {
            "descr": np.lib.format.dtype_to_descr(self.kind),
            "fortran_order": False,
            "shape": (self.count,),
        }
        np.lib.format.write_array_header_1_0(self._file, facts)
        return self._file.tell()

    def add(self, values: npt.NDArray[Any]) -> None:
        self._file.write(np.ascontiguousarray(values, self.kind).data)
        self.count += len(values)
