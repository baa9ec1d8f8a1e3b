"""The claims that removing heads of real checkpoints settles.

What a removal costs: decoders lose nats a token; an encoder has no loss, so its cost is 1 − the cosine between its
embedding of a document and that of the whole model. Heads are removed for all tokens but the first. Two things were
changed after a first look, before any verdict: heads were first removed for the first token as well, which broke the
sink of SmolLM2 in one document of six (3 nats), and matched heads of the ends of the entropies were first drawn from
the middle half of the entropies, where many layers had none.
"""

from experiments.claims.diagnosis import each_checkpoint, slots
from experiments.verdicts import Claim, Decision, Evidence, above, below

MARGIN = 0.02  # nats, or of the cosine: a cost that matters
REDUNDANT = {"divergence": 0.05, "cka": 0.95}  # two heads closer than both lines are a redundant pair
SINK_CALIPER = 0.2  # heads are matched if their mass on the first token differs by no more

H5_FIELDS = {
    "gain": "cost of removing matched heads − of removing the most similar ones",
    "cost": "cost of removing the most similar heads, all at once",
    "gain_random": "the gain at random weights",
    "gain_shuffled": "the gain on shuffled tokens, similarity measured there too",
    "removed": "heads removed at once, mean over draws",
    "redundant": "share of heads that redundant pairs leave over",
    "redundant_random": "the same at random weights",
    "redundant_shuffled": "the same on shuffled tokens",
}
SINKS = (("", ""), ("_no_sink", " without the sink"))
ENDS = {"sharp": "sharpest", "diffuse": "most diffuse"}
D2A_FIELDS = {
    **{end: f"cost of removing the {name} heads − of matched ones between the ends" for end, name in ENDS.items()},
    **{f"{end}_no_sink": f"the same, {name} without the first token" for end, name in ENDS.items()},
    **{f"{end}_random": f"the first at random weights: {name}" for end, name in ENDS.items()},
    "spearman": "rank correlation of entropy and importance within layers",
    "spearman_no_sink": "the same, entropy without the first token",
    "agreement": "rank correlation of importance by gradient and |cost| of removing one head (decoders)",
}
SCOPE = (
    "{models}; {documents} documents of {tokens} tokens of {text}, means over {fitted} others, {share} of the heads at "
    "once, {draws} draws of matched heads."
)


def _h5(e: Evidence) -> Decision:
    def redundant(one: Evidence) -> str | None:
        finds, little = above(one["gain"], MARGIN), below(one["cost"], MARGIN)
        if None in (finds, little) or above(one["gain_random"], MARGIN):
            return None
        if finds and little:
            return "yes"
        if finds:
            return "cheaper than matched heads, but not cheap"
        return "cheap, but matched heads are as cheap" if little else "no"

    return each_checkpoint(e, H5_FIELDS, redundant, digits=3)


def _d2a(e: Evidence) -> Decision:
    def idle(one: Evidence) -> str | None:
        names = {f"{end}{sink}": f"the {name}{told}" for sink, told in SINKS for end, name in ENDS.items()}
        answers = {field: below(one[field], -MARGIN) for field in names}
        if None in answers.values() or any(below(one[f"{end}_random"], -MARGIN) for end in ENDS):
            return None
        found = [names[field] for field, answer in answers.items() if answer]
        if len(found) == len(names):
            return "yes"
        return f"only {' and '.join(found)}" if found else "no"

    return each_checkpoint(e, D2A_FIELDS, idle, digits=3)


CLAIMS = (
    Claim(
        id="H5",
        statement="Some heads are redundant: similarity finds them and removing them costs little.",
        paper="Michel et al. 2019; Voita et al. 2019; Clark et al. 2019, section 6 (clusters of heads)",
        prediction="Refined: the most similar tenth of the heads costs less than matched heads, since a twin stays, "
        "but more than 0.02 nats in decoders as small as these; of the encoder's embedding it changes little.",
        rule="Heads of a layer are clustered by the larger of √JS of their patterns and √(1 − CKA) of their outputs, "
        "in units of the lines of a redundant pair (JS 0.05, CKA 0.95), on other documents; the tightest clusters that "
        "leave a tenth of the heads over are cut, and of each cluster all heads but the most central are removed, at "
        "once. Removed: the output is its mean over other documents, for all tokens but the first, whose change would "
        "break the sink. Matched: as many heads that are in no cluster, drawn from the same layers, their mass on the "
        "first token within 0.2. Similarity finds them if the matched ones cost more by more than 0.02 (nats a token; "
        "of an encoder's cosine), paired by document; removing them costs little if the cost is below 0.02. "
        "Confirmed if both hold in every checkpoint, refuted if neither does in any, refined otherwise; "
        "inconclusive if an interval straddles or random weights gain more than 0.02.",
        scope=SCOPE,
        evidence=slots(H5_FIELDS),
        decide=_h5,
        least_count=5,
    ),
    Claim(
        id="D2a",
        statement="Entropy near 0 is over-concentration, near log n diffusion.",
        paper="repeated in tutorials; Zhai et al. 2023 for entropy near 0",
        prediction="Refined: sharp heads (previous token, induction) cost as much as others or more, unless it is the "
        "first token that makes them sharp, when they are idle; the most diffuse ones cost less than others.",
        rule="A head is at fault if it does little. The tenth of the heads with the lowest normalised entropy (the "
        "sharpest) and that with the highest (the most diffuse) are removed at once, each beside as many heads of the "
        "same layers, drawn from those at neither end. An end does little if it costs less than these by more than "
        "0.02 (nats a token; of an encoder's cosine), paired by document; with the first token's mass in the entropy, "
        "and without. Confirmed if both ends do little, with and without, in every checkpoint; "
        "refuted if none does in any, refined otherwise; inconclusive if an interval straddles or an end does little "
        "at random weights. Entropies are measured on other documents.",
        scope=SCOPE,
        evidence=slots(D2A_FIELDS),
        decide=_d2a,
        least_count=5,
    ),
)
