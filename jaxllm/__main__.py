"""`python -m jaxllm` is `jaxllm`."""

from jaxllm.cli.main import run

if __name__ == "__main__":
    run()
