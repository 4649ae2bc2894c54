"""`python -m tests.peers PATH...`"""

import sys

from .runner import main

sys.exit(main())
