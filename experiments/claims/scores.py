"""The claims about scores and their scale."""

from experiments.verdicts import NEEDS, Claim, Decision, Evidence, above, below, every, inside, plain


def _s1(e: Evidence) -> Decision:
    answer = every(inside(e["slope"], 0.98, 1.02), inside(e["ratio"], 0.95, 1.05))
    found = (
        f"Var(q·k) grows as d_k^{e['slope'].value:.3f}. One correlated side changes nothing "
        f"(×{e['one_white_ratio'].value:.2f}); with two, Var = tr ΣqΣk (×{e['trace_ratio'].value:.2f}), here "
        f"d_k^{e['both_slope'].value:.2f}. Heavy tails leave the mean (×{e['heavy_ratio'].value:.2f}) and spread the "
        f"estimate of a single run ×{e['heavy_spread'].value:.1f}."
    )
    return plain(answer, found)


def _s2(e: Evidence) -> Decision:
    answer = every(
        inside(e["sqrt_slope"], -0.02, 0.02),
        inside(e["sqrt_ratio"], 0.95, 1.05),
        inside(e["inverse_slope"], -1.02, -0.98),
        above(e["inverse_entropy_wide"], 0.99),
    )
    conditions = []
    if above(e["correlated_ratio"], 1.05):
        conditions.append(
            f"one side must be uncorrelated: with two correlated sides 1/√d_k leaves {e['correlated_ratio'].value:.3g}"
        )
    if above(e["inverse_entropy_narrow"], 0.99) is not True:
        narrow = e["inverse_entropy_narrow"].value
        conditions.append(f"1/d_k is near-uniform only for wide heads (the narrowest reads {narrow:.3f} of ln n)")
    if answer and conditions:
        return Decision("refined", "; ".join(conditions))
    return plain(answer, f"variance {e['sqrt_ratio'].value:.3f} at every width under 1/√d_k")


def _s3(e: Evidence) -> Decision:
    unit = {name: inside(e[name], 0.9, 1.1) for name in ("lecun", "xavier", "normal", "mup")}
    matters = inside(e["without"], 0.9, 1.1)
    values = ", ".join(f"{name} {e[name].value:.3g}" for name in unit)
    if None in unit.values() or matters is None:
        return Decision("inconclusive", NEEDS)
    if matters or not any(unit.values()):
        return Decision("refuted", f"variance of q: {values}; without the norm {e['without'].value:.3g}")
    if all(unit.values()):
        return Decision("confirmed", f"variance of q: {values}; without the norm {e['without'].value:.3g}")
    return Decision(
        "refined",
        f"the norm fixes the input, the initialiser fixes q: {values}. Only those with Var(W) = 1/D give 1; without "
        f"the norm the stream's variance passes through (×{e['without'].value:.3g})",
    )


def _s4(e: Evidence) -> Decision:
    limit = every(
        above(e["rise"], 0.0),
        inside(e["scaled_rise"], -0.1, 0.1),
        above(e["weight_wide"], 0.9),
        below(e["entropy_wide"], 0.1),
    )
    if not limit:
        return plain(limit, f"largest weight {e['weight_wide'].value:.2f} at the widest head")
    common = above(e["weight_common"], 0.9)
    found = (
        f"largest weight {e['weight_common'].value:.2f} at a common width and the longest length, "
        f"{e['weight_wide'].value:.2f} at the widest. It passes 1/2 at a d_k that grows as "
        f"(ln n)^{e['onset_exponent'].value:.2f}; H ≈ ln n − v/2 holds to 0.1 nats up to "
        f"r = sd/√(2 ln n) = {e['gaussian_end'].value:.2f}"
    )
    if common is None:
        return Decision("inconclusive", NEEDS)
    return Decision("confirmed" if common else "refined", found if common else f"only for d_k far above ln n: {found}")


def _s5(e: Evidence) -> Decision:
    names = {
        "logit_median_ratio": "the median gradient at the logits",
        "query_median_ratio": "the median gradient at q",
        "logit_mean_ratio": "the mean gradient at the logits",
        "query_mean_ratio": "the mean gradient at q",
    }
    dies = {name: below(e[name], 0.1) for name in names}
    spelled = {name: f"{names[name]} (×{e[name].value:.2g})" for name in names}
    dead, alive = ([spelled[name] for name in names if dies[name] is state] for state in (True, False))
    if len(dead) == len(names):
        return Decision("confirmed", "under a tenth: " + ", ".join(dead))
    if len(alive) == len(names):
        return Decision("refuted", "not under a tenth: " + ", ".join(alive))
    if not (dead and alive):
        return Decision("inconclusive", NEEDS)
    return Decision(
        "refined",
        f"dies: {', '.join(dead)}; does not: {', '.join(alive)}. {e['dead_share'].value:.0%} of rows get under 1% of "
        f"the scaled median at the logits; W_Q against W_V: ×{e['weight_ratio'].value:.2g} of the scaled ratio",
    )


def _s5b(e: Evidence) -> Decision:
    exact = below(e["diagonal_error"], 1e-4)
    shares = [below(e[name], 0.01) for name in ("off_share_sharp", "off_share_uniform", "diagonal_only_error")]
    if not exact:
        return plain(exact, "the diagonal of the Jacobian is not p(1 − p)")
    if all(shares):
        return Decision("confirmed", "the diagonal is all there is")
    if False not in shares:
        return Decision("inconclusive", NEEDS)
    return Decision(
        "refined",
        f"p(1 − p) is the diagonal only. Off it lie {e['off_share_sharp'].value:.0%} of the squared norm when sharp, "
        f"{e['off_share_uniform'].value:.1%} when diffuse; the diagonal alone gives a gradient that is "
        f"{e['diagonal_only_error'].value:.0%} off and moves along the constant direction, which the softmax ignores",
    )


def _s7(e: Evidence) -> Decision:
    head, model, half = (inside(e[name], 0.5, 2.0) for name in ("head", "model", "half"))
    found = (
        f"variance {e['head'].value:.3g} under 1/√d_k, {e['model'].value:.3g} under 1/√D, {e['half'].value:.2g} under "
        "1/(2 d_k)"
    )
    if not head or model is None or half is None:
        return Decision("inconclusive", NEEDS)
    if model and half:
        return Decision("confirmed", found)
    if not (model or half):
        return Decision("refuted", f"it is the head width, under the root: {found}")
    return Decision("refined", f"{'the model width' if model else 'twice the head width'} does as well: {found}")


VASWANI = "Vaswani et al. 2017, section 3.2.1"

CLAIMS = (
    Claim(
        id="S1",
        statement="For independent zero-mean unit-variance components Var(q·k) = d_k: standard deviation 8 at 64, "
        "22.6 at 512.",
        paper=VASWANI + ", footnote 4",
        prediction="Confirmed. One white side is enough, since Var = tr ΣqΣk; heavy tails with a finite variance "
        "spoil the estimate and not the variance.",
        rule="Confirmed if the interval of the slope of ln Var on ln d_k lies in 1 ± 0.02 and that of Var/d_k in "
        "1 ± 0.05; refuted if one of them lies outside; else inconclusive.",
        scope="Simulated Gaussian q and k, d_k = {widths}, {seeds} seeds of {pairs} pairs; correlated by one "
        "shared factor (ρ = {correlation}); heavy tails: Student t, {degrees} degrees of freedom. No model, no "
        "data.",
        evidence={
            "slope": "slope of ln Var(q·k) on ln d_k",
            "ratio": "Var(q·k) / d_k, mean over widths",
            "one_white_ratio": "Var / d_k with one correlated side",
            "both_slope": "slope with two correlated sides",
            "trace_ratio": "Var / tr ΣqΣk with two correlated sides",
            "heavy_ratio": "Var / d_k with heavy tails",
            "heavy_spread": "spread of one run's estimate, heavy tails over Gaussian",
        },
        decide=_s1,
    ),
    Claim(
        id="S2",
        statement="Dividing by √d_k restores variance 1 at every width; dividing by d_k gives 1/d_k and a "
        "near-uniform softmax.",
        paper=VASWANI,
        prediction="Refined: for components uncorrelated on one side; and near-uniform from d_k of about "
        "1/(0.02 ln n) on.",
        rule="The statement holds if slope (0 ± 0.02) and mean (1 ± 0.05) of the variance under 1/√d_k, slope "
        "under 1/d_k (−1 ± 0.02) and normalised entropy at the widest head (≥ 0.99) do. Then refined if two "
        "correlated sides leave more than 1.05 at the widest head, or if the narrowest head's entropy is not "
        "above 0.99; else confirmed. Refuted if one part lies outside; else inconclusive.",
        scope="Simulated q and k at initialisation, d_k = {widths}, n = {length} keys, {seeds} seeds. No model, "
        "no data.",
        evidence={
            "sqrt_ratio": "variance under 1/√d_k, mean over widths",
            "sqrt_slope": "slope of ln Var on ln d_k under 1/√d_k",
            "inverse_slope": "slope under 1/d_k",
            "inverse_entropy_wide": "normalised entropy under 1/d_k, widest head",
            "inverse_entropy_narrow": "normalised entropy under 1/d_k, narrowest head",
            "correlated_ratio": "variance under 1/√d_k, two correlated sides, widest head",
        },
        decide=_s2,
    ),
    Claim(
        id="S3",
        statement="Layer normalisation of the input is what makes Q and K unit-variance.",
        paper="Ba et al. 2016; " + VASWANI,
        prediction="Refined: it takes the norm and an initialiser of variance 1/D; N(0, 0.02²) gives D/2500.",
        rule="A variance is unit if its interval lies in 1 ± 0.1. Confirmed if it is under every initialiser and "
        "is not without the norm; refined if it is under some and is not without the norm; refuted if under "
        "none, or if it is without the norm as well; inconclusive if an interval straddles.",
        scope="Initialisation only. D = {model_width}, d_k = {head_width}, {tokens} tokens, {seeds} seeds; "
        "without the norm the stream has variance {stream_variance}. No training.",
        evidence={
            "lecun": "Var(q), LayerNorm, LeCun normal (1/D)",
            "xavier": "Var(q), LayerNorm, Xavier on D × D",
            "normal": "Var(q), LayerNorm, N(0, 0.02²)",
            "mup": "Var(q), LayerNorm, muP-like (1/D, scale 1/d_k)",
            "without": "Var(q) without LayerNorm, LeCun normal",
        },
        decide=_s3,
    ),
    Claim(
        id="S4",
        statement="Unscaled, the softmax saturates as d_k grows: largest weight → 1, entropy → 0.",
        paper=VASWANI,
        prediction="Refined: it begins where sd = √d_k passes √(2 ln n), and approaches 1 slowly, as 1 − √(2 ln "
        "n / d_k); at d_k = 128 and thousands of keys it is not there.",
        rule="The limit holds if at the longest length the largest weight rises from the narrowest to the widest "
        "head (interval above 0), the scaled one moves by less than 0.1, and the widest head reads above 0.9 "
        "with normalised entropy below 0.1. Then confirmed if a common width (the widest up to 128) reads above "
        "0.9 too, refined if below. Refuted if a part of the limit fails; else inconclusive.",
        scope="Simulated Gaussian q and k, d_k = {widths}, n = {lengths}, {seeds} seeds of {rows} queries. No "
        "model, no data.",
        evidence={
            "weight_common": "mean largest weight, unscaled, common width, longest length",
            "weight_wide": "mean largest weight, unscaled, widest head, longest length",
            "entropy_wide": "normalised entropy, unscaled, widest head, longest length",
            "rise": "largest weight, widest − narrowest head, unscaled",
            "scaled_rise": "largest weight, widest − narrowest head, scaled",
            "onset_exponent": "exponent of the d_k of largest weight 1/2 in ln n",
            "gaussian_end": "r where ln n − v/2 is first 0.1 nats off",
        },
        decide=_s4,
    ),
    Claim(
        id="S5",
        statement="Saturation kills the gradient.",
        paper=VASWANI,
        prediction="Refined: the median row dies, the mean does not, because rows with two close leaders keep a "
        "large gradient; and at q the missing factor 1/√d_k pays back what the softmax takes.",
        rule="Each of four ratios, unscaled over scaled (median and mean over rows, at the logits and at q), "
        "dies if its interval lies below 0.1. Confirmed if all die, refuted if none, refined if one does "
        "and one does not; else inconclusive.",
        scope="Simulated Gaussian q, k, v, d_k = {width}, n = {length}, {seeds} seeds of {rows} queries, a random "
        "gradient at the output. No model, no data.",
        evidence={
            "logit_median_ratio": "gradient at the logits, median over rows, unscaled / scaled",
            "query_median_ratio": "gradient at q, median over rows, unscaled / scaled",
            "logit_mean_ratio": "gradient at the logits, mean over rows, unscaled / scaled",
            "query_mean_ratio": "gradient at q, mean over rows, unscaled / scaled",
            "dead_share": "share of unscaled rows below 1% of the scaled median, at the logits",
            "query_dead_share": "the same at q",
            "weight_ratio": "‖∇W_Q‖/‖∇W_V‖, unscaled / scaled",
        },
        decide=_s5,
    ),
    Claim(
        id="S5b",
        statement="The derivative of softmax is p(1 − p).",
        paper="the logistic function's derivative, carried over",
        prediction="Refined: that is the diagonal of diag(p) − p pᵀ; the rest carries half of the norm when two "
        "keys compete.",
        rule="Refuted if the Jacobian's diagonal differs from p(1 − p) by more than 1e-4 of its largest entry. "
        "Confirmed if the off-diagonal share of the squared Frobenius norm, sharp and diffuse, and the error of "
        "a gradient made with the diagonal alone are all below 1%; refined if one is above; else "
        "inconclusive.",
        scope="Jacobian by automatic differentiation, n = {length}, sharp: unscaled d_k = {width}, diffuse: "
        "scaled; {seeds} seeds.",
        evidence={
            "off_share_sharp": "off-diagonal share of ‖J‖², unscaled",
            "off_share_uniform": "off-diagonal share of ‖J‖², scaled",
            "diagonal_only_error": "‖J g − diag(J) g‖ / ‖J g‖, random g, unscaled",
            "diagonal_error": "largest |diag(J) − p(1 − p)| over the largest entry",
            "row_sum": "largest |Σ_j J_ij| over the largest entry (0: a constant moves nothing)",
        },
        decide=_s5b,
    ),
    Claim(
        id="S7",
        statement="Any reading of d will do: 1/√D with the model width, or 1/(2 d_k), serves as 1/√d_k does.",
        paper=VASWANI,
        prediction="Refuted: the variance is d_k/D = 1/N under the first and 1/(4 d_k) under the second.",
        rule="A rule serves if the interval of the logit variance at initialisation lies in [0.5, 2]. Confirmed "
        "if both serve, refined if one does, refuted if none does; inconclusive if an interval straddles or "
        "1/√d_k itself does not serve.",
        scope="Initialisation only. D = {model_width}, d_k = {head_width}, n = {length}, {seeds} seeds. No training.",
        evidence={
            "model": "logit variance under 1/√D",
            "half": "logit variance under 1/(2 d_k)",
            "head": "logit variance under 1/√d_k",
            "entropy_model": "normalised entropy under 1/√D",
            "entropy_half": "normalised entropy under 1/(2 d_k)",
        },
        decide=_s7,
    ),
)
