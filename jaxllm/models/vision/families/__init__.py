"""One file for each family of towers; `jaxllm.models.vision.FILES` lists them."""
