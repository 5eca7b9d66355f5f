"""The decoder on the device: dense prefill by matrix products, decode by kernels over the weights.

``forward`` walks layer by layer over the whole prompt, as models/decoder.py does, whose readable
rows it shares. ``decode_batch`` is one program of launches, captured in CUDA graphs; layers whose
cache lies on the host interrupt it. Letters as in sparsekv_cli/cache.py; B sequences in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from sparsekv_cli.cache import AttnInput, LayerCache, LayerSpec, padded
from sparsekv_cli.cpu import matvec as host_matvec
from sparsekv_cli.device.cache import DeviceCache, DeviceInput, Step
from sparsekv_cli.device.graphs import Piece, Steps
from sparsekv_cli.device.host import HostCache
from sparsekv_cli.device.weights import DeviceWeights
from sparsekv_cli.kernels import layer as kernels
from sparsekv_cli.models.architectures import Architecture
from sparsekv_cli.models.decoder import specs_of
from sparsekv_cli.models.hparams import HParams
from sparsekv_cli.models.prefill_rows import TorchRows, rms_norm
from sparsekv_cli.models.rope import RopeTable
from sparsekv_cli.models.weights import Weights

Progress = Callable[[int, int], None]
