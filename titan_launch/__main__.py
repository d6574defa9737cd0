"""`python -m titan_launch` and `torchrun -m titan_launch`."""

import sys

from titan_launch.cli import main

sys.exit(main())
