"""How a run shows its progress on a terminal and in a log."""

import contextlib
import fcntl
import io
import os
import re
import struct
import termios

from undertow.cli.busy_line import ERASE, BusyLine
from undertow.train import progress
from undertow.train.progress import Lines, Live, StepView, choose_columns, make_display

VIEW = StepView(3, 10, 0, 2, 0.12345, 64, 5 << 20, 8 << 20)


def test_lines_come_every_few_seconds(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    stream = io.StringIO()
    display = Lines(stream)
    display.show(VIEW)
    assert stream.getvalue() == ""
    now[0] = 16.0
    display.show(VIEW)
    assert stream.getvalue() == "epoch 1/2  step 3/10  loss 0.1235  8 examples/s  5.0 MiB of 8.0 MiB\n"


def test_a_live_line_has_everything(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    display = Live()
    display.show(VIEW)
    display.say("a line [that] stays")
    display.close()
    shown = capsys.readouterr().err
    assert "a line [that] stays" in shown
    for part in ("1/2", "step 3/10", "loss 0.1235", "5.0 MiB of 8.0 MiB"):
        assert part in shown, part


def test_a_narrow_terminal_gets_what_matters_most_and_nothing_is_cut(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    least = {"step", "loss"}
    for columns, wanted in ((100, {"bar", "rate"}), (70, {"peak", "rate"}), (40, {"time", "epoch"}), (24, set())):
        chosen = choose_columns(VIEW, columns)
        assert least | wanted <= set(chosen)
        monkeypatch.setenv("COLUMNS", str(columns))
        display = Live()
        display.show(VIEW)
        display.close()
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
        assert "step 3/10" in shown and "loss 0.1235" in shown and "…" not in shown
        assert max(map(len, re.split(r"[\r\n]", shown))) <= columns


def test_lines_that_stay_fit_80_columns():
    stream = io.StringIO()
    Lines(stream).say("epoch 1/3: training loss 0.7628, validation loss 0.1698, accuracy 93.75%, f1 0.9346 (144)")
    assert len(stream.getvalue().splitlines()) == 2 and max(map(len, stream.getvalue().splitlines())) <= 80


def test_the_line_that_says_what_is_done_is_erased_on_a_narrow_terminal():
    ours, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    with open(terminal, "w") as stream:
        line = BusyLine(stream)
        line.show("searching for plans of 106 operations of a long name")
        line.close()
    drawn = ""
    with contextlib.suppress(OSError):  # the end of a terminal that is closed at the other side
        while part := os.read(ours, 4096):
            drawn += part.decode()
    os.close(ours)
    # A line as wide as the terminal would wrap, and what wrapped would stay.
    assert drawn.endswith(ERASE) and all(len(part) < 40 for part in drawn.split(ERASE)) and "searching" in drawn


def test_a_log_is_no_terminal(capsys):
    assert isinstance(make_display(), Lines)
