"""Known decisions of every rule, by topic: `CASES[claim]` lists verdicts and the evidence that gives them."""
