"""``python -m hasten``: the same as the command ``hasten``."""

import sys

from hasten.commands import main

if __name__ == "__main__":
    sys.exit(main())
