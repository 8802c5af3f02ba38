"""``python -m outrider.metrics > docs/metrics.md``: generate the metrics page from the declarations."""

import sys

from outrider.metrics.registry import metrics_page

sys.stdout.write(metrics_page())
