"""What a head of each kind would do: texts, and where its weights would lie.

A probe is a batch of examples. An example has tokens and a target: what a unit of weight of query i on key j counts
for, so that its score for a head is the sum of weights times targets. Every target sums to at most 1 over the rows that
it asks about: a head that always does it scores 1.

    local           weight on the last 8 tokens, itself included
    previous token  weight on the one before
    induction       random tokens, twice: weight on what followed the same token the first time
    syntax          a verb's weight on its subject, less that on the other noun
    coreference     a pronoun's weight on the name it refers to, less that on the other name

The sentences come in sets that put each word in each place, so that no head scores by place alone; such a set is one
example. Clark et al. 2019 and Voita et al. 2019 have kinds of heads like these; Olsson et al. 2022 the induction.
"""

import dataclasses
import itertools

import numpy as np
from tokenizers import Tokenizer

LOCAL_REACH = 8
OPENINGS = ("Yesterday evening, ", "As the report says, ", "In the old town, ", "On that day, ")
NOUNS = (
    ("dog", "tree"), ("car", "house"), ("woman", "river"), ("boy", "wall"), ("horse", "fence"), ("teacher", "window"),
    ("ship", "bridge"), ("cat", "table"),
)  # fmt: skip
VERBS = ("was", "stood", "looked", "appeared")
NAMES = (
    ("Mary", "John"), ("Anna", "Peter"), ("Susan", "David"), ("Laura", "Michael"), ("Emma", "Robert"),
    ("Sarah", "Thomas"), ("Julia", "George"), ("Alice", "Henry"),
)  # fmt: skip
MEETINGS = ("met {} at the station because", "wrote to {} before", "called {} when", "thanked {} after")


@dataclasses.dataclass(frozen=True)
class Probe:
    """Examples of one kind.

    Attributes:
        token_ids: int `[examples, sentences, T]`.
        lengths: int `[examples, sentences]`, tokens that count.
        target: `[examples, sentences, T, T]`, queries by keys.
    """

    token_ids: np.ndarray
    lengths: np.ndarray
    target: np.ndarray


def local(documents: np.ndarray) -> Probe:
    """Of real text `[documents, T]`: rows whose last 8 tokens leave out the first token, which is often a sink."""
    return _on_documents(documents, range(LOCAL_REACH), first_row=2 * LOCAL_REACH)


def previous_token(documents: np.ndarray) -> Probe:
    """Of real text `[documents, T]`."""
    return _on_documents(documents, (1,), first_row=2)


def induction(vocabulary: np.ndarray, examples: int, half: int, seed: int) -> Probe:
    """Of random tokens of `vocabulary`, no two alike in a sequence, which is read twice."""
    rng = np.random.default_rng([seed, 1])
    once = np.stack([rng.choice(vocabulary, half, replace=False) for _ in range(examples)])
    target = np.zeros((2 * half, 2 * half))
    rows = np.arange(half, 2 * half - 1)  # the last token's follower would be the second reading itself
    target[rows, rows - half + 1] = 1 / len(rows)
    return _probe(np.concatenate([once, once], axis=1), target)


def syntax(tokenizer: Tokenizer) -> Probe:
    """Of sentences whose subject comes first or second, with either noun as the subject."""
    sets = []
    for index, (nouns, verb) in enumerate(itertools.product(NOUNS, VERBS)):
        opening, tail = OPENINGS[index % len(OPENINGS)], f" {verb} as it had always been."
        sentences = []
        for subject, other in (nouns, nouns[::-1]):
            for text in (f"{opening}the {subject} near the {other}", f"{opening}near the {other} the {subject}"):
                sentences.append((text + tail, len(text) + 1, (subject, other)))
        sets.append(sentences)
    return _on_sentences(tokenizer, sets)


def coreference(tokenizer: Tokenizer) -> Probe:
    """Of sentences with a woman and a man in either order, and a pronoun for either."""
    sets = []
    for index, (names, meeting) in enumerate(itertools.product(NAMES, MEETINGS)):
        opening = OPENINGS[index % len(OPENINGS)]
        sentences = []
        for first, second in (names, names[::-1]):
            text = f"{opening}{first} {meeting.format(second)} "
            for pronoun, meant in zip(("she", "he"), names, strict=True):
                other = names[1 - names.index(meant)]
                sentences.append((f"{text}{pronoun} had to leave.", len(text), (meant, other)))
        sets.append(sentences)
    return _on_sentences(tokenizer, sets)


def _on_documents(documents: np.ndarray, back: range | tuple[int, ...], first_row: int) -> Probe:
    length = documents.shape[1]
    target = np.zeros((length, length))
    rows = np.arange(first_row, length)
    for steps in back:
        target[rows, rows - steps] = 1 / len(rows)
    return _probe(documents, target)


def _probe(token_ids: np.ndarray, target: np.ndarray) -> Probe:
    """Examples of one sequence each, with the same target."""
    examples, length = token_ids.shape
    targets = np.broadcast_to(target, (examples, 1, length, length))
    return Probe(token_ids[:, None].astype(np.int32), np.full((examples, 1), length), targets)


def _on_sentences(tokenizer: Tokenizer, sets: list[list[tuple[str, int, tuple[str, str]]]]) -> Probe:
    """Of sentences `(text, where the asking word begins, (the right word, the other))`, equal shares of their set."""
    encoded = [[tokenizer.encode(text, add_special_tokens=False) for text, _, _ in sentences] for sentences in sets]
    longest = max(len(one.ids) for encodings in encoded for one in encodings)
    shape = len(sets), len(sets[0])
    token_ids, lengths = np.zeros((*shape, longest), np.int32), np.zeros(shape, np.int64)
    target = np.zeros((*shape, longest, longest))
    for at in np.ndindex(shape):
        one, (text, asking, words) = encoded[at[0]][at[1]], sets[at[0]][at[1]]
        token_ids[at][: len(one.ids)] = one.ids
        lengths[at] = len(one.ids)
        row = one.char_to_token(asking)
        right, other = (one.char_to_token(text.index(f" {word}") + len(word)) for word in words)  # its last letter
        if None in (row, right, other):
            raise ValueError(f"{text!r}: the tokenizer leaves out a word")
        target[(*at, row, right)], target[(*at, row, other)] = 1.0, -1.0
    return Probe(token_ids, lengths, target)
