"""How a run shows its progress on a terminal and in a log."""

import io

from undertow.train import progress
from undertow.train.progress import Lines, Live, StepView, make_display

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


def test_a_log_is_no_terminal(capsys):
    assert isinstance(make_display(), Lines)
