"""A line about a long run every half minute, in place of a dot for each test.

It says what has run longest of what runs now, so that what hangs has a name long before
its limit of time. A failure has a line at once.
"""

import threading
import time

import pytest

EVERY = 30.0  # seconds


def pytest_addoption(parser):
    parser.addoption(
        "--progress",
        action="store_true",
        help="write a line every half minute, in place of a dot for each test",
    )


@pytest.hookimpl(trylast=True)  # when there is a reporter
def pytest_configure(config):
    if config.option.progress and not hasattr(config, "workerinput"):
        reporter = config.pluginmanager.getplugin("terminalreporter")
        config.pluginmanager.register(Progress(reporter), "progress-of-a-run")


class Progress:
    """Counts what has ended, and remembers when what runs began.

    Args:
        reporter: pytest's, which writes.
    """

    def __init__(self, reporter) -> None:
        self._reporter = reporter
        self._collected = 0
        self._running: dict[str, float] = {}  # test -> when it began
        self._begun = time.monotonic()
        self._over = threading.Event()
        self._lines = threading.Thread(target=self._write_lines, daemon=True)

    # -- what pytest tells -------------------------------------------------------------

    def pytest_collection_finish(self, session):
        self._collected = len(session.items) or self._collected
        if not self._lines.is_alive():
            self._lines.start()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node, ids):
        self._collected = len(ids)
        if not self._lines.is_alive():
            self._lines.start()

    def pytest_runtest_logstart(self, nodeid):
        self._running[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid):
        self._running.pop(nodeid, None)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self._reporter.write_line(f"failed: {report.nodeid}")

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self):
        category, *_ = yield
        return category, "", ""  # which is not written

    def pytest_sessionfinish(self):
        self._over.set()

    # -- lines -------------------------------------------------------------------------

    def line(self, now: float) -> str:
        """Returns how far the run is.

        Args:
            now: of `time.monotonic`.
        """
        stats = self._reporter.stats
        ended = [
            (outcome, len({report.nodeid for report in stats.get(outcome, [])}))
            for outcome in ("passed", "failed", "error", "skipped")
        ]
        part = sum(number for _, number in ended) / max(1, self._collected)
        counts = ", ".join(f"{number} {outcome}" for outcome, number in ended if number)
        line = f"{_clock(now - self._begun)} {part:4.0%}  {counts or 'nothing ended'}"
        running = sorted(self._running.items(), key=lambda item: item[1])[:1]
        for test, begun in running:
            line += f"; {test} runs for {now - begun:.0f} s"
        return line

    def _write_lines(self) -> None:
        while not self._over.wait(EVERY):
            self._reporter.write_line(self.line(time.monotonic()))


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60:3}:{int(seconds) % 60:02}"
