"""`python -m titan_launch` and `torchrun -m titan_launch`."""

import gc
import sys

gc.disable()  # start-up makes no garbage, and looking for it takes a twentieth of the time of a `check`

from titan_launch.cli import main  # noqa: E402

sys.exit(main())
