"""Tokenizers, built by the `tokenizers` library from the vocabulary that a checkpoint file carries."""

import math
from collections.abc import Sequence

from gguf import TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from attn_jax.models.gguf_file import GGUFFile

# How text is cut before the merges, by the file's name for it. The byte-level rule alone would cut a run of spaces
# before a digit elsewhere than the model learned it.
_PRE_TOKENIZERS = {
    "smollm": lambda: [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ],
}
_SPACE = "▁"  # SentencePiece's letter for a space


def tokenizer_from_gguf(file: GGUFFile) -> Tokenizer:
    """Builds the tokenizer whose vocabulary, merges or scores, and special tokens stand in the file.

    `encode(text).ids` gives token ids, `decode(ids)` text. Control tokens such as `<|im_start|>` are found whole in a
    text and left out by `decode`, as `transformers` does. Two kinds are built, by `tokenizer.ggml.model`:

    - "gpt2", byte-level BPE. A byte that the vocabulary lacks leaves no token: SmolLM2's lacks those that UTF-8 never
      uses and a few control characters.
    - "llama", SentencePiece's BPE, with a token for each byte of a character that the vocabulary lacks; Gemma's. Where
      the file says so, as Gemma's does, a text begins with the token `bos`: not with `add_special_tokens=False`.

    Args:
        file: an opened GGUF file.

    Returns:
        tokenizers.Tokenizer: with as many ids as the file has tokens.

    Raises:
        ValueError: the file's tokenizer is of another kind, or its lists contradict each other.
    """
    model = file.value("tokenizer.ggml.model", str)
    if model not in _BUILDERS:
        known = " or ".join(map(repr, _BUILDERS))
        raise ValueError(f"{file.path}: tokenizer.ggml.model must be {known}, got {model!r}")
    tokens = _strings(file, "tokenizer.ggml.tokens")
    kinds = file.value("tokenizer.ggml.token_type", list)
    if len(kinds) != len(tokens):
        raise ValueError(f"{file.path}: tokenizer.ggml.token_type must have {len(tokens)} items, got {len(kinds)}")
    if model == "llama":  # whose texts have no spaces left where runs of spaces are looked for
        tokens = [_SPACE * len(token) if _is_run(token) else token for token in tokens]
    if len(set(tokens)) != len(tokens):
        raise ValueError(f"{file.path}: tokenizer.ggml.tokens has {len(tokens) - len(set(tokens))} repeated tokens")
    tokenizer = _BUILDERS[model](file, tokens, kinds)
    for kind, special in ((TokenType.CONTROL, True), (TokenType.USER_DEFINED, False)):
        whole = [t for t, k in zip(tokens, kinds, strict=True) if k == kind and not _is_run(t)]
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=special) for token in whole])
    return tokenizer


def _byte_level(file: GGUFFile, tokens: Sequence[str], kinds: Sequence[int]) -> Tokenizer:
    del kinds
    cut = file.value("tokenizer.ggml.pre", str)
    if cut not in _PRE_TOKENIZERS:
        raise ValueError(f"{file.path}: tokenizer.ggml.pre must be one of {', '.join(_PRE_TOKENIZERS)}; got {cut!r}")
    for option in ("add_space_prefix", "add_bos_token", "add_eos_token"):
        _require(file, option, default=False)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=_merges(file, vocabulary)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_PRE_TOKENIZERS[cut]())
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GGUFFile, tokens: Sequence[str], kinds: Sequence[int]) -> Tokenizer:
    _require(file, "add_space_prefix", default=True)  # the defaults that this kind of file has
    _require(file, "add_eos_token", default=False)
    scores = file.value("tokenizer.ggml.scores", list)
    if len(scores) != len(tokens) or not all(isinstance(one, float) and math.isfinite(one) for one in scores):
        raise ValueError(f"{file.path}: tokenizer.ggml.scores must be {len(tokens)} finite floats, one for each token")
    unknown = tokens[_token_id(file, "unknown_token_id", len(tokens))]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = merges_from_scores(tokens, kinds, scores)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    if file.value("tokenizer.ggml.add_bos_token", bool, True):
        first = _token_id(file, "bos_token_id", len(tokens))
        bos = {"id": "bos", "ids": [first], "tokens": [tokens[first]]}
        tokenizer.post_processor = processors.TemplateProcessing(
            single="bos $A", pair="bos $A bos:1 $B:1", special_tokens=[bos]
        )
    return tokenizer


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}


def merges_from_scores(tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges by which a pair of neighbours becomes the token of the best score first, as in SentencePiece.

    A token that is made from two others in several ways takes the longest left part first, as `transformers` has it.
    Runs of spaces come before all scores: SentencePiece looks for tokens that a user defined before it merges.

    Args:
        tokens: of the vocabulary, runs of spaces spelled with ▁.
        kinds: the `gguf.TokenType` of each.
        scores: of each.

    Returns:
        `(left, right)` pairs, the first to be merged first.
    """
    ranked = {t: s for t, k, s in zip(tokens, kinds, scores, strict=True) if k == TokenType.NORMAL}
    ranked |= {
        t: float("inf") for t, k in zip(tokens, kinds, strict=True) if k == TokenType.USER_DEFINED and _is_run(t)
    }
    return [
        (token[:cut], token[cut:])
        for token in sorted(ranked, key=lambda token: -ranked[token])
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in ranked and token[cut:] in ranked
    ]


def _is_run(token: str) -> bool:
    """Whether the token is a run of spaces, in either spelling."""
    return len(token) > 1 and set(token) in ({" "}, {_SPACE})


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


def _require(file: GGUFFile, option: str, *, default: bool) -> None:
    """Raises unless the option is off."""
    if file.value(f"tokenizer.ggml.{option}", bool, default):
        raise ValueError(f"{file.path}: tokenizer.ggml.{option} must be False, got True")


def _token_id(file: GGUFFile, name: str, count: int) -> int:
    value = file.value(f"tokenizer.ggml.{name}", int)
    if value >= count:
        raise ValueError(f"{file.path}: tokenizer.ggml.{name} must be below {count}, got {value}")
    return value
