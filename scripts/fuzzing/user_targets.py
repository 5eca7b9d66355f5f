"""Fuzz targets of what users write: grammars, and the inputs of chat."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from input_targets import CITY, N_TOKENS, SHAPE, VARYING
from kept_targets import opened
from mutation import TEXTS, FoundError, changed_json, changed_text, packed_json


class Grammars:
    """A grammar, a JSON schema or a regex, which a few tokens are to match."""

    WORDS = (
        *("root ::= ", "|", "*", "+", "?", "{2,}", "{0,999999}", "[^a]", "(", ")", '"a"'),
        *("\\u00e9", "[a-z]", "%json {}", "%regex", "start: ", "A: /a/", "::=", "#", "\n", "\\x41"),
        *("(?i)", "^", "type", "object", "string", "integer", "anyOf", "oneOf", "allOf", "$ref"),
        *("#", "#/$defs/a", "minItems", "maxLength", "pattern", "enum", "const", "format"),
        *("date-time", "not", "items", "additionalProperties", "patternProperties", "multipleOf"),
        *("minimum", "required", "null"),
        *TEXTS,
    )

    @classmethod
    def change(cls, rng: random.Random, case: bytes) -> bytes:
        try:
            given = json.loads(case)
            schema = given["kind"] == "json-schema" and rng.random() < 0.7
            text = given["text"].encode("utf-8", "replace")
            if schema:
                given["text"] = changed_json(rng, text, cls.WORDS).decode(errors="replace")
            else:
                given["text"] = changed_text(rng, given["text"], cls.WORDS)
            return packed_json(given)
        except Exception:
            return changed_json(rng, case, cls.WORDS)

    def __init__(self, folder: Path) -> None:
        from sparsekv_cli.generation.grammar_trial import GrammarTrial

        self.model = opened(folder, **SHAPE)
        self.trial = GrammarTrial(self.model.gguf.path)

    def seeds(self) -> Iterable[bytes]:
        large = {
            "type": "object", "properties": {
                "a": {"type": "array", "items": {"$ref": "#/$defs/x"}, "maxItems": 3},
                "b": {"anyOf": [{"type": "integer", "minimum": 3}, {"type": "null"}]},
                "c": {"type": "string", "pattern": "^[a-c]{2,4}$"}, "d": {"enum": ["x", 1, None]},
                "e": {"type": "string", "format": "date-time"},
            }, "$defs": {"x": {"type": "number"}}, "additionalProperties": False,
        }  # fmt: skip
        gbnf = 'root ::= "a" | item+\nitem ::= [a-z]{2,3} "," #c\n'
        texts = {
            "json-schema": (json.dumps(CITY), json.dumps(large)),
            "grammar": (gbnf, "start: A+\nA: /[ab]/\n"),
            "regex": ("[ab]+(c|d){2,3}", "(?i)yes|no", "\\d{1,3}\\.\\w*"),
        }
        for kind, of_kind in texts.items():
            yield from (packed_json({"kind": kind, "text": text}) for text in of_kind)

    def run(self, case: bytes) -> str:
        from sparsekv_cli.generation.sampler import SamplingOptions, new_constraint, new_sampler

        try:
            given = json.loads(case)
            kind, text = given["kind"], given["text"]
            text.encode()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return "no case"
        if kind not in ("json-schema", "grammar", "regex"):
            return "no case"
        grammar = self.trial.read(kind, text)
        options = SamplingOptions({"temp": 1.0}, grammar=grammar)
        constraint = new_constraint(self.model.tokenizer, options, None)
        sample: Any = new_sampler(self.model, options, 1, constraint)
        sequence = self.model.sequence()
        logits = sequence.prefill([5, 6, 7])
        for _ in range(N_TOKENS * 2):
            token = sample(logits, sequence.tokens)
            if token in self.model.tokenizer.eog_ids:
                break
            logits = sequence.decode(int(token))
        return "matched"


class Chat:
    """Inputs of ``chat``, a line each; files stay in the target's folder."""

    WORDS = (
        *("/help", "/clear", "/regen", "/undo", "/system", "/set", "/read", "/save", "/load", "\n"),
        *("/stats", "/method", "/exit", "temp", "top_k", "seed", "n_predict", "stop", "think"),
        *("ctx", "context_shift", "keep", "samplers", "logit_bias", "json_schema", "on", "off"),
        *("lfps", "quest", "snapkv", "topk", "budget=8", "page=4", "a.json", "b.txt", "sinks=0"),
        *("h2o", "streaming", "repeat_penalty", "mirostat", "grammar", "think_budget", "'", '"'),
        *('""', "~"),
        *TEXTS,
    )

    @classmethod
    def change(cls, rng: random.Random, case: bytes) -> bytes:
        text = case.decode("utf-8", "replace")
        changed = changed_text(rng, text, (*cls.WORDS, *("\n" + word for word in cls.WORDS)))
        return changed.encode("utf-8", "replace")

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "files"
        self.model = opened(folder, head_dim=64, **SHAPE)

    def seeds(self) -> Iterable[bytes]:
        yield b"Hi\n/regen\n/undo\n/system You\nHi\n/stats\n/set\n/set temp 0\n/set n_predict 3\nA"
        yield b"A\n/save a.json\n/clear\n/load a.json\n/regen\n/read a.json\nB\n/save b.txt"
        yield b"/method lfps\nA\n/method topk budget=8\nB\n/method full\n/undo\n/set ctx 64\nC"
        yield b"/set context_shift on\n/set keep 4\n/set stop a,b\n/set think off\n" + b"long " * 60
        yield b"/method quest page=16\n/method snapkv\nA\n/method h2o\n/method streaming sinks=2\nB"

    def run(self, case: bytes) -> str:
        import os

        from sparsekv_cli.commands.chat.commands import Chat as Program
        from sparsekv_cli.commands.chat.commands import enter
        from sparsekv_cli.commands.chat.conversation import ChatSettings, Conversation
        from sparsekv_cli.commands.options.model import ModelOptions
        from sparsekv_cli.commands.options.prefix import PrefixOptions
        from sparsekv_cli.generation.sampler import SamplingOptions

        self.folder.mkdir(exist_ok=True)
        os.chdir(self.folder)
        for path in self.folder.iterdir():
            path.unlink()
        (self.folder / "b.txt").write_bytes(case)
        settings = ChatSettings(SamplingOptions({}), seed=1, n_predict=N_TOKENS)
        said, text = io.StringIO(), case.decode("utf-8", "replace")
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            conversation = Conversation(self.model, settings, None)
            options = ModelOptions(None, self.model.config, 1)
            chat = Program(conversation, options, PrefixOptions(None, 1.0, True, None))
            for line in text.split("\n")[:24]:
                found = re.match(r"\s*/(save|load|read)\s", line)
                if found and re.search(r"/|\.\.", line[found.end() :]):
                    continue  # it may not write elsewhere
                if re.match(r"\s*/method\s+(sals|fasa|faedkv)", line):
                    continue  # a minute of calibration
                if not enter(chat, line):
                    break
        told = said.getvalue().splitlines()
        errors = [line for line in told if line.startswith("error: ")]
        for line in errors:
            if "unexpected " in line and "Error" in line:
                raise FoundError(line)
        return re.sub(VARYING, "#", errors[0])[:60] if errors else "answered"
