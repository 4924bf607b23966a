"""Builds and verifies the proofs of one sequence."""

from inference.proofs import toploc


def build(hidden_TD, *, chunk: int = 32, topk: int = 128) -> list[bytes]:
    """Returns one proof per `chunk` rows; those of the last, shorter chunk may have fewer coefficients."""
    return toploc.encode(toploc._top_values(toploc._chunks(hidden_TD, chunk), topk))


def verify(hidden_TD, proofs, **options) -> list[toploc.ProofResult]:
    """Verifies the proofs of one sequence, as `toploc.verify_proofs_batch` those of several."""
    return toploc.verify_proofs_batch([hidden_TD], [proofs], **options)[0]
