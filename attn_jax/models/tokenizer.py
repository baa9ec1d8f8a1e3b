"""Tokenizers, built by the `tokenizers` library from the vocabulary that a checkpoint file carries."""

from gguf import TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from attn_jax.models.gguf_file import GGUFFile

# How text is cut before the merges, by the file's name for it. The byte-level rule alone would cut a run of spaces
# before a digit elsewhere than the model learned it.
_PRE_TOKENIZERS = {
    "smollm": lambda: [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ],
}


def tokenizer_from_gguf(file: GGUFFile) -> Tokenizer:
    """Builds the byte-level BPE tokenizer whose vocabulary, merges and special tokens stand in the file.

    `encode(text).ids` gives token ids, `decode(ids)` text. Control tokens such as `<|im_start|>` are found whole in a
    text and left out by `decode`, as `transformers` does. A byte that the vocabulary lacks leaves no token: SmolLM2's
    lacks those that UTF-8 never uses and a few control characters.

    Args:
        file: an opened GGUF file.

    Returns:
        tokenizers.Tokenizer: with as many ids as the file has tokens.

    Raises:
        ValueError: the file's tokenizer is of another kind, or its lists contradict each other.
    """
    family = file.value("tokenizer.ggml.model", str)
    if family != "gpt2":
        raise ValueError(f"{file.path}: tokenizer.ggml.model must be 'gpt2' (byte-level BPE), got {family!r}")
    cut = file.value("tokenizer.ggml.pre", str)
    if cut not in _PRE_TOKENIZERS:
        raise ValueError(f"{file.path}: tokenizer.ggml.pre must be one of {', '.join(_PRE_TOKENIZERS)}; got {cut!r}")
    for option in ("add_space_prefix", "add_bos_token", "add_eos_token"):
        if file.value(f"tokenizer.ggml.{option}", bool, False):
            raise ValueError(f"{file.path}: tokenizer.ggml.{option} must be False, got True")

    tokens = _strings(file, "tokenizer.ggml.tokens")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ValueError(f"{file.path}: tokenizer.ggml.tokens has {len(tokens) - len(vocabulary)} repeated tokens")
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=_merges(file, vocabulary)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_PRE_TOKENIZERS[cut]())
    tokenizer.decoder = decoders.ByteLevel()

    kinds = file.value("tokenizer.ggml.token_type", list)
    if len(kinds) != len(tokens):
        raise ValueError(f"{file.path}: tokenizer.ggml.token_type must have {len(tokens)} items, got {len(kinds)}")
    for kind, special in ((TokenType.CONTROL, True), (TokenType.USER_DEFINED, False)):
        whole = [t for t, k in zip(tokens, kinds, strict=True) if k == kind]
        tokenizer.add_tokens([AddedToken(t, normalized=False, special=special) for t in whole])
    return tokenizer


def _merges(file: GGUFFile, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for merge in _strings(file, "tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= vocabulary.keys():
            raise ValueError(f"{file.path}: tokenizer.ggml.merges has {merge!r}, whose parts or sum are no tokens")
        merges.append((left, right))
    return merges


def _strings(file: GGUFFile, key: str) -> list[str]:
    values = file.value(key, list)
    if not values or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{file.path}: metadata {key!r} must be a list of strings")
    return values
