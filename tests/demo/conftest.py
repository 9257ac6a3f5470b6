"""The demo's generators are scripts beside launch/demo.sh, no part of the package."""

import sys

from demo_files import DEMO

sys.path.insert(0, str(DEMO))
