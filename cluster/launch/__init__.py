"""The composition root: the only place that knows which parts make a worker, and how workers are started."""
