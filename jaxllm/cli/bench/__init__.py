"""`jaxllm bench`: how fast, offline, in one batch, through the server, from a cold start; and how good, quantized."""

from __future__ import annotations

from cyclopts import App

from jaxllm.cli.bench.comparing import perplexity, speculation
from jaxllm.cli.bench.offline import latency, throughput
from jaxllm.cli.bench.server import serve, startup

bench = App(
    name="bench",
    help="Measure throughput, latency, the server, start-up, and what drafts and quantized weights change.",
)
for command in (throughput, latency, serve, startup, speculation, perplexity):
    bench.command(command)
