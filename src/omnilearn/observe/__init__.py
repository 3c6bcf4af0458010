"""What happened in a run: ``read(folder)`` gives its events. docs/events.md lists the fields."""

from omnilearn.observe.events import EventLog, read

__all__ = ["EventLog", "read"]
