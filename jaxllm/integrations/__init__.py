"""jaxllm as other libraries know an engine: lm-evaluation-harness and tunix, which are imported from here alone."""
