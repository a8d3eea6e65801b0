"""What a run writes down: metrics, samples, the trace, checkpoints, and what a person sees meanwhile."""
