"""The page of a model: its data are the model's, its text stays text, it asks nobody for anything, and it is small."""

import base64
import dataclasses
import hashlib
import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax import models
from attn_jax.diagnostics import summarize_heads
from attn_jax.diagnostics.diagnosis import measures as diagnosed
from experiments import artifacts, model_report
from experiments.model_report import measures
from experiments.model_report import page as pages
from experiments.model_report.page import encode, render, write_report
from experiments.model_report.safe import packed, rounded, to_script, visible, visible_token
from tests.experiments.report_subjects import HOSTILE, NAME, subject, unpacked
from tests.experiments.test_report import Page
from tests.models import llama_files

# Numbers and texts on their way


@pytest.mark.parametrize(("kind", "step"), [("uint8", 1 / 254), ("uint16", 1 / 65534), ("float32", 1e-7)])
def test_packed_numbers_come_back(kind, step):
    values = np.array([[0, 1, np.nan], [0.5, 1 / 3, 1 - 1e-9]], np.float64)
    found = json.loads(json.dumps(packed(values, kind)))
    np.testing.assert_allclose(unpacked(found), values, atol=step / 2 + 1e-12)
    if kind != "float32":
        assert unpacked(packed(np.array([np.inf, -0.1, 1.1]), kind)).tolist()[1:] == [0, 1]
        assert np.isnan(unpacked(packed(np.array([np.inf]), kind)))


def test_what_is_encoded_is_what_was_measured():
    one = subject(start=5)
    found = json.loads(json.dumps(encode(one)))
    shown = len(HOSTILE)
    np.testing.assert_allclose(unpacked(found["pattern"]), one.look.pattern[..., :shown], atol=0.5 / 254 + 1e-9)
    np.testing.assert_allclose(unpacked(found["entropy"]), one.look.entropy, atol=1e-5)
    np.testing.assert_array_equal(unpacked(found["spectrum"]), one.look.spectrum)
    by_name = {measure["name"]: measure for measure in found["measures"]}
    assert set(by_name) == set(one.diagnosis.measures) - {"nearest_head"}
    for name, measure in by_name.items():
        values = np.array(measure["values"], np.float64)
        expected = one.diagnosis.measures[name]
        np.testing.assert_allclose(values, expected.reshape(values.shape), rtol=1e-5)
        assert measure["by_head"] == (expected.ndim == 2)
    assert [measure["name"] for measure in found["measures"]][:2] == [
        "normalized_entropy",
        "normalized_entropy_no_sink",
    ]
    assert found["clusters"] == one.clusters.tolist()
    for head, (nearest, divergence) in enumerate(zip(found["nearest"], found["divergence"], strict=True)):
        others = np.delete(np.arange(6), head)
        assert nearest == others[np.argsort(one.divergence[head, others])].tolist()
        np.testing.assert_allclose(divergence, one.divergence[head, nearest], rtol=1e-5)
    assert len(found["keys"]) == len(found["queries"]) == shown


def test_weight_outside_the_window_has_a_column_where_there_is_some():
    one = subject()
    weights = one.look.pattern.copy()
    weights[0, 0, 3, :] = 0
    weights[0, 0, 3, -2] = 1
    found = encode(dataclasses.replace(one, look=dataclasses.replace(one.look, pattern=weights)))
    assert found["keys"][-1] == "(all before)"
    assert unpacked(found["pattern"])[0, 0, 3, -1] == 1
    moved = dataclasses.replace(one, look=dataclasses.replace(one.look, pattern=weights))
    assert pages.compare([one, moved]) == {"heads": True, "window": False}  # they have other columns
    assert found["queries"] == found["keys"][:-1]


def test_every_letter_is_to_be_seen():
    assert visible("a b\u202e\ud800\x00\u2028é😀مر") == "a b⟨U+202E⟩⟨U+D800⟩⟨U+0000⟩⟨U+2028⟩é😀مر"
    assert [visible_token(x) for x in (" of", "\n\t", "", "\xa0")] == ["␣of", "⏎⇥", "∅", "⟨U+00A0⟩"]
    for text in (*HOSTILE, NAME):
        visible_token(text).encode()  # no surrogate is left


def test_data_cannot_end_its_script():
    text = to_script({"x": [*HOSTILE, None, 0.5]})
    assert text.isascii()
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"x": [*HOSTILE, None, 0.5]}
    assert rounded(np.array([[1 / 3, np.nan], [np.inf, -0.0]])) == [[0.333333, None], [None, 0.0]]


# The page


@pytest.fixture(scope="module")
def hostile_page():
    return render([subject(), subject(1, name="b" + NAME)])


def calm(one):
    """The same subject with texts that say nothing."""
    findings = [
        dataclasses.replace(x, evidence="e", cause="c", check="c", mend="m", origin="o") for x in one.diagnosis.findings
    ]
    diagnosis = dataclasses.replace(one.diagnosis, findings=tuple(findings), skipped=(("residual", "w"),))
    return dataclasses.replace(one, name="a", text="t", tokens=("t",) * len(one.tokens), diagnosis=diagnosis)


def test_hostile_text_stays_text(hostile_page):
    page, plain = Page(hostile_page), Page(render([calm(subject()), calm(subject(1))]))
    assert [tag for tag, _ in page.elements] == [tag for tag, _ in plain.elements]  # no element more or less
    assert "".join(page.text["bdi"]).count(visible(NAME)) == 8  # both names in four places
    assert HOSTILE[0] + visible(HOSTILE[4]) in "".join(page.text["dd"])
    assert "\u202e" not in hostile_page
    (title,) = page.text["title"]
    assert title == f"Routing of {visible(NAME)} and {visible('b' + NAME)}"


def test_nothing_is_fetched_and_only_our_scripts_run(hostile_page):
    page = Page(hostile_page)
    for tag, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "srcset", "action")]
        assert attributes.get("href", "#").startswith("#")
        assert tag not in ("link", "iframe", "object", "embed", "base", "img")
    (policy,) = [m["content"] for m in page.all("meta") if m.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    digests = rules.pop("script-src").split()
    assert rules == {
        "default-src": "'none'", "style-src": "'unsafe-inline'", "img-src": "data:", "base-uri": "'none'",
        "form-action": "'none'",
    }  # fmt: skip
    data, plotly, report = page.text["script"]
    assert [script.get("type") for script in page.all("script")] == ["application/json", "text/plain", None]
    for script in (plotly, report):
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert digests.pop(0) == f"'sha256-{digest}'"
        assert "\r" not in script  # the browser would turn it into another text
        assert "</script" not in script.lower()
        assert "<!--" not in script
    assert digests == []
    assert plotly == pages.plotly_script()
    assert "innerHTML" not in report
    assert json.loads(data)["subjects"] == json.loads(
        to_script([encode(subject()), encode(subject(1, name="b" + NAME))])
    )
    style = "".join(page.text["style"])
    assert "url(" not in style
    assert "@import" not in style


def test_the_page_is_whole_and_accessible(hostile_page):
    page = Page(hostile_page)
    assert page.all("html") == [{"lang": "en"}]
    assert len(page.all("h1")) == len(page.all("main")) == len(page.all("title")) == 1
    levels = [int(tag[1]) for tag, _ in page.elements if tag in ("h1", "h2", "h3", "h4")]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [a["href"][1:] for a in page.all("a")]
    assert {link for link in links if not link.startswith("L")} <= set(ids)
    assert {link for link in links if link.startswith("L")} >= {"L2H1", "L1H0", "L0"}  # where the findings are
    assert [a for a in page.all("a") if a.get("class") == "skip"] == page.all("a")[:3]
    named = [
        attributes for _, attributes in page.elements if attributes.get("role") in ("application", "img", "region")
    ]
    assert all(attributes["aria-label"] for attributes in named)
    for figure in ("map-0", "pattern", "entropy", "spectrum"):
        assert figure in ids
    tables = [
        attributes for tag, attributes in page.elements if tag == "details" and attributes.get("class") == "table"
    ]
    assert len(tables) == len(page.all("figure")) == len(subject().diagnosis.measures) - 1 + 3


def test_what_is_the_same_everywhere_is_a_line_and_not_a_map():
    one = subject()
    found = {**one.diagnosis.measures, "head_width": np.full(3, 8.0), "non_finite": np.zeros((3, 2))}
    diagnosis = dataclasses.replace(one.diagnosis, measures=found)
    page = Page(render([dataclasses.replace(one, diagnosis=diagnosis)]))
    assert len(page.all("figure")) == len(Page(render([one])).all("figure"))
    words = " ".join("".join(page.text["p"]).split())
    assert "The same in all layers and heads: Rows that are not finite 0; Width of a head 8." in words
    unknown = {**found, "non_finite": np.full((3, 2), np.nan), "head_width": np.array([8.0, 8.0, 4.0])}
    diagnosis = dataclasses.replace(one.diagnosis, measures=unknown)
    page = Page(render([dataclasses.replace(one, diagnosis=diagnosis)]))
    assert "The same in all" not in "".join(page.text["p"])


def test_every_measure_of_a_diagnosis_has_words():
    assert set(diagnosed.MEASURES) == {*measures.MEASURES, "nearest_head"}


def test_findings_come_first_and_say_what_they_have():
    one = subject()
    text = render([one])
    assert text.index('id="findings"') < text.index('id="maps"') < text.index('id="head"')
    page = Page(text)
    words = " ".join("".join(page.text["dd"]).split())
    for found in one.diagnosis.findings:
        for part in (found.origin, found.cause, found.check, found.mend):
            assert visible(part) in words
    assert "1234, where the line is 1000 (a paper)" in words
    assert "–, where" in words
    assert "and 3 more" in " ".join(page.text["summary"])
    nothing = dataclasses.replace(one.diagnosis, findings=(), skipped=())
    assert "Nothing was found" in render([dataclasses.replace(one, diagnosis=nothing)])


def test_two_models_are_compared_where_they_can_be():
    one = subject()
    assert pages.compare([one]) == {"heads": False, "window": False}
    assert pages.compare([one, subject(1)]) == {"heads": True, "window": True}
    assert pages.compare([one, subject(1, tokens=("t",) * len(HOSTILE))]) == {"heads": True, "window": False}
    assert pages.compare([one, subject(1, layers=2)]) == {"heads": False, "window": False}
    render([one, subject(1, layers=2)])
    for wrong in ([], [one] * 3):
        with pytest.raises(ValueError, match=f"one or two, got {len(wrong)}"):
            render(wrong)


def test_a_page_of_30_layers_is_below_8_megabytes():
    large = {"layers": 30, "heads": 9, "width": 64, "length": 256}
    one = subject(**large, tokens=[f" word{i}" for i in range(64)])
    assert len(render([one]).encode()) < 8e6
    two = [subject(seed, **large, tokens=[f" word{i}" for i in range(48)]) for seed in (0, 1)]
    assert len(render(two).encode()) < 8e6


def test_equal_subjects_give_equal_pages_and_files_of_others_are_left_alone(tmp_path):
    first, second = (write_report(tmp_path / out / "index.html", [subject()]) for out in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
    assert write_report(first, [subject(1)]).read_bytes() != second.read_bytes()
    (tmp_path / "mine.html").write_text("mine")
    with pytest.raises(artifacts.OutputError, match=r"mine\.html"):
        write_report(tmp_path / "mine.html", [subject()])
    assert (tmp_path / "mine.html").read_text() == "mine"
    with pytest.raises(artifacts.OutputError, match="cannot be written"):
        write_report(tmp_path / "mine.html" / "index.html", [subject()])


# The command


def ended(*flags):
    with pytest.raises(SystemExit) as stopped:
        model_report.main(["model_report", *map(str, flags)])
    return stopped.value.code


def data_of(page):
    return json.loads(Page(page.read_text("utf-8")).text["script"][0])


def test_the_command_reads_a_checkpoint(tmp_path, capsys):
    llama_files.write(tmp_path / "a.gguf")
    (tmp_path / "b.txt").write_text(" ".join(HOSTILE[:4]) + "😀 \u202e", "utf-8")
    out = tmp_path / "out"
    flags = (f"--model={tmp_path}/a.gguf", f"--text_file={tmp_path}/b.txt", "--max_tokens=24", "--window=2:10")
    assert ended(*flags, f"--out={out}") == 0
    assert f"wrote {out}/index.html" in capsys.readouterr().out
    (found,) = data_of(out / "index.html")["subjects"]
    assert (found["layers"], found["heads"], found["start"]) == (llama_files.LAYERS, llama_files.N, 2)
    assert "".join(found["queries"]) == HOSTILE[0][2:10]
    assert found["keys"][-1] == "(all before)"
    measured = {measure["name"]: np.array(measure["values"]) for measure in found["measures"]}
    loaded = models.load(tmp_path / "a.gguf")
    token_ids = loaded.tokenizer.encode((tmp_path / "b.txt").read_text("utf-8")).ids[:24]
    _, expected = loaded.model(jnp.asarray(token_ids), observe=summarize_heads)
    np.testing.assert_allclose(measured["sink_mass"], expected.sink_mass, rtol=1e-5)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--window=5"], "window must be START:STOP with 1 to 64 positions, got '5'"),
        (["--window=9:9"], "'9:9'"),
        (["--window=0:65"], "'0:65'"),
        (["--model=a,b,c"], "model must hold at most 2, got 3"),
        (["--run=x", "--capture=y"], "only one of model, capture and run can be shown, got capture and run"),
        (["--run=x", "--text_file=y"], "text_file has no effect with run"),
        (["--steps=3"], "steps has no effect without run"),
        (["--run=absent"], "--run=absent is not the directory of a run of experiments.train"),
        (["--capture=absent.npz"], "--capture=absent.npz: absent.npz: no such file"),
        (["--model=absent"], "--model=absent: name_or_path must be one of"),
    ],
)
def test_what_is_wrong_is_one_line_and_nothing_is_written(flags, says, tmp_path, capsys):
    assert ended(*flags, f"--out={tmp_path / 'o'}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert not (tmp_path / "o" / "index.html").exists()


def test_help_says_the_flags(capsys):
    assert ended("--help") == 0
    assert "--window: positions START:STOP" in capsys.readouterr().out
