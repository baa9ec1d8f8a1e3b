"""The command line of the audit."""

import json
import subprocess
import sys

import pytest

from attn_jax.audit.__main__ import main

PLANTED = "experiments.benchmarks.planted.functions"


def test_no_fault_is_0_and_the_report_is_printed_and_written(tmp_path, capsys):
    path = tmp_path / "report.json"
    assert main([f"--target={PLANTED}:attention", f"--json={path}"]) == 0
    assert capsys.readouterr().out.startswith("attention: no faults, 1 difference")
    assert json.loads(path.read_text())["ok"]


def test_a_fault_is_1(capsys):
    assert main([f"--target={PLANTED}:tiled_heads"]) == 1
    assert "fault: heads (groups in order)" in capsys.readouterr().out


def test_what_is_meant_is_said_by_flags(capsys):
    flags = ["--scale=none", "--causal", "--window=1,0", "--positions=rotary"]
    assert main([f"--target={PLANTED}:reshaped_heads", *flags]) == 1
    assert "fault: heads" in capsys.readouterr().out


def test_a_file_is_a_target_and_a_parameter_of_another_name_is_told(tmp_path, capsys):
    file = tmp_path / "json.py"  # not the json of the standard library
    file.write_text(
        "import jax, jax.numpy as jnp\n"
        "def mine(query, key, value, autoregressive=False):\n"
        "    logits = jnp.einsum('btnh,bsnh->bnts', query, key) / query.shape[-1] ** 0.5\n"
        "    if autoregressive:  # one key too many\n"
        "        seen = jnp.tri(*logits.shape[-2:], k=1, dtype=bool)\n"
        "        logits = jnp.where(seen[None, None], logits, -jnp.inf)\n"
        "    return jnp.einsum('bnts,bsnv->btnv', jax.nn.softmax(logits), value)\n"
    )
    assert main([f"--target={file}:mine"]) == 0
    assert "not audited, autoregressive: left at the default" in capsys.readouterr().out
    assert main([f"--target={file}:mine", "--argument=is_causal=autoregressive"]) == 1
    printed = capsys.readouterr().out
    assert "fault: mask" in printed
    assert "not audited" not in printed
    assert main([f"--target={file}:mine", "--argument=is_causal=autoregresive"]) == 2
    said = "arguments['is_causal'] must be a parameter of the function (query, key, value, autoregressive), got"
    assert capsys.readouterr().err.startswith(f"error: {said} 'autoregresive'")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--target=json"], "target must be package.module:function or path/file.py:function, got 'json'"),
        (["--target=nowhere/mine.py:f"], "target nowhere/mine.py cannot be imported: FileNotFoundError"),
        (["--target=no_such_module:f"], "target no_such_module cannot be imported: ModuleNotFoundError"),
        (["--target=json:nothing"], "target json has no nothing"),
        (["--target=sys:version"], "fn must be callable, got str"),
        (["--target=json:dumps", "--window=3"], "window must be left,right, got '3'"),
        (["--target=json:dumps", "--scale=odd"], "scale must be one of"),
        (["--target=json:dumps", "--argument=mask"], "argument must be option=name, got 'mask'"),
        (["--target=json:dumps", "--argument=masks=m"], "arguments must name options among"),
    ],
)
def test_what_cannot_be_audited_is_one_line_and_2(flags, says, capsys):
    assert main(flags) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: {says}")
    assert printed.err.count("\n") == 1


def test_a_report_that_cannot_be_written_is_said(tmp_path, capsys):
    assert main(["--target=json:dumps", f"--json={tmp_path}"]) == 2
    assert "the report cannot be written to" in capsys.readouterr().err


def test_it_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "attn_jax.audit", "--target=json:dumps"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "fault: output (runs)" in done.stdout
