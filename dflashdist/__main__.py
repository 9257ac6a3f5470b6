"""`python -m dflashdist` is the console script."""

import sys

try:
    from dflashdist.cli import main

    sys.exit(main())
except KeyboardInterrupt:  # while it was being imported
    sys.exit(130)
