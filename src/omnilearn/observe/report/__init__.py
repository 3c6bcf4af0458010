"""The report: ``write(folders, "report.html")`` makes one page from the log folders of one run or several."""

from omnilearn.observe.report.command import write

__all__ = ["write"]
