"""Makes the source of drafts that ``--speculate`` names."""

from sparsekv_cli.drafts.auto import AutoDrafts
from sparsekv_cli.drafts.draft_model import ModelDrafts
from sparsekv_cli.drafts.mtp import MtpDrafts
from sparsekv_cli.drafts.ngrams import NgramDrafts
from sparsekv_cli.sequence import Drafts, Sequence


def new_drafts(name: str, sequence: Sequence, of_model: Sequence | None) -> Drafts | None:
    """Returns the source of drafts ``name`` for a sequence; None for ``off``.

    of_model: a sequence of the draft model, or None. The ids of the smaller of both vocabularies
    mean the same in the other.
    """
    if name == "off":
        return None
    if name == "ngram":
        return NgramDrafts()
    if name == "mtp":
        assert sequence.next_rows is not None
        return MtpDrafts(sequence.next_rows)
    model = None
    if of_model is not None:
        model = ModelDrafts(of_model, min(sequence.engine.n_vocab, of_model.engine.n_vocab))
    if name == "auto":
        return AutoDrafts(NgramDrafts(), model)
    assert model is not None, name
    return model
