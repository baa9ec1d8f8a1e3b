"""The claims about what measurements tell of a model."""

from experiments.verdicts import NEEDS, Claim, Decision, Evidence, above, below


def _d1(e: Evidence) -> Decision:
    falls, without = below(e["spearman"], -0.5), below(e["spearman_no_sink"], -0.5)
    control = below(e["spearman_random"], -0.5)
    found = (
        f"rank correlation with depth {e['spearman'].value:.2f}, without the sink {e['spearman_no_sink'].value:.2f}, "
        f"at random weights {e['spearman_random'].value:.2f}"
    )
    if None in (falls, without, control):
        return Decision("inconclusive", f"{found}; {NEEDS.replace('seeds', 'documents')}")
    if not falls and not without:
        return Decision("refuted", found)
    if control:
        return Decision("inconclusive", f"the untrained control falls as well: {found}")
    if falls and without:
        return Decision("confirmed", found)
    return Decision("refined", f"only {'with' if falls else 'without'} the sink: {found}")


def _d6(e: Evidence) -> Decision:
    excess, heads = above(e["excess"], 0.1), above(e["sink_heads"], 0.1)
    other = above(e["excess_other_token"], 0.1)
    found = (
        f"mass {e['sink_mass'].value:.2f}, {e['excess'].value:+.2f} against random weights; "
        f"{e['sink_heads'].value:.0%} of heads are sinks; with another first token "
        f"{e['excess_other_token'].value:+.2f}"
    )
    if None in (excess, heads, other):
        return Decision("inconclusive", f"{found}; {NEEDS.replace('seeds', 'documents')}")
    if not excess:
        return Decision("refuted", found)
    if heads and other:
        return Decision("confirmed", found)
    return Decision("refined", f"only {'in few heads' if not heads else 'with its usual first token'}: {found}")


CLAIMS = (
    Claim(
        id="D1",
        statement="Healthy models have high entropy in shallow layers and low entropy in deep ones.",
        paper="Zhai et al. 2023, on training curves; repeated in tutorials",
        prediction="Refuted for decoders with sinks: the entropy follows the sink, which grows early and stays.",
        rule="Rank correlation of a layer's normalised entropy with its depth, per document. It falls if the "
        "interval lies below −0.5. Confirmed if it falls with and without the sink and not at random weights; "
        "refined if only with or only without; refuted if neither; inconclusive if an interval straddles or the "
        "control falls too.",
        scope="{model}, one checkpoint of three, {documents} documents of {tokens} tokens of {text}.",
        evidence={
            "spearman": "rank correlation of normalised entropy with depth",
            "spearman_no_sink": "the same without the first token",
            "spearman_random": "the same at random weights",
        },
        decide=_d1,
        least_count=5,
    ),
    Claim(
        id="D6",
        statement="Trained language models park mass on the first token.",
        paper="Xiao et al. 2023",
        prediction="Confirmed for decoders: far above the random-weight baseline, in a third of the heads or more, "
        "whatever the first token is.",
        rule="Confirmed if the first token's mass exceeds the random-weight baseline by more than 0.1 (interval "
        "of the paired difference over documents), with another first token as well, and more than 10% of heads "
        "give it over 0.3; refined if the difference holds and one of the others does not; refuted if it does "
        "not; inconclusive if an interval straddles.",
        scope="{model}, one checkpoint of three, {documents} documents of {tokens} tokens of {text}.",
        evidence={
            "excess": "mass on the first token, trained − random weights",
            "sink_mass": "mass on the first token, mean over layers and heads",
            "sink_heads": "share of heads with more than 0.3 on the first token",
            "excess_other_token": "the difference with another first token",
        },
        decide=_d6,
        least_count=5,
    ),
)
