"""`python -m jaxamp`, which is also the command `jaxamp`."""

import sys

from ._cli.main import main

if __name__ == "__main__":
    sys.exit(main())
