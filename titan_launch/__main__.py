"""Entry point of `python -m titan_launch` and `torchrun -m titan_launch`."""

import gc

gc.disable()  # garbage collection would take 5 % of the time of a `check`, and the start creates no garbage

from titan_launch.core.signals import stop_with_agent  # noqa: E402

stop_with_agent()  # before the slow imports below, because `launch` or torchrun may be killed during these imports

from titan_launch.cli import main  # noqa: E402
from titan_launch.core.process import exit_process  # noqa: E402

exit_process(main())
