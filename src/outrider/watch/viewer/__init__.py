"""``outrider view``: a page in the browser that leads from a strange number to the rollouts behind it."""
