"""``python -m pipeline.cli``: the command ``forebay``, where its script is not on the path."""

import sys

from pipeline.cli import main

if __name__ == "__main__":
    sys.exit(main())
