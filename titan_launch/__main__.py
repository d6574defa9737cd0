"""Entry point of `python -m titan_launch` and `torchrun -m titan_launch`."""

import gc

gc.disable()  # the start creates no garbage, and collections would take 5 % of the time of a `check`

from titan_launch.core.signals import stop_with_agent  # noqa: E402

stop_with_agent()  # before the imports below, during which `launch` or torchrun may be killed

from titan_launch.cli import main  # noqa: E402
from titan_launch.core.process import exit_process  # noqa: E402

exit_process(main())
