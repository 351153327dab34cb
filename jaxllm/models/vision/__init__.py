"""Models that see images: decoding, preparation, towers. `decode` and `processor` import no JAX."""
