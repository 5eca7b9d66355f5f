"""The GGUF weight formats, one record each. Each record lies next to its decoder in blocks_*.py."""

from __future__ import annotations

from sparsekv_cli.cpu.weights.block import BlockFormat
from sparsekv_cli.cpu.weights.blocks_grid import GRID
from sparsekv_cli.cpu.weights.blocks_large import LARGE
from sparsekv_cli.cpu.weights.blocks_small import SMALL
from sparsekv_cli.cpu.weights.types import GGMLType

FLOATS = (BlockFormat(GGMLType.F32), BlockFormat(GGMLType.F16), BlockFormat(GGMLType.BF16))
FORMATS = {format_.name: format_ for format_ in (*FLOATS, *SMALL, *LARGE, *GRID)}
FORMAT_OF_CODE = {format_.code: format_ for format_ in FORMATS.values()}
