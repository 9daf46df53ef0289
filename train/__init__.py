"""Pretraining of a Llama-style decoder with exact, cuDNN or SageBwd attention: ``python -m train --preset tiny``."""

import signal
import sys

# `python -m train` is looking for what to run, and will import for seconds. Until `cli.run` takes over, Ctrl-C ends it
# by the signal itself: an exception would come out of another package's import, as a traceback or as another error.
if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
