"""What happened in a run: ``read(folder)`` gives its events, ``steps(folder)`` its steps as a flat table.

docs/events.md lists the fields, docs/observe.md what can be looked at with them.
"""

from omnilearn.observe.events import EventLog, read, steps
from omnilearn.observe.track import Tracker, replay, track

__all__ = ["EventLog", "Tracker", "read", "replay", "steps", "track"]
