"""The figures that people see: the catalogue of metrics, and the bars and figures of the page `/ui`."""
