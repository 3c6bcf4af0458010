"""``python -m omnilearn`` is the ``omnilearn`` command, for checkouts that are not installed."""

import sys

from omnilearn.cli import main

sys.exit(main())
