"""What is said of each signal besides its numbers: the link, where the line comes from, cause, next check and mend."""

from typing import Any, NamedTuple

from attn_jax.diagnostics.diagnosis.findings import Finding


class Words(NamedTuple):
    """The words of a signal."""

    link: str
    origin: str
    cause: str
    check: str
    mend: str


OURS, EXACT, BY_DEFINITION = "ours, experimental", "rounding of float32; a fault is off by far more", "by definition"
_EDGES = "which keys the first, a middle and the last query see."

WORDS = {
    # of measures
    "non_finite": Words(
        "numerics", BY_DEFINITION, "Something overflows, or a row sees no key.",
        "fully masked rows, the largest logit, the dtype of the sums.", "finite masking, a softmax in float32.",
    ),
    "max_logit": Words(
        "projections", "Kimi K2 clips at 100, plain Muon passed 1000; Wortsman et al. 2023: runs above 1e4 diverged",
        "Queries or keys have grown.", "the spectral norms of W_Q and W_K, and the learning rate.",
        "QK-norm, clipping, spectral reparametrisation, a lower rate.",
    ),
    "sharp_entropy": Words(
        "scale", OURS, "Logits are too large for a softmax over so few keys.",
        "Var(q·k) / H, and whether 1/√H is there.", "restore the scale; QK-norm.",
    ),
    "saturated": Words(
        "softmax", OURS, "Most rows put all their weight on one key, and pass no gradient to q and k.",
        "the scale, the norms of q and k, and what the mask leaves visible.", "the scale; QK-norm.",
    ),
    "logit_sd": Words(
        "projections", "a Gaussian reference", "The median head's logits are spread far.",
        "the scale, and the norms of q and k.", "the scale; QK-norm; a smaller initialisation.",
    ),
    "sink_mass": Words(
        "softmax", "no error by itself: large decoders reach 90% of their heads",
        "A head that has nothing to fetch parks its weight.",
        "which heads are active on other data; the norm of the value there.",
        "usually nothing; a gate or a sink logit.",
    ),
    "clone_distance": Words(
        "heads", OURS, "Two heads look at the same keys and fetch the same.", "their weights; shared keys and values.",
        "fewer heads, or wider ones.",
    ),
    "dead_output": Words(
        "heads", OURS, "A head fetches next to nothing.", "the norm of its W_V, and whether it was pruned.",
        "draw it anew, or take it out.",
    ),
    "gradient_ratio": Words(
        "softmax", "after Noci et al. 2022; the number is ours", "Rows are saturated, or tokens have become alike.",
        "the rank-1 residual by depth, and the share of saturated rows.", "skips, pre-norm, residual scale; the scale.",
    ),
    "scale_ratio": Words(
        "scale", "Vaswani et al. 2017, section 3.2.1", "1/√H is missing, or applied twice, or H is another width.",
        "Var(q·k) / H at initialisation; a scale that is meant (1/H, or one behind a QK-norm) needs no mend.",
        "divide q·k by √H once.",
    ),
    "temperature": Words(
        "scale", OURS, "A temperature was read as its logarithm, or has run away in training.",
        "what the checkpoint stores, and the temperature over training.", "take the logarithm; bound it.",
    ),
    "uniform_entropy": Words(
        "projections", f"{OURS}; a small sd alone is no fault", "Queries and keys are small.",
        "the norms of q and k, and the effective scale.", "initialisation, scale, one normaliser fewer.",
    ),
    "score_rank": Words(
        "projections", OURS, "W_Q or W_K has lost its rank.", "the singular values of q (k − mean k)ᵀ over training.",
        "weight decay, width, initialisation.",
    ),
    "token_cosine": Words(
        "softmax", "rank collapse, Dong et al. 2021; the number is ours",
        "Attention averages tokens, and nothing keeps them apart.",
        "the rank-1 residual of the stream by depth, and ∇W_Q against ∇W_V.", "skips, pre-norm, residual scale.",
    ),
    "distance_ratio": Words(
        "positions", OURS, "Positions may not act.", "entropy and distance by position.",
        "base, order and offset of positions.",
    ),
    "future_keys": Words("mask", BY_DEFINITION, "The causal mask is too wide.", _EDGES, "the causal offset."),
    "own_share": Words("mask", BY_DEFINITION, "The causal mask is too narrow.", _EDGES, "the causal offset."),
    "visible_keys": Words(
        "mask", "a choice needs two keys", "The mask hides nearly everything, or is inverted.", _EDGES, "the mask.",
    ),
    "head_width": Words("heads", "common practice", "A choice.", "nothing, if it is meant.", "fewer or more heads."),
    # of what attention functions return
    "attention_function": Words(
        "softmax", EXACT, "The attention function is not the one that was asked for.",
        "the function alone: attn_jax.audit.audit_attention.", "",
    ),
    # of parameters
    "parameters": Words(
        "numerics", BY_DEFINITION, "A step of training overflowed, or the file is broken.", "the loss before it.",
        "an earlier checkpoint.",
    ),
    "tied_projections": Words(
        "projections", "relative difference of equal weights", "One projection is used for both.",
        "the symmetry of the scores.", "untie: scores are symmetric otherwise.",
    ),
    "symmetry": Words(
        "projections", f"{OURS}; independent weights have 0", "W_Q and W_K are nearly one: i attends to j as j to i.",
        "W_Q against W_K; with rotary positions direction is still expressible.", "untie.",
    ),
    "output_mixing": Words(
        "output", "relative size of what should mix", "W_O was left out, or never trained.",
        "whether W_O is read from the checkpoint.", "a full matrix lets heads write to all dimensions.",
    ),
    "output_size": Words(
        "output", OURS, "What heads fetch hardly reaches the stream.",
        "RMS(update) / RMS(stream), and the rank of W_O.",
        "the initialisation of W_O.",
    ),
    "output_rank": Words(
        "output", OURS, "W_O has lost its rank: heads write into few dimensions.", "the singular values of W_O.",
        "the initialisation of W_O.",
    ),
    "dead_heads": Words(
        "heads", OURS, "Heads write nothing.", "were they pruned, or is W_V or W_O 0?",
        "draw them anew, or take them out.",
    ),
    "equal_heads": Words(
        "heads", "cosine of copies", "Heads are copies of each other, and stay so under training.",
        "how they were drawn.", "draw each head apart.",
    ),
    # of blocks
    "layer_query": Words(
        "projections", EXACT, "Queries are not what the parameters and positions give.",
        "the projection and rotation of q.",
        "q = rotate(norm(x W_Q)).",
    ),
    "layer_key": Words(
        "projections", EXACT, "Keys are not what the parameters and positions give.",
        "the projection and rotation of k.",
        "k = rotate(norm(x W_K)).",
    ),
    "layer_value": Words(
        "values", EXACT, "Values are not what the parameters give.", "the projection of v.",
        "v = x W_V: no positions, one head after another.",
    ),
    "layer_output": Words(
        "output", EXACT, "The output projection is not applied as it stands.", "how heads are merged.",
        "merge heads in order, then W_O and its bias.",
    ),
    "skip": Words(
        "softmax", EXACT, "The residual path is cut: tokens become alike with depth (Dong et al. 2021).",
        "the mean cosine of tokens by layer.", "x + attention(norm(x)), then x + mlp(norm(x)).",
    ),
    "block": Words(
        "output", EXACT, "The block is not the sum of its branches.", "the norms and the residual path.",
        "x + attention(norm(x)), then x + mlp(norm(x)).",
    ),
    "heads_cut": Words(
        "heads", EXACT, "Heads are cut by a reshape that gives a head some of the tokens.", "the shapes before it.",
        "reshape to [B, T, N, H], then exchange the two axes.",
    ),
    # of calls
    "outputs": Words(
        "softmax", BY_DEFINITION, "An empty row, or an overflow.", "the first layer whose outputs are not finite.",
        "finite masking, float32.",
    ),
    "two_calls": Words(
        "dropout", "equal calls are equal", "Dropout, or noise, is on in evaluation.", "the flag deterministic.",
        "switch it off there.",
    ),
    "batch_items": Words(
        "batch", EXACT, "Something runs over the batch axis.", "means, norms and reshapes.", "keep items apart.",
    ),
    "future": Words(
        "mask", EXACT, "The mask lets queries see later tokens: a training loss that is too good.", _EDGES,
        "the causal offset.",
    ),
    "padding": Words("mask", EXACT, "Padding is read.", "the lengths on their way to the mask.", "a padding mask."),
    "decoding": Words(
        "cache", EXACT, "A cached sequence is continued in another way than it is read.",
        "where new keys go, which positions they get, and what the mask sees.", "one position, one slot, one mask.",
    ),
    "order": Words(
        "positions", EXACT, "The order of tokens does not matter: it is a bag of tokens.", "where positions enter.",
        "rotary positions, a position table or a bias.",
    ),
    "no_positions": Words(
        "positions", EXACT, "Positions do not reach the scores.",
        "the position table, the base, the positions handed over.",
        "turn queries and keys by the positions of their tokens.",
    ),
    "values_by_position": Words(
        "values", EXACT, "Positions enter the values.", "what is rotated.", "turn queries and keys alone.",
    ),
    "loss_cliff": Words(
        "positions", OURS, "Positions are past the trained length, or wrong.", "the loss by position on other texts.",
        "the base and scaling of the positions; a shorter input.",
    ),
    "gradients": Words(
        "gradients", "finite differences", "The derivative is not that of the function.",
        "a custom derivative, a stop_gradient.", "differentiate what is computed.",
    ),
}  # fmt: skip


def finding(signal: str, evidence: str, *, severity: str, **given: Any) -> Finding:
    """A finding of a signal: its words, unless others are given, and its numbers."""
    words = {**WORDS[signal]._asdict(), **{name: x for name, x in given.items() if name in Words._fields}}
    numbers = {name: x for name, x in given.items() if name not in Words._fields}
    return Finding(signal=signal, severity=severity, evidence=evidence, **words, **numbers)
