"""Reads GGUF files (version 2 and 3, little endian) through a memory map.

The container is parsed here, with every length checked against the file, since the reference reader takes seconds
for a vocabulary. The block formats follow ggml (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md):
the common ones are decoded with a few whole-array operations; rarer ones by the `gguf` library.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidInput

MAX_FIELDS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_ARRAY_ITEMS = 1 << 22
MAX_DIMENSIONS = 4

_MAGIC = b"GGUF"
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_F32, _F16, _Q4_0, _Q4_1, _Q8_0 = 0, 1, 2, 3, 8
_BLOCKS = {_F32: (1, 4), _F16: (1, 2), _Q4_0: (32, 18), _Q4_1: (32, 20), _Q8_0: (32, 34)}  # (elements, bytes)


@dataclass(frozen=True)
class GgufTensor:
    """`shape` is row-major (outermost first); `kind` is the ggml type number; `raw` the stored bytes, mapped."""

    name: str
    shape: tuple[int, ...]
    kind: int
    raw: npt.NDArray[np.uint8]


@dataclass(frozen=True)
class GgufFile:
    fields: Mapping[str, object]
    tensors: Mapping[str, GgufTensor]


def open_gguf(path: Path) -> GgufFile:
    """Maps and parses a file. Raises InvalidInput (field `model`, reason `bad_gguf`) when it is not well-formed."""
    try:
        data = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise InvalidInput("bad_gguf", f"cannot map {path}: {error}", field="model") from error
    try:
        return _Parser(data).parse()
    except (struct.error, UnicodeDecodeError, IndexError, KeyError, ValueError) as error:
        raise InvalidInput("bad_gguf", f"{path} is not a readable GGUF file: {error}", field="model") from error


class _Parser:
    """A cursor over the mapped header."""

    def __init__(self, data: npt.NDArray[np.uint8]) -> None:
        self._data = data
        self._view = memoryview(data)  # type: ignore[arg-type]  # a buffer on 3.11, which the stubs do not say
        self._at = 0

    def parse(self) -> GgufFile:
        if bytes(self._take(4)) != _MAGIC:
            raise ValueError("no GGUF magic")
        version = self._scalar(4)
        if version not in (2, 3):
            raise ValueError(f"version {version} is not supported")
        tensor_count = self._count(MAX_TENSORS)
        field_count = self._count(MAX_FIELDS)
        fields = {}
        for _ in range(field_count):
            key = self._string()
            fields[key] = self._value(self._uint(4))
        headers = [self._tensor_header() for _ in range(tensor_count)]
        align = fields.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1:
            raise ValueError("general.alignment is not a positive number")
        start = -(-self._at // align) * align
        tensors = {name: self._tensor(name, shape, kind, start + at) for name, shape, kind, at in headers}
        return GgufFile(fields, tensors)

    def _take(self, size: int) -> memoryview:
        end = self._at + size
        if end > len(self._view):
            raise ValueError("truncated")
        part = self._view[self._at : end]
        self._at = end
        return part

    def _scalar(self, kind: int) -> int | float | bool:
        form = _SCALARS[kind]
        (value,) = struct.unpack(form, self._take(struct.calcsize(form)))
        return value  # type: ignore[no-any-return]  # struct is untyped; the formats above yield these three

    def _uint(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _count(self, limit: int) -> int:
        count = self._uint(8)
        if count > limit:
            raise ValueError(f"a count of {count} is over the limit {limit}")
        return count

    def _string(self) -> str:
        return str(self._take(self._uint(8)), "utf-8")

    def _value(self, kind: int) -> object:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(kind)
        item = self._uint(4)
        count = self._count(MAX_ARRAY_ITEMS)
        if item == _STRING:
            return [self._string() for _ in range(count)]
        if item == _ARRAY:
            raise ValueError("nested arrays are not supported")
        form = _SCALARS[item]
        return list(struct.unpack(f"<{count}{form[1]}", self._take(count * struct.calcsize(form))))

    def _tensor_header(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        rank = self._uint(4)
        if not 1 <= rank <= MAX_DIMENSIONS:
            raise ValueError(f"tensor {name} has {rank} dimensions")
        shape = tuple(reversed([self._uint(8) for _ in range(rank)]))
        return name, shape, self._uint(4), self._uint(8)

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> GgufTensor:
        elements, size = _block(kind)
        total = math.prod(shape)
        if total < 1 or shape[-1] % elements:
            raise ValueError(f"tensor {name} of shape {shape} does not fill blocks of {elements}")
        end = start + total // elements * size
        if end > len(self._data):
            raise ValueError(f"tensor {name} is truncated")
        return GgufTensor(name, shape, kind, self._data[start:end])


def _block(kind: int) -> tuple[int, int]:
    """(elements, bytes) of one block."""
    if kind in _BLOCKS:
        return _BLOCKS[kind]
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # slow to import, and only rarer formats need it

    elements, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    return int(elements), int(size)


def dequantize(tensor: GgufTensor) -> npt.NDArray[np.float32]:
    """Returns an owned fp32 array of `tensor.shape`. Raises InvalidInput for a block format that nobody decodes."""
    raw, kind = tensor.raw, tensor.kind
    if kind == _F32:
        return np.array(raw.view(np.float32)).reshape(tensor.shape)
    if kind == _F16:
        return raw.view(np.float16).astype(np.float32).reshape(tensor.shape)
    if kind in _BLOCKS:
        return _dequantize_blocks(raw.reshape(-1, _BLOCKS[kind][1]), kind).reshape(tensor.shape)
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize as library_dequantize

    quant = GGMLQuantizationType(kind)
    try:
        rows = raw.reshape(*tensor.shape[:-1], -1)
        return np.asarray(library_dequantize(rows, quant), np.float32).reshape(tensor.shape)
    except NotImplementedError as error:
        raise InvalidInput(
            "unsupported_model", f"tensor {tensor.name} is stored as {quant.name}", field=f"weights.{tensor.name}"
        ) from error


def _dequantize_blocks(blocks: npt.NDArray[np.uint8], kind: int) -> npt.NDArray[np.float32]:
    """Blocks [n, bytes] of 32 elements: fp16 scale, for Q4_1 also fp16 minimum, then codes; low nibbles come first."""
    head = 4 if kind == _Q4_1 else 2
    scales = np.ascontiguousarray(blocks[:, :head]).view(np.float16).astype(np.float32)
    codes = blocks[:, head:]
    if kind == _Q8_0:
        return np.ascontiguousarray(codes).view(np.int8) * scales
    out = np.empty((len(blocks), 32), np.float32)
    np.bitwise_and(codes, 15, out=out[:, :16], casting="unsafe")
    np.right_shift(codes, 4, out=out[:, 16:], casting="unsafe")
    if kind == _Q4_0:
        out -= 8
    out *= scales[:, :1]
    if kind == _Q4_1:
        out += scales[:, 1:]
    return out
