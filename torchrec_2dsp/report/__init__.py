"""The one place that draws: pages and plots. Its libraries are an extra."""
