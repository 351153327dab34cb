"""The monitor port: metrics, probes, and looks at the processes while they run."""
