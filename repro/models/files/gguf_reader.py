"""gguf's reader, with every count and place in a file held against the file before it is followed.

The library slices past a file's end without an error, loops as often as a count says, follows
arrays within arrays, and lets products of dimensions overflow. So a file of some hundred bytes can
make it work for years. Needs the extra `gguf`; nothing imports this module before it is needed.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType
from gguf.gguf_reader import ReaderField

from repro.spec.checks import require

# Far beyond any model's: keys, tensors, and members of all arrays together. A vocabulary of a
# quarter of a million tokens, with kinds, scores and merges, has 1.3 million.
_MOST_NAMES: Final = 2**16
_MOST_MEMBERS: Final = 2**22
_MOST_DIMENSIONS: Final = 4


class BoundedReader(GGUFReader):
    """A GGUF file's fields and tensors; `ValueError` says what in the file cannot be so."""

    _members = 0

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        kind = np.dtype(dtype).newbyteorder(override_order or self.byte_order)
        end = int(offset) + kind.itemsize * int(count)
        if end > len(self.data):  # a sentence for each of a vocabulary's words would take seconds
            raise ValueError(f"byte {end} is needed, and the file has {len(self.data)}")
        return self.data[int(offset) : end].view(kind)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == GGUFValueType.ARRAY:
            kind, count = (
                int(self._get(orig_offs + place, dtype)[0])
                for place, dtype in ((0, np.uint32), (4, np.uint64))
            )
            require(kind != GGUFValueType.ARRAY, "it holds an array of arrays")
            self._members += count
            require(
                self._members <= _MOST_MEMBERS,
                f"an array has {count} members; needed are {_MOST_MEMBERS} at most in all arrays",
            )
        return super()._get_field_parts(orig_offs, raw_type)

    def _build_fields(self, offs: int, count: int) -> int:
        require(count <= _MOST_NAMES, f"it has {count} keys; needed are {_MOST_NAMES} at most")
        return super()._build_fields(offs, count)

    def _build_tensor_info(self, offs: int, count: int) -> tuple[int, list[ReaderField]]:
        require(count <= _MOST_NAMES, f"it has {count} tensors; needed are {_MOST_NAMES} at most")
        return super()._build_tensor_info(offs, count)

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        """Hold each tensor's place against the end of the one before it, then read them."""
        expected = 0
        for field in fields:
            _, letters, _, dimensions, kind, offset = field.parts
            name, shape = bytes(letters).decode(), [int(size) for size in dimensions]
            fits = len(shape) <= _MOST_DIMENSIONS and all(shape)
            require(fits, f"{name} has the shape {shape[: _MOST_DIMENSIONS + 1]}")
            require(
                int(offset[0]) == expected,
                f"{name} begins at byte {int(offset[0])} of the data; needed is {expected}, where "
                "the tensor before it ends",
            )
            block, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType(int(kind[0]))]
            require(shape[0] % block == 0, f"{name} has rows of {shape[0]}, in blocks of {block}")
            size = math.prod(shape) // block * nbytes
            expected += -(-size // int(self.alignment)) * int(self.alignment)
            held = len(self.data) - start_offs
            require(
                int(offset[0]) + size <= held,
                f"{name} ends at byte {int(offset[0]) + size} of the data, which has {held}",
            )
        super()._build_tensors(start_offs, fields)
