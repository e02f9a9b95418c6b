"""Check Ctrl-C: the command prints one line and exits with a shell's status, from its imports to its end."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_attn_variants import cli, errors
from hf_attn_variants.errors import run_script
from hf_attn_variants.training.engine import checkpoints
from hf_attn_variants.training.engine.checkpoints import StopSignalRecorder

ROOT = Path(__file__).parents[2]
# This module shadows Transformers, so that Ctrl-C comes during the import.
INTERRUPTING = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(30)\n"
# The script that pip writes for an entry point.
COMMAND = "import sys\nfrom attn_variants import main\nsys.exit(main())\n"
# A program that starts a process which imports the program again, like a worker of a data loader on macOS.
SPAWNING = """
import multiprocessing, signal, types
import attn_variants

def tell(argv=None):
    handler = signal.getsignal(signal.SIGINT)
    print(getattr(handler, "name", None) or handler.__name__, flush=True)

def parse_args(argv):
    tell()
    process = multiprocessing.get_context("spawn").Process(target=tell)
    process.start()
    process.join()
    raise SystemExit

if __name__ == "__main__":
    attn_variants.run(types.SimpleNamespace(parse_args=parse_args))
"""


def run_python(*argv, cwd, paths):
    """Run Python in a process that handles SIGINT. Background processes ignore it, and so would their children."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    options = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler), "timeout": 120}
    return subprocess.run([sys.executable, *argv], cwd=cwd, env=environment, capture_output=True, text=True, **options)


@pytest.mark.parametrize(
    ("argv", "is_own_command"),
    [
        (["{tmp}/attn-variants", "inspect", "x"], True),
        pytest.param(["-m", "attn_variants", "inspect", "x"], True, marks=pytest.mark.slow),
        (["scripts/convert_checkpoint.py", "x", "--output_dir", "y"], True),
        pytest.param(["scripts/quickstart.py"], True, marks=pytest.mark.slow),
        (["-m", "hf_attn_variants", "inspect", "x"], False),  # Python imports the package before the command
        (["-c", "import hf_attn_variants"], False),
        (["-c", "import sys; sys.argv.clear(); import hf_attn_variants"], False),
        pytest.param(["-m", "other", "hf_attn_variants"], False, marks=pytest.mark.slow),
        (["theirs.py"], False),
    ],
)
def test_interrupt_during_imports_prints_one_line(argv, is_own_command, tmp_path):
    (tmp_path / "stub/other").mkdir(parents=True)
    (tmp_path / "stub/transformers.py").write_text(INTERRUPTING)
    (tmp_path / "stub/other/__init__.py").write_text("import hf_attn_variants\n")
    (tmp_path / "attn-variants").write_text(COMMAND)
    root = folder = ROOT
    if not is_own_command:  # the folder of an installed package contains files of other packages
        root = tmp_path / "installed"
        folder = root / "scripts"
        shutil.copytree(ROOT / "hf_attn_variants", root / "hf_attn_variants")
        folder.mkdir()
        (folder / "theirs.py").write_text("import hf_attn_variants\n")
    ended = run_python(*(part.format(tmp=tmp_path) for part in argv), cwd=folder, paths=[tmp_path / "stub", root])
    if is_own_command:
        assert (ended.returncode, ended.stderr) == (128 + signal.SIGINT, "Stopped by Ctrl-C.\n")
    else:
        assert ended.returncode == -signal.SIGINT and "KeyboardInterrupt" in ended.stderr


def test_spawned_process_ignores_the_interrupt(tmp_path):
    (tmp_path / "transformers.py").write_text("raise ImportError\n")
    program = tmp_path / "attn-variants"
    program.write_text(SPAWNING)
    ended = run_python(program, cwd=None, paths=[tmp_path, ROOT])
    expected = (0, f"{errors._exit_immediately.__name__}\nSIG_IGN\n")
    assert (ended.returncode, ended.stdout) == expected, ended.stderr


def test_interrupt_during_work_prints_one_line(capsys):
    def interrupted():
        raise KeyboardInterrupt

    assert run_script(interrupted) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "Stopped by Ctrl-C.\n"


def test_command_work_uses_the_default_interrupt_handler():
    before, result = signal.signal(signal.SIGINT, errors._exit_immediately), []
    try:
        note = lambda args: result.append(signal.getsignal(signal.SIGINT))  # noqa: E731
        assert cli.run(SimpleNamespace(parse_args=note, main=note)) == 0
    finally:
        signal.signal(signal.SIGINT, before)
    assert result == [errors._exit_immediately, signal.default_int_handler]


def test_second_interrupt_stops_training_unless_a_launcher_sent_it(monkeypatch, capfd):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        signals = StopSignalRecorder()
        with signals.record_signals():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            assert signals.number == signal.SIGINT
            monkeypatch.setattr(checkpoints, "CTRL_C_REPEAT_SECONDS", -1.0)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with StopSignalRecorder().record_signals():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # so that `nohup` works
    finally:
        signal.signal(signal.SIGINT, before)
    assert capfd.readouterr().err.count("Press again") == 1
