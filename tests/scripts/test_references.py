"""The reference decoder and the tiny models against the recorded logits of llama.cpp."""

import numpy as np
import pytest
from reference_decoder import kl_divergences, nmse, reference_logits
from reference_records import (
    PROSE_FILE,
    REFERENCE_CASES,
    REFERENCE_IDS,
    REFERENCE_ROWS,
    compact,
    compact_kl,
    smollm2_record,
    smollm2_tokens,
    tiny_reference,
    top1_agreement,
)
from tiny_models import fingerprint, make_model


@pytest.mark.parametrize("case", REFERENCE_CASES)
def test_reference_decoder_agrees_with_llama_cpp(case, tmp_path):
    options = REFERENCE_CASES[case]
    path = make_model(tmp_path / "model.gguf", **options)
    expected = tiny_reference(case)
    assert fingerprint(path) == expected.fingerprint, "run scripts/references/logits again"
    actual = reference_logits(path, REFERENCE_IDS)[-REFERENCE_ROWS:]
    limit = 1e-6 if options.get("wtype", "F32") == "F32" else 1e-3
    assert nmse(expected.logits, actual) < limit


def test_compact_divergence_is_close_to_the_whole_and_never_above_it():
    rng = np.random.RandomState(0)
    one = (3 * rng.standard_normal((6, 4000))).astype(np.float32)
    other = one + (0.2 * rng.standard_normal(one.shape)).astype(np.float32)
    whole = np.array(list(kl_divergences(one, other)))
    lumped = compact_kl(compact(one), other)
    assert np.all(lumped <= whole + 1e-6)
    assert np.all(lumped > 0.4 * whole)
    assert compact_kl(compact(one), one) == pytest.approx(0.0, abs=1e-6)


def test_default_models_records_belong_together():
    tokens = smollm2_tokens()
    llama, reference = smollm2_record("llama"), smollm2_record("reference")
    assert tokens.shape == (512,) and len(PROSE_FILE.read_text().split()) > 600
    for record in (llama, reference):
        total = np.exp(record.logp.astype(np.float64)).sum(axis=-1) + record.rest
        np.testing.assert_allclose(total, 1.0, atol=2e-4)
    logits = np.full((512, 49152), -40.0, np.float32)  # the reference's record as logits
    np.put_along_axis(logits, reference.ids, reference.logp, axis=-1)
    assert compact_kl(llama, logits).mean() < 2.0
    assert 0.96 < np.mean(llama.top1 == reference.top1) < 1.0
    assert top1_agreement(reference, logits) > 0.99
