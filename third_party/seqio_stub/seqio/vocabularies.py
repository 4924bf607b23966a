"""Class names for JetStream's type annotations and isinstance checks; constructing one is an error."""


class Vocabulary:
    """Raises on use: Intellax engines build their own tokenizer."""

    def __init__(self, *args, **kwargs):
        raise NotImplementedError(
            "this environment holds a stand-in for seqio (third_party/seqio_stub); "
            "pip install --force-reinstall seqio to use SentencePiece vocabularies"
        )


class SentencePieceVocabulary(Vocabulary):
    """See `Vocabulary`."""
