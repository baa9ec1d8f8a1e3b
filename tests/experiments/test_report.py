"""The page: complete, valid, self-contained, and deaf to whatever the artifacts say."""

import base64
import dataclasses
import html.parser
import itertools
import json

import pytest

from experiments import harness, report
from experiments.report import Run
from tests.experiments.toy import make

HOSTILE = (
    '<script>alert(1)</script>"><img src=x onerror=alert(2)>\' onmouseover=\'alert(3) </td></table><iframe src="http://e.vil">'
    "{{ 7 * 7 }} {% include 'x' %} javascript:alert(4) </style><link href=//e.vil> &amp; \x00 \u202e"
)
VOID = {"meta", "link", "img", "br", "hr", "input"}


class Page(html.parser.HTMLParser):
    """What a browser would build: elements with attributes and text, and whether every tag is closed in turn."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.open: list[str] = []
        self.text: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert len({name for name, _ in attrs}) == len(attrs)
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open, f"stray </{tag}>"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.text.setdefault(self.open[-1], []).append(data)

    def all(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.elements if name == tag]


def written(tmp_path, name="toy", *flags):
    with pytest.raises(SystemExit):
        harness.main(make(name=name), [name, f"--out={tmp_path / name}", *flags])
    run = report.load_run(tmp_path / name)
    assert run is not None
    return run


def poisoned(run: Run) -> Run:
    """Every text of a run replaced by hostile text."""

    def poison(value):
        if isinstance(value, dict):
            return {name: poison(x) for name, x in value.items()}
        if isinstance(value, list):
            return [poison(x) for x in value]
        return HOSTILE if isinstance(value, str) else value

    record, claims, tables = (poison(json.loads(json.dumps(x))) for x in (run.record, run.claims, run.tables))
    return dataclasses.replace(run, name=HOSTILE, record=record, claims=claims, tables=tables, alt=HOSTILE)


def test_every_claim_has_verdict_scope_number_rule_figure_and_command(tmp_path):
    run = written(tmp_path, "toy", "--seed=5")
    text = report.render([run])
    page = Page(text)
    (claim,) = run.claims
    for needed in ("T1", "Squares grow.", "confirmed", "sizes (1, 2, 3)", claim["rule"], claim["paper"], "mean square"):
        assert needed in text
    assert report.spell(claim) in text
    assert "python -m experiments.toy --preset=quick --seed=5" in text
    (image,) = page.all("img")
    kind, data = image["src"].split(",", 1)
    assert kind == "data:image/png;base64"
    assert base64.b64decode(data) == (tmp_path / "toy" / "figure.png").read_bytes()
    assert "1 confirmed, 0 refined, 0 refuted, 0 inconclusive." in " ".join(text.split())


def test_what_is_counted_has_no_runs(tmp_path):
    run = written(tmp_path)
    sampled, counted = ("".join(Page(report.render([x])).text["td"]) for x in (run, counted_instead(run)))
    assert "counted" not in sampled
    assert "counted" in counted


def counted_instead(run: Run) -> Run:
    claims = [{**claim, "evidence": [{**x, "count": None} for x in claim["evidence"]]} for claim in run.claims]
    return dataclasses.replace(run, claims=claims)


@pytest.mark.parametrize("runs", [0, 1, 2])
def test_the_page_is_whole_and_accessible(runs, tmp_path):
    names = ["toy", "other"][:runs]
    page = Page(report.render([written(tmp_path, name) for name in names]))
    assert page.all("html") == [{"lang": "en"}]
    assert len(page.all("h1")) == len(page.all("main")) == len(page.all("title")) == 1
    levels = [int(tag[1]) for tag, _ in page.elements if tag in ("h1", "h2", "h3", "h4")]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert len(page.all("caption")) == len(page.all("table"))
    assert all(cell.get("scope") in ("col", "row") for cell in page.all("th"))
    assert all(image["alt"] for image in page.all("img"))
    assert all(
        region["tabindex"] == "0" and region["aria-label"] for region in page.all("div")
    )  # scrollable by keyboard
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(set(ids)) >= len(ids) - (runs == 2)  # the two toys make the same claim
    targets = [a["href"][1:] for a in page.all("a")] + [s["aria-labelledby"] for s in page.all("section")]
    assert set(targets) <= set(ids)
    assert page.all("a")[0] == {"class": "skip", "href": "#main"}


def test_nothing_is_fetched_and_nothing_runs(tmp_path):
    page = Page(report.render([written(tmp_path)]))
    assert_inert(page)
    (policy,) = [m["content"] for m in page.all("meta") if m.get("http-equiv") == "Content-Security-Policy"]
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    style = "".join(page.text["style"])
    assert "url(" not in style
    assert "@import" not in style
    assert "prefers-color-scheme: dark" in style


def test_hostile_text_stays_text(tmp_path):
    calm = written(tmp_path)
    page, plain = Page(report.render([poisoned(calm)], failed=[HOSTILE])), Page(report.render([calm], failed=["x"]))
    assert_inert(page)
    assert [tag for tag, _ in page.elements] == [tag for tag, _ in plain.elements]  # no element more or less
    assert "{{ 7 * 7 }}" in "".join(page.text["h3"])  # shown, not evaluated
    assert HOSTILE.replace("\x00", "\ufffd") in "".join(page.text["caption"]) or HOSTILE in "".join(
        page.text["caption"]
    )


def assert_inert(page: Page) -> None:
    allowed = {
        "a",
        "body",
        "caption",
        "code",
        "dd",
        "div",
        "dl",
        "dt",
        "figcaption",
        "figure",
        "h1",
        "h2",
        "h3",
        "head",
    }
    allowed |= {
        "header",
        "html",
        "img",
        "li",
        "main",
        "meta",
        "nav",
        "p",
        "section",
        "span",
        "strong",
        "style",
        "table",
    }
    allowed |= {"tbody", "td", "th", "thead", "title", "tr", "ul"}
    assert {tag for tag, _ in page.elements} <= allowed
    for tag, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on") or name in ("style", "srcset", "action")]
        assert attributes.get("href", "#").startswith("#")
        assert attributes.get("src", "data:image/png;base64,").startswith("data:image/png;base64,")
        assert tag != "meta" or attributes.get("http-equiv") in (None, "Content-Security-Policy")


def test_the_page_of_a_model_is_linked_where_there_is_one(tmp_path):
    def links():
        page = Page(report.build(tmp_path, ()).read_text("utf-8"))
        return [a["href"] for a in page.all("a") if not a["href"].startswith("#")]

    assert links() == []
    (tmp_path / "model_report").mkdir()
    (tmp_path / "model_report" / "index.html").write_text("it")
    assert links() == ["../model_report/index.html"]
    assert (tmp_path / "report" / links()[0]).read_text() == "it"


def test_unknown_numbers_are_dashes():
    assert report.spell({"value": None, "interval": [None, float("nan")]}) == "– [–, –]"
    assert report.spell({"value": 0.123456, "interval": [-1, 2e7]}) == "0.1235 [-1, 2e+07]"


def test_measurements_by_layer_become_a_table_without_a_summary(tmp_path):
    written(tmp_path)
    (tmp_path / "toy" / "summary.json").unlink()
    (tmp_path / "toy" / "measurements.csv").write_text(
        "layer,head,measure,value\n0,0,entropy,0.5\n0,1,entropy,0.7\n1,0,entropy,0.25\n1,0,sink,0.125\n"
    )
    run = report.load_run(tmp_path / "toy")
    (table,) = run.tables
    assert table["columns"] == ["layer", "entropy", "sink"]
    assert table["rows"] == [["0", "0.6", "–"], ["1", "0.25", "0.125"]]
    assert run.alt
    Page(report.render([run]))


def test_a_run_that_is_not_finished_is_not_shown(tmp_path):
    assert report.load_run(tmp_path) is None
    written(tmp_path)
    (tmp_path / "toy" / "claims.json").unlink()
    assert report.load_run(tmp_path / "toy") is None


def spoil(path, text):
    """Puts `text` in the place of a file, or a directory if there is none."""
    path.unlink()
    if text is None:
        path.mkdir()
    else:
        path.write_text(text)


@pytest.mark.parametrize("name", ["claims.json", "config.json", "summary.json"])
@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '{"experiment": "toy", "tables": 7}', '[{"claim": "T1"}]', "7", "[" * 100_000, None]
)
def test_a_broken_run_is_named_and_the_others_are_shown(name, text, tmp_path):
    written(tmp_path)
    written(tmp_path, "other")
    spoil(tmp_path / "toy" / name, text)
    page = report.build(tmp_path, ("toy", "other", "absent"))
    assert page == tmp_path / "report" / "index.html"
    shown = page.read_text("utf-8")
    assert "toy failed" in " ".join(shown.split())
    assert "experiments.other" in shown
    assert "experiments.toy" not in shown


def test_equal_runs_give_equal_pages(tmp_path):
    first, second = (report.build(tmp_path / out, ("toy",)) for out in ("a", "b") if written(tmp_path / out))
    assert first.read_bytes() == second.read_bytes()
