"""Reports a rank's failure to ``torchrun``. Does not import torch."""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from offloop.bus.errors import RankError

_FILE = "TORCHELASTIC_ERROR_FILE"


def report_failure(message: str, seconds: float | None = None) -> None:
    """Write the reason to the file of ``torchrun``, which reports the first rank by ``seconds`` since 1970."""
    if file := os.environ.get(_FILE):
        failed_at = int(time.time() if seconds is None else seconds)
        Path(file).write_text(json.dumps({"message": message.replace("\n", "\n  "), "timestamp": failed_at}))


def report_uncaught_errors(failed_at: Callable[[], float | None]) -> None:
    show = sys.excepthook

    def show_and_report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show(kind, error, trace)
        if isinstance(error, Exception):
            seconds = failed_at() or time.time()
            # torchrun compares whole seconds, in which a consequence on another rank could come before its cause.
            seconds += isinstance(error, RankError)
            report_failure("".join(traceback.format_exception(kind, error, trace)).rstrip(), seconds)

    sys.excepthook = show_and_report
