"""Records of a run on disk, its progress and report, trackers, and the page of ``outrider view``."""
