"""A prompt's rows in one file that the user names, for other machines and methods.

Other products (--prefill-dtype) may have computed the rows. Their types may differ from the
session's; they are converted.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from sparsekv_cli.models.identity import RowsIdentity
from sparsekv_cli.models.tokenizer.ids import n_common
from sparsekv_cli.prefix.blocks import BlockHeader, DamagedError, read_header
from sparsekv_cli.prefix.difference import difference
from sparsekv_cli.prefix.folder import PrefixFolder
from sparsekv_cli.prefix.prefixes import LEAST, STEP, Prefixes
from sparsekv_cli.prefix.prompt_rows import Found
from sparsekv_cli.system.files import open_regular


class SessionFile(Prefixes):
    """One block with all tokens of a prompt, under a name of the user's.

    It is written if it is missing or damaged. It is also written if the prompt has LEAST tokens
    that are not in it. The file of another model is left as it is, and so is one of dense rows
    where the session reads sparsely.
    """

    def __init__(
        self,
        path: Path,
        model: str,
        identity: RowsIdentity,
        types: tuple[str, str],
        n_queried: int,
        warn: Callable[[str], None],
        tell: Callable[[str], None],
    ) -> None:
        folder, identity = PrefixFolder(path.parent, 0, warn), identity.of_any_products()
        super().__init__(folder, model, identity, types, n_queried, tell)
        self._file = path
        self._is_new = self._is_foreign = self._is_dense = False

    def find(self, ids: Sequence[int]) -> Found:
        self._is_new = self._is_foreign = self._is_dense = False
        roots = self.known_roots()
        if not roots:
            return Found()
        try:
            with open_regular(self._file) as file:
                header = read_header(file)
            if header.first or header.rows:
                raise DamagedError("its rows are not those of a whole prompt")
        except FileNotFoundError:
            self._is_new = True
            return Found()
        except (OSError, DamagedError) as error:
            self._drop(None, error)
            return Found()
        if header.parent not in roots:
            self._is_foreign = True
            self.folder.warn(
                f"{self._file}: is of another model, version, RoPE scaling or reading "
                f"({header.model}) and is left as it is; the prompt is computed"
            )
            return Found()
        self._is_dense = header.parent != roots[0]
        found = self._found([header], n_common(header.tokens, ids), ids, STEP)
        return found._replace(difference=difference(header.tokens, ids))

    def _drop(self, header: BlockHeader | None, error: Exception) -> None:
        self._is_new = True
        what = (isinstance(error, OSError) and error.strerror) or error
        self.folder.warn(f"{self._file}: {what}; the prompt is computed")

    def _path(self, header: BlockHeader) -> Path:
        return Path(os.path.realpath(self._file))

    @property
    def _place(self) -> Path:
        return self._file

    def _new_blocks(
        self,
        ids: Sequence[int],
        n_known: int,
        n_kept: int,
        types: tuple[str, str],
        layers: tuple[tuple[int, int, int], ...],
    ) -> list[BlockHeader]:
        if self._is_foreign or not (self._is_new or len(ids) - n_known >= LEAST):
            return []
        if self._is_dense:
            self.folder.warn(
                f"{self._file}: its rows were read densely, so it is left as it is, without the "
                f"{len(ids) - n_known} tokens that are read sparsely; another --session keeps them"
            )
            return []
        tokens = tuple(int(token) for token in ids)
        return [BlockHeader(self.model, self._begun, 0, tokens, types, layers)]

    def _is_over_half(self, n_bytes: int) -> bool:
        return False

    def _may_keep(self, headers: Sequence[BlockHeader]) -> bool:
        return True

    def _settle(self, new: BlockHeader) -> None:
        """Removes leftovers of killed processes. All other files in the folder are the user's."""
        self.folder.remove_leftovers()
