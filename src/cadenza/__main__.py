"""`python -m cadenza` is the command `cadenza`."""

import sys

from cadenza.cli import main

if __name__ == "__main__":
    sys.exit(main())
