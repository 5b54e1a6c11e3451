"""`ortprep adopt` and `ortprep run`, on applications that know nothing of bundles."""

import shutil
import signal
import sys

import pytest

from tests.prepare.builders import Project
from tests.runtime.dropin.builders import run_program, write_bundle_of, write_source

ORTPREP = [sys.executable, "-m", "ortprep", "run"]
SESSION = (
    "import sys, onnxruntime\n"
    "s = onnxruntime.InferenceSession(sys.argv[1], providers=['CPUExecutionProvider'])\n"
    "from tests.runtime.dropin.builders import is_of_bundle; print(is_of_bundle(s))"
)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    (folder / "other").mkdir()
    write_bundle_of(write_source(folder / "net.onnx"), folder / "artifacts/net")
    return folder


def run(project, *arguments, stdin=""):
    return run_program([*ORTPREP, *arguments], {}, stdin=stdin, cwd=project)


@pytest.mark.parametrize("bundles", [[], ["--bundles", "artifacts"], ["--bundles=artifacts/net"]])
def test_sessions_of_the_program_are_of_bundles(project, bundles):
    done = run(project, *bundles, "--", sys.executable, "-c", SESSION, "net.onnx")
    assert (done.stdout, done.stderr, done.returncode) == ("True\n", "", 0)


def test_verbose_says_what_each_session_is_of(project):
    done = run(project, "--verbose", sys.executable, "-c", SESSION, "net.onnx")
    of_bundle = f"ortprep: session of net.onnx: {project}/artifacts/net, variant cpu\n"
    assert (done.stdout, done.stderr) == ("True\n", of_bundle)
    done = run(project, "--verbose", "--bundles", "other", sys.executable, "-c", SESSION, "net.onnx")
    plain = "ortprep: plain session of net.onnx: no bundle was prepared from these bytes in "
    assert (done.stdout, done.stderr) == ("False\n", f"{plain}{project}/other\n")


@pytest.mark.attack
def test_names_of_folders_give_a_terminal_no_orders_and_look_like_no_other_line(tmp_path):
    orders = "\x1b]0;owned\x07\x9b2J\u202e"
    folder = tmp_path / f"bundles/x{orders}\nortprep session of bank.onnx"
    write_bundle_of(write_source(tmp_path / "net.onnx"), folder)
    done = run(tmp_path, "--verbose", "--bundles=bundles", sys.executable, "-c", SESSION, "net.onnx")
    assert done.stdout == "True\n"
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("ortprep: session of net.onnx: ")
    failed = run(tmp_path, "--bundles", f"no{orders}", "--", "true")
    assert failed.returncode == 2
    assert all(one.isprintable() or one == "\n" for one in done.stderr + failed.stderr)


def test_the_programs_own_options_streams_and_exit_code_are_its_own(project):
    code = "import sys; print(sys.argv[1:], sys.stdin.read()); sys.stderr.write('talk'); sys.exit(7)"
    done = run(project, sys.executable, "-c", code, "--verbose", "-x", stdin="words")
    assert (done.stdout, done.stderr, done.returncode) == ("['--verbose', '-x'] words\n", "talk", 7)


def test_a_program_that_a_signal_ends_is_seen_to_be(project):
    code = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    assert run(project, "--", sys.executable, "-c", code).returncode == -signal.SIGTERM


def test_what_cannot_be_run_is_told_as_a_shell_does(project, tmp_path):
    assert run(project).returncode == 2
    nowhere = run(project, "--bundles", "nowhere", "--", "true")
    assert (nowhere.returncode, "no folder of bundles: nowhere" in nowhere.stderr) == (2, True)
    done = run(project, "--", "no-such-program")
    assert done.returncode == 127
    assert "cannot run no-such-program" in done.stderr
    done = run(project, "--", "./net.onnx")
    assert done.returncode == 126
    assert "ermission denied" in done.stderr


@pytest.mark.attack
def test_a_registry_is_no_place_of_bundles(project, monkeypatch):
    for place in ("https://user:tok3n@host/net@v1", "net@v1"):
        done = run(project, "--bundles", place, "--", "true")
        assert (done.returncode, done.stdout, "tok3n" in done.stderr) == (2, "", False)
        assert "hint: ortprep pull " in done.stderr
    monkeypatch.setenv("ORTPREP_BUNDLES", "registry://net@v1")
    done = run(project, "--", "true")
    assert (done.returncode, "ORTPREP_BUNDLES names a registry" in done.stderr) == (2, True)


@pytest.mark.attack
def test_a_signature_that_is_required_is_passed_on_wherever_the_program_runs(project, monkeypatch):
    for key in ("keys/key.pub", str(project / "keys/key.pub")):
        monkeypatch.setenv("ORTPREP_REQUIRE_SIGNATURE", key)
        shown = run(project, "--print-environment").stdout
        assert f"ORTPREP_REQUIRE_SIGNATURE={project}/keys/key.pub\n" in shown


def test_the_environment_alone_does_the_same(project):
    shown = run_program([*ORTPREP, "--print-environment"], {"ORTPREP_FORK": "1"}, cwd=project).stdout
    variables = dict(line.split("=", 1) for line in shown.splitlines())
    assert variables.pop("ORTPREP_FORK") == "1"
    assert variables["ORTPREP_BUNDLES"] == str(project / "artifacts")
    assert "ORTPREP_REQUIRE_SIGNATURE" not in variables
    done = run_program([sys.executable, "-c", SESSION, str(project / "net.onnx")], variables)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.attack
def test_a_place_of_bundles_cannot_add_a_variable(project):
    (project / "a\nLD_PRELOAD=evil").mkdir(exist_ok=True)
    done = run(project, "--bundles=a\nLD_PRELOAD=evil", "--print-environment")
    assert (done.returncode, done.stdout) == (2, "")
    assert "control characters" in done.stderr


@pytest.mark.attack
@pytest.mark.parametrize("options", [[], ["--verbose"]])
def test_a_strangers_bundle_gives_the_terminal_no_orders(project, tmp_path, options):
    shutil.copytree(project / "artifacts/net", tmp_path / "bundles/\033[2Jnet")
    graph = next((tmp_path / "bundles").rglob("*.onnx"))
    graph.write_bytes(b"\0" + graph.read_bytes()[1:])
    places = ("--bundles", str(tmp_path / "bundles"))
    done = run(project, *options, *places, "--", sys.executable, "-c", SESSION, "net.onnx")
    assert "[2Jnet" in done.stderr
    assert "\033" not in done.stderr


# -- `adopt` runs a program that makes no session, or is none


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        (["-c", "raise SystemExit(7)"], 7, "exit code 7"),
        (["-c", "pass"], 2, "created no ONNX Runtime session"),
        (["-c", "import os; os.kill(os.getpid(), 9)"], 137, "exit code 137"),
        (["-m", "no_such_module"], 1, "exit code 1"),
    ],
)
def test_the_exit_code_of_the_application_is_passed_on(tmp_path, program, code, said):
    project = Project(tmp_path)
    outcome = project.call("adopt", "--", sys.executable, *program)
    assert (outcome.code, outcome.out) == (code, "")
    assert said in outcome.err
    assert not project.configs.exists()


@pytest.mark.parametrize("out", ["app.py", "app.py/configs", "/proc/configs"])
def test_the_program_is_not_run_if_specs_cannot_be_written(tmp_path, out):
    (tmp_path / "app.py").write_text("open('ran', 'w').close()")
    outcome = Project(tmp_path).call("adopt", "--out", out, "--", sys.executable, "app.py")
    assert (outcome.code, f"cannot write to {out}" in outcome.err) == (2, True), outcome.err
    assert not (tmp_path / "ran").exists()
