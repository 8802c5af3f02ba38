"""An agent whose framework starts a thread when it is imported."""

import threading
from typing import Any

threading.Thread(target=threading.Event().wait).start()


def run(task: Any) -> float:
    return 1.0
