"""`python -m dflashdist` is the console script."""

import sys

from dflashdist.cli import main

sys.exit(main())
