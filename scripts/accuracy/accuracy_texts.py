"""What scripts/accuracy/measure reads to the model: four long texts, and questions hidden in them.

A story; minutes, code and letters; the transcript of a hearing; the manual of a machine.

Texts and facts are ours. A needle prompt is a text with one fact put between two of its paragraphs,
followed by a question about it, all as one user message.
"""

import ast
import sys
import sysconfig
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measuring import ROOT

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.generation.conversation import chat_template, encode_messages, messages_of
from sparsekv_cli.model import Model

FOLDER = Path(__file__).resolve().parent
HELD_OUT = tomllib.loads((FOLDER / "held_out.toml").read_text(encoding="utf-8"))
CHARACTERS = 6  # of a text, a token of its length
OWN_TEXTS = 40_000  # tokens of a text of our own at most
PACKAGES = (
    "asyncio", "collections", "concurrent", "email", "html", "http", "importlib", "json", "logging",
    "multiprocessing", "unittest", "urllib", "wsgiref", "xml", "xmlrpc",
)  # fmt: skip
TEXT_FILES = tuple(
    FOLDER / "texts" / f"{name}.txt" for name in ("prose", "mixed", "hearing", "manual")
)


class Needle(NamedTuple):
    """A fact, the question about it, the words that an answer must hold, and where it stands."""

    fact: str
    question: str
    value: str
    text: int  # number of the text that hides it
    depth: float  # 0 = before the text, 1 = behind it


NEEDLES = tuple(
    Needle(f"The {what} is {value}.", f"What is the {what}?", value, text, depth)
    for what, value, text, depth in (
        ("secret code of the harbour master", "48213", 0, 0.2),
        ("special magic number for Lisbon", "73952", 1, 0.4),
        ("licence number of Captain Moreno", "90467", 0, 0.6),
        ("telephone number of Doctor Ferris", "61583", 1, 0.8),
        ("account number of Widow Pettersen", "35867", 2, 0.3),
        ("combination of the safe in the cellar", "82915", 3, 0.5),
        ("ticket number of Professor Amundsen", "17294", 2, 0.7),
        ("password of the night watchman", "59046", 3, 0.9),
        ("locker number of the choir master", "26738", 1, 0.1),
        ("serial number of the old ferry engine", "94105", 0, 0.35),
        ("secret code of the chess club", "37260", 2, 0.5),
        ("special magic number for Reykjavik", "68419", 3, 0.65),
        ("policy number of Madame Laurent", "50872", 0, 0.85),
        ("room number of Inspector Halloran", "14936", 1, 0.55),
        ("telephone number of the village bakery", "71604", 3, 0.25),
        ("registration number of the blue tractor", "83527", 2, 0.9),
    )
)


def read_texts() -> list[str]:
    """The texts, each long enough for 6.5K tokens and a continuation."""
    return [path.read_text(encoding="utf-8") for path in TEXT_FILES]


def text_of(half: str, kind: str, n_tokens: int) -> str:
    """Returns the beginning of a half's ``code`` or ``prose``: text for ``n_tokens``.

    A long text is of Python's library: every second file of it, or its docstrings.
    """
    if n_tokens > OWN_TEXTS:
        files = library_files()[list(HELD_OUT).index(half) :: 2]
    else:
        paths = [ROOT / name for name in HELD_OUT[half][kind]]
        files = [each for p in paths for each in (sorted(p.rglob("*.py")) if p.is_dir() else [p])]
    texts = (path.read_text(encoding="utf-8") for path in files)
    if n_tokens > OWN_TEXTS and kind == "prose":
        texts = map(docstrings, texts)
    return "\n\n".join(texts)[: CHARACTERS * n_tokens]


def library_files() -> list[Path]:
    """Returns files that Python's library has on all systems: modules, then packages, by name."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    modules = [folder / f"{name}.py" for name in sorted(sys.stdlib_module_names)]
    inner = (path for name in PACKAGES for path in sorted((folder / name).rglob("*.py")))
    found = [path for path in modules if path.is_file()]
    return found + [path for path in inner if "test" not in path.parts]


def docstrings(source: str) -> str:
    """Returns the docstrings of a file, in the order of ``ast.walk``."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    found = (
        ast.get_docstring(node) for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)
    )
    return "\n\n".join(filter(None, found))


def library(n_tokens: int) -> dict[str, str]:
    """Returns the version of the library that a text is of; nothing for texts of our own."""
    return {"library": f"Python {sys.version.split()[0]}"} if n_tokens > OWN_TEXTS else {}


def counter(model: Model) -> Callable[[str], int]:
    """Counts the tokens of a part of a text."""
    encode = model.tokenizer.encode
    return lambda text: len(encode(text, add_bos=False, parse_special=False))


def prompt_ids(model: Model, prompt: str) -> list[int]:
    """The tokens of a conversation in which the user has said ``prompt``."""
    template = chat_template(model.gguf)
    return list(encode_messages(model.tokenizer, template, messages_of(None, prompt)))


def needle_prompt(needle: Needle, text: str, n_tokens: int, count: Callable[[str], int]) -> str:
    """A user message of nearly ``n_tokens``, with the needle's question at its end.

    It has as many whole paragraphs of ``text`` as fit; count: tokens of a string. SparseKVError
    when the text is shorter than that.
    """
    question = f"{needle.question} Answer in one sentence."
    room = n_tokens - count(f"\n\n{needle.fact}\n\n{question}")
    paragraphs: list[str] = []
    for paragraph in text.strip().split("\n\n"):
        room -= count(paragraph + "\n\n")
        if room < 0:
            break
        paragraphs.append(paragraph)
    else:
        raise SparseKVError(f"needle prompt of {n_tokens} tokens: the text is {room} too short")
    paragraphs.insert(round(needle.depth * len(paragraphs)), needle.fact)
    return "\n\n".join([*paragraphs, question])
