"""The fuzz targets by name."""

from __future__ import annotations

from typing import Any

from input_targets import Lines, Server, Templates
from kept_targets import Calibration, PrefixCache, Session
from model_targets import Model, SplitModel, Tokenizers
from user_targets import Chat, Grammars

TARGETS: dict[str, Any] = {
    "gguf": Model,
    "split": SplitModel,
    "tokenizer": Tokenizers,
    "template": Templates,
    "calibration": Calibration,
    "session": Session,
    "prefix": PrefixCache,
    "jsonl": Lines,
    "serve": Server,
    "grammar": Grammars,
    "chat": Chat,
}
